"""From the files and folders that a user names to tables that fits read: which files, in whose layout.

A folder is searched. Of an AIConfigurator tree the newest version of one engine is taken, of any tree only the
parts of the named device. Everything that is passed over is said and counted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from calibration import aiconfigurator, bench_table, vidur
from calibration.layouts import SUFFIXES
from calibration.tables import Table, read_table
from serving.errors import UsageError

_DEVICE = re.compile(r"^(gb|gh|[abhlvt])\d{2,4}s?([_\- ]|$)|^rtx|^mi\d|^tpu", re.IGNORECASE)
_FORM = re.compile(r"(sxm\d?|dgx|hgx|server|nvlink|pairwisenvlink|pairnvlink|\d+gb)*$")
_NOT_MEASURED = ("predictions", "archive")
_NOT_TIMINGS = re.compile(r"^(skew|skew_fit|step|.*_predictions)$")
_IMPORTERS: dict[str, Callable[[Table], list[Table]]] = {
    **dict.fromkeys(("aic_gemm", "aic_attention", "aic_comm"), aiconfigurator.converted),
    **dict.fromkeys(("vidur_mlp", "vidur_attention", "vidur_all_reduce"), vidur.converted),
    "microbench": bench_table.converted,
}


@dataclass(slots=True)
class Found:
    """Tables in our own layout, which files they were, and what was passed over, in words."""

    tables: list[Table] = field(default_factory=list)
    files: list[Table] = field(default_factory=list)
    passed_over: list[str] = field(default_factory=list)

    def notes(self) -> list[str]:
        """What importers left out, one line per file and reason."""
        return [
            f"{table.name}: {count:,} rows left out ({reason})"
            for table in self.tables
            for reason, count in sorted(table.dropped.items())
        ]


def read_sources(paths: Sequence[Path], device: str, engine: str = "vllm") -> Found:
    """The tables of `paths` (files or folders) for `device`; AIConfigurator trees give those of `engine`.

    Raises `UsageError` for a file that is not a table of kernel timings and for a folder without one.
    """
    found = Found()
    for given in paths:
        path = Path(given).expanduser()
        if path.is_dir():
            _read_folder(path, device, engine, found)
        else:
            _take(read_table(path), found)
    return found


def _take(table: Table, found: Found) -> None:
    found.tables.extend(_IMPORTERS[table.kind](table) if table.kind in _IMPORTERS else [table])
    found.files.append(table)


def _read_folder(folder: Path, device: str, engine: str, found: Found) -> None:
    files = sorted(f for f in folder.rglob("*") if f.is_file() and f.suffix.lower() in SUFFIXES)
    files = [f for f in files if not set(f.relative_to(folder).parts) & set(_NOT_MEASURED)]
    files = [f for f in files if not _NOT_TIMINGS.match(f.stem)]
    if not files:
        raise UsageError(f"{folder}: no CSV or Parquet file of kernel timings in this folder")
    mine = [f for f in files if is_of_device(f.relative_to(folder).parts[:-1], device)]
    if not mine:
        raise UsageError(f"{folder}: it holds tables of other devices only, none of {device}")
    if len(mine) < len(files):
        found.passed_over.append(f"{folder}: {len(files) - len(mine):,} files of other devices")
    collected = [f for f in mine if f.stem.endswith("_perf")]
    chosen = [*_newest(collected, engine, folder, found), *(f for f in mine if f not in set(collected))]
    before = len(found.files)
    for file in chosen:
        label = str(file.relative_to(folder)).replace(" ", "_")
        try:
            _take(read_table(file, label), found)
        except UsageError as error:
            found.passed_over.append(str(error))
    if len(found.files) == before:
        why = found.passed_over[-1] if chosen else "no table that the cost model has a kernel for"
        raise UsageError(f"{folder}: nothing to read ({why})")


def is_of_device(parts: Iterable[str], device: str) -> bool:
    """Whether a path with these folder names belongs to `device`: none of them names another device."""
    named = [re.sub(r"[_\- ]", "", part.lower()) for part in parts if _DEVICE.match(part)]
    return all(name.startswith(device) and _FORM.fullmatch(name[len(device) :]) for name in named)


def _newest(files: Sequence[Path], engine: str, folder: Path, found: Found) -> list[Path]:
    """One file per table: of `…/<engine>/<version>/<table>_perf.*` the newest version of the engine (NCCL's
    own table has NCCL in the engine's place)."""
    best: dict[str, Path] = {}
    for file in files:
        if file.stem not in aiconfigurator.TABLES or file.parent.parent.name not in (engine, "nccl"):
            continue
        if file.stem not in best or version_key(file.parent.name) > version_key(best[file.stem].parent.name):
            best[file.stem] = file
    if others := len(files) - len(best):
        found.passed_over.append(
            f"{folder}: {others:,} tables of other engines, older versions or kernels not modelled"
        )
    engines = sorted({f.parent.parent.name for f in files} - {"nccl"})
    if files and engines and engine not in engines:
        raise UsageError(f"{folder}: no tables of engine {engine!r}; it has {', '.join(engines)}")
    return [best[stem] for stem in aiconfigurator.TABLES if stem in best]


def version_key(text: str) -> list[tuple[int, int]]:
    """A key that orders versions: 1.3.0rc20 before 1.3.0 before 1.3.0.post1 before 1.10.0."""
    order = {"dev": -3, "a": -2, "b": -2, "rc": -1, "post": 1}
    words = re.findall(r"\d+|[a-z]+", text.lower())
    return [*((2, int(word)) if word.isdigit() else (order.get(word, 0), 0) for word in words), (0, 0)]
