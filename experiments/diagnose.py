"""From a run to what ails it: the governing stage, the patterns it shows, and changes that were simulated before they are
proposed.

A change is simulated under the run's own traffic beside the run's own deployment, with common random numbers: both meet
the same requests, calibration errors and step noise, so that the interval of their difference is not that of two runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from pydantic import ValidationError

from experiments.diagnose_changes import Change, Patient, changes_for
from experiments.diagnose_rules import Finding, Judged, apply_rules, explain, judge
from experiments.diagnose_run import Measured
from serving.errors import TokenTwinError, UsageError
from sim.certainty import default_replications
from sim.deployment import Built, build, simulate
from sim.hull import after_run
from sim.intervals import Difference, Replicated, compare
from sim.metrics import Summary, slo_outcomes, summarise
from sim.record import RunRecord
from sim.replications import replicate
from sim.slo import PRESETS, Slo
from sim.workload import Workload, WorkloadSpec, load_workload

MOST_PROPOSED = 3
MOST_REPLICATED = 5
"""Changes that get intervals: the best of those that the single run says help."""
TWIN_TOLERANCE = 0.5
"""A twin further off the run's figure than this cannot say what a change does to it."""
DEFAULT_SLO = "chat"
HIGHER_IS_BETTER = ("request_throughput", "output_throughput", "request_goodput", "slo_attainment")
WATCHED = ("mean_ttft", "p95_ttft", "mean_tpot", "p95_tpot", "p99_itl", "p95_e2el", *HIGHER_IS_BETTER)
"""Figures of which a change may make some worse."""
LEAST_WORSE = 0.01
"""A figure that moves by less is not worth a line, however certain that is."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A change that was simulated. `effect` is on the target figure, and None where one run already said no."""

    change: Change
    before_s: float
    after_s: float
    effect: Difference | None = None
    met: bool = False
    """Whether the target is kept after it."""
    worse: tuple[tuple[str, Difference], ...] = ()
    breaks: tuple[str, ...] = ()
    """Promises that were kept before and are not after."""
    not_measured: tuple[str, ...] = ()
    """What of its prices was never measured."""

    @property
    def helps(self) -> bool:
        """Whether the whole interval of the effect is on the good side."""
        return self.effect is not None and self.effect.high < 0


@dataclass(frozen=True, slots=True)
class TwinCheck:
    """The twin of the run beside the run, on the target figure."""

    run_s: float
    twin_s: float

    @property
    def error(self) -> float:
        return self.twin_s / self.run_s - 1 if self.run_s > 0 else math.inf

    @property
    def trusted(self) -> bool:
        return abs(self.error) <= TWIN_TOLERANCE


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What was found and what was tried."""

    run: Measured
    assumed: bool
    """Nobody set an SLO: the preset stands in."""
    judged: tuple[Judged, ...]
    """Worst first."""
    findings: tuple[Finding, ...]
    causes: tuple[Finding, ...]
    """Those that explain the target, strongest first."""
    check: TwinCheck | None = None
    proposed: tuple[Trial, ...] = ()
    rejected: tuple[Trial, ...] = ()
    """Simulated and found not to help."""
    impossible: tuple[tuple[Change, str], ...] = ()
    why_nothing: str = ""
    """Why nothing was simulated."""

    @property
    def target(self) -> Judged:
        return self.judged[0]

    @property
    def healthy(self) -> bool:
        """Every promise that can be judged is kept, everybody was served, and no queue grows."""
        overloaded = any(f.rule == "backlog" and f.fired for f in self.findings)
        met = {j.met for j in self.judged}
        return True in met and False not in met and not self.run.lost and not overloaded


def diagnose(
    run: Measured,
    slos: Sequence[Slo] = (),
    *,
    replications: int | None = None,
    jobs: int | None = None,
    told: Callable[[str], None] | None = None,
) -> Diagnosis:
    """Judge a run by `slos` (its own by default), apply every rule, and simulate the changes that follow.

    A proposal needs an interval, so fewer than three `replications` are a `UsageError`. `told` hears what is simulated.
    """
    if replications is not None and replications < 3:
        raise UsageError(f"--replications must be at least 3 for intervals of an effect, got {replications}")
    own = tuple(slos) or run.slos
    judged = judge(run, own or PRESETS[DEFAULT_SLO])
    findings = apply_rules(run, judged)
    causes = explain(findings, judged[0]) if judged[0].exists else ()
    base = Diagnosis(run, not own, judged, findings, causes)
    if base.healthy:
        return base
    if not judged[0].exists:
        return replace(base, why_nothing="no promise can be judged")
    if run.deployment is None or run.traffic is None:
        ours = run.record is not None and run.record.meta.get("real")
        flags = "--gpu, the profile of its device" if ours else "--model, --gpu and the engine's flags"
        why = f"what was deployed is not known; give {flags}"
        return replace(base, why_nothing=why)
    if not math.isfinite(judged[0].value_s):
        why = f"{run.lost} requests were lost, so {judged[0].slo.label} has no value to improve"
        return replace(base, why_nothing=why)
    if not causes:
        return replace(base, why_nothing="no rule explains the figure")
    return _Clinic(base, replications, jobs, told).treat()


class _Clinic:
    """Simulates the changes that a diagnosis asks for."""

    def __init__(
        self,
        diagnosis: Diagnosis,
        replications: int | None,
        jobs: int | None,
        told: Callable[[str], None] | None,
    ) -> None:
        self.diagnosis, self.jobs = diagnosis, jobs
        self.run, self.target = diagnosis.run, diagnosis.target.slo
        self.slos = tuple(j.slo for j in diagnosis.judged)
        assert self.run.traffic is not None
        self.traffic: WorkloadSpec | Workload = self.run.traffic
        self.replications = replications
        self.told = told or (lambda words: None)
        self.workload = (
            load_workload(self.traffic, seed=self.run.seed)
            if isinstance(self.traffic, WorkloadSpec)
            else self.traffic
        )

    def treat(self) -> Diagnosis:
        assert self.run.deployment is not None
        built = build(self.run.deployment)
        self.told("the run's own twin")
        record, summary = self._simulate(built)
        before_s = self._figure(record)
        check = TwinCheck(self.diagnosis.target.value_s, before_s)
        diagnosis = replace(self.diagnosis, check=check)
        if not check.trusted:
            why = f"the twin is {check.error:+.0%} off the run; calibrate first (docs/calibration.md)"
            return replace(diagnosis, why_nothing=why)
        changes = changes_for(self.diagnosis.causes, Patient(built, record))
        if not changes:
            return replace(diagnosis, why_nothing="nothing on the server cures this")
        screened, impossible = self._screen(changes, built, before_s)
        helping = sorted((t for t, _ in screened if t.after_s < before_s), key=lambda t: self._rank(t))
        chosen = _varied(helping, MOST_REPLICATED)
        by_change = {id(trial): trial_built for trial, trial_built in screened}
        count = self.replications or max(default_replications(record), 2)
        measured: list[Trial] = []
        if chosen:
            self.told("the run's own twin, with intervals")
            base = self._replicate(built, count, summary)
            for trial in chosen:
                self.told(trial.change.flags)
                measured.append(self._measure(trial, by_change[id(trial)], base, count))
        good = sorted((t for t in measured if t.helps), key=lambda t: self._rank(t))
        proposed = tuple(sorted(_varied(good, MOST_PROPOSED), key=lambda t: self._rank(t)))
        known = {id(t.change) for t in measured}
        rest = [t for t, _ in screened if id(t.change) not in known] + [
            t for t in measured if t not in proposed
        ]
        return replace(diagnosis, proposed=proposed, rejected=tuple(rest), impossible=tuple(impossible))

    def _screen(
        self, changes: Sequence[Change], built: Built, before_s: float
    ) -> tuple[list[tuple[Trial, Built]], list[tuple[Change, str]]]:
        """One run of each change under the nominal world."""
        screened, impossible = list[tuple[Trial, Built]](), list[tuple[Change, str]]()
        kept_before = {j.slo.name for j in self.diagnosis.judged if j.met}
        for change in changes:
            self.told(change.flags)
            try:
                other = build(change.applied(built.deployment))
                record, _ = self._simulate(other)
            except ValidationError as error:
                impossible.append((change, error.errors()[0]["msg"]))
                continue
            except TokenTwinError as error:
                impossible.append((change, str(error)))
                continue
            broken = tuple(
                outcome.slo.label
                for outcome in slo_outcomes(record, self.slos)
                if outcome.met is False and outcome.slo.name in kept_before
            )
            after_s = self._figure(record)
            trial = Trial(
                change, before_s, after_s, None, self.target.met(after_s), (), broken,
                tuple(line.words for line in after_run(other, record)),
            )  # fmt: skip
            screened.append((trial, other))
        return screened, impossible

    def _measure(self, trial: Trial, built: Built, base: Replicated, count: int) -> Trial:
        found = compare(base, self._replicate(built, count, None))
        effect = found.get(f"slo_{self.target.name}")
        worse = [(name, found[name]) for name in WATCHED if name in found and _is_worse(name, found[name])]
        return replace(trial, effect=effect, worse=tuple(worse))

    def _rank(self, trial: Trial) -> tuple[bool, bool, float]:
        return bool(trial.breaks), not trial.met, trial.after_s

    def _simulate(self, built: Built) -> tuple[RunRecord, Summary]:
        record = simulate(self.workload, built, seed=self.run.seed)
        if record.interrupted:
            raise KeyboardInterrupt
        return record, summarise(record, goodput=self.run.goodput, slos=self.slos)

    def _figure(self, record: RunRecord) -> float:
        return slo_outcomes(record, [self.target])[0].value_s

    def _replicate(self, built: Built, count: int, nominal: Summary | None) -> Replicated:
        return replicate(
            self.traffic,
            built,
            seed=self.run.seed,
            replications=count,
            goodput=self.run.goodput,
            slos=self.slos,
            jobs=self.jobs,
            nominal=nominal,
        )


def _is_worse(name: str, difference: Difference) -> bool:
    if not difference.differs or difference.a <= 0:
        return False
    bad = difference.value < 0 if name in HIGHER_IS_BETTER else difference.value > 0
    return bad and abs(difference.value) / difference.a >= LEAST_WORSE


def _varied(trials: Sequence[Trial], most: int) -> list[Trial]:
    """The first of each kind (settings, precision, hardware), then the next best; of changes to the same fields one."""
    chosen: list[Trial] = []
    for again in (False, True):
        for trial in trials:
            names = set(trial.change.fields)
            alike = any(names <= (other := set(t.change.fields)) or names >= other for t in chosen)
            new_kind = trial.change.kind not in {t.change.kind for t in chosen}
            if len(chosen) < most and not alike and (again or new_kind):
                chosen.append(trial)
    return chosen
