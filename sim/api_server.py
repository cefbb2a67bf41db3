"""The API server in front of an engine, as far as it makes several requests of one: beam searches and best-of.

A router sends the one request; what is made of it lives and dies with the replica that was chosen. Nothing of the answer
is shown before all of it is known.
"""

from __future__ import annotations

import math

import numpy as np

from serving.request import Request
from sim.beam import BeamSearches
from sim.best_of import Candidates
from sim.clock import Clock
from sim.log import RequestLog
from sim.record import Status
from sim.replica import Replica
from sim.whole import Whole
from sim.workload.types import Workload


class ApiServer:
    """Of all replicas of a run. Requests that it makes are written down in rows of the log beyond the workload's."""

    def __init__(self, clock: Clock, log: RequestLog, workload: Workload) -> None:
        self.log = log
        self.beams: BeamSearches | None = None
        self.candidates: Candidates | None = None
        if workload.beam_width is not None:
            self.beams = BeamSearches(clock, self, workload)
        if workload.best_of is not None:
            self.candidates = Candidates(self, workload)
        self._prompt: list[int] = workload.prompt_tokens.tolist()
        self._output: list[int] = workload.output_tokens.tolist()
        self._rows = np.flatnonzero(workload.come_whole()).tolist()
        self._whose: dict[int, Whole] = {}
        """By row of the log; each of its requests to the engine leads to it."""
        self._shown: dict[int, tuple[int, ...]] = {}
        """The one range of tokens of each request that is over."""
        self._free_rows: list[int] = []
        self._owner: dict[int, int] = {}
        """The request that last used a row."""
        log.speculates = True  # the last step gives all tokens that are shown
        log.unstreamed = self._rows

    # ---- what a replica asks -------------------------------------------------------------------------------

    def submit(self, request: Request, replica: Replica) -> bool:
        """A request reaches a replica. False when it is refused."""
        row = request.id
        assert isinstance(row, int)
        # Where prompts are computed apart, only the first token is asked for: one row, whatever comes of it.
        if request.max_tokens == self._output[row]:
            if self.beams is not None and self.beams.width[row]:
                return self.beams.begin(request, replica)
            if self.candidates is not None and self.candidates.count[row] > 1:
                return self.candidates.begin(request, replica)
        return replica.queue(request)

    def ended(self, request: Request, now_s: float) -> bool:
        """A request to the engine has ended. Whether it was one of several."""
        row, log = request.id, self.log
        assert isinstance(row, int)
        if (whole := self._whose.get(row)) is None:
            return False
        log.status[whole.row], log.reason[whole.row] = int(Status.UNFINISHED), ""
        log.engine_done_s[whole.row] = math.nan
        whole.generated += log.output_tokens[row]
        whole.missing -= 1
        if log.ranges and log.ranges[-1][0] == row:
            _, replica, first, count = log.ranges.pop()[:4]
            whole.last_step = (replica, first + count - 1)
        self._kind(whole.row).ended(whole, request, now_s)  # type: ignore[arg-type]
        return True

    def _kind(self, row: int) -> BeamSearches | Candidates:
        if self.beams is not None and self.beams.width[row]:
            return self.beams
        assert self.candidates is not None
        return self.candidates

    def holds(self, replica: Replica) -> bool:
        """Whether a replica has an answer under way, though its engine may have nothing to do at this moment."""
        return any(whole.replica is replica for whole in self._whose.values())

    def halted(self, replica: Replica, lost: list[tuple[Request, int]]) -> list[tuple[Request, int]]:
        """Unfinished requests of a replica that failed and the tokens it gave them, as their senders know them."""
        tokens: dict[Whole, int] = {
            whole: whole.generated for whole in self._whose.values() if whole.replica is replica
        }
        out = []
        for request, count in lost:
            assert isinstance(request.id, int)
            if (whole := self._whose.get(request.id)) is None:
                out.append((request, count))
            else:
                tokens[whole] += count
        for whole, count in tokens.items():
            for row in whole.guests:
                self.log.preemptions[row] = 0
                self._owner.pop(row)
            self.forget(whole)
            out.append((whole.request, count))
        out.sort(key=lambda each: each[0].arrival_s)
        return out

    # ---- what searches and candidates ask ------------------------------------------------------------------

    def keep(self, whole: Whole) -> None:
        """Lead what the engine says of the request's own row to it."""
        self._whose[whole.row] = whole

    def add_guest(self, whole: Whole) -> int:
        """A further row of the log for a request."""
        row = self._free_rows.pop() if self._free_rows else self.log.add_guest()
        self._settle(row)
        self.log.output_tokens[row] = 0
        whole.guests.append(row)
        self._whose[row], self._owner[row] = whole, whole.row
        return row

    def is_kept(self, whole: Whole) -> bool:
        """Whether a request is still under way, and did not fail with its replica."""
        return self._whose.get(whole.row) is whole

    def forget(self, whole: Whole) -> None:
        """A request is over, or lost."""
        for row in (whole.row, *whole.guests):
            del self._whose[row]
        self._free_rows += whole.guests

    def show(self, whole: Whole, now_s: float, num_tokens: int) -> None:
        """The answer is there."""
        row, log = whole.row, self.log
        log.status[row], log.reason[row] = int(Status.FINISHED), "length"
        log.engine_done_s[row], log.output_tokens[row] = now_s, num_tokens
        self._shown[row] = (row, *whole.last_step, 1, num_tokens)
        self.forget(whole)
        whole.replica.answered(whole.request, now_s)

    def _settle(self, guest: int) -> None:
        """Preemptions of what was made of a request are its own."""
        if (owner := self._owner.get(guest)) is not None:
            self.log.preemptions[owner] += self.log.preemptions[guest]
            self.log.preemptions[guest] = 0

    def settle(self) -> None:
        """The run is over: what was shown is all that stays."""
        log, mine = self.log, set(self._rows)
        for guest in self._owner:
            self._settle(guest)
        for row in sorted(mine - self._shown.keys()):
            if log.status[row] != Status.FINISHED:
                log.output_tokens[row] = 0
                continue
            mine.discard(row)
            if log.replica[row] >= 0:  # not out of the response cache: nothing came after the prompt's step
                self._kind(row).had_one_token(row, self._prompt[row])
        log.ranges = [entry for entry in log.ranges if entry[0] not in mine] + list(self._shown.values())
