"""`tokentwin workload describe`: the traffic of the same flags as `simulate`, in numbers."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

from sim.workload import describe as describe_workload
from sim.workload import load_workload
from tokentwin.config_file import print_config, with_config
from tokentwin.flag_tables import BLOCK_SIZE, CONFIG_FLAGS, JSON, SEED, TRAFFIC
from tokentwin.flags import at_least, takes
from tokentwin.job import make_spec

KNOWN = {flag.name: flag for flag in (*TRAFFIC, SEED, BLOCK_SIZE, *CONFIG_FLAGS, JSON)}


@takes(TRAFFIC, (SEED, BLOCK_SIZE), CONFIG_FLAGS, (JSON,))
def describe(**flags: Any) -> int:
    """Summarise a workload: requests, rates, lengths, and how much of the prompts is shared.

    Example: tokentwin workload describe --dataset-path trace.csv --rate-scale 2
    """
    given = with_config(flags, KNOWN)
    spec = make_spec(given)
    if given.get("print_config"):
        return print_config(given, known=KNOWN)
    page_tokens = at_least(given, "block_size", default=16)
    workload = load_workload(spec, seed=given.get("seed", 0))
    summary = describe_workload(workload, page_tokens=page_tokens)
    if given.get("json"):
        sys.stdout.write(json.dumps(summary, indent=1) + "\n")
        return 0
    lines = _table(summary)
    if len(summary["tenants"]) > 1:
        for tenant in summary["tenants"]:
            lines += ["", *_table(tenant, indent="  ")]
    lines += [f"warning: {warning}" for warning in summary["warnings"]]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def _table(part: Mapping[str, Any], indent: str = "") -> list[str]:
    """One workload, or one tenant of it, as lines of at most 80 columns."""
    rate, cv = part["request_rate"], part["gap_cv"]
    sessions = part.get("num_sessions", part["num_requests"])
    rows = [("requests", f"{part['num_requests']:,}")]
    if sessions != part["num_requests"]:
        rows.append(("sessions", f"{sessions:,}"))
    rows.append(("sent within", f"{part['duration_s']:,.1f} s"))
    if rate is None:
        rows.append(("rate", "all at once"))
    else:
        rows.append(("rate", f"{rate:,.3g} a second; gaps vary by {cv:.2f} of their mean"))
    if part.get("max_concurrency") is not None:
        rows.append(("in flight", f"at most {part['max_concurrency']:,}"))
    if (searches := part.get("num_beam_searches")) is not None:
        widths = f"{part['mean_beam_width']:.3g} on average, {part['max_beam_width']} at most"
        rows.append(("beam searches", f"{searches:,}, with a width of {widths}"))
    shared = f"{part['shared_prefix_share']:.1%} of prompt tokens, found by an infinite cache"
    rows.append(("shared prefixes", shared))
    lines = [indent + part["name"], *(f"{indent}  {key:<18}{value}" for key, value in rows)]
    lines.append(
        f"{indent}  {'':<14}{'total':>14}{'mean':>8}{'P50':>8}{'P90':>8}{'P95':>8}{'P99':>8}{'max':>8}"
    )
    for title, key in (("prompt tokens", "prompt_tokens"), ("answer tokens", "output_tokens")):
        if f"mean_{key}" in part:
            points = [part[f"{p}_{key}"] for p in ("mean", "p50", "p90", "p95", "p99", "max")]
            cells = "".join(f"{value:>8,.0f}" for value in points)
            lines.append(f"{indent}  {title:<14}{part[f'total_{key}']:>14,}{cells}")
    return lines
