"""Best-of in the twin: several answers are sampled to one prompt, and one is shown when all have ended.

The answers share the prompt's pages by copy on write (`Request.sibling`), as in the engine. A twin cannot tell which is
likeliest; since all have the length that the workload says, it does not matter here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from serving.beams import CandidateCounts
from serving.errors import UsageError
from serving.request import Request
from sim.log import RequestLog
from sim.record import Status
from sim.replica import Replica
from sim.router import Central, Router
from sim.workload.types import Workload


def check_best_of(workload: Workload, *, fleet: bool = False, followed: bool = False) -> None:
    """Raise `UsageError` for what best-of cannot be combined with."""
    if workload.best_of is None:
        return
    if fleet or followed:
        what = "a fleet (pools, autoscaling, failures, admission)" if fleet else "streams over a network"
        raise UsageError(f"best-of (--best-of) beside {what} is not modelled; leave one of them out")
    if workload.beam_width is not None and bool(((workload.best_of > 1) & (workload.beam_width > 0)).any()):
        raise UsageError("a beam search samples nothing: --best-of and --beam-width; leave one of them out")


@dataclass(slots=True, eq=False)
class _Group:
    """The candidates of one request."""

    row: int
    missing: int
    rows: list[int] = field(default_factory=list)
    last_step: tuple[int, int] = (0, 0)
    """Replica and step that gave the last token of all."""


class Candidates:
    """All groups of a run. `ended(row)` is told when the last answer of one has ended.

    Candidates but the first are written down in rows of the log beyond the workload's.
    """

    def __init__(
        self,
        log: RequestLog,
        workload: Workload,
        page_tokens: int,
        router: Router,
        ended: Callable[[int], None],
    ) -> None:
        assert workload.best_of is not None
        self.count: list[int] = workload.best_of.tolist()
        self.counts = CandidateCounts()
        self._log, self._router, self._ended = log, router, ended
        self._page_tokens = page_tokens
        self._by_row: dict[int, _Group] = {}
        self._owner: dict[int, int] = {}
        self._shown: dict[int, tuple[int, ...]] = {}
        """The one range of tokens of each request that is over."""
        self._rows = [row for row, count in enumerate(self.count) if count > 1]
        log.speculates = True  # the last step gives all tokens that are shown
        log.unstreamed = [*log.unstreamed, *self._rows]

    def __contains__(self, request: Request) -> bool:
        return request.id in self._by_row

    def begin(self, request: Request) -> bool:
        """The request reaches the server. False when it can never run."""
        row = request.id
        assert isinstance(row, int)
        group = _Group(row, self.count[row], [row])
        self._by_row[row] = group
        if not self._router.submit(request):
            del self._by_row[row]
            return False
        # Later turns find the answer that is shown, the first; the others share the prompt alone.
        pages = request.prompt_tokens // self._page_tokens
        keys = [request.keys[page] for page in range(min(len(request.keys), pages))]
        central = isinstance(self._router, Central)
        home: Replica | None = None
        if not central:
            home = next(r for r in self._router.replicas if r.index == self._log.replica[row])
        for _ in range(1, group.missing):
            guest = self._log.add_guest()
            group.rows.append(guest)
            self._by_row[guest], self._owner[guest] = group, row
            # Wherever a seat is free may be another replica, whose pages nobody can share.
            other = replace(
                request, id=guest, slot=-1, num_tokens=-1, keys=keys, sibling=None if central else request
            )
            _ = self._router.submit(other) if home is None else home.submit(other)
        return True

    def finished(self, request: Request, now_s: float) -> None:
        """One answer has ended."""
        row, log = request.id, self._log
        assert isinstance(row, int)
        group = self._by_row.pop(row)
        self.counts.answers += 1
        self.counts.generated_tokens += log.output_tokens[row]
        log.status[group.row], log.engine_done_s[group.row] = int(Status.UNFINISHED), math.nan
        if log.ranges and log.ranges[-1][0] == row:
            _, replica, first, count = log.ranges[-1][:4]
            group.last_step = (replica, first + count - 1)
        group.missing -= 1
        if group.missing:
            return
        shown = log.output_tokens[group.row]
        log.status[group.row], log.reason[group.row] = int(Status.FINISHED), "length"
        log.engine_done_s[group.row] = now_s
        self._shown[group.row] = (group.row, *group.last_step, 1, shown)
        self.counts.requests += 1
        self.counts.shown_tokens += shown
        self._ended(group.row)

    def settle(self) -> None:
        """The run is over: what was shown is all that stays of the candidates."""
        log, mine = self._log, set(self._rows)
        for guest, owner in self._owner.items():
            log.preemptions[owner] += log.preemptions[guest]
            log.preemptions[guest] = 0
        log.ranges = [entry for entry in log.ranges if entry[0] not in mine] + list(self._shown.values())
        for row in mine - self._shown.keys():
            log.output_tokens[row] = 0
