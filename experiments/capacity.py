"""Capacity: the highest load at which a deployment keeps its promises in the long run.

Loads lie on a ladder (`Ladder`); the answer is the highest rung that a full-length run sustains. Short runs bracket it:
they start with an empty server and therefore flatter it, so that their "no" ends a test early and their "yes" never
settles the answer. Every load meets the same requests in the same order (common random numbers).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from costmodel.prices import Prices
from experiments.capacity_interval import capacity_interval
from experiments.capacity_lengths import SHORT, Lengths
from experiments.capacity_traffic import Closed, Traffic, head
from experiments.capacity_trial import Promises, Trial, judge, served_s, words
from sim.deployment import Built, simulate
from sim.fleet.build import num_replicas
from sim.intervals import Interval
from sim.metrics import summarise
from sim.record import RunRecord, Status
from sim.saturation import Load
from sim.verdict import Bound, what_bounds
from sim.workload import Workload

SPANS = 8
"""A run of full length takes in at least this many times the P95 of a request's time in service."""
LOWEST_UTILISATION = 0.01
"""Loads are tested down to this share of what one request at a time keeps busy."""

Told = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Capacity:
    """The answer. `load` is None where no load is sustained."""

    load: float | None
    next_load: float | None
    """The next rung above, which is not sustained; None where no limit was found."""
    requests_per_s: float
    variable: str
    interval: Interval | None = None
    at: Trial | None = None
    """The test at `load`."""
    beyond: Trial | None = None
    """The test just above."""
    lone: Trial | None = None
    """Requests one at a time."""
    bound: Bound | None = None
    infeasible: str | None = None
    """Why no load is sustained."""
    limited: bool = True
    """False where every load that was tested is sustained: the answer is a lower bound."""
    trials: tuple[Trial, ...] = ()
    simulated_requests: int = 0
    record: RunRecord | None = field(default=None, repr=False)
    """The run at `load`."""

    @property
    def gives_first(self) -> str:
        """What breaks first when the load rises."""
        return self.beyond.reason if self.beyond is not None else "nothing that was tested"


def find_capacity(
    built: Built,
    traffic: Traffic,
    promises: Promises,
    *,
    start: float | None = None,
    full: int | None = None,
    replications: int = 8,
    seed: int = 0,
    jobs: int | None = None,
    pricer: Prices | None = None,
    told: Told | None = None,
    progress: Told | None = None,
) -> Capacity:
    """Search for the capacity of a deployment (with all its replicas).

    `full` is the number of requests of a full-length run at least, by default what `Lengths` says; `replications` 1
    leaves the interval out. `pricer` stands in for the deployment's prices. `told` hears of every test, `progress` of
    how far each run is. Raises UsageError as `sim.deployment.simulate` does, and for promises that promise nothing.
    """
    promises.check(traffic.workload(1.0, SHORT))
    search = Search(built, traffic, promises, full, pricer, told, progress)
    lone = search.lone()
    why = _infeasible_alone(lone)
    if why is not None:
        return search.answer(None, lone, why)
    top = search.top(start if start is not None else search.guess(), lone)
    if top is None:
        lowest = min(search.finals)
        trial = search.finals[lowest]
        at = traffic.ladder.load(lowest)
        return search.answer(None, lone, f"even at {at:.4g} {unit(traffic.variable)}, {trial.reason}")
    found = search.answer(top, lone, None)
    if replications < 2 or not found.limited:
        return found
    assert found.load is not None
    assert found.at is not None
    interval = capacity_interval(
        built,
        traffic,
        promises,
        found.load,
        requests=found.at.num_requests,
        drawn=search.lengths.drawn,
        seed=seed,
        replications=replications,
        jobs=jobs,
        progress=progress,
    )
    return replace(found, interval=interval)


def unit(variable: str) -> str:
    """The load in words."""
    return {
        "request_rate": "requests/s",
        "rate_scale": "times the trace's speed",
        "max_concurrency": "requests at once",
    }[variable]


def _infeasible_alone(lone: Trial) -> str | None:
    """Why not even requests on an idle server keep the promises, or None when they may."""
    broken = [outcome for outcome in lone.outcomes if not outcome.kept]
    if not broken:
        return None
    worst = max(broken, key=lambda outcome: outcome.ratio)
    if worst.ratio == math.inf and lone.rejected:
        return f"{lone.rejected} of {lone.num_requests} requests are refused: they are longer than max_model_len allows"
    if not worst.settled:
        return None
    if worst.name == "slo_attainment":
        return f"of requests that have the server to themselves only {worst.value:.1%} are good"
    return f"of requests that have the server to themselves, {words(worst)}"


class Search:
    """Tests at rungs of the ladder, each made once."""

    def __init__(
        self,
        built: Built,
        traffic: Traffic,
        promises: Promises,
        full: int | None,
        pricer: Prices | None,
        told: Told | None,
        progress: Told | None = None,
    ) -> None:
        self.built, self.traffic, self.promises = built, traffic, promises
        several = min(num_replicas(built.deployment), 4)  # each replica needs a run of its own length
        self.lengths = Lengths.of(traffic.workload(1.0, SHORT), full)
        self.least, self.full = self.lengths.short * several, self.lengths.full * several
        self.pricer, self.told, self.progress = pricer, told, progress
        self.shorts: dict[int, Trial] = {}
        self.finals: dict[int, Trial] = {}
        self.order: list[Trial] = []
        self.simulated = 0
        self.best: tuple[int, RunRecord] | None = None
        self.unlimited = False
        self.lowest_load = 0.0

    # ---- tests ---------------------------------------------------------------------------------------------

    def lone(self) -> Trial:
        """Requests one at a time: as good as it gets."""
        inner = self.traffic.inner if isinstance(self.traffic, Closed) else self.traffic
        workload = Closed(inner).workload(1, self.lengths.lone)
        if len(workload) > self.lengths.lone:
            workload = head(workload, self.lengths.lone)
        record = self._run(workload, "one request at a time")
        trial = judge(record, 1.0, self.promises, whole=True)
        busy_s = float(record.end_s) / max(len(record.requests), 1)
        self.lowest_load = LOWEST_UTILISATION / busy_s if busy_s > 0 else LOWEST_UTILISATION
        return trial

    def guess(self) -> float:
        """A load near capacity: 70 % of the throughput of a queue that never runs dry."""
        if self.traffic.variable == "max_concurrency":
            return 32.0
        inner = self.traffic
        count = self.lengths.short
        workload = Closed(inner).workload(10**9, count)
        if len(workload) > 4 * count:
            workload = head(workload, 4 * count)
        record = self._run(workload, "all requests at once")
        done = int(np.count_nonzero(record.requests.status == Status.FINISHED))
        per_s = max(done, 1) / max(float(record.end_s), 1e-9)
        return 0.7 * per_s / inner.requests_per_s(1.0)

    def short(self, rung: int) -> Trial:
        """A test that may stop early: few requests first, four times as many while it is open."""
        if rung in self.finals:
            return self.finals[rung]
        if rung not in self.shorts:
            load = self.traffic.ladder.load(rung)
            if self.traffic.whole:
                return self.final(rung)
            count = min(self._least(load, self.least), self.full)
            trial = self._test(load, count, final=False)
            while not self._enough(trial):
                count *= 4
                if count >= self.full:
                    return self.final(rung)
                trial = self._test(load, count, final=False)
            self.shorts[rung] = trial
            if not trial.sustained and self._beyond_doubt(trial):
                self.finals[rung] = trial
            self._tell(trial)
        return self.shorts[rung]

    def final(self, rung: int) -> Trial:
        """A test of full length, or one that failed beyond doubt before."""
        if rung not in self.finals:
            load = self.traffic.ladder.load(rung)
            count = self._least(load, self.full)
            trial, record = self._test_and_keep(load, count)
            while (
                not self.traffic.whole
                and count < self.lengths.longest
                and self._too_short(trial, record, load)
            ):
                count *= 2
                trial, record = self._test_and_keep(load, count)
            self.finals[rung] = trial
            if trial.sustained and (self.best is None or rung > self.best[0]):
                self.best = (rung, record)
            self._tell(trial)
        return self.finals[rung]

    def _least(self, load: float, count: int) -> int:
        """In a closed loop every user needs some turns."""
        return max(count, int(8 * load)) if self.traffic.variable == "max_concurrency" else count

    def _too_short(self, trial: Trial, record: RunRecord, load: float) -> bool:
        if trial.hopeless or trial.saturation.load is Load.SATURATED:
            return False
        if trial.saturation.load is Load.INCONCLUSIVE:
            return True
        sent_s = record.requests.sent_s
        return float(sent_s[-1] - sent_s[0]) < SPANS * served_s(record)

    def _enough(self, trial: Trial) -> bool:
        if trial.hopeless:
            return True
        if trial.sustained:
            return all(outcome.settled for outcome in trial.outcomes)
        return self._beyond_doubt(trial)

    def _beyond_doubt(self, trial: Trial) -> bool:
        """A "no" from a short run: most requests miss, or a longer run misses by more than sampling explains."""
        if trial.hopeless or trial.num_requests >= self.full:
            return True
        return trial.settled_miss and trial.num_requests >= 4 * self.least

    def _test(self, load: float, count: int, *, final: bool) -> Trial:
        return self._judged(self._run_at(load, count), load, final)

    def _test_and_keep(self, load: float, count: int) -> tuple[Trial, RunRecord]:
        record = self._run_at(load, count)
        return self._judged(record, load, True), record

    def _run_at(self, load: float, count: int) -> RunRecord:
        return self._run(self.traffic.workload(load, count), f"{load:.4g} {unit(self.traffic.variable)}")

    def _judged(self, record: RunRecord, load: float, final: bool) -> Trial:
        return judge(record, load, self.promises, whole=self.traffic.whole, final=final)

    def _run(self, workload: Workload, words: str) -> RunRecord:
        progress, told = self.progress, None
        if progress is not None:
            told = lambda p: progress(f"{words}: {p.done:,} of {p.total:,} requests")  # noqa: E731
        record = simulate(workload, self.built, pricer=self.pricer, progress=told)
        if record.interrupted:
            raise KeyboardInterrupt
        self.simulated += len(record.requests)
        return record

    def _tell(self, trial: Trial) -> None:
        self.order.append(trial)
        if self.told is not None:
            verb = "sustained" if trial.sustained else "not sustained"
            self.told(f"{trial.load:.4g} {unit(self.traffic.variable)}: {verb}")

    # ---- search --------------------------------------------------------------------------------------------

    def top(self, start: float, lone: Trial) -> int | None:
        """The highest rung that a full-length run sustains, None where there is none."""
        bracket = self._bracket(self.traffic.ladder.rung(max(start, 1e-6)))
        if bracket is None:
            return None
        low, high = bracket
        while high - low > 1:
            middle = (low + high) // 2
            if self.short(middle).sustained:
                low = middle
            else:
                high = middle
        return self._settle(low, high)

    def _bracket(self, rung: int) -> tuple[int, int] | None:
        """A rung that short runs sustain and one above that they do not."""
        step = 8
        if self.short(rung).sustained:
            while True:
                higher = rung + step
                if self._unlimited(higher):
                    self.unlimited = True
                    return rung, rung + 1
                if not self.short(higher).sustained:
                    return rung, higher
                rung, step = higher, min(2 * step, 64)
        while True:
            lower = rung - step
            if self._at_the_bottom(lower):
                lower = self._bottom()
                if lower >= rung or not self.short(lower).sustained:
                    self.final(min(lower, rung))
                    return None
                return lower, rung
            if self.short(lower).sustained:
                return lower, rung
            rung, step = lower, min(2 * step, 64)

    def _settle(self, low: int, high: int) -> int | None:
        """Confirm the bracket with full-length runs, and go down where they disagree."""
        if self.unlimited:
            if self.final(low).sustained:
                return low
            self.unlimited = False
        step = 1
        while not self.final(low).sustained:
            high = low
            low -= step
            step *= 2
            if self._at_the_bottom(low):
                low = self._bottom()
                if low >= high or not self.final(low).sustained:
                    return None
        while True:
            while high - low > 1:
                middle = (low + high) // 2
                if self.final(middle).sustained:
                    low = middle
                else:
                    high = middle
            if not self.final(high).sustained:
                return low
            low, high = high, high + 2  # a short run was wrong about the rung above

    def _unlimited(self, rung: int) -> bool:
        load = self.traffic.ladder.load(rung)
        if self.traffic.variable == "max_concurrency":
            return 8 * load > self.lengths.longest
        return self.traffic.requests_per_s(load) > 1e6 * self.lowest_load

    def _at_the_bottom(self, rung: int) -> bool:
        lowest = self.traffic.ladder.lowest
        return rung < (lowest if lowest is not None else self._bottom())

    def _bottom(self) -> int:
        lowest = self.traffic.ladder.lowest
        if lowest is not None:
            return lowest
        return self.traffic.ladder.rung(self.lowest_load / self.traffic.requests_per_s(1.0))

    # ---- the answer ----------------------------------------------------------------------------------------

    def answer(self, rung: int | None, lone: Trial, why: str | None) -> Capacity:
        trials = tuple(sorted(self.order, key=lambda trial: (trial.load, trial.num_requests)))
        variable = self.traffic.variable
        if rung is None:
            return Capacity(
                None,
                None,
                0.0,
                variable,
                lone=lone,
                infeasible=why,
                trials=trials,
                simulated_requests=self.simulated,
            )
        load = self.traffic.ladder.load(rung)
        at = self.final(rung)
        assert self.best is not None
        record = self.best[1]
        summary = summarise(record)
        rate = self.traffic.requests_per_s(load)
        return Capacity(
            load,
            None if self.unlimited else self.traffic.ladder.load(rung + 1),
            summary.request_throughput if math.isnan(rate) else rate,
            variable,
            at=at,
            beyond=None if self.unlimited else self.final(rung + 1),
            lone=lone,
            bound=what_bounds(record, summary),
            limited=not self.unlimited,
            trials=trials,
            simulated_requests=self.simulated,
            record=record,
        )
