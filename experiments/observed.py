"""What a monitor would say of a run, for the terminal and the result file: share of peak, and alerts. Light to import."""

from __future__ import annotations

from typing import Any

import numpy as np

from sim.record import RunRecord

UTILISATION, ALERTS = "utilisation", "alerts"
"""Keys of `RunRecord.meta`: `experiments.utilisation.Utilisation.json()`, and the rules of `--alert` as text."""


def span_s(record: RunRecord) -> tuple[float, float]:
    """From the first request to the end of the run, in seconds of its clock."""
    sent_s = record.requests.sent_s
    from_s = float(sent_s.min()) if len(sent_s) else 0.0
    last_s = record.requests.last_token_s
    last = float(np.nanmax(last_s)) if (~np.isnan(last_s)).any() else from_s
    return from_s, max(record.end_s, last, from_s)


def observed_json(record: RunRecord) -> dict[str, Any]:
    """`sim_mfu`, `sim_mbu` and the like where they are known, and `sim_alerts` where rules were given."""
    out: dict[str, Any] = {
        f"sim_{name}": value for name, value in (record.meta.get(UTILISATION) or {}).items()
    }
    if record.meta.get(ALERTS):
        from experiments.alert_series import alerts_json

        out["sim_alerts"] = alerts_json(record)
    return out


def utilisation_rows(record: RunRecord) -> list[tuple[str, str, str]]:
    """Rows for the terminal; none where nothing is known."""
    known: dict[str, float] = record.meta.get(UTILISATION) or {}
    rows = []
    for name, what in (("mfu", "of peak FLOP/s"), ("mbu", "of peak memory bandwidth")):
        if name in known:
            rows.append((f"{name.upper()}, while busy (%):", f"{100 * known[name]:.2f}", what))
            rows.append((f"{name.upper()}, with idle time (%):", f"{100 * known[f'{name}_wall']:.2f}", ""))
    if "mfu" not in known and "flops_per_s" in known:
        rows.append(
            ("Achieved GFLOP/s, while busy:", f"{known['flops_per_s'] / 1e9:.2f}", "by the model's shape")
        )
        rows.append(
            ("Achieved GB/s, while busy:", f"{known['bytes_per_s'] / 1e9:.2f}", "by the model's shape")
        )
    return rows


def alert_lines(record: RunRecord) -> list[tuple[bool, str]]:
    """(whether it fired, a sentence) for each alert rule of a run."""
    if not record.meta.get(ALERTS):
        return []
    from experiments.alert_series import histories, history_words

    from_s = span_s(record)[0]
    return [(history.fired, history_words(history, from_s)) for history in histories(record)]


def any_fired(record: RunRecord) -> bool:
    """Whether an alert rule of the run fired."""
    return any(fired for fired, _ in alert_lines(record))
