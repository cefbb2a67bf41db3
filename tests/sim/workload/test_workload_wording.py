"""What is wrong with a workload is said in the user's own words: flags on the command line, key paths in a file."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from serving.errors import UsageError
from sim.workload import load_workload, read_workload_file, spec_from_flags
from sim.workload.flags import ARRIVAL_FLAGS, SESSION_FLAGS

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:17:0{i}.0000000,{100 + i},{10 + i}\n" for i in range(5)
)
RANDOM = {"dataset_name": "random"}
CURVE = {**RANDOM, "daily_curve": "office", "request_rate": 1}


@pytest.fixture
def azure(tmp_path: Path) -> dict[str, Any]:
    path = tmp_path / "trace.csv"
    path.write_text(AZURE)
    return {"dataset_name": "azure", "dataset_path": str(path)}


CASES: list[tuple[dict[str, Any], str, str]] = [
    # flags, tenant's words in a file, what is said: {…} is the field, named as it was written
    ({**RANDOM, "request_rate": 1, "rate_scale": 2}, "arrivals", "{rate_scale} scales a trace's own times"),
    ({**RANDOM, "rate_scale": 2}, "arrivals", "{rate_scale} scales a trace's own times"),
    ({**RANDOM, "burstiness": 2}, "arrivals", "{burstiness} has no effect without a finite {request_rate}"),
    ({**RANDOM, "period_s": 60}, "arrivals", "{period_s} has no effect without {daily_curve}"),
    ({**CURVE, "request_rate": None}, "arrivals", "{daily_curve} needs a finite {request_rate}"),
    (
        {**CURVE, "ramp_up_strategy": "linear", "ramp_up_start_rps": 1, "ramp_up_end_rps": 2}
        | {"request_rate": None},
        "arrivals",
        "{daily_curve} and {ramp_up_strategy} exclude each other",
    ),
    ({**RANDOM, "ramp_up_strategy": "linear"}, "arrivals", "{ramp_up_start_rps} and {ramp_up_end_rps}"),
    ({**RANDOM, "ramp_up_end_rps": 2}, "arrivals", "{ramp_up_end_rps} need {ramp_up_strategy}"),
    ({**CURVE, "rate_points": "0:1,2:3"}, "arrivals", "{rate_points} replaces {request_rate}"),
    ({**RANDOM, "request_rate": float("inf"), "duration_s": 5}, "arrivals", "{duration_s} has no effect"),
    ({**RANDOM, "duration_s": 5}, "arrivals", "{duration_s} needs times"),
    ({**RANDOM, "request_rate": 0.1, "duration_s": 0.1}, "arrivals", "raise {duration_s} or {request_rate}"),
    ({**RANDOM, "request_rate": 1e9, "duration_s": 1e9}, "arrivals", "lower {duration_s} or {request_rate}"),
    ({**RANDOM, "turns_min": 3, "turns_max": 2}, "sessions", "{turns_min} 3 exceeds {turns_max} 2"),
    ({**RANDOM, "think_s": 3}, "sessions", "{think_s} has no effect on sessions of one turn"),
    ({**RANDOM, "input_len": 0, "prefix_len": 0}, "dataset", "raise {input_len} or {prefix_len}"),
    (
        {"dataset_name": "prefix_repetition", "prefix_len": 0, "suffix_len": 0},
        "dataset",
        "raise {prefix_len} or {suffix_len}",
    ),
    (
        {"dataset_name": "prefix_repetition", "num_prefixes": 9, "num_prompts": 3},
        "dataset",
        "raise {num_prompts} or lower {num_prefixes}",
    ),
    ({"azure": True, "order": "shuffle"}, "dataset", "{order} has no effect"),
    ({"azure": True, "turns_max": 3}, "sessions", "set {request_rate}"),
]
DATASET = {
    "input_len": "random_input_len",
    "order": "dataset_order",
    "num_prefixes": "prefix_repetition_num_prefixes",
    "suffix_len": "prefix_repetition_suffix_len",
}
FLAGS = {field: flag for table in (ARRIVAL_FLAGS, SESSION_FLAGS) for flag, field in table.items()} | DATASET


def as_flag(field: str, dataset: str) -> str:
    name = FLAGS.get(field, field)
    if field == "prefix_len":
        name = f"{dataset}_prefix_len"
    return "--" + name.replace("_", "-")


@pytest.mark.parametrize(("fields", "section", "words"), CASES)
def test_flags_are_named_on_the_command_line(
    azure: dict[str, Any], fields: dict[str, Any], section: str, words: str
) -> None:
    fields = dict(fields)
    base = azure if fields.pop("azure", False) else {"dataset_name": fields.pop("dataset_name")}
    name = base["dataset_name"]
    flags = {as_flag(key, name)[2:].replace("-", "_"): value for key, value in fields.items()}
    wanted = re.sub(r"\{(\w+)\}", lambda found: as_flag(found[1], name), words)
    with pytest.raises(UsageError) as error:
        load_workload(spec_from_flags({**base, **flags}), seed=0)
    assert wanted in str(error.value)
    # No field is called by its name in the file where that is not the flag's.
    hidden = [
        f for f in ("duration_s", "period_s", "think_s", "turns_max", "num_prefixes") if f in str(error.value)
    ]
    assert not hidden
    assert "`" not in str(error.value)


@pytest.mark.parametrize(("fields", "section", "words"), CASES)
def test_keys_are_named_in_a_file(
    azure: dict[str, Any], tmp_path: Path, fields: dict[str, Any], section: str, words: str
) -> None:
    fields = dict(fields)
    dataset: dict[str, Any] = {"name": fields.pop("dataset_name", "azure")}
    if fields.pop("azure", False):
        dataset["path"] = "trace.csv"
    arrivals, sessions = (
        {k: fields.pop(k) for k in [*fields] if k in t.values()} for t in (ARRIVAL_FLAGS, SESSION_FLAGS)
    )
    tenant: dict[str, Any] = {key: fields.pop(key) for key in [*fields] if key == "num_prompts"}
    tenant |= {"dataset": dataset | fields, "arrivals": arrivals}
    if sessions:
        tenant["sessions"] = sessions
    path = tmp_path / "w.yaml"
    path.write_text(json.dumps({"tenants": [tenant]}).replace("Infinity", ".inf"))
    with pytest.raises(UsageError) as error:
        load_workload(read_workload_file(path), seed=0)
    said = str(error.value)
    assert said.startswith(f"{path}: ")
    assert "tenants[0]" in said
    for field in re.findall(r"\{(\w+)\}", words):
        assert field in said
    assert "--" not in said
    assert "`" not in said
