"""Beam search in the twin, which has no model: requests of one token, step by step, over the same scheduler.

A search is a client beside the engine, as it is in vLLM's server: when all hypotheses of a step have their token it keeps
the books (`serving.beams`, those of the engine) and sends the next ones. They arrive after the boundary at which they
became known, so that the step planned at that boundary goes without them. What hypotheses share they find in the prefix
cache, page for page.

Which hypotheses survive is decided by made-up log-probabilities, `NextTokens`; nothing else of a model matters here,
since a twin's hypothesis never ends before the workload says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import numpy as np

from serving.beams import BeamCounts, Beams, Likeliest
from serving.config import SchedulerConfig
from serving.errors import UsageError
from serving.request import Request
from sim.clock import Clock
from sim.log import RequestLog
from sim.record import Floats, Status
from sim.replica import Replica
from sim.router import Central, Router
from sim.workload.types import Workload


@dataclass(frozen=True, slots=True)
class NextTokens:
    """How sure a model is of its next token, for searches without one.

    The likeliest token has probability p, which is drawn from a beta distribution for every hypothesis and step. The
    k-th likeliest takes the share 1 / (k - 1 + 1 / p) of what those before it have left, so that with c = 1 / p its
    probability is (c - 1) / ((c + k - 2)(c + k - 1)). Both were read off beams of SmolLM2-135M-Instruct, see
    docs/engine.md.
    """

    alpha: float = 1.0
    beta: float = 0.64

    def logprobs(self, rng: np.random.Generator, hypotheses: int, count: int) -> Floats:
        """Of the `count` likeliest tokens behind each hypothesis, best first, [hypotheses, count]."""
        p = np.clip(rng.beta(self.alpha, self.beta, hypotheses), 1e-9, 1 - 1e-9)
        before = (1 / p)[:, None] + np.arange(-1, count - 1)
        drawn: Floats = np.log((1 / p - 1)[:, None] / (before * (before + 1)))
        return drawn


@dataclass(slots=True, eq=False)
class _Search:
    """One request's search."""

    row: int
    whole: Request
    """The request as it was sent: its prompt and what the scheduler knows of its sender."""
    beams: Beams
    rng: np.random.Generator
    keys: list[list[int]]
    """Of each live hypothesis the identity of its full pages, by place."""
    guests: list[int] = field(default_factory=list)
    """Rows of the log for hypotheses; the first step, the prompt's, is written down in the request's own."""
    replica: Replica | None = None
    missing: int = 0
    last_step: tuple[int, ...] = ()
    """Replica and step that gave the last token."""


def check_beams(
    workload: Workload, *, fleet: bool = False, followed: bool = False, drafts: bool = False
) -> None:
    """Raise `UsageError` for what searches cannot be combined with."""
    if workload.beam_width is None:
        return
    if fleet:
        raise UsageError(
            "beam search (--beam-width) beside a fleet (pools, autoscaling, failures, admission) is not modelled: its "
            "hypotheses would be requests of their own; leave one of them out"
        )
    if followed:
        raise UsageError(
            "a beam search (--beam-width) shows nothing before its end, so that there is no stream to follow; leave out "
            "--network, --stream-interval and --stream-slice-ms"
        )
    if drafts and bool((workload.beam_width > 0).all()):
        raise UsageError(
            "drafts (--speculative-config) have no effect on beam searches (--beam-width), whose requests have one "
            "token; leave one of them out"
        )


class BeamSearches:
    """All searches of a run. `ended(row)` is told when one is over.

    Hypotheses are written down in rows of the log beyond the workload's, used again by every step.
    """

    def __init__(
        self,
        clock: Clock,
        log: RequestLog,
        workload: Workload,
        config: SchedulerConfig,
        router: Router,
        ended: Callable[[int], None],
        next_tokens: NextTokens | None = None,
    ) -> None:
        assert workload.beam_width is not None
        self.width: list[int] = workload.beam_width.tolist()
        self.counts = BeamCounts()
        self._clock, self._log, self._config = clock, log, config
        self._router, self._ended = router, ended
        self._next_tokens = next_tokens or NextTokens()
        self._seed = int(workload.meta.get("seed") or 0)
        self._goes_on = set(workload.after[workload.after >= 0].tolist())
        self._by_row: dict[int, _Search] = {}
        self._free_rows: list[int] = []
        self._owner: dict[int, int] = {}
        """The request whose search last used a row for a hypothesis."""
        self._next_key = -1
        self._renamed: dict[int, int] = {}
        log.speculates = True  # the last step of a search gives all of its tokens
        log.unstreamed = [*log.unstreamed, *np.flatnonzero(workload.beam_width > 0).tolist()]

    def __contains__(self, request: Request) -> bool:
        return request.id in self._by_row

    def begin(self, request: Request) -> bool:
        """The request for a search reaches the server. False when it can never run."""
        whole, row = request, request.id
        assert isinstance(row, int)
        scheduler = self._router.replicas[0].scheduler
        if reason := scheduler.refusal(whole):
            self._log.status[row], self._log.reason[row] = int(Status.REJECTED), reason
            self._log.replica[row] = 0
            return False
        length = scheduler.finish_at(whole) - whole.prompt_tokens
        search = _Search(
            row,
            whole,
            Beams(self.width[row], length),
            np.random.Generator(np.random.PCG64([self._seed, row])),
            [self._prompt_keys(whole)],
        )
        self._by_row[row] = search
        self._send(search)
        return True

    def stepped(self, request: Request, now_s: float) -> None:
        """A hypothesis has its token."""
        row = request.id
        assert isinstance(row, int)
        search, log = self._by_row[row], self._log
        cached = max(0, request.cached_tokens)
        self.counts.cached_tokens += cached
        self.counts.computed_tokens += request.prompt_tokens - cached
        if row == search.row:
            search.replica = next(r for r in self._router.replicas if r.index == log.replica[row])
        log.status[row], log.reason[row], log.engine_done_s[row] = int(Status.UNFINISHED), "", math.nan
        if log.ranges and log.ranges[-1][0] == row:
            search.last_step = log.ranges.pop()[1:3]
        search.missing -= 1
        if search.missing:
            return
        self._grow(search)
        if search.beams.over:
            self._end(search, now_s)
        else:
            # A client is told, and answers: the plan that is made at this very boundary goes without it.
            self._clock.call_at(self._clock.now, lambda: self._send(search))

    # ---- one step ------------------------------------------------------------------------------------------

    def _send(self, search: _Search) -> None:
        """One request of one token for each live hypothesis."""
        whole, now_s, live = search.whole, self._clock.now, search.beams.live
        search.missing = len(live)
        rows = [search.row] if not search.beams.num_steps else self._seats(search)
        self._log.output_tokens[search.row] = 0
        for row, hypothesis, keys in zip(rows, live, search.keys, strict=True):
            request = Request(
                row,
                whole.prompt_tokens + len(hypothesis.token_ids),
                1,
                now_s,
                whole.priority,
                whole.deadline_s,
                None,
                keys,
                whole.tenant,
                whole.weight,
                whole.session,
                whole.turn,
            )
            self.counts.requests += 1
            # A search stays where it began, for that is where its pages are.
            if search.replica is None or isinstance(self._router, Central):
                self._router.submit(request)
            else:
                search.replica.submit(request)

    def _seats(self, search: _Search) -> list[int]:
        """A row of the log for each live hypothesis."""
        while len(search.guests) < len(search.beams.live):
            row = self._free_rows.pop() if self._free_rows else self._log.add_guest()
            search.guests.append(row)
            self._by_row[row] = search
            self._settle(row)
            self._owner[row] = search.row
        # Not before: under asynchronous scheduling a plan may have preempted a hypothesis whose token was on its way.
        for row in search.guests:
            self._log.output_tokens[row] = 0
        return search.guests

    def _settle(self, guest: int) -> None:
        """Preemptions of a hypothesis are its search's."""
        if (owner := self._owner.get(guest)) is not None:
            self._log.preemptions[owner] += self._log.preemptions[guest]
            self._log.preemptions[guest] = 0

    def settle(self) -> None:
        """The run is over."""
        for guest in self._owner:
            self._settle(guest)

    def _grow(self, search: _Search) -> None:
        beams, count = search.beams, 2 * search.beams.width
        drawn = self._next_tokens.logprobs(search.rng, len(beams.live), count).tolist()
        first = self._next_key
        self._next_key -= len(drawn) * count
        beams.grow([_named(row, first - place * count) for place, row in enumerate(drawn)])
        size, keys = self._config.page_tokens, search.keys
        tokens = search.whole.prompt_tokens + beams.num_steps
        if tokens % size or not self._config.enable_prefix_caching:
            search.keys = [keys[hypothesis.parents[-1]] for hypothesis in beams.live]
        else:
            # A page and all before it are named by its last token: no two hypotheses have one in common.
            search.keys = [[*keys[h.parents[-1]], h.token_ids[-1]] for h in beams.live]

    def _end(self, search: _Search, now_s: float) -> None:
        row, log, beams = search.row, self._log, search.beams
        length = beams.num_steps
        log.status[row], log.reason[row] = int(Status.FINISHED), "length"
        log.engine_done_s[row], log.output_tokens[row] = now_s, length
        log.ranges.append((row, *search.last_step, 1, length))
        self.counts.searches += 1
        self.counts.shown_tokens += length
        for each in (row, *search.guests):
            del self._by_row[each]
        self._free_rows += search.guests
        if row in self._goes_on:
            self._rename(search)
        self._ended(row)

    # ---- who may find what ---------------------------------------------------------------------------------

    def _prompt_keys(self, whole: Request) -> list[int]:
        """All full pages of the prompt, so that hypotheses find those that no other request shares."""
        if not self._config.enable_prefix_caching:
            return []
        pages = whole.prompt_tokens // self._config.page_tokens
        shared = _keys(whole)[:pages]
        first = self._next_key
        self._next_key -= pages - len(shared)
        return [*shared, *range(first, self._next_key, -1)]

    def _rename(self, search: _Search) -> None:
        """The next turn's prompt holds the best hypothesis: it finds that one's pages."""
        whole, best = search.whole, search.beams.best()[0]
        own = search.keys[search.beams.live.index(best)]
        computed = (whole.prompt_tokens + search.beams.num_steps - 1) // self._config.page_tokens
        keys = _keys(whole)
        for page in range(whole.prompt_tokens // self._config.page_tokens, min(computed, len(keys))):
            self._renamed[keys[page]] = own[page]

    def found(self, keys: list[int]) -> list[int]:
        """The page keys of a prompt, with those of earlier answers that a search has found."""
        return [self._renamed.get(key, key) for key in keys] if self._renamed else keys


def _keys(request: Request) -> list[int]:
    """The workload's page keys, which are numbers."""
    return cast(list[int], request.keys) or []


def _named(logprobs: list[float], first: int) -> Likeliest:
    """Tokens with names that no other has, falling from `first` on."""
    return [(first - rank, logprob) for rank, logprob in enumerate(logprobs)]
