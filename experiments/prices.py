"""What a GPU costs an hour: the example table, a file of one's own, and single prices on top."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from serving.errors import UsageError, nearest
from sim.workload.yaml_lines import DuplicateKey, load_yaml, yaml_problem

HOURS_PER_MONTH = 730.0


@dataclass(frozen=True, slots=True)
class Price:
    """Dollars per GPU and hour, and where the figure is from."""

    usd_per_hour: float
    source: str
    example: bool = False


def load_prices(path: Path | None = None, own: Sequence[str] = ()) -> dict[str, Price]:
    """Prices by GPU: those of `path` or the shipped examples, then `own` such as `["h200=3.5"]`.

    With `own` and no file only the GPUs that are named have a price. Raises UsageError.
    """
    table: dict[str, Price] = {}
    if path is not None:
        table = _read(path, _text(path))
    elif not own:
        shipped = resources.files("experiments") / "prices.yaml"
        table = _read(Path("prices.yaml"), shipped.read_text(encoding="utf-8"))
    for number, item in enumerate(own):
        gpu, equals, value = item.partition("=")
        if not equals or not gpu.strip():
            raise UsageError(f"--price: {item!r} is not GPU=DOLLARS_PER_HOUR, such as h200=3.5")
        if gpu.strip() in [given.partition("=")[0].strip() for given in own[:number]]:
            raise UsageError(f"--price: {gpu.strip()} is given twice; keep one")
        table[gpu.strip()] = Price(_dollars(value, f"--price {item}"), "--price")
    return table


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UsageError(f"--prices {path}: {error.strerror}; name a YAML file") from None
    except UnicodeDecodeError:
        raise UsageError(f"--prices {path}: not UTF-8 text; name a YAML file") from None


def _read(path: Path, text: str) -> dict[str, Price]:
    try:
        content = load_yaml(text)
    except DuplicateKey as error:
        raise UsageError(f"--prices {path}: {yaml_problem(error)}") from None
    except (yaml.YAMLError, ValueError, RecursionError):
        raise UsageError(f"--prices {path}: not YAML; write lines such as prices: {{h200: 3.5}}") from None
    if not isinstance(content, dict) or not isinstance(content.get("prices"), dict):
        raise UsageError(f"--prices {path}: needs the key prices, such as prices: {{h200: 3.5}}")
    known = ("currency", "unit", "example", "prices")
    for key in content:
        if key not in known:
            raise UsageError(f"--prices {path}: unknown key {key!r}; {nearest(str(key), known)}")
    example = bool(content.get("example", False))
    return {
        str(gpu): _price(entry, f"--prices {path}: {gpu}", example)
        for gpu, entry in content["prices"].items()
    }


def _price(entry: Any, where: str, example: bool) -> Price:
    if isinstance(entry, dict):
        return Price(_dollars(entry.get("usd"), where), str(entry.get("source", where)), example)
    return Price(_dollars(entry, where), where, example)


def _dollars(value: Any, where: str) -> float:
    try:
        dollars = float(value)
    except (TypeError, ValueError):
        raise UsageError(f"{where}: {value!r} is not a number of dollars per hour") from None
    if not (math.isfinite(dollars) and dollars > 0):
        raise UsageError(f"{where}: the price must be a positive number of dollars per hour")
    return dollars
