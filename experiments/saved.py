"""A saved run folder read back: its record, and all that a report is made of.

The inverse of `experiments.results.save_run` with steps. Folders of older versions lack the times of tokens, or the
percentiles that bound intervals; they open, and `missing` says what cannot be shown.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from experiments.report import write_report
from experiments.report_figures import Roofline, step_roofline
from experiments.results import CERTAINTY, EVENTS, FLEET_COLUMNS, STEPS, TOKENS, load_run
from serving.beams import BeamCounts, CandidateCounts
from serving.draft_counts import DraftCounts
from serving.draft_steps import NAMES as DRAFT_COLUMNS
from serving.draft_steps import DraftSteps
from serving.errors import TokenTwinError, UsageError
from sim.certainty import Certainty
from sim.fleet.record import FleetRecord
from sim.latency import DEFAULT_PERCENTILES
from sim.meta import meta_value
from sim.metrics import Summary, summarise
from sim.record import (
    OPTIONAL_COLUMNS,
    Deliveries,
    Ints,
    RequestTable,
    RunRecord,
    Status,
    StepTable,
    Tenant,
    TokenRanges,
)
from sim.slo import Goodput, Slo
from sim.verdict import Verdict, verdict

REPORT = "report.html"
_FLOATS = {"start_s", "end_s", "gpu_s", "host_s", "prefill_attention_area"}
_NOT_META = {"drafts", "beams", "candidates", "fleet", "capacity", "partial", "end_s", "tenants", "warnings"}


@dataclass(frozen=True, slots=True)
class Opened:
    """A saved run with its numbers worked out again."""

    folder: Path
    record: RunRecord
    summary: Summary
    verdict: Verdict
    certainty: Certainty | None
    roofline: Roofline | None
    missing: tuple[str, ...]
    """What the folder does not hold, in sentences."""

    def report(self, path: str | Path | None = None) -> Path:
        """Write the report, the same as when the run was made, into the folder or to `path`. Raises UsageError."""
        return write_report(
            self.record,
            self.summary,
            self.verdict,
            self.folder / REPORT if path is None else path,
            roofline=self.roofline,
            certainty=self.certainty,
            notes=self.missing,
        )


def open_run(folder: str | Path) -> Opened:
    """A saved run, ready to be reported. Raises UsageError naming what is missing or broken."""
    base = Path(folder)
    record = load_record(base)
    missing = []
    if not len(record.tokens.first_step) and record.requests.output_tokens.any():
        missing.append(
            f"This folder has no {TOKENS} (older versions saved none): ITL, output tokens per second over time and "
            "the timeline of tokens are left out. Run it again to have them."
        )
    meta = record.meta
    promised = ((*name.partition("_"), limit_s) for name, limit_s in (meta.get("slos") or {}).items())
    slos = tuple(Slo(statistic, metric, limit_s) for statistic, _, metric, limit_s in promised)
    limits = {f"{name}_s": value for name, value in (meta.get("goodput_s") or {}).items()}
    points = tuple(meta.get("percentiles") or DEFAULT_PERCENTILES)
    summary = summarise(record, percentiles=points, goodput=Goodput(**limits), slos=slos)
    certainty = _certainty(base / CERTAINTY)
    if certainty is not None and certainty.replicated is not None and not certainty.replicated.ladders:
        missing.append(
            "The intervals are of an older version, which did not bound percentiles by one another: between two "
            "populations, such as fast and slow replicas, they are too wide. Run it again to have narrower ones."
        )
    roofline, why = _roofline(record)
    if why:
        missing.append(why)
    return Opened(base, record, summary, verdict(record, summary), certainty, roofline, tuple(missing))


def load_record(folder: str | Path) -> RunRecord:
    """The record of a saved run. Raises UsageError naming what is missing or broken."""
    saved = load_run(folder)
    path = saved.folder / STEPS
    if not path.is_file():
        raise UsageError(f"{folder}: no {STEPS}; run again with -o, which saves the steps")
    run, capacity = saved.run, saved.run.get("capacity") or {}
    requests, tenants = saved.requests(), tuple(_tenant(t) for t in run.get("tenants") or ["default"])
    names = [tenant.name for tenant in tenants]
    try:
        steps = import_module("pyarrow.parquet").read_table(path)
        there = set(requests.column_names)
        columns = {
            f.name: _column(requests, f.name)
            for f in fields(RequestTable)
            if f.name in there or f.name not in OPTIONAL_COLUMNS
        }
        codes = {status.name.lower(): int(status) for status in Status}
        columns["status"] = np.array([codes[word] for word in columns["status"]], np.int64)
        columns["tenant"] = np.array([names.index(name) for name in columns["tenant"]], np.int64)
        table = StepTable(
            **{
                f.name: _column(steps, f.name).astype(np.float64 if f.name in _FLOATS else np.int64)
                for f in fields(StepTable)
            }
        )
        drafting = None
        if set(DRAFT_COLUMNS) <= set(steps.column_names):
            drafting = DraftSteps(*(_column(steps, name).astype(np.int64) for name in DRAFT_COLUMNS))
        fleet = _fleet(run, requests)
        tokens = _tokens(saved.folder / TOKENS, len(columns["status"]))
        deliveries = _deliveries(saved.folder / EVENTS, len(columns["status"]))
        sizes: dict[str, Any] = {
            name: int(capacity[name])
            for name in ("num_pages", "page_tokens", "num_replicas", "max_num_seqs", "max_num_batched_tokens")
        }
        end_s = float(run["end_s"])
    except (KeyError, ValueError, OSError) as error:
        raise UsageError(f"{folder}: not a run saved by this version ({error})") from None
    return RunRecord(
        requests=RequestTable(**columns),
        steps=table,
        tokens=tokens,
        tenants=tenants,
        end_s=end_s,
        interrupted=bool(run.get("partial")),
        warnings=tuple(run.get("warnings") or ()),
        meta={key: value for key, value in run.items() if key not in _NOT_META},
        drafts=DraftCounts(**run["drafts"]) if run.get("drafts") else None,
        draft_steps=drafting,
        beams=BeamCounts(**run["beams"]) if run.get("beams") else None,
        candidates=CandidateCounts(**run["candidates"]) if run.get("candidates") else None,
        deliveries=deliveries,
        fleet=fleet,
        **sizes,
    )


def _fleet(run: Mapping[str, Any], requests: Any) -> FleetRecord | None:
    """Pools and lives of replicas, where the run had any."""
    if "fleet" not in run:
        return None
    return FleetRecord.of_json(run["fleet"], {name: _column(requests, name) for name in FLEET_COLUMNS})


def _tenant(saved: Any) -> Tenant:
    """Older versions saved the name alone."""
    if not isinstance(saved, Mapping):
        return Tenant(str(saved))
    return Tenant(**{f.name: saved[f.name] for f in fields(Tenant) if f.name in saved})


def _tokens(path: Path, num_requests: int) -> TokenRanges:
    """The ranges of each request; none where the file is not there."""
    if not path.is_file():
        none = np.empty(0, np.int64)
        return TokenRanges(np.zeros(num_requests + 1, np.int64), none, none.copy())
    table = import_module("pyarrow.parquet").read_table(path)
    owner: Ints = _column(table, "request").astype(np.int64)
    offsets = np.searchsorted(owner, np.arange(num_requests + 1), side="left").astype(np.int64)
    known = [f.name for f in fields(TokenRanges) if f.name in table.column_names]
    return TokenRanges(offsets, **{name: _column(table, name) for name in known})


def _deliveries(path: Path, num_requests: int) -> Deliveries | None:
    """Of a run that followed its streams."""
    if not path.is_file():
        return None
    table = import_module("pyarrow.parquet").read_table(path)
    owner: Ints = _column(table, "request").astype(np.int64)
    offsets = np.searchsorted(owner, np.arange(num_requests + 1), side="left").astype(np.int64)
    return Deliveries(offsets, _column(table, "seen_s"), _column(table, "tokens").astype(np.int64))


def _certainty(path: Path) -> Certainty | None:
    if not path.is_file():
        return None
    pydantic: Any = import_module("pydantic")
    try:
        found: Certainty = pydantic.TypeAdapter(Certainty).validate_python(
            json.loads(path.read_text(encoding="utf-8"))
        )
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {path}: {error}") from None
    return found


def _roofline(record: RunRecord) -> tuple[Roofline | None, str]:
    """Of a simulated run, from its deployment worked out again; why there is none, where there should be one."""
    deployment = meta_value(record, "deployment")
    if not isinstance(deployment, Mapping) or meta_value(record, "real"):
        return None, ""
    from sim.deployment import Deployment, build

    try:
        built = build(Deployment.model_validate(deployment))
    except (TokenTwinError, ValueError) as error:
        first = str(error).splitlines()[0]
        return None, f"No roofline of the steps: the deployment cannot be worked out here ({first})."
    return step_roofline(record, built), ""


def _column(table: Any, name: str) -> Any:
    values = table.column(name).to_numpy(zero_copy_only=False)
    return values if values.dtype == object else np.array(values)
