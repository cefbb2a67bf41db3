"""The files a run leaves: the JSON of `vllm bench serve`, a Parquet row per request, and what was run.

Everything is a function of the record, so that one seed gives the same bytes; only `date` is of the moment,
and it can be passed in or taken from SOURCE_DATE_EPOCH.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.beams import beam_json, candidate_json
from experiments.certainty import certainty_json, interval_keys
from experiments.drafts import draft_json
from experiments.fleet_report import fleet_json
from experiments.observed import observed_json
from experiments.source_date import source_date_s
from serving.errors import UsageError
from sim.latency import LatencyStats, latencies, stage_times
from sim.meta import meta_value
from sim.metrics import Summary
from sim.pipeline import bubble_share
from sim.record import Deliveries, RunRecord, Status
from sim.slo import Goodput
from sim.verdict import Verdict

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sim.certainty import Certainty


RESULT, RUN, REQUESTS, STEPS = "result.json", "run.json", "requests.parquet", "steps.parquet"
TOKENS, EVENTS, CERTAINTY = "tokens.parquet", "events.parquet", "certainty.json"
BACKEND_SIM, BACKEND_REAL = "sim", "tokentwin-engine"
FLEET_COLUMNS = ("retries", "prefill_replica", "kv_transfer_s")
METRICS = ("ttft", "tpot", "itl", "e2el")
DETAILED_KEYS = (
    "input_lens",
    "output_lens",
    "ttfts",
    "itls",
    "latencies",
    "start_times",
    "queue_times",
    "errors",
)


@dataclass(frozen=True, slots=True)
class SavedRun:
    """A run read back from its folder."""

    folder: Path
    result: dict[str, Any]
    """The `vllm bench serve` JSON (the last one, where several were appended)."""
    run: dict[str, Any]
    """What was run: argv, configuration, seed, versions."""

    def requests(self) -> Any:
        """One row per request, as a `pyarrow.Table`. Raises UsageError when it cannot be read."""
        pq: Any = import_module("pyarrow.parquet")
        with _readable(path := self.folder / REQUESTS):
            return pq.read_table(path)


def result_json(
    record: RunRecord,
    summary: Summary,
    *,
    verdict: Verdict | None = None,
    detailed: bool = False,
    label: str | None = None,
    metadata: Mapping[str, str] | Sequence[str] = (),
    date: datetime | str | None = None,
    metrics: Sequence[str] = METRICS,
    certainty: Certainty | None = None,
) -> dict[str, Any]:
    """The result in the keys and order of `vllm bench serve --save-result`, then ours. Strict JSON values.

    `detailed` adds lists per request, in seconds, in order of sending. Latencies that do not exist are null.
    `metrics` are those whose statistics are wanted; `certainty` adds `*_ci95_low_ms` and `*_ci95_high_ms` and says what
    was extrapolated.
    """

    def fact(key: str, default: Any = None) -> Any:
        return meta_value(record, key, default)

    head = {
        "date": result_date(date),
        "endpoint_type": fact("backend", BACKEND_SIM),
        "backend": fact("backend", BACKEND_SIM),
        "label": label if label is not None else fact("label"),
        "model_id": fact("model_id"),
        "tokenizer_id": fact("tokenizer_id") or fact("model_id"),
        "num_prompts": summary.sent,
    }
    traffic = {
        "request_rate": request_rate(record),
        "burstiness": fact("burstiness", 1.0),
        "max_concurrency": fact("max_concurrency"),
    }
    body: dict[str, Any] = {
        "duration": summary.duration_s,
        "completed": summary.completed,
        "failed": summary.failed,
        "total_input_tokens": summary.total_input_tokens,
        "total_output_tokens": summary.total_output_tokens,
        "request_throughput": summary.request_throughput,
        "request_goodput": summary.request_goodput,
        "output_throughput": summary.output_throughput,
        "total_token_throughput": summary.total_token_throughput,
        **(_details(record) if detailed else {}),
        "max_output_tokens_per_s": summary.max_output_tokens_per_s,
        "max_concurrent_requests": summary.max_concurrent_requests,
    }
    for name in metrics:
        body |= _stats_ms(name, getattr(summary, name))
    body |= draft_json(record.drafts) | beam_json(record.beams) | candidate_json(record.candidates)
    ours = _ours(record, summary, verdict)
    if certainty is not None:
        ours |= {**interval_keys(certainty, metrics), **certainty_json(certainty)}
    extra = _metadata(metadata, known={*head, *traffic, *body, *ours, *DETAILED_KEYS})
    strict: dict[str, Any] = _strict({**head, **extra, **traffic, **body, **ours})
    return strict


def save_run(
    record: RunRecord,
    summary: Summary,
    out_dir: str | Path,
    *,
    verdict: Verdict | None = None,
    detailed: bool = False,
    steps: bool = False,
    append: bool = False,
    filename: str = RESULT,
    label: str | None = None,
    metadata: Mapping[str, str] | Sequence[str] = (),
    date: datetime | str | None = None,
    metrics: Sequence[str] = METRICS,
    certainty: Certainty | None = None,
    step_columns: Mapping[str, np.ndarray[Any, Any]] | None = None,
) -> list[Path]:
    """Write a run into a folder, made if missing, and return the files in the order they were written.

    `steps` adds the step table (with `step_columns`) and the times of tokens and events, from which
    `experiments.saved` makes the same report again.
    `append` adds the result JSON on a line of its own to `filename` instead of replacing it. Raises
    UsageError when the folder cannot be written.
    """
    folder = Path(out_dir)
    result = result_json(
        record,
        summary,
        verdict=verdict,
        detailed=detailed,
        label=label,
        metadata=metadata,
        date=date,
        metrics=metrics,
        certainty=certainty,
    )
    paths = [save_result(result, folder / filename, append=append), folder / RUN, folder / REQUESTS]
    with writable(folder):
        what = json.dumps(_strict(run_json(record, summary)), indent=1, allow_nan=False)
        paths[1].write_text(what + "\n", encoding="utf-8")
        _write_parquet(request_columns(record), paths[2])
        if steps:
            paths += [folder / STEPS, folder / TOKENS]
            drafting = {} if record.draft_steps is None else record.draft_steps.columns()
            _write_parquet({**record.steps.columns(), **drafting, **(step_columns or {})}, paths[-2])
            _write_parquet(token_columns(record), paths[-1])
            if record.deliveries is None:
                (folder / EVENTS).unlink(missing_ok=True)  # of another run
            else:
                paths.append(folder / EVENTS)
                _write_parquet(event_columns(record.deliveries), paths[-1])
        if certainty is not None:
            paths.append(folder / CERTAINTY)
            text = json.dumps(_finite_only(asdict(certainty)), allow_nan=False)
            paths[-1].write_text(text + "\n", encoding="utf-8")
    return paths


def save_result(result: Mapping[str, Any], path: str | Path, *, append: bool = False) -> Path:
    """Write one result JSON, or add it on a line of its own, and return the path. Raises UsageError."""
    target = Path(path)
    text = json.dumps(result, allow_nan=False)
    with writable(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        if append and target.exists() and target.stat().st_size:
            with target.open("a", encoding="utf-8") as out:
                out.write("\n" + text)
        else:
            target.write_text(text, encoding="utf-8")
    return target


def load_run(folder: str | Path, filename: str = RESULT) -> SavedRun:
    """Read a folder written by `save_run`. Raises UsageError naming the file that is missing or broken."""
    base = Path(folder)
    if not base.is_dir():
        what = "it is a file" if base.is_file() else "there is no such folder"
        raise UsageError(f"cannot read {base}: {what}; name the folder of a run (-o of simulate or run)")
    with _readable(base / filename):
        lines = (base / filename).read_text(encoding="utf-8").strip().splitlines()
        result = json.loads(lines[-1]) if lines else {}
    with _readable(base / RUN):
        run = json.loads((base / RUN).read_text(encoding="utf-8"))
    for name, content in ((filename, result), (RUN, run)):
        if not isinstance(content, dict):
            raise UsageError(f"cannot read {base / name}: it is not a JSON object; make the run again")
    return SavedRun(base, result, run)


def run_json(record: RunRecord, summary: Summary) -> dict[str, Any]:
    """What was run: `meta` (argv, config, seed, version, commit, profile hash), the promises and the capacity."""
    return {
        "slos": {outcome.slo.name: outcome.slo.limit_s for outcome in summary.slos},
        "goodput_s": summary.goodput_limits.limits_s(),
        "percentiles": [p for p, _ in summary.ttft.percentiles_s],
        **record.meta,
        "partial": record.interrupted,
        "capacity": {
            "num_replicas": record.num_replicas,
            "num_pages": record.num_pages,
            "page_tokens": record.page_tokens,
            "max_num_seqs": record.max_num_seqs,
            "max_num_batched_tokens": record.max_num_batched_tokens,
        },
        "end_s": record.end_s,
        "tenants": [asdict(tenant) for tenant in record.tenants],
        "warnings": list(record.warnings),
        **({} if record.drafts is None else {"drafts": asdict(record.drafts)}),
        **({} if record.beams is None else {"beams": asdict(record.beams)}),
        **({} if record.candidates is None else {"candidates": asdict(record.candidates)}),
        **({} if record.fleet is None else {"fleet": record.fleet.json()}),
    }


def request_columns(record: RunRecord) -> dict[str, np.ndarray[Any, Any]]:
    """The request table with names for codes, and each request's latencies and stages in seconds."""
    lat, stages = latencies(record), stage_times(record)
    columns = record.requests.columns()
    names = np.array([t.name for t in record.tenants], dtype=object)
    columns["tenant"] = names[columns["tenant"]] if len(columns["tenant"]) else np.empty(0, dtype=object)
    words = np.array([s.name.lower() for s in Status], dtype=object)
    columns["status"] = words[columns["status"]]
    if record.fleet is not None:
        columns |= {name: getattr(record.fleet, name) for name in FLEET_COLUMNS}
    columns |= {"ttft_s": lat.ttft_s, "tpot_s": lat.tpot_s, "e2el_s": lat.e2el_s}
    return columns | {f"{name}_s": times_s for name, times_s in stages.items() if f"{name}_s" not in columns}


def token_columns(record: RunRecord) -> dict[str, np.ndarray[Any, Any]]:
    """The token ranges, a row each, by the request's row in the request table."""
    tokens = record.tokens
    owner = np.repeat(np.arange(len(record.requests)), np.diff(tokens.offsets))
    columns = {f.name: getattr(tokens, f.name) for f in fields(tokens) if f.name != "offsets"}
    return {"request": owner, **{name: column for name, column in columns.items() if column is not None}}


def event_columns(deliveries: Deliveries) -> dict[str, np.ndarray[Any, Any]]:
    """What clients took and when, a row per event, by the request's row in the request table."""
    return {"request": deliveries.owners(), "seen_s": deliveries.seen_s, "tokens": deliveries.tokens}


@contextmanager
def writable(path: Path) -> Iterator[None]:
    """Turn a failure to write into one line for the user."""
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"cannot write to {path}: {error.strerror or error}; choose another -o folder"
        ) from error


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error


def _write_parquet(columns: Mapping[str, np.ndarray[Any, Any]], path: Path) -> None:
    pa: Any = import_module("pyarrow")
    pq: Any = import_module("pyarrow.parquet")
    arrays = {
        name: pa.array(values, type=pa.string() if values.dtype == object else None, from_pandas=True)
        for name, values in columns.items()
    }
    pq.write_table(pa.table(arrays), path, compression="zstd")


def result_date(date: datetime | str | None = None) -> str:
    """The date of a result: as given, else SOURCE_DATE_EPOCH in UTC, else now. Raises UsageError as `source_date_s`."""
    if isinstance(date, str):
        return date
    if date is None:
        epoch_s = source_date_s()
        date = datetime.now() if epoch_s is None else datetime.fromtimestamp(epoch_s, UTC)
    return date.strftime("%Y%m%d-%H%M%S")


def request_rate(record: RunRecord) -> float | str:
    """The configured rate, else the offered one; "inf" for a closed loop, or when all was sent at once."""
    rate = meta_value(record, "request_rate")
    if rate is None:
        rate = offered_rate(record) if meta_value(record, "max_concurrency") is None else "inf"
    return "inf" if isinstance(rate, str) or math.isinf(rate) else float(rate)


def offered_rate(record: RunRecord) -> float:
    """Requests sent per second, from the first to the last."""
    sent_s = record.requests.sent_s
    span_s = float(np.ptp(sent_s)) if len(sent_s) else 0.0
    return (len(sent_s) - 1) / span_s if span_s > 0 else math.inf


def _stats_ms(name: str, stats: LatencyStats) -> dict[str, float]:
    points = {f"p{p:g}_{name}_ms": v * 1000 for p, v in stats.percentiles_s}
    return {
        f"mean_{name}_ms": stats.mean_s * 1000,
        f"median_{name}_ms": stats.median_s * 1000,
        f"std_{name}_ms": stats.std_s * 1000,
        **points,
    }


def _details(record: RunRecord) -> dict[str, list[Any]]:
    r, lat = record.requests, latencies(record)
    done = r.status == Status.FINISHED
    gaps = [np.diff(record.event_times_s(i)).tolist() if done[i] else [] for i in range(len(r))]
    errors = np.where(done, "", np.where(r.reason == "", "unfinished", r.reason))
    values = (
        r.prompt_tokens.tolist(),
        np.where(done, r.output_tokens, 0).tolist(),
        np.where(done, lat.ttft_s, 0.0).tolist(),
        gaps,
        np.where(done, lat.e2el_s, 0.0).tolist(),
        r.sent_s.tolist(),
        [0.0] * len(r),  # waits before sending are the workload's: a client here never holds a request back
        errors.tolist(),
    )
    return dict(zip(DETAILED_KEYS, values, strict=True))


def _ours(record: RunRecord, summary: Summary, verdict: Verdict | None) -> dict[str, Any]:
    out: dict[str, Any] = {
        "slo_attainment": summary.slo_attainment,
        "slo_attainment_by_metric": summary.slo_attainment_by_metric,
        "goodput_slos_ms": _limits_ms(summary.goodput_limits),
        "tensor_parallel_size": meta_value(record, "tensor_parallel_size", 1),
        "pipeline_parallel_size": meta_value(record, "pipeline_parallel_size", 1),
        "data_parallel_size": meta_value(record, "data_parallel_size", record.num_replicas),
        "partial": record.interrupted,
        "sim_duration": summary.sim_duration_s,
        "sim_offered_rate": offered_rate(record),
        "sim_rejected": summary.rejected,
        "sim_unfinished": summary.unfinished,
        "sim_num_steps": summary.num_steps,
        "sim_max_in_system": summary.max_in_system,
        "sim_prefix_hit_rate": summary.prefix_hit_rate,
        "sim_preemptions": summary.preemptions,
        "sim_batch_occupancy_mean": summary.batch_occupancy_mean,
        "sim_batch_occupancy_busy": summary.batch_occupancy_busy,
        "sim_batch_occupancy_max": summary.batch_occupancy_max,
        "sim_kv_occupancy_mean": summary.kv_occupancy_mean,
        "sim_kv_occupancy_busy": summary.kv_occupancy_busy,
        "sim_kv_occupancy_max": summary.kv_occupancy_max,
        "sim_gpu_busy_share": summary.gpu_busy_share,
        "sim_stage_mean_ms": {name: t * 1000 for name, t in summary.stage_mean_s.items()},
        "sim_stage_share": summary.stage_share,
        **({} if summary.perceived is None else {"sim_perceived": summary.perceived.figures()}),
        "sim_tenants": {t.name: _tenant(t) for t in summary.tenants},
        "sim_warnings": list(summary.warnings),
        "sim_errors": summary.errors,
        **({} if (bubbles := bubble_share(record)) is None else {"sim_pipeline_bubble_share": bubbles}),
        **fleet_json(record),
        **observed_json(record),
    }
    if verdict is not None:
        out["sim_slos"] = {
            o.slo.name: {"limit_ms": o.slo.limit_s * 1000, "value_ms": o.value_s * 1000, "met": o.met}
            for o in verdict.slos
        }
        out["sim_meets_slos"] = verdict.meets_slos
        out["sim_load"] = str(verdict.saturation.load)
        out["sim_bound"] = verdict.bound.kind
        out["sim_bound_shares"] = verdict.bound.shares
        out["sim_verdict"] = list(verdict.sentences)
    for key in ("seed", "version", "git_commit", "profile_hash"):
        out[f"sim_{key}"] = meta_value(record, key)
    for key in ("all_reduce", "products"):
        if (source := meta_value(record, key)) is not None:
            out[f"sim_{key}"] = source
    return out


def _tenant(tenant: Any) -> dict[str, Any]:
    plain = ("slo_class", "sent", "completed", "rejected", "unfinished", "total_input_tokens")
    rates = ("total_output_tokens", "output_throughput", "request_goodput", "slo_attainment")
    out = {name: getattr(tenant, name) for name in plain + rates}
    out["goodput_slos_ms"] = _limits_ms(tenant.goodput_limits)
    for name in ("ttft", "tpot", "itl", "e2el"):
        out |= _stats_ms(name, getattr(tenant, name))
    return out


def _limits_ms(limits: Goodput) -> dict[str, float]:
    return {name: limit_s * 1000 for name, limit_s in limits.limits_s().items()}


def metadata_pairs(items: Mapping[str, str] | Sequence[str]) -> dict[str, str]:
    """`KEY=VALUE` texts as a dictionary. Raises UsageError for one that is not such a pair."""
    if isinstance(items, Mapping):
        return dict(items)
    pairs: dict[str, str] = {}
    for item in items:
        key, equals, value = item.partition("=")
        if not equals or not key.strip():
            raise UsageError(f"--metadata: {item!r} is not KEY=VALUE")
        if key.strip() in pairs:
            raise UsageError(f"--metadata: {key.strip()} is given twice; keep one")
        pairs[key.strip()] = value.strip()
    return pairs


def _metadata(items: Mapping[str, str] | Sequence[str], known: set[str]) -> dict[str, str]:
    pairs = metadata_pairs(items)
    for key in pairs:
        if key in known:
            raise UsageError(f"--metadata: {key!r} is the name of a result; choose another key")
    return pairs


def _finite_only(value: Any) -> Any:
    """The same value for JSON; a figure without a number is left out of its mapping, as if it were not known."""
    if isinstance(value, Mapping):
        kept = {k: v for k, v in value.items() if not (isinstance(v, float) and not math.isfinite(v))}
        return {str(k): _finite_only(v) for k, v in kept.items()}
    if isinstance(value, list | tuple):
        return [_finite_only(v) for v in value]
    if isinstance(value, frozenset):
        return sorted(value)
    return value.item() if isinstance(value, np.generic) else value


def _strict(value: Any) -> Any:
    """The same value with plain Python numbers, and null where JSON has no number."""
    if isinstance(value, Mapping):
        return {str(k): _strict(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(v) for v in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
