"""Whether a flag's value can be at all, whatever the other flags say: limits of its field, names, files."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from costmodel.formats import gemm_format, kv_format
from costmodel.model import load_model
from costmodel.profile import load_profile
from serving.errors import UsageError, nearest
from serving.policies import load_policy
from serving.policies.adaptive import parse_size_classes
from serving.speculative_config import parse_speculative_config
from sim.deployment_limits import check_cache
from sim.router import check_router
from sim.workload import WorkloadSpec
from sim.workload.files import WORKLOAD, explain
from sim.workload.flags import (
    ARRIVAL_FLAGS,
    DATASET_FLAGS,
    NAMES,
    SESSION_FLAGS,
    TENANT_FLAGS,
    flag_name,
    known_flags,
)
from sim.workload.text_datasets import token_counter
from sim.workload.textfile import first_line
from tokentwin.job import DEPLOYMENT_NAMES, check_run, make_deployment

NAMED: dict[str, Callable[[Any], object]] = {
    "model": load_model,
    "gpu": load_profile,
    "dtype": lambda name: gemm_format(name, None),
    "quantization": partial(gemm_format, "auto"),
    "kv_cache_dtype": kv_format,
    "policy": load_policy,
    "response_cache": check_cache,
    "router": check_router,
    "size_classes": parse_size_classes,
    "speculative_config": parse_speculative_config,
}
"""Fields of a deployment whose values are names or texts, and what raises UsageError for one that is none."""


def check_value(name: str, value: Any) -> None:
    """Raise UsageError where no other flags could make a run of this value of the flag `name`.

    What it takes together with others, such as GPUs that divide a model's heads, is checked when a run is worked out.
    """
    if name in DEPLOYMENT_NAMES:
        _check_deployment(name, value)
    elif name == "dataset_name":
        if value not in (*NAMES, WORKLOAD):
            raise UsageError(f"unknown dataset {value!r}; {nearest(value, (*NAMES, WORKLOAD))}")
    elif name == "dataset_path":
        first_line(Path(value))
    elif name == "dataset_tokenizer":
        token_counter(Path(value))
    elif name in known_flags() - {"goodput"}:
        _check_traffic(name, value)
    else:
        check_run({name: value})


def _check_deployment(name: str, value: Any) -> None:
    made = make_deployment({"model": "any", name: value})
    if name in NAMED:
        NAMED[name](getattr(made, name))
    for index, pool in enumerate(made.pools):
        for own in NAMED.keys() & pool.overrides().keys():
            try:
                NAMED[own](getattr(pool, own))
            except UsageError as error:
                raise UsageError(f"pool {pool.name or f'pool{index}'}: {error}") from None


def _check_traffic(name: str, value: Any) -> None:
    """The value in a workload of one tenant, of a dataset that takes the flag, with nothing else set."""
    if name == "shared_prefix_len" and not value:
        return  # no prefix
    dataset = next((each for each, flags in DATASET_FLAGS.items() if name in flags), "random")
    tenant: dict[str, Any] = {"dataset": {"name": dataset}}
    if dataset not in ("random", "prefix_repetition"):
        tenant["dataset"]["path"] = "-"
    content: dict[str, Any] = {"tenants": [tenant]}
    if name == "max_concurrency":
        place, field = content, name
    elif name == "shared_prefix_len":
        place, field = tenant.setdefault("shared_prefix", {"group": "default"}), "tokens"
    elif name in TENANT_FLAGS:
        place, field = tenant, TENANT_FLAGS[name]
    elif name in ARRIVAL_FLAGS or name in SESSION_FLAGS:
        section = "arrivals" if name in ARRIVAL_FLAGS else "sessions"
        place, field = tenant.setdefault(section, {}), (ARRIVAL_FLAGS | SESSION_FLAGS)[name]
    else:
        place, field = tenant["dataset"], DATASET_FLAGS[dataset][name]
    place[field] = value
    try:
        WorkloadSpec.model_validate(content)
    except ValidationError as error:
        if field in error.errors(include_url=False)[0]["loc"]:  # else it lacks others, which a sweep may set
            raise UsageError(explain(error, lambda location: flag_name(name))) from None
