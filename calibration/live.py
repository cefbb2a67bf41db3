"""The engine and its twin on the same requests, load by load: is the profile right, where not, and why.

Each load runs once in the engine, measured, and once in the twin, priced by the profile. Where `interleave` is on, steps
are measured again before the first load and after every one, and a load's twin is priced by the two rounds around it: on
a shared machine the speed of the hour is not that of the morning.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from calibration.device_calibrate import Bench, finish, host_of
from calibration.device_facts import measured_facts, raised
from calibration.diff import Split, diff
from calibration.live_engine import (
    CpuTimeEngine,
    CpuTimeRunner,
    arrivals_of,
    record_of,
    serve_on_the_wall,
)
from calibration.microbench_points import reference
from calibration.microbench_run import Store, measure_round
from costmodel.pricer import StepPricer
from costmodel.profile import DeviceProfile
from realengine.engine import Engine
from realengine.export import hugging_face_config
from serving.errors import UsageError
from sim.certainty import default_replications
from sim.deployment import Built, Deployment, build, simulate
from sim.metrics import summarise
from sim.record import Floats, RunRecord
from sim.replications import figures, replicate
from sim.workload import Workload, WorkloadSpec, load_workload

METRICS = ("ttft", "tpot", "itl", "e2el")
STATISTICS = ("mean", "median", "p95", "p99")
SCHEMA = "tokentwin-live/1"
SPLIT = ("mean_ttft", "p95_ttft", "mean_tpot", "mean_e2el")

Say = Callable[[str], None]
SpecAtRate = Callable[[float], WorkloadSpec]
"""The workload at a number of requests a second; infinity sends all at once."""


@dataclass(frozen=True, slots=True)
class LiveFigure:
    """One statistic of a load, milliseconds. The interval is the twin's, NaN where it has none."""

    metric: str
    statistic: str
    real_ms: float
    twin_ms: float
    low_ms: float = math.nan
    high_ms: float = math.nan

    @property
    def error(self) -> float:
        """Signed, as a fraction of the real figure."""
        return self.twin_ms / self.real_ms - 1.0 if self.real_ms else math.nan

    @property
    def covered(self) -> bool | None:
        """Whether the real figure lies in the twin's interval; None without one."""
        if math.isnan(self.low_ms):
            return None
        return self.low_ms <= self.real_ms <= self.high_ms


@dataclass(frozen=True, slots=True)
class StepPair:
    """Device seconds of the engine's steps, and what the twin would charge for the same work."""

    kind: np.ndarray[Any, np.dtype[np.str_]]
    real_s: Floats
    twin_s: Floats

    def bias(self, kind: str | None = None) -> float:
        """Sum of the twin's over the real ones', less one."""
        mask = np.ones(len(self.kind), bool) if kind is None else self.kind == kind
        return float(self.twin_s[mask].sum() / self.real_s[mask].sum() - 1.0) if mask.any() else math.nan


@dataclass(frozen=True, slots=True)
class LoadPoint:
    """One load."""

    load: float
    request_rate: float
    num_requests: int
    figures: tuple[LiveFigure, ...]
    steps: StepPair
    splits: tuple[Split, ...]
    wander: float
    """Reference step around this load over its median, less one: how fast the machine was just then."""
    cached_share: float
    """Prompt tokens that the real run found in its prefix cache."""


@dataclass(frozen=True, slots=True)
class LiveReport:
    """All loads of one model and setting."""

    title: str
    settings: dict[str, Any]
    capacity_rps: float
    points: tuple[LoadPoint, ...]
    wander: float
    """Spread (10th to 90th percentile over the median) of the reference step through the whole session."""
    notes: tuple[str, ...] = ()

    def errors(self, metric: str, statistics: Sequence[str] = STATISTICS, up_to: float = 1.0) -> list[float]:
        """Absolute errors of a metric at loads of at most `up_to`."""
        return [
            abs(f.error)
            for point in self.points
            if point.load <= up_to + 1e-9
            for f in point.figures
            if f.metric == metric and f.statistic in statistics
        ]

    def coverage(self) -> float:
        """Share of the figures that their interval covered; NaN without intervals."""
        known = [f.covered for p in self.points for f in p.figures if f.covered is not None]
        return sum(known) / len(known) if known else math.nan


@dataclass(slots=True)
class Live:
    """A session: one loaded model, one store of steps, any number of loads."""

    bench: Bench
    store: Store
    folder: Path
    """Where profile and model shape are written, for the twin to be built from."""
    clock: str = "cpu"
    block_size: int = 16
    profile: DeviceProfile | None = None
    """Prices the twin when nothing is interleaved."""
    say: Say = lambda line: None
    _round: int = field(default=0, init=False)

    def deployment(self, profile: DeviceProfile, name: str = "profile") -> Built:
        """The twin of the bench's engine, priced by `profile`."""
        self.folder.mkdir(parents=True, exist_ok=True)
        model, gpu = self.folder / "config.json", self.folder / f"{name}.json"
        model.write_text(
            json.dumps(hugging_face_config(self.bench.source.architecture)) + "\n", encoding="utf-8"
        )
        gpu.write_text(profile.to_json() + "\n", encoding="utf-8")
        limits, plan, weights = self.bench.limits, self.bench.plan, self.bench.gemm_format
        return build(
            Deployment(
                model=str(model),
                gpu=str(gpu),
                quantization=None if weights == "bfloat16" else weights,
                kv_cache_dtype=plan.options.kv_cache_dtype,
                max_num_seqs=limits.max_num_seqs,
                max_num_batched_tokens=limits.max_num_batched_tokens,
                max_model_len=limits.max_model_len,
                block_size=self.block_size,
                num_gpu_blocks_override=limits.num_pages + 1,
                async_scheduling=limits.async_scheduling,
                enforce_eager=self.bench.device.type == "cpu" or plan.options.enforce_eager,
                tokenize_us_per_token=0.0,
                detokenize_us_per_token=0.0,
            )
        )

    def serve(self, workload: Workload) -> tuple[RunRecord, Engine]:
        """The requests in the real engine."""
        shape, limits = self.bench.shape, self.bench.limits
        arrivals = arrivals_of(workload, shape.vocab_size)
        tokenizer = self.bench.source.tokenizer
        if self.clock == "cpu":
            engine: Engine = CpuTimeEngine(
                limits,
                CpuTimeRunner(self.bench.runner),
                tokenizer=tokenizer,
                vocab_size=shape.vocab_size,
                record_events=True,
            )
            assert isinstance(engine, CpuTimeEngine)
            engine.serve(arrivals)
        else:
            engine = Engine(
                limits,
                self.bench.runner,
                tokenizer=tokenizer,
                vocab_size=shape.vocab_size,
                record_events=True,
            )
            serve_on_the_wall(engine, arrivals)
        meta = {
            "workload": {"name": workload.name, **workload.meta},
            "limits": {name: getattr(limits, name) for name in limits.__slots__},
            # A request that waits for a step's end waits in the queue, as in the twin, and not on its way there.
            "deployment": dict.fromkeys(
                ("frontend_overhead_ms", "tokenize_us_per_token", "detokenize_us_per_token"), 0.0
            ),
        }
        return record_of(engine, workload, meta), engine

    def measure(self, repeats: int, until_s: float = math.inf) -> int:
        """Another round of steps; its number."""
        measure_round(
            self.bench.steps,
            self.store,
            self.bench.bounds,
            round_=self._round,
            repeats=repeats,
            until_s=until_s,
        )
        self._round += 1
        return self._round - 1

    def fit(self, rounds: set[int]) -> DeviceProfile:
        """The profile of some rounds."""
        facts = raised(measured_facts(self.bench.device), *self.bench.fastest(self.store))
        return finish(self.bench, self.store, facts, host_of(self.bench, self.store), rounds).profile

    def mark(self) -> float:
        """Seconds of the reference step just now."""
        what = reference(self.bench.bounds)
        self.bench.steps.run(what)
        return float(np.median([self.bench.steps.run(what)["total"] for _ in range(5)]))


def validate_live(
    live: Live,
    spec_at: SpecAtRate,
    loads: Sequence[float],
    *,
    seed: int = 0,
    interleave: bool = True,
    repeats: int = 2,
    replications: int | None = None,
) -> LiveReport:
    """Run every load in engine and twin. Raises `UsageError` for loads that cannot be."""
    if not loads or any(not 0 < load <= 2 for load in loads):
        raise UsageError(
            "--sweep-load takes shares of the measured capacity between 0 and 2, such as 0.3,0.6,0.8"
        )
    if not interleave and live.profile is None:
        raise UsageError("--no-interleave needs a profile to compare with; make one with tokentwin calibrate")
    live.bench.steps.warm(live.bench.limits.max_num_batched_tokens)
    live.serve(load_workload(spec_at(math.inf), seed=seed + 1))
    burst, _ = live.serve(load_workload(spec_at(math.inf), seed=seed))
    capacity = len(burst.requests) / burst.end_s
    live.say(f"capacity: {capacity:.3g} requests/s ({len(burst.requests)} at once)")
    marks, runs, rounds = [live.mark()], [], [live.measure(repeats) if interleave else -1]
    for load in loads:
        workload = load_workload(spec_at(load * capacity), seed=seed)
        record, engine = live.serve(workload)
        marks.append(live.mark())
        rounds.append(live.measure(repeats) if interleave else -1)
        runs.append((load, workload, record, engine))
        live.say(f"load {load:g}: {len(record.requests)} requests, {len(record.steps)} steps measured")
    middle = float(np.median(marks))
    points = []
    for index, (load, workload, record, engine) in enumerate(runs):
        profile = live.fit({rounds[index], rounds[index + 1]}) if interleave else live.profile
        assert profile is not None
        built = live.deployment(profile, f"profile-{load:g}")
        wander = (marks[index] + marks[index + 1]) / 2 / middle - 1.0
        points.append(
            _point(load, load * capacity, workload, record, engine, built, wander, seed, replications)
        )
    return LiveReport(
        title=f"{live.bench.shape.name} on {measured_facts(live.bench.device).product}",
        settings={
            **{k: v for k, v in live.bench.header().items() if k != "device"},
            "device": str(live.bench.device),
            "clock": live.clock,
            "interleave": interleave,
            "seed": seed,
            "kv_pages": live.bench.limits.num_pages,
            "kv_pages_predicted": live.bench.pages.num_pages,
        },
        capacity_rps=capacity,
        points=tuple(points),
        wander=float((np.quantile(marks, 0.9) - np.quantile(marks, 0.1)) / middle),
        notes=_notes(live),
    )


def _notes(live: Live) -> tuple[str, ...]:
    clock = (
        "times are CPU seconds of the engine's thread, idle time leapt over: neighbours do not stretch them"
        if live.clock == "cpu"
        else "times are wall-clock seconds"
    )
    return (clock, "requests of engine and twin are the same, so that no sampling error is between them")


def _point(
    load: float,
    rate: float,
    workload: Workload,
    record: RunRecord,
    engine: Engine,
    built: Built,
    wander: float,
    seed: int,
    replications: int | None,
) -> LoadPoint:
    twin = simulate(workload, built)
    percentiles = (95.0, 99.0)
    real_summary, twin_summary = (summarise(run, percentiles=percentiles) for run in (record, twin))
    count = default_replications(twin) if replications is None else replications
    intervals = (
        replicate(
            workload, built, seed=seed, replications=count, percentiles=percentiles, nominal=twin_summary
        )
        if count > 1
        else None
    )
    real, mine = figures(real_summary), figures(twin_summary)
    found = []
    for metric in METRICS:
        for statistic in STATISTICS:
            name = f"{statistic}_{metric}"
            interval = intervals.interval(name) if intervals is not None else None
            low, high = (interval.low, interval.high) if interval is not None else (math.nan, math.nan)
            found.append(
                LiveFigure(metric, statistic, real[name] * 1e3, mine[name] * 1e3, low * 1e3, high * 1e3)
            )
    # Matched by price lists, a twin's own name for its prices would hide the kernels' part.
    splits = diff(record, replace(twin, meta={**twin.meta, "profile_hash": ""}), metrics=SPLIT)
    r = record.requests
    return LoadPoint(
        load,
        rate,
        len(r),
        tuple(found),
        step_pairs(record, engine, built.pricer),
        splits.splits,
        wander,
        float(r.cached_tokens.sum() / max(int(r.prompt_tokens.sum()), 1)),
    )


def step_pairs(record: RunRecord, engine: Engine, pricer: StepPricer) -> StepPair:
    """Every real step beside the price of the same composition. The engine must have recorded its events."""
    assert engine.recorder.events is not None
    plans = [event.plan for event in engine.recorder.events if event.kind == "commit"]
    kinds, prices = [], []
    for plan in plans:
        assert plan is not None
        chunks = [(chunk.num_tokens, chunk.context) for chunk in plan.chunks]
        kinds.append("mixed" if chunks and plan.num_decodes else "prefill" if chunks else "decode")
        prices.append(
            pricer.step_s(
                plan.num_tokens,
                plan.num_sampled,
                chunks,
                plan.num_decodes,
                plan.decode_context_sum,
                plan.decode_context_max,
            )
        )
    return StepPair(np.array(kinds), record.steps.gpu_s, np.array(prices))
