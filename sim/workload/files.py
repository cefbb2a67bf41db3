"""Workload files in YAML and the recognition of trace formats; errors are one line that names the place."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from serving.errors import UsageError, nearest
from sim.workload import arrival_spec, spec
from sim.workload.csv_traces import AZURE_COLUMNS, BURSTGPT_COLUMNS, LENGTHS_COLUMNS
from sim.workload.spec import DATASETS, WorkloadSpec
from sim.workload.textfile import first_line, read_text
from sim.workload.yaml_lines import DuplicateKey, line_of, load_yaml, yaml_problem

SAMPLES: dict[str, str] = {"sample": "chat.yaml"}
"""Bundled workload files by the name they have for `--dataset-name`."""

WORKLOAD = "workload"
"""What `detect_format` calls a YAML workload file."""


def sample_path(name: str) -> Path:
    """The file of a bundled workload. Raises UsageError for an unknown name."""
    if name not in SAMPLES:
        raise UsageError(f"no bundled workload {name!r}; {nearest(name, SAMPLES)}")
    return Path(str(resources.files("sim.workload").joinpath("samples", SAMPLES[name])))


def read_workload_file(path: str | Path) -> WorkloadSpec:
    """The spec in a YAML file; dataset paths in it are relative to its folder. Raises UsageError."""
    path = Path(path)
    text, _ = read_text(path)
    try:
        content = load_yaml(text)
    except yaml.YAMLError as error:
        problem = yaml_problem(error)
        if not isinstance(error, DuplicateKey):
            problem += f" ({getattr(error, 'problem', None) or 'cannot be parsed'}); correct the line"
        raise UsageError(f"{path}: {problem}") from None
    except (ValueError, RecursionError, TypeError, AttributeError) as error:
        raise UsageError(f"{path}: not YAML ({str(error)[:80]}); correct the file") from None
    if not isinstance(content, dict):
        raise UsageError(f"{path}: is not a workload; it needs the key 'tenants' with a list")
    if "model" in content and "tenants" not in content:
        raise UsageError(f"{path}: is a file of options and no workload; give it to --config")
    content.setdefault("name", path.name.removesuffix(".gz").rsplit(".", 1)[0])
    for dataset in _datasets(content):
        for key in ("path", "tokenizer"):
            if isinstance(dataset.get(key), str):
                dataset[key] = str(path.parent / dataset[key])
    return parse_spec(content, str(path), text)


def _datasets(content: dict[Any, Any]) -> Iterator[dict[Any, Any]]:
    tenants = content.get("tenants")
    for tenant in tenants if isinstance(tenants, list) else []:
        if isinstance(tenant, dict) and isinstance(tenant.get("dataset"), dict):
            yield tenant["dataset"]


def parse_spec(content: Mapping[str, Any], where: str = "workload", text: str = "") -> WorkloadSpec:
    """`content` as a spec. Raises UsageError with one line that names the field and what is wrong.

    With the `text` that `content` was read from, it also names the line.
    """
    try:
        parsed = WorkloadSpec.model_validate(content)
    except ValidationError as error:
        line = line_of(text, first_problem(error)["loc"]) if text else None
        raise UsageError(f"{where}: {'' if line is None else f'line {line}: '}{explain(error)}") from None
    parsed._file = where if text else ""
    return parsed


Location = tuple[int | str, ...]


def dotted(location: Location) -> str:
    """`tenants[0].arrivals.request_rate`, without the tag of the dataset union, no key of the file."""
    place = ""
    for i, part in enumerate(location):
        if i and location[i - 1] == "dataset" and part in DATASETS:
            continue
        place += f"[{part}]" if isinstance(part, int) else f".{part}" if place else part
    return place


def explain(
    error: ValidationError,
    name_of: Callable[[Location], str] = dotted,
    keys_at: Callable[[Location], set[str]] | None = None,
) -> str:
    """The first problem of a validation error in one line, an unknown key before all others.

    `name_of` names its place for the user; `keys_at` are the keys that the mapping at a place may have.
    """
    first = first_problem(error)
    place = name_of(first["loc"])
    kind, value = first["type"], first["input"]
    if kind == "too_short" and not value:
        return f"{place}: the list is empty; give at least {first['ctx']['min_length']}"
    message = (
        named(first["msg"], first["loc"], name_of)
        .removeprefix("Value error, ")
        .replace("Input should be", "must be")
    )
    message = message.replace("a valid tuple", "a list")
    message = re.sub(
        r"a valid dictionary or (instance of \w+|object to .* from)", "a mapping of keys", message
    )
    if kind == "extra_forbidden":
        key = str(first["loc"][-1])
        if keys_at is not None:
            mapping = first["loc"][:-1]
            return f"unknown key {key!r} in {name_of(mapping)}; {nearest(key, keys_at(mapping))}"
        where = f"{dotted(first['loc'])}" if name_of is dotted else f"{key!r} in {place}"
        return f"unknown key {where}; {_place_of(key) or nearest(key, _field_names())}"
    if kind == "missing":
        return f"{place} is missing; add it"
    if kind == "union_tag_invalid":
        name = str(first.get("ctx", {}).get("tag", ""))
        return f"{place}: unknown dataset {name!r}; {nearest(name, DATASETS)}"
    if kind == "union_tag_not_found":
        return f"{place}.name is missing; give one of {', '.join(DATASETS)}"
    shown = "" if kind == "value_error" or isinstance(value, (dict, list)) else f", got {str(value)[:40]!r}"
    return f"{place}: {message[:1].lower()}{message[1:]}{shown}" if place else message


def named(message: str, place: Location, name_of: Callable[[Location], str] = dotted) -> str:
    """`message` with the fields in backquotes, which lie at or below `place`, as the user calls them.

    In a file they go by their keys below the place, which the message names before.
    """

    def name(found: re.Match[str]) -> str:
        return "" if name_of is dotted else name_of((*place, *found[1].split(".")))

    return _FIELD.sub(lambda found: name(found) or found[1], message)


_FIELD = re.compile(r"`([a-z_]+(?:\.[a-z_]+)*)`")


def first_problem(error: ValidationError) -> Any:
    """The first problem of a validation error, an unknown key before all others."""
    found = error.errors(include_url=False)
    return next((each for each in found if each["type"] == "extra_forbidden"), found[0])


def _place_of(key: str) -> str:
    """Where in a workload file a key belongs that is there at the wrong depth; empty where it is none."""
    if key in spec.WorkloadSpec.model_fields:
        return f"{key} belongs at the top of the file, beside tenants"
    if key in spec.TenantSpec.model_fields:
        return f"{key} belongs to the tenant itself, beside its dataset"
    inner = (
        ("arrivals", arrival_spec.ArrivalSpec),
        ("sessions", spec.SessionSpec),
        ("goodput", spec.GoodputSpec),
    )
    for section, model in (*inner, ("shared_prefix", spec.SharedPrefixSpec)):
        if key in model.model_fields:
            return f"{key} belongs below {section} of a tenant"
    return ""


def _field_names() -> set[str]:
    names: set[str] = set()
    for module in (spec, arrival_spec):
        for value in vars(module).values():
            if isinstance(value, type) and issubclass(value, BaseModel):
                names.update(value.model_fields)
    return names


def detect_format(path: str | Path) -> str:
    """The dataset a file belongs to by its header or keys, or `WORKLOAD` for a YAML workload.

    Raises UsageError when it is none, or when the format leaves open what its numbers mean.
    """
    path = Path(path)
    if path.name.lower().removesuffix(".gz").endswith((".yaml", ".yml")):
        return WORKLOAD
    line = first_line(path)
    if line.startswith("["):
        return "sharegpt"
    if line.startswith("{"):
        return _detect_json(path, line)
    columns = {name.strip().strip('"').lower() for name in line.split(",")}
    for name, wanted in (
        ("azure", AZURE_COLUMNS),
        ("burstgpt", BURSTGPT_COLUMNS),
        ("lengths", LENGTHS_COLUMNS),
    ):
        if columns >= {column.lower() for column in wanted}:
            return name
    raise UsageError(f"{path}: format not recognised by its first line {line[:60]!r}; set --dataset-name")


def _detect_json(path: Path, line: str) -> str:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        raise UsageError(f"{path}: line 1 is not a JSON object; set --dataset-name") from None
    length, ids = entry.get("input_length"), entry.get("hash_ids")
    if isinstance(length, int) and isinstance(ids, list) and len(ids) == -(-length // 512):
        return "mooncake"
    if "timestamp" in entry and "input_length" in entry:
        raise UsageError(
            f"{path}: its time unit and block size cannot be told from its keys; "
            "set --dataset-name timed_trace, --timed-trace-chunk-hash-size, --timed-trace-sec-multiplier"
        )
    if "prompt" in entry or "prompt_tokens" in entry:
        return "custom"
    keys = ", ".join(map(str, list(entry)[:8])) or "none"
    raise UsageError(f"{path}: format not recognised by its keys ({keys[:100]}); set --dataset-name")
