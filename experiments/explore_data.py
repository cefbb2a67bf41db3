"""Finds what `tokentwin explore` is to show: a sweep or a plan, by its folder or its file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from experiments.explore_plan import plan_space
from experiments.explore_space import Space
from experiments.explore_sweep import sweep_space
from experiments.sweep_store import RESULTS, SWEEP
from serving.errors import UsageError

PLAN_FILE = "plan.json"


def load_space(path: str | Path, *, serving: Sequence[str] = ()) -> Space:
    """A sweep's folder or Parquet file, or a plan's folder or JSON. Raises UsageError naming what is missing or broken.

    `serving` are the flags of the deployment, from which a sweep names its folders.
    """
    place = Path(path)
    if place.is_dir():
        place = _inside(place)
    if place.name == SWEEP:
        place = place.parent
    if place.is_dir() and (place / SWEEP).is_file():
        return sweep_space(place, place / RESULTS, serving)
    if place.suffix == ".parquet":
        return sweep_space(place.parent, place, serving)
    if place.suffix == ".json":
        return plan_space(place)
    raise UsageError(f"{path}: neither a sweep's folder or results.parquet, nor a plan's folder or plan.json")


def _inside(folder: Path) -> Path:
    """The folder itself, or the one sweep or plan in it."""
    if (folder / SWEEP).is_file():
        return folder
    if (folder / PLAN_FILE).is_file():
        return folder / PLAN_FILE
    inner = sorted(path.parent for name in (SWEEP, PLAN_FILE) for path in folder.glob(f"*/{name}"))
    if len(inner) == 1:
        return _inside(inner[0])
    if inner:
        raise UsageError(
            f"{folder} holds {len(inner)} sweeps and plans; name one: {', '.join(map(str, inner))}"
        )
    if (folder / RESULTS).is_file():
        return folder / RESULTS
    raise UsageError(
        f"{folder}: no {SWEEP} and no {PLAN_FILE}; make one with tokentwin sweep or tokentwin plan -o"
    )
