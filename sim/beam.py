"""Beam search in the twin, which has no model: requests of one token, step by step, over the same scheduler.

A search is a client beside the engine, as it is in vLLM's server: when all hypotheses of a step have their token it keeps
the books (`serving.beams`, those of the engine) and sends the next ones. They arrive after the boundary at which they
became known, so that the step planned at that boundary goes without them. What hypotheses share they find in the prefix
cache, page for page.

Which hypotheses survive is decided by made-up log-probabilities, `NextTokens`; nothing else of a model matters here,
since a twin's hypothesis never ends before the workload says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np

from serving.beams import BeamCounts, Beams, Likeliest
from serving.config import SchedulerConfig
from serving.errors import UsageError
from serving.request import Request
from sim.clock import Clock
from sim.record import Floats, Status
from sim.whole import Whole
from sim.workload.types import Workload

if TYPE_CHECKING:
    from sim.api_server import ApiServer
    from sim.replica import Replica


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


@dataclass(slots=True, eq=False, kw_only=True)
class _Search(Whole):
    """One request's search; the first step, the prompt's, is written down in the request's own row."""

    beams: Beams
    rng: np.random.Generator
    keys: list[list[int]]
    """Of each live hypothesis the identity of its full pages, by place."""


def check_beams(workload: Workload, *, drafts: bool = False) -> None:
    """Raise `UsageError` for what searches cannot be combined with."""
    if workload.beam_width is not None and drafts and bool((workload.beam_width > 0).all()):
        raise UsageError(
            "drafts (--speculative-config) have no effect on beam searches (--beam-width), whose requests have one "
            "token; leave one of them out"
        )


class BeamSearches:
    """All searches of a run. Hypotheses are written down in rows that every step uses again."""

    def __init__(
        self, clock: Clock, server: ApiServer, workload: Workload, next_tokens: NextTokens | None = None
    ) -> None:
        assert workload.beam_width is not None
        self.width: list[int] = workload.beam_width.tolist()
        self.counts = BeamCounts()
        self._clock, self._server, self._log = clock, server, server.log
        self._next_tokens = next_tokens or NextTokens()
        self._seed = int(workload.meta.get("seed") or 0)
        self._goes_on = set(workload.after[workload.after >= 0].tolist())
        self._next_key = -1
        self._renamed: dict[int, int] = {}

    def begin(self, request: Request, replica: Replica) -> bool:
        """The request for a search reaches a replica. False when it can never run."""
        row, log, scheduler = request.id, self._log, replica.scheduler
        assert isinstance(row, int)
        log.replica[row] = replica.index
        if reason := scheduler.refusal(request):
            log.status[row], log.reason[row] = int(Status.REJECTED), reason
            return False
        search = _Search(
            row,
            request,
            replica,
            beams=Beams(self.width[row], scheduler.finish_at(request) - request.prompt_tokens),
            rng=np.random.Generator(np.random.PCG64([self._seed, row])),
            keys=[self._prompt_keys(request, scheduler.config)],
        )
        self._server.keep(search)
        if request.external_tokens:
            # Another engine has made the first step. What it found likely came with the pages of the prompt.
            search.generated = 1
            self.counts.requests += 1
            self._count(request.prompt_tokens, log.cached_tokens[row])
            self._grow(search)
        self._send(search)
        return True

    def ended(self, search: _Search, request: Request, now_s: float) -> None:
        """A hypothesis has its token."""
        self._count(request.prompt_tokens, max(0, request.cached_tokens))
        if search.missing:
            return
        self._grow(search)
        if search.beams.over:
            self._end(search, now_s)
            return
        # A client is told, and answers: the plan that is made at this very boundary goes without it.
        search.replica.coming += len(search.beams.live)
        self._clock.call_at(self._clock.now, lambda: self._answered(search))

    def had_one_token(self, row: int, prompt_tokens: int) -> None:
        """A search was over when another pool had computed its prompt, for lack of room."""
        self._count(prompt_tokens, self._log.cached_tokens[row])
        self.counts.requests += 1
        self.counts.searches += 1
        self.counts.shown_tokens += 1

    # ---- one step ------------------------------------------------------------------------------------------

    def _answered(self, search: _Search) -> None:
        if self._server.is_kept(search):
            search.replica.coming -= len(search.beams.live)
            self._send(search)

    def _send(self, search: _Search) -> None:
        """One request of one token for each live hypothesis, to where the search began: there are its pages."""
        whole, now_s, live = search.request, self._clock.now, search.beams.live
        search.missing = len(live)
        self.counts.requests += len(live)
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
            # Pages that were sent are there once: the first to be admitted brings them in, the others find them.
            request.external_tokens, whole.external_tokens = whole.external_tokens, 0
            search.replica.queue(request)

    def _seats(self, search: _Search) -> list[int]:
        """A row of the log for each live hypothesis."""
        while len(search.guests) < len(search.beams.live):
            self._server.add_guest(search)
        # Not before: under asynchronous scheduling a plan may have preempted a hypothesis whose token was on its way.
        for row in search.guests:
            self._log.output_tokens[row] = 0
        return search.guests

    def _count(self, num_tokens: int, cached_tokens: int) -> None:
        """A request of one token that is over."""
        self.counts.cached_tokens += cached_tokens
        self.counts.computed_tokens += num_tokens - cached_tokens

    def _grow(self, search: _Search) -> None:
        beams, count = search.beams, 2 * search.beams.width
        drawn = self._next_tokens.logprobs(search.rng, len(beams.live), count).tolist()
        first = self._next_key
        self._next_key -= len(drawn) * count
        beams.grow([_named(row, first - place * count) for place, row in enumerate(drawn)])
        config, keys = search.replica.scheduler.config, search.keys
        tokens = search.request.prompt_tokens + beams.num_steps
        if tokens % config.page_tokens or not config.enable_prefix_caching:
            search.keys = [keys[hypothesis.parents[-1]] for hypothesis in beams.live]
        else:
            # A page and all before it are named by its last token: no two hypotheses have one in common.
            search.keys = [[*keys[h.parents[-1]], h.token_ids[-1]] for h in beams.live]

    def _end(self, search: _Search, now_s: float) -> None:
        length = search.beams.num_steps
        self.counts.searches += 1
        self.counts.shown_tokens += length
        if search.row in self._goes_on:
            self._rename(search)
        self._server.show(search, now_s, length)

    # ---- who may find what ---------------------------------------------------------------------------------

    def _prompt_keys(self, whole: Request, config: SchedulerConfig) -> list[int]:
        """All full pages of the prompt, so that hypotheses find those that no other request shares."""
        if not config.enable_prefix_caching:
            return []
        pages = whole.prompt_tokens // config.page_tokens
        shared = _keys(whole)[:pages]
        first = self._next_key
        self._next_key -= pages - len(shared)
        return [*shared, *range(first, self._next_key, -1)]

    def _rename(self, search: _Search) -> None:
        """The next turn's prompt holds the best hypothesis: it finds that one's pages."""
        whole, best = search.request, search.beams.best()[0]
        size = search.replica.scheduler.config.page_tokens
        own = search.keys[search.beams.live.index(best)]
        computed = (whole.prompt_tokens + search.beams.num_steps - 1) // size
        keys = _keys(whole)
        for page in range(whole.prompt_tokens // size, min(computed, len(keys))):
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
