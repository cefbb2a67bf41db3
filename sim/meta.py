"""Looking up what a run was: `RunRecord.meta` holds facts at its top, or under the workload or deployment they
belong to."""

from __future__ import annotations

from typing import Any

from sim.record import RunRecord

_ALIASES = {"model_id": "model"}
"""What a deployment calls a fact that results name otherwise."""


def meta_value(record: RunRecord, key: str, default: Any = None) -> Any:
    """A fact about a run, from `meta[key]`, `meta["deployment"][key]` or `meta["workload"][key]`, if not None."""
    if record.meta.get(key) is not None:
        return record.meta[key]
    for part in ("deployment", "workload"):
        facts: dict[str, Any] = record.meta.get(part) or {}
        for name in (key, _ALIASES.get(key, key)):
            if facts.get(name) is not None:
                return facts[name]
    return default
