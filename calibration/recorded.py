"""A recorded run taken apart: its workload, its rules, its step times, each ready to be put into another world.

Twin runs and real ones look alike here: nothing but the record's tables and its `meta` is read.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

from costmodel.pipeline import PipelinePricer
from costmodel.pricer import StepPricer
from costmodel.prices import Step, steps_of_run
from serving.config import SchedulerConfig
from serving.errors import TokenTwinError, UsageError
from sim.deployment import Built, Deployment, build
from sim.deployment_limits import policy_options
from sim.meta import meta_value
from sim.record import Floats, RunRecord, Status, StepTable
from sim.workload import Workload, WorkloadSpec, load_workload
from sim.workload.types import ClosedLoop
from sim.world import Frontend

Key = tuple[int, int, int, int, int, float]
"""What a step computes: tokens, prompt tokens, prompt chunks, decodes, their context, query-key pairs of the chunks."""

COMPOSITION = (
    "num_tokens",
    "num_prefill_tokens",
    "num_prefills",
    "num_decodes",
    "decode_context_sum",
    "prefill_attention_area",
)
_PRICED_BY = (
    "model",
    "tensor_parallel_size",
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "enforce_eager",
    "max_num_seqs",
    "max_num_batched_tokens",
)
_NEIGHBOURS = 4


@dataclass(frozen=True, slots=True)
class Rules:
    """Who decides what runs next: limits, policy, replicas."""

    limits: SchedulerConfig
    policy: str = "chunked"
    policy_options: tuple[tuple[str, Any], ...] = ()
    num_replicas: int = 1
    router: str = "round_robin"


def workload_of(record: RunRecord) -> tuple[Workload, list[str]]:
    """The requests of a run, and what could not be recovered of them.

    A twin's run says from which spec and seed its workload was made; otherwise the request table is replayed: recorded
    send times (or the closed loop), without shared prefixes and without waits of a session's turns.
    """
    r = record.requests
    facts: dict[str, Any] = record.meta.get("workload") or {}
    if "spec" in facts and facts.get("seed") is not None:
        try:
            made = load_workload(WorkloadSpec.model_validate(facts["spec"]), seed=int(facts["seed"]))
        except (UsageError, ValidationError):
            made = None
        if made is not None and _same_requests(made, record):
            return made, []
    if record.beams is not None or record.candidates is not None:
        raise UsageError(
            "a run with beam searches or best-of cannot be replayed without its workload (a file moved, or times were "
            "scaled): the request table does not say how wide or how many they were"
        )
    done = (r.status == Status.FINISHED) & (r.reason == "stop")
    limit = meta_value(record, "max_concurrency")
    sent_s = r.sent_s - r.sent_s.min() if len(r) else r.sent_s
    notes = ["its workload is replayed from the request table"]
    if r.cached_tokens.any():
        notes.append("shared prefixes are not in the record and are not replayed")
    zeros = np.zeros(len(r), np.int64)
    workload = Workload(
        name="recorded",
        sent_s=np.zeros(len(r)) if limit is not None else sent_s,
        prompt_tokens=r.prompt_tokens,
        output_tokens=np.where(done, r.output_tokens, r.max_output_tokens),
        tenant=r.tenant,
        priority=zeros,
        segment_offsets=np.zeros(len(r) + 1, np.int64),
        segment_ends=zeros[:0],
        segment_streams=zeros[:0],
        after=zeros - 1,
        think_s=np.zeros(len(r)),
        tenants=record.tenants,
        closed_loop=None if limit is None else ClosedLoop(int(limit)),
    )
    return workload, notes


def _same_requests(workload: Workload, record: RunRecord) -> bool:
    r = record.requests
    if len(r) > len(workload) or (len(r) and int(r.request_id.max()) >= len(workload)):
        return False
    return bool(
        (workload.prompt_tokens[r.request_id] == r.prompt_tokens).all()
        and (workload.output_tokens[r.request_id] == r.max_output_tokens).all()
    )


def rules_of(record: RunRecord) -> tuple[Rules, list[str]]:
    """Scheduler limits and policy of a run; vLLM V1's defaults where a record only has its capacity."""
    known = {f.name for f in fields(SchedulerConfig)}
    limits: dict[str, Any] = {
        name: _frozen(value) for name, value in (record.meta.get("limits") or {}).items() if name in known
    }
    notes = [] if limits else ["its scheduler is not recorded; vLLM V1's defaults with its capacity stand in"]
    limits.setdefault("async_scheduling", is_asynchronous(record))
    capacity = ("num_pages", "page_tokens", "max_num_seqs", "max_num_batched_tokens")
    limits |= {name: getattr(record, name) for name in capacity}
    deployment: dict[str, Any] = record.meta.get("deployment") or {}
    options: dict[str, Any] = {}
    if deployment:
        try:
            options = policy_options(Deployment.model_validate(deployment))
        except (UsageError, ValidationError):
            notes.append("the options of its batch policy are not readable; the policy's defaults stand in")
    return (
        Rules(
            SchedulerConfig(**limits),
            deployment.get("policy", "chunked"),
            tuple(options.items()),
            record.num_replicas,
            deployment.get("router", "round_robin"),
        ),
        notes,
    )


def _frozen(value: Any) -> Any:
    """Lists as the tuples that they were before they were saved."""
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value


def is_asynchronous(record: RunRecord) -> bool:
    """Whether host and device worked beside each other: as recorded, or because steps last no longer than the device."""
    limits: dict[str, Any] = record.meta.get("limits") or {}
    if "async_scheduling" in limits:
        return bool(limits["async_scheduling"])
    steps = record.steps
    if not len(steps):
        return False
    beyond_s = float(np.median(steps.end_s - steps.start_s - steps.gpu_s))
    return beyond_s < 0.5 * float(np.median(steps.host_s))


def frontend_of(record: RunRecord) -> Frontend:
    """Times between socket and queue: as deployed, or the medians of the record."""
    deployment: dict[str, Any] = record.meta.get("deployment") or {}
    if "frontend_overhead_ms" in deployment:
        return Frontend(
            deployment["frontend_overhead_ms"] / 1e3,
            deployment["tokenize_us_per_token"] / 1e6,
            deployment["detokenize_us_per_token"] / 1e6,
        )
    r = record.requests
    rtt_s = np.array([tenant.rtt_s for tenant in record.tenants])[r.tenant] if len(r) else np.zeros(0)
    # Of beam searches nothing is shown before the end.
    shown_s = r.first_token_s - r.prefill_done_s if record.beams is None else r.last_token_s - r.engine_done_s
    in_s, out_s = r.queued_s - r.sent_s - rtt_s / 2, shown_s - rtt_s / 2
    return Frontend(_median(in_s), 0.0, _median(out_s))


def _median(values: Floats) -> float:
    known = values[np.isfinite(values)]
    return max(float(np.median(known)), 0.0) if len(known) else 0.0


def built_of(record: RunRecord) -> Built | None:
    """A twin's deployment worked out again, when it and its profile are at hand unchanged."""
    if not record.meta.get("deployment") or not record.meta.get("profile_hash"):
        return None
    try:
        built = build(Deployment.model_validate(record.meta["deployment"]))
    except (TokenTwinError, ValidationError):
        return None
    return built if built.profile.content_hash == record.meta["profile_hash"] else None


class RecordedPrices:
    """Step times of a run as a price list, for steps it had and for steps it did not have.

    A step that the run had costs what it took; several alike cost what they took, in turn, from `rewind` on. Any other
    step costs what the run's own price list says, or without one a non-negative fit of the run's steps, corrected by
    the nearest of them.
    """

    def __init__(
        self,
        record: RunRecord,
        model: StepPricer | Literal["own"] | None = "own",
        rows: npt.NDArray[np.bool_] | None = None,
    ) -> None:
        """Of all steps, or of those in `rows`; `model` is the run's own price list where it is known."""
        steps = record.steps if rows is None else record.steps.where(rows)
        if not len(record.steps):
            raise UsageError("the run has no step table; save it with its steps (steps.parquet)")
        if model == "own":
            built = built_of(record)
            model = None if built is None else built.pricer
        self.model = model
        self._deployment: dict[str, Any] = record.meta.get("deployment") or {}
        columns = [getattr(steps, name).tolist() for name in COMPOSITION]
        self._table: dict[Key, list[float]] = {}
        in_time = np.argsort(_planned_s(steps, is_asynchronous(record)), kind="stable").tolist()
        keys, gpu_s = list(zip(*columns, strict=True)), steps.gpu_s.tolist()
        for i in in_time:
            self._table.setdefault(keys[i], []).append(gpu_s[i])
        for key, values in self._table.items():
            if min(values) == max(values):
                self._table[key] = values[:1]
        self.ambiguous = any(len(values) > 1 for values in self._table.values())
        """Whether steps that look alike took different times."""
        self._used: dict[Key, int] = {}
        host: dict[tuple[int, int], list[float]] = {}
        host_s = _host_seconds(steps, is_asynchronous(record))
        seqs = (steps.num_prefills + steps.num_decodes).tolist()
        for num_seqs, num_tokens, each_s in zip(seqs, columns[0], host_s.tolist(), strict=True):
            host.setdefault((num_seqs, num_tokens), []).append(each_s)
        self._host = {key: _mean(values) for key, values in host.items()}
        self._fit: _Fit | None = None
        self._host_fit: Floats | None = None

    def rewind(self) -> None:
        """Start over with the first of the steps that look alike."""
        self._used.clear()

    def ratios(self, other: RecordedPrices) -> dict[Key, float]:
        """Other's time over this one's, for the steps that both had."""
        theirs = other._table
        return {
            key: _mean(theirs[key]) / _mean(values)
            for key, values in self._table.items()
            if key in theirs and min(values) > 0
        }

    def same_kernels(self, other: RecordedPrices) -> bool:
        """Whether steps cost the same on the device: one price list, and no step that both had differs."""
        return self._same_model(other) and all(
            theirs == self._table.get(key, theirs) for key, theirs in other._table.items()
        )

    def same_host(self, other: RecordedPrices) -> bool:
        """The same of the host's times."""
        mine, theirs = self._host, other._host
        return self._same_model(other) and all(theirs.get(key, t) == t for key, t in mine.items())

    def _same_model(self, other: RecordedPrices) -> bool:
        a, b = self.model, other.model
        if a is None or b is None:
            return a is b and self._table.keys() == other._table.keys()
        mine, theirs = self._deployment, other._deployment
        return a.profile == b.profile and all(mine.get(name) == theirs.get(name) for name in _PRICED_BY)

    def step_s(self, *step: *Step) -> float:
        """As `StepPricer.step_s`."""
        found = self.found(key := _key(step))
        if found is not None:
            return found
        return self.fitted(key) if self.model is None else self.model.step_s(*step)

    def found(self, key: Key) -> float | None:
        """What such a step took, the next of them in turn; None where the run had none."""
        found = self._table.get(key)
        if found is None:
            return None
        if len(found) == 1:
            return found[0]
        used = self._used.get(key, 0)
        self._used[key] = used + 1
        return found[used % len(found)]

    def fitted(self, key: Key) -> float:
        """The time of a step that was not recorded, between those that were."""
        if self._fit is None:
            self._fit = _Fit({key: _mean(values) for key, values in self._table.items()})
        return self._fit.seconds(key)

    @property
    def num_stages(self) -> int:
        """Stages of a pipeline, 1 where there is none."""
        return self.model.num_stages if isinstance(self.model, PipelinePricer) else 1

    def stage_s(self, *step: *Step) -> list[float]:
        """As `PipelinePricer.stage_s`: the recorded mean over the stages, in the proportions of the price list."""
        assert isinstance(self.model, PipelinePricer)
        stages = self.model.stage_s(*step)
        mean_s = self.found(_key(step))
        if mean_s is None:
            return stages
        factor = mean_s * len(stages) / sum(stages)
        return [seconds * factor for seconds in stages]

    def decode_run_s(self, num_decodes: int, context_sum: int, context_max: int, num_steps: int) -> Floats:
        """As `StepPricer.decode_run_s`."""
        steps = steps_of_run(num_decodes, context_sum, context_max, num_steps)
        return np.array([self.step_s(*step) for step in steps])

    def host_s(self, num_seqs: int, num_tokens: int) -> float:
        """As `StepPricer.host_s`."""
        found = self._host.get((num_seqs, num_tokens))
        if found is not None:
            return found
        if self.model is not None:
            return self.model.host_s(num_seqs, num_tokens)
        if self._host_fit is None:
            rows = np.array([(1.0, *key) for key in self._host])
            self._host_fit = _nonnegative(rows, np.array(list(self._host.values())))
        return float(self._host_fit @ np.array([1.0, num_seqs, num_tokens]))

    def move_s(self, num_pages: int) -> float:
        """Nothing: recorded times of steps hold what was moved in them."""
        return 0.0


def _key(step: Step) -> Key:
    """What the record of a run says of a step, from the arguments of `step_s`."""
    num_tokens, _, prefills, num_decodes, decode_context_sum, _ = step
    tokens = area = 0
    for chunk, before in prefills:
        tokens += chunk
        area += chunk * before + chunk * (chunk + 1) // 2
    return num_tokens, tokens, len(prefills), num_decodes, decode_context_sum, float(area)


def _mean(values: list[float]) -> float:
    """The mean; of equal values, exactly their value."""
    return values[0] if min(values) == max(values) else sum(values) / len(values)


def _planned_s(steps: StepTable, asynchronous: bool) -> Floats:
    """When each step was planned, and so priced: when the one before it started, where planning is ahead."""
    if not asynchronous or not len(steps):
        return steps.start_s
    follows = (steps.replica[1:] == steps.replica[:-1]) & (steps.end_s[:-1] == steps.start_s[1:])
    planned_s = steps.start_s - steps.host_s
    planned_s[1:] = np.where(follows, steps.start_s[:-1], planned_s[1:])
    return planned_s


def _host_seconds(steps: StepTable, asynchronous: bool) -> Floats:
    """Host time per step. Where the engine is synchronous, all that a step took beyond the device counts."""
    beyond_s = steps.end_s - steps.start_s - steps.gpu_s
    close = np.abs(beyond_s - steps.host_s) <= 1e-9 * np.maximum(1.0, np.abs(steps.end_s))
    kept = close | asynchronous
    return np.where(kept, steps.host_s, np.maximum(beyond_s, 0.0))


class _Fit:
    """Step times between the recorded ones: a non-negative linear form times the error of its nearest steps."""

    def __init__(self, table: dict[Key, float]) -> None:
        from scipy.spatial import cKDTree

        keys = np.array(list(table), np.float64)
        seconds = np.array(list(table.values()))
        self._coefficients = _nonnegative(_features(keys), seconds)
        predicted = np.maximum(_features(keys) @ self._coefficients, 1e-12)
        self._log_ratio = np.log(np.maximum(seconds, 1e-12) / predicted)
        self._tree = cKDTree(np.log1p(keys))
        self._known: dict[Key, float] = {}

    def seconds(self, key: Key) -> float:
        """Time of a step that was not recorded."""
        found = self._known.get(key)
        if found is None:
            row = np.array([key], np.float64)
            count = min(_NEIGHBOURS, len(self._log_ratio))
            distance, index = self._tree.query(np.log1p(row[0]), k=count)
            weight = 1.0 / (np.atleast_1d(distance) + 1e-3)
            ratio = float((self._log_ratio[np.atleast_1d(index)] * weight).sum() / weight.sum())
            base = max(float((_features(row) @ self._coefficients)[0]), 1e-12)
            found = self._known[key] = base * float(np.exp(ratio))
        return found


def _features(keys: Floats) -> Floats:
    return np.concatenate([np.ones((len(keys), 1)), keys], axis=1)


def _nonnegative(rows: Floats, seconds: Floats) -> Floats:
    """Non-negative coefficients that minimise the relative squared error."""
    from scipy.optimize import nnls

    weight = 1.0 / np.maximum(seconds, max(1e-6, float(seconds.mean()) * 1e-3))
    scale = np.maximum(np.abs(rows).max(axis=0), 1e-12)
    solution: Floats = nnls(rows / scale * weight[:, None], seconds * weight)[0]
    return np.asarray(solution / scale)
