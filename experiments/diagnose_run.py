"""A run as the rules of a diagnosis read it: columns per finished request, whatever file they came from.

Read here: our run folders and the JSON of `vllm bench serve --save-detailed`. Exports of production requests are read in
`experiments.diagnose_exports`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from calibration.observed import plain_workload
from calibration.recorded import workload_of
from calibration.runs_saved import DETAILED, is_bench_json, is_saved_run
from experiments.results import load_run
from experiments.saved import load_record
from serving.errors import UsageError
from sim.deployment import Deployment
from sim.latency import Bools, Pooled, inter_token_gaps, latencies, percentile_s, pooled, stage_times
from sim.meta import meta_value
from sim.metrics import slo_outcomes
from sim.record import Floats, Ints, RunRecord, Status
from sim.slo import TICK_S, Goodput, Slo, parse_slo
from sim.workload import Workload, WorkloadSpec

GAP_PERCENTILES = 1001
"""Quantiles kept of the gaps between tokens."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Columns of the finished requests, times in seconds; None where the source does not have them."""

    name: str
    source: str
    sent_s: Floats
    prompt_tokens: Ints
    output_tokens: Ints
    ttft_s: Floats
    tpot_s: Floats
    """NaN where an answer had one token."""
    e2el_s: Floats
    queue_s: Floats | None = None
    prefill_s: Floats | None = None
    network_s: Floats | None = None
    """Network and tokenising: what TTFT has beside queue and prefill."""
    cached_tokens: Ints | None = None
    preemptions: Ints | None = None
    gaps_s: Floats | None = None
    """Quantiles of the gaps between tokens, over all requests, in equal steps."""
    lost: int = 0
    """Requests that failed, were rejected or never ended."""
    record: RunRecord | None = None
    deployment: Deployment | None = None
    traffic: WorkloadSpec | Workload | None = None
    """What to replay: a spec where another seed draws other requests."""
    seed: int = 0
    slos: tuple[Slo, ...] = ()
    """Those that the run was made with."""
    goodput: Goodput = field(default_factory=Goodput)
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.sent_s)

    @property
    def decode_s(self) -> Floats:
        """From the first token to the last."""
        return self.e2el_s - self.ttft_s

    @property
    def streams(self) -> bool:
        """Whether there is a pace of tokens, as `Summary.streams`."""
        return bool((self.tpot_s > TICK_S).any())

    def has(self, metric: str) -> bool:
        """Whether there is such a latency: no TPOT and no ITL where every answer came whole."""
        return self.streams or metric not in ("tpot", "itl")

    def column(self, metric: str) -> Floats:
        """`ttft`, `tpot` or `e2el` of every finished request."""
        return {"ttft": self.ttft_s, "tpot": self.tpot_s, "e2el": self.e2el_s}[metric]

    def value_s(self, slo: Slo) -> float:
        """The figure that an SLO limits. A lost request counts as infinite in percentiles, as everywhere."""
        if self.record is not None and slo.metric != "itl":
            return slo_outcomes(self.record, [slo])[0].value_s
        if slo.metric == "itl":
            if self.gaps_s is None:
                raise UsageError(
                    f"{self.name}: --slo {slo.name} needs gaps between tokens, which {self.source} lacks"
                )
            return float(
                self.gaps_s.mean() if slo.percentile is None else np.percentile(self.gaps_s, slo.percentile)
            )
        values = self.column(slo.metric)
        values = values[~np.isnan(values)]
        if slo.percentile is None:
            return float(values.mean()) if len(values) else float("nan")
        return percentile_s(pooled(np.concatenate([values, np.full(self.lost, np.inf)])), slo.percentile)


def read_measured(
    path: str | Path, deployment: Deployment | None = None, *, gpu: str | None = None
) -> Measured:
    """The run at `path`, recognised by what is in it.

    `deployment` says how a foreign run was served, `gpu` names the profile of the device that a run of our own engine
    had. Raises `UsageError` for what is none of the formats or cannot be read.
    """
    from experiments.diagnose_exports import read_export

    path = Path(path)
    if is_saved_run(path):
        return read_folder(path, gpu)
    if path.is_dir():
        raise UsageError(
            f"{path}: not a run folder; it needs run.json and requests.parquet (-o of simulate or run)"
        )
    if not path.is_file():
        raise UsageError(
            f"{path}: no such run; give a run folder, a JSON of vllm bench serve or an export of requests"
        )
    if is_bench_json(path) and (result := _bench(path)) is not None:
        return _of_bench(path, result, deployment)
    return read_export(path, deployment)


def is_engines(folder: Path) -> bool:
    """Whether a run folder was left by the real engine, whose device only the user can name."""
    return bool(load_run(folder).run.get("real"))


def read_folder(folder: Path, gpu: str | None = None) -> Measured:
    """A run folder of `simulate -o`, `tt.simulate(...).save` or `run -o`."""
    record = load_record(folder)
    deployment = None
    content: dict[str, Any] = dict(record.meta.get("deployment") or {})
    if record.meta.get("real"):
        content |= {
            "gpu": gpu,
            "max_num_seqs": record.max_num_seqs,
            "max_num_batched_tokens": record.max_num_batched_tokens,
            "num_gpu_blocks_override": record.num_pages + 1,
        }
    if content.get("model") and content.get("gpu"):
        try:
            deployment = Deployment.model_validate(content)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise UsageError(f"{folder / 'run.json'}: deployment.{where}: {first['msg']}") from None
    r, lat, stages = record.requests, latencies(record), stage_times(record)
    done = r.status == Status.FINISHED
    if not done.any():
        raise UsageError(f"{folder}: no request of this run finished; there is nothing to diagnose")
    traffic, notes = _traffic(record)
    limits = {name: float(value) for name, value in (record.meta.get("goodput_s") or {}).items()}
    return Measured(
        name=folder.name,
        source="the run folder",
        sent_s=r.sent_s[done],
        prompt_tokens=r.prompt_tokens[done],
        output_tokens=r.output_tokens[done],
        ttft_s=lat.ttft_s[done],
        tpot_s=np.where(r.output_tokens > 1, lat.tpot_s, np.nan)[done],
        e2el_s=lat.e2el_s[done],
        queue_s=lat.queue_s[done],
        prefill_s=lat.prefill_s[done],
        network_s=(
            stages["network"] + stages["gateway"] + stages["tokenize"]
            if record.deliveries is None
            else lat.ttft_s - lat.queue_s - lat.prefill_s
        )[done],
        cached_tokens=r.cached_tokens[done],
        preemptions=r.preemptions[done],
        gaps_s=_gaps(record),
        lost=int((~done).sum()),
        record=record,
        deployment=deployment,
        traffic=traffic,
        seed=int(record.meta.get("seed") or 0),
        slos=parse_slo(
            [f"{name}:{value * 1000:.12g}" for name, value in (record.meta.get("slos") or {}).items()]
        ),
        goodput=Goodput(limits.get("ttft"), limits.get("tpot"), limits.get("e2el")),
        notes=tuple(notes),
    )


def _traffic(record: RunRecord) -> tuple[WorkloadSpec | Workload, list[str]]:
    """The run's spec where it makes these very requests, otherwise the requests themselves."""
    workload, notes = workload_of(record)
    facts: dict[str, Any] = record.meta.get("workload") or {}
    if not notes and facts.get("seed") == meta_value(record, "seed"):
        return WorkloadSpec.model_validate(facts["spec"]), []
    return workload, notes


def _gaps(record: RunRecord) -> Floats | None:
    """Quantiles of the gaps between tokens; where only steps were kept, without the waits after preemptions.

    Each decoding sequence then waits one step for its next token.
    """
    if len(record.tokens.count):
        exact = inter_token_gaps(record)
        return (
            np.array([percentile_s(exact, p) for p in np.linspace(0, 100, GAP_PERCENTILES)])
            if exact.size
            else None
        )
    s = record.steps
    rows = s.num_decodes > 0
    if not rows.any():
        return None
    order = np.argsort(s.start_s[rows], kind="stable")
    length_s, count = (s.end_s - s.start_s)[rows][order], s.num_decodes[rows][order]
    by_length = np.argsort(length_s, kind="stable")
    pool = Pooled(length_s[by_length], count[by_length])
    return np.array([percentile_s(pool, p) for p in np.linspace(0, 100, GAP_PERCENTILES)])


def _bench(path: Path) -> dict[str, Any] | None:
    """The (last) result in a JSON file of `vllm bench serve`; None when it is something else."""
    try:
        text = path.read_text(encoding="utf-8").strip()
        lines = text.splitlines()
        result = json.loads(text if text.startswith("{\n") or len(lines) < 2 else lines[-1])
    except (OSError, ValueError):
        return None
    keys = {"request_throughput", "total_input_tokens", *DETAILED}
    return result if isinstance(result, dict) and keys & set(result) else None


def _of_bench(path: Path, result: dict[str, Any], deployment: Deployment | None) -> Measured:
    missing = [key for key in DETAILED if not result.get(key)]
    if missing:
        raise UsageError(f"{path}: no list {missing[0]!r}; save the run with --save-result --save-detailed")
    lengths = {key: len(result[key]) for key in DETAILED}
    if len(set(lengths.values())) > 1:
        raise UsageError(
            f"{path}: lists of different lengths ({', '.join(f'{k} {n}' for k, n in lengths.items())})"
        )
    outputs = np.array(result["output_lens"], np.int64)
    errors = result.get("errors") or [""] * len(outputs)
    done = np.array([not error for error in errors]) & (outputs > 0)
    if not done.any():
        raise UsageError(f"{path}: no request of this run succeeded; there is nothing to diagnose")
    ttft_s = np.array(result["ttfts"], np.float64)[done]
    decode_s = np.array([float(np.sum(gaps)) for gaps in result["itls"]])[done]
    queue_s, server_ttft_s = (
        _reported(result.get(key), done) for key in ("server_queue_times", "server_ttfts")
    )
    gaps = [np.asarray(g, np.float64) for g, kept in zip(result["itls"], done, strict=True) if kept]
    every = np.concatenate(gaps) if gaps else np.empty(0)
    return from_columns(
        path.stem,
        "the JSON of vllm bench serve",
        sent_s=np.array(result["start_times"], np.float64)[done],
        prompt_tokens=np.array(result["input_lens"], np.int64)[done],
        output_tokens=outputs[done],
        ttft_s=ttft_s,
        e2el_s=ttft_s + decode_s,
        queue_s=queue_s,
        prefill_s=None
        if queue_s is None or server_ttft_s is None
        else np.maximum(server_ttft_s - queue_s, 0.0),
        gaps_s=np.quantile(every, np.linspace(0, 1, GAP_PERCENTILES)) if len(every) else None,
        lost=int((~done).sum()),
        deployment=deployment,
        max_concurrency=result.get("max_concurrency"),
        all_at_once=result.get("request_rate") in (None, "inf", float("inf")),
    )


def _reported(values: Sequence[float | None] | None, done: Bools) -> Floats | None:
    """What the server said of every finished request; `queue_times` is the wait for the client's own limit instead."""
    if not values:
        return None
    column = np.array([np.nan if value is None else value for value in values], np.float64)[done]
    return None if np.isnan(column).any() else column


def from_columns(
    name: str,
    source: str,
    *,
    sent_s: Floats,
    prompt_tokens: Ints,
    output_tokens: Ints,
    ttft_s: Floats,
    e2el_s: Floats,
    queue_s: Floats | None = None,
    prefill_s: Floats | None = None,
    cached_tokens: Ints | None = None,
    preemptions: Ints | None = None,
    gaps_s: Floats | None = None,
    lost: int = 0,
    deployment: Deployment | None = None,
    max_concurrency: int | None = None,
    all_at_once: bool = False,
    notes: Sequence[str] = (),
) -> Measured:
    """A foreign run of finished requests, in order of sending.

    It is replayed without prefixes, at its own times, or as the closed loop it was: `all_at_once` with a limit.
    """
    order = np.argsort(sent_s, kind="stable")

    def sorted_(column: Any) -> Any:
        return None if column is None else column[order]

    sent_s = sent_s[order] - sent_s.min()
    prompt, output = prompt_tokens[order], output_tokens[order]
    ttft_s, e2el_s = ttft_s[order], e2el_s[order]
    tpot_s = np.where(output > 1, (e2el_s - ttft_s) / np.maximum(output - 1, 1), np.nan)
    queue_s, prefill_s = sorted_(queue_s), sorted_(prefill_s)
    if queue_s is not None and prefill_s is None:
        prefill_s = np.maximum(ttft_s - queue_s, 0.0)
        notes = [*notes, "prefill is what TTFT has beside the queue, the network included"]
    closed = max_concurrency if all_at_once else None
    how = f"as a closed loop of {closed}" if closed else "at the recorded times"
    network_s = None
    if queue_s is not None and prefill_s is not None:
        network_s = np.maximum(ttft_s - queue_s - prefill_s, 0.0)
    return Measured(
        name=name,
        source=source,
        sent_s=sent_s,
        prompt_tokens=prompt,
        output_tokens=output,
        ttft_s=ttft_s,
        tpot_s=tpot_s,
        e2el_s=e2el_s,
        queue_s=queue_s,
        prefill_s=prefill_s,
        network_s=network_s,
        cached_tokens=sorted_(cached_tokens),
        preemptions=sorted_(preemptions),
        gaps_s=gaps_s,
        lost=lost,
        deployment=deployment,
        traffic=plain_workload(
            name,
            np.zeros(len(sent_s)) if closed else sent_s,
            prompt.tolist(),
            output.tolist(),
            max_concurrency=closed,
        ),
        notes=(
            f"requests are replayed {how}; shared prefixes are unknown, so none are replayed",
            *notes,
        ),
    )
