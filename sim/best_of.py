"""Best-of in the twin: several answers are sampled to one prompt, and one is shown when all have ended.

The answers share the prompt's pages by copy on write (`Request.sibling`), as in the engine. A twin cannot tell which is
likeliest; since all have the length that the workload says, it does not matter here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from serving.beams import CandidateCounts
from serving.errors import UsageError
from serving.request import Request, State
from sim.whole import Whole
from sim.workload.types import Workload

if TYPE_CHECKING:
    from sim.api_server import ApiServer
    from sim.replica import Replica


def check_best_of(workload: Workload) -> None:
    """Raise `UsageError` for what best-of cannot be combined with."""
    best_of, width = workload.best_of, workload.beam_width
    if best_of is not None and width is not None and bool(((best_of > 1) & (width > 0)).any()):
        raise UsageError("a beam search samples nothing: --best-of and --beam-width; leave one of them out")


class Candidates:
    """All groups of a run. Candidates but the first are written down in rows beyond the workload's."""

    def __init__(self, server: ApiServer, workload: Workload) -> None:
        assert workload.best_of is not None
        self.count: list[int] = workload.best_of.tolist()
        self.counts = CandidateCounts()
        self._server, self._log = server, server.log

    def begin(self, request: Request, replica: Replica) -> bool:
        """The request reaches a replica. False when it can never run."""
        row = request.id
        assert isinstance(row, int)
        if not replica.queue(request):
            return False
        group = Whole(row, request, replica, missing=self.count[row])
        self._server.keep(group)
        # Later turns find the answer that is shown, the first; the others share the prompt alone.
        pages = request.prompt_tokens // replica.scheduler.config.page_tokens
        keys = [request.keys[page] for page in range(min(len(request.keys), pages))]
        for _ in range(1, group.missing):
            replica.queue(
                replace(
                    request,
                    id=self._server.add_guest(group),
                    state=State.WAITING,
                    slot=-1,
                    num_tokens=-1,
                    external_tokens=0,
                    keys=keys,
                    sibling=request,
                )
            )
        return True

    def ended(self, group: Whole, request: Request, now_s: float) -> None:
        """One answer has ended."""
        assert isinstance(request.id, int)
        self.counts.answers += 1
        self.counts.generated_tokens += self._log.output_tokens[request.id]
        if group.missing:
            return
        shown = self._log.output_tokens[group.row]
        self.counts.requests += 1
        self.counts.shown_tokens += shown
        self._server.show(group, now_s, shown)

    def had_one_token(self, row: int, prompt_tokens: int) -> None:
        """All answers were over when another pool had computed the prompt, for lack of room."""
        self.counts.requests += 1
        self.counts.answers += self.count[row]
        self.counts.generated_tokens += self.count[row]
        self.counts.shown_tokens += 1
