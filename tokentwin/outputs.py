"""What a run writes and where: the folder of `-o`, and the single JSON file of `vllm bench serve --save-result`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from experiments.results import (
    METRICS,
    metadata_pairs,
    request_rate,
    result_date,
    result_json,
    save_result,
)
from experiments.source_date import source_date_s
from serving.errors import UsageError, nearest
from sim.certainty import Certainty
from sim.metrics import Summary
from sim.record import RunRecord
from sim.verdict import Verdict

NEEDS_SAVE_RESULT = ("append_result", "result_dir", "result_filename")
NEEDS_A_FILE = ("save_detailed", "metadata", "label", "plot_timeline", "date")


class Finished(Protocol):
    """A run that can be written: a simulated one (`tokentwin.run.Run`) or one of the engine."""

    @property
    def record(self) -> RunRecord: ...
    @property
    def summary(self) -> Summary: ...
    @property
    def verdict(self) -> Verdict: ...
    @property
    def certainty(self) -> Certainty: ...

    def save(
        self,
        folder: str | Path,
        *,
        detailed: bool = False,
        label: str | None = None,
        metadata: Mapping[str, str] | Sequence[str] = (),
        date: str | None = None,
        metrics: Sequence[str] = METRICS,
    ) -> list[Path]:
        """Write everything into a folder and return the files."""


@dataclass(frozen=True, slots=True)
class Outputs:
    """The output flags, checked against one another."""

    output_dir: Path | None = None
    save_result: bool = False
    save_detailed: bool = False
    append_result: bool = False
    result_dir: Path = Path()
    result_filename: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    label: str | None = None
    plot_timeline: bool = False
    date: str | None = None
    metrics: tuple[str, ...] = METRICS

    @classmethod
    def of(cls, flags: Mapping[str, Any]) -> Outputs:
        """From flags by name. Raises UsageError for a flag that would have no effect."""
        given = {name: flags[name] for name in flags if flags[name] not in (None, False)}
        for name in NEEDS_SAVE_RESULT:
            if name in given and "save_result" not in given:
                raise UsageError(f"{_option(name)} has no effect without --save-result; add it")
        for name in NEEDS_A_FILE:
            if name in given and "save_result" not in given and "output_dir" not in given:
                raise UsageError(
                    f"{_option(name)} has no effect without -o or --save-result; add one of them"
                )
        if "append_result" in given and "result_filename" not in given:
            raise UsageError("--append-result needs --result-filename, the file to add to")
        names = {f: given[f] for f in cls.__slots__ if f in given and f not in ("metrics", "metadata")}
        return cls(**names, metadata=metadata_pairs(given.get("metadata", ())), metrics=_metrics(given))

    def check(self) -> None:
        """Make the folders and fail now rather than after the simulation. Raises UsageError."""
        if self.output_dir is not None:
            check_folder(self.output_dir)
        if self.save_result:
            check_folder(self.result_dir, "--result-dir")
            if self.result_filename is not None:
                check_file(self.result_dir / self.result_filename, "--result-filename")

    def write(self, run: Finished) -> list[Path]:
        """Write the files and return them in the order they were written."""
        paths: list[Path] = []
        date = result_date(self.date)
        if self.output_dir is not None:
            paths += run.save(
                self.output_dir,
                detailed=self.save_detailed,
                label=self.label,
                metadata=self.metadata,
                date=date,
                metrics=self.metrics,
            )
        if self.save_result:
            path = self.result_dir / (self.result_filename or _file_name(run, self.label, date))
            result = result_json(
                run.record,
                run.summary,
                verdict=run.verdict,
                detailed=self.save_detailed,
                label=self.label,
                metadata=self.metadata,
                date=date,
                metrics=self.metrics,
                certainty=run.certainty,
            )
            paths.append(save_result(result, path, append=self.append_result))
        if self.plot_timeline:
            from experiments.timeline import write_timeline

            beside = paths[-1] if self.save_result else paths[0]
            paths.append(write_timeline(run.record, beside.with_name(beside.stem + ".timeline.html")))
        return paths


def check_folder(folder: Path, option: str = "-o", *, file: Path | None = None) -> None:
    """Make a folder, or that of a file; fails now rather than when there is something to write. Raises UsageError."""
    source_date_s()  # what is written may bear it
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(13, "Permission denied")
    except OSError as error:
        why = "it is a file" if isinstance(error, FileExistsError) else error.strerror
        where = f"{folder}: {why}" if file is None else f"{file}: {folder}: {why}"
        raise UsageError(f"{option}: cannot write to {where}; choose another folder") from None


def check_file(path: Path, option: str = "-o") -> None:
    """The same for a file: make its folder. Raises UsageError, also where a folder has its name."""
    if path.is_dir():
        raise UsageError(f"{option}: {path} is a folder; name a file, such as {path / 'a'}{path.suffix}")
    check_folder(path.parent, option, file=path)


def _metrics(given: Mapping[str, Any]) -> tuple[str, ...]:
    text = given.get("percentile_metrics")
    if text is None:
        return METRICS
    names = [name.strip().lower() for name in str(text).split(",") if name.strip()]
    for name in names:
        if name not in METRICS:
            raise UsageError(f"--percentile-metrics: unknown metric {name!r}; {nearest(name, METRICS)}")
    if not names:
        raise UsageError(f"--percentile-metrics names none; known: {', '.join(METRICS)}")
    return tuple(name for name in METRICS if name in names)


def _file_name(run: Finished, label: str | None, date: str) -> str:
    """`vllm bench serve`'s: label or backend, rate or ramp, concurrency, model and date; "trace" for its own times."""
    meta = run.record.meta
    rate = meta.get("request_rate")
    if rate is None:
        rate = "inf" if request_rate(run.record) == "inf" else "trace"
    limit = meta.get("max_concurrency")
    parts = [
        label or meta.get("backend") or "sim",
        _ramp(meta) or f"{rate}qps",
        *([f"concurrency{limit}"] if limit is not None else []),
        str(meta["model_id"]).rsplit("/", 1)[-1],
        date,
    ]
    return "-".join(parts).replace("/", "-") + ".json"


def _ramp(meta: Mapping[str, Any]) -> str:
    """`ramp-up-linear-1qps-10qps` where the rate rises, of the only tenant."""
    tenants: Sequence[Any] = ((meta.get("workload") or {}).get("spec") or {}).get("tenants") or ()
    arrivals = tenants[0].get("arrivals") or {} if len(tenants) == 1 else {}
    if not (how := arrivals.get("ramp_up_strategy")):
        return ""
    return f"ramp-up-{how}-{arrivals['ramp_up_start_rps']:g}qps-{arrivals['ramp_up_end_rps']:g}qps"


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
