"""From the traffic flags of the command line to a `WorkloadSpec`. A flag without effect is an error."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from serving.errors import UsageError, nearest
from sim.workload.files import (
    SAMPLES,
    WORKLOAD,
    Location,
    detect_format,
    dotted,
    explain,
    named,
    read_workload_file,
    sample_path,
)
from sim.workload.spec import DATASETS, TRACES, WorkloadSpec

DATASET_FLAGS: dict[str, dict[str, str]] = {
    "azure": {"dataset_order": "order"},
    "burstgpt": {"dataset_order": "order", "burstgpt_model": "model"},
    "custom": {
        "dataset_order": "order",
        "dataset_tokenizer": "tokenizer",
        "custom_output_len": "output_len",
        "output_len": "output_len",
    },
    "lengths": {"dataset_order": "order"},
    "mooncake": {"dataset_order": "order", "mooncake_block_tokens": "block_tokens"},
    "prefix_repetition": {
        "prefix_repetition_num_prefixes": "num_prefixes",
        "prefix_repetition_prefix_len": "prefix_len",
        "prefix_repetition_suffix_len": "suffix_len",
        "prefix_repetition_output_len": "output_len",
        "output_len": "output_len",
    },
    "random": {
        "random_input_len": "input_len",
        "random_output_len": "output_len",
        "random_range_ratio": "range_ratio",
        "random_prefix_len": "prefix_len",
        "input_len": "input_len",
        "output_len": "output_len",
    },
    "sharegpt": {
        "dataset_order": "order",
        "dataset_tokenizer": "tokenizer",
        "sharegpt_output_len": "output_len",
        "sharegpt_multi_turn": "multi_turn",
        "output_len": "output_len",
    },
    "timed_trace": {
        "dataset_order": "order",
        "timed_trace_chunk_hash_size": "chunk_hash_size",
        "timed_trace_sec_multiplier": "sec_multiplier",
        "timed_trace_label_timestamp": "label_timestamp",
        "timed_trace_label_input_length": "label_input_length",
        "timed_trace_label_output_length": "label_output_length",
        "timed_trace_label_hash_ids": "label_hash_ids",
    },
}
"""For each dataset: flag (with underscores) → field of its spec."""

ARRIVAL_FLAGS: dict[str, str] = {
    "request_rate": "request_rate",
    "burstiness": "burstiness",
    "rate_scale": "rate_scale",
    "ramp_up_strategy": "ramp_up_strategy",
    "ramp_up_start_rps": "ramp_up_start_rps",
    "ramp_up_end_rps": "ramp_up_end_rps",
    "rate_points": "rate_points",
    "daily_curve": "daily_curve",
    "period": "period_s",
    "duration": "duration_s",
}
SESSION_FLAGS: dict[str, str] = {
    "session_turns_min": "turns_min",
    "session_turns_max": "turns_max",
    "think_time": "think_s",
    "think_distribution": "think_distribution",
}
TENANT_FLAGS: dict[str, str] = {
    "num_prompts": "num_prompts",
    "goodput": "goodput",
    "rtt_ms": "rtt_ms",
    "priority": "priority",
    "beam_width": "beam_width",
    "best_of": "best_of",
}
OTHER_FLAGS: tuple[str, ...] = ("dataset_name", "dataset_path", "max_concurrency", "shared_prefix_len")
FILE_FLAGS: tuple[str, ...] = (
    "dataset_name",
    "dataset_path",
    "max_concurrency",
    "goodput",
    "rate_scale",
    "rtt_ms",
)
"""Flags that may override a workload file, for all its tenants."""

NAMES: tuple[str, ...] = tuple(sorted({*DATASETS, *SAMPLES}))
"""What `--dataset-name` takes."""


def flag_name(name: str) -> str:
    """`--request-rate` for `request_rate`."""
    return "--" + name.replace("_", "-")


def spec_from_flags(flags: Mapping[str, Any]) -> WorkloadSpec:
    """The workload that the given flags describe; names have underscores, None means not given.

    Raises UsageError for an unknown dataset (with the nearest), a missing file, a value out of range, or a
    flag that has no effect on the chosen dataset.
    """
    given = {name: value for name, value in flags.items() if value is not None}
    known = known_flags()
    for flag in given:
        if flag not in known:
            raise UsageError(f"unknown flag {flag_name(flag)}; {nearest(flag, known)}")
    path = given.get("dataset_path")
    if path is None and "dataset_name" not in given:
        raise UsageError(f"no workload: set --dataset-path or --dataset-name; known: {', '.join(NAMES)}")
    name: str = given["dataset_name"] if "dataset_name" in given else detect_format(str(path))
    if name in SAMPLES:
        if path is not None:
            raise UsageError(f"--dataset-path has no effect with --dataset-name {name}; remove one of them")
        return _from_file(sample_path(name), given, f"--dataset-name {name}")
    if name == WORKLOAD:
        if path is None:
            raise UsageError("--dataset-name workload needs --dataset-path with a YAML file")
        return _from_file(Path(path), given, f"the workload file {path}")
    if name not in DATASET_FLAGS:
        raise UsageError(f"unknown dataset {name!r}; {nearest(name, (*NAMES, WORKLOAD))}")
    return _from_dataset(name, path, given)


def known_flags() -> set[str]:
    """Every flag name `spec_from_flags` takes."""
    names = {*ARRIVAL_FLAGS, *SESSION_FLAGS, *TENANT_FLAGS, *OTHER_FLAGS}
    for fields in DATASET_FLAGS.values():
        names.update(fields)
    return names


def _from_dataset(name: str, path: Any, given: dict[str, Any]) -> WorkloadSpec:
    fields = DATASET_FLAGS[name]
    dataset: dict[str, Any] = {"name": name}
    generated = name in ("random", "prefix_repetition")
    if generated and path is not None:
        raise UsageError(f"--dataset-path has no effect with --dataset-name {name}; remove one of them")
    if not generated and path is None:
        raise UsageError(f"--dataset-name {name} needs --dataset-path")
    if path is not None:
        dataset["path"] = path
    tenant: dict[str, Any] = {"dataset": dataset, "arrivals": {}}
    sessions: dict[str, Any] = {}
    for flag, value in given.items():
        if flag in ARRIVAL_FLAGS:
            tenant["arrivals"][ARRIVAL_FLAGS[flag]] = value
        elif flag in SESSION_FLAGS:
            sessions[SESSION_FLAGS[flag]] = value
        elif flag in TENANT_FLAGS:
            tenant[TENANT_FLAGS[flag]] = value
        elif flag in fields:
            field = fields[flag]
            if dataset.get(field, value) != value:
                raise UsageError(f"{flag_name(flag)} and another flag give {field} twice; keep one of them")
            dataset[field] = value
        elif flag not in OTHER_FLAGS:
            takes = ", ".join(flag_name(f) for f in fields)
            raise UsageError(
                f"{flag_name(flag)} has no effect with --dataset-name {name}, which takes {takes}"
            )
    if sessions:
        tenant["sessions"] = sessions
    if given.get("shared_prefix_len"):
        tenant["shared_prefix"] = {"group": "default", "tokens": given["shared_prefix_len"]}
    content = {"name": name, "tenants": [tenant], "max_concurrency": given.get("max_concurrency")}
    return _parse(content, name, given)


def _parse(content: dict[str, Any], dataset: str, given: dict[str, Any]) -> WorkloadSpec:
    """The spec, or an error that speaks of the flag."""
    try:
        parsed = WorkloadSpec.model_validate(content)
    except ValidationError as error:
        raise UsageError(explain(error, lambda place: flag_of(place, dataset, given))) from None
    parsed._flags = tuple(given)
    return parsed


def flag_of(location: Location, dataset: str, given: Collection[str]) -> str:
    """The flag that sets what is at `location` of a spec, one of those given if any does; empty where none does."""
    names = [part for part in location if isinstance(part, str) and part not in ("tenants", dataset)]
    if not names:
        return ""
    sections = {
        "arrivals": ARRIVAL_FLAGS,
        "sessions": SESSION_FLAGS,
        "dataset": DATASET_FLAGS.get(dataset, {}),
        "shared_prefix": {"shared_prefix_len": "tokens"},
    }
    fields = sections.get(names[0])
    if fields is None:
        return flag_name(names[0])
    flags = [flag for flag, field in fields.items() if field in names[1:]]
    flags.sort(key=lambda flag: flag not in given)
    return flag_name(flags[0]) if flags else ""


def reworded(message: str, spec: WorkloadSpec, tenant: int) -> str:
    """`message` about a tenant of `spec`, with the fields in backquotes as whoever described it calls them."""
    place = ("tenants", tenant)
    if spec._flags is not None:
        name, given = spec.tenants[tenant].dataset.name, spec._flags
        return named(message, place, lambda location: flag_of(location, name, given))
    plain = named(message, place)
    return message if plain == message else f"{spec._file or 'workload'}: {dotted(place)}: {plain}"


def _from_file(path: Path, given: dict[str, Any], what: str) -> WorkloadSpec:
    for flag in given:
        if flag not in FILE_FLAGS:
            fix = (
                "set it in the file's tenants"
                if given.get("dataset_path")
                else "take another dataset, such as random"
            )
            raise UsageError(f"{flag_name(flag)} has no effect with {what}; {fix}")
    workload = read_workload_file(path)
    # The overrides are checked on a tenant of their own and then put into the file's.
    overrides = {flag: given[flag] for flag in ("goodput", "rtt_ms") if flag in given}
    probe: dict[str, Any] = {"tenants": [{"dataset": {"name": "random"}, **overrides}]}
    checked = _parse(probe | {"max_concurrency": given.get("max_concurrency")}, "random", given)
    changes: dict[str, Any] = {flag: getattr(checked.tenants[0], flag) for flag in overrides}
    update: dict[str, Any] = {"tenants": tuple(t.model_copy(update=changes) for t in workload.tenants)}
    if "max_concurrency" in given:
        update["max_concurrency"] = checked.max_concurrency
    workload = workload.model_copy(update=update)
    return scale_rates(workload, given["rate_scale"]) if "rate_scale" in given else workload


def scale_rates(workload: WorkloadSpec, factor: float) -> WorkloadSpec:
    """The same tenants sending `factor` times as often: every rate times it, every trace that much faster.

    Tenants whose requests all come at once stay as they are. Raises UsageError unless the factor is positive.
    """
    if not (factor > 0 and math.isfinite(factor)):
        raise UsageError(f"--rate-scale must be a positive number, got {factor:g}")
    tenants = []
    for tenant in workload.tenants:
        arrivals = tenant.arrivals
        faster: dict[str, Any] = {}
        for key in ("request_rate", "ramp_up_start_rps", "ramp_up_end_rps"):
            if getattr(arrivals, key) is not None:
                faster[key] = getattr(arrivals, key) * factor
        if arrivals.rate_points is not None:
            faster["rate_points"] = tuple((time_s, rate * factor) for time_s, rate in arrivals.rate_points)
        if arrivals.from_trace and tenant.dataset.name in (*TRACES, "custom"):
            faster["rate_scale"] = arrivals.rate_scale * factor
        tenants.append(tenant.model_copy(update={"arrivals": arrivals.model_copy(update=faster)}))
    return workload.model_copy(update={"tenants": tuple(tenants)})
