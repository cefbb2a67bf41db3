"""The published schemas are those of the program, describe what it takes, and refuse what it refuses."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

import jsonschema
import pytest
import yaml

from serving.errors import UsageError
from sim.deployment import Deployment
from sim.workload.files import read_workload_file, sample_path
from tests.tokentwin.shell import Command
from tokentwin import schema
from tokentwin.api import keyword_names
from tokentwin.cli import make_app
from tokentwin.commands.sweep import sweep_spec
from tokentwin.config_file import read_config
from tokentwin.flag_tables import SIMULATE

DOCS = Path(__file__).parents[2] / "docs"
EXAMPLES = sorted((DOCS / "examples").glob("*.yaml"))
WITHOUT_OPTIONS = {"conformance", "profile list", "profile show", "model list", "model show", "schema"}
"""Commands that have no option but --json, or print a fixed text."""


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    """docs/schema.py."""
    spec = importlib.util.spec_from_file_location("docs_schema", DOCS / "schema.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def validator(kind: schema.Kind, command: str | None = None) -> jsonschema.Draft202012Validator:
    content = schema.schema(kind, command)
    jsonschema.Draft202012Validator.check_schema(content)
    return jsonschema.Draft202012Validator(content)


def test_published_files_are_current(maker: ModuleType) -> None:
    for path, text in maker.files().items():
        assert path.read_text(encoding="utf-8") == text, f"{path}: run python docs/schema.py"


def test_the_command_prints_the_published_file(tokentwin: Command) -> None:
    published = (DOCS / "schema" / "tokentwin.schema.json").read_text(encoding="utf-8")
    assert tokentwin("schema").out == published
    one = json.loads(tokentwin("schema", "--command", "memory").out)
    assert "max_num_seqs" in one["properties"]
    assert "request_rate" not in one["properties"]
    assert "did you mean 'simulate'" in tokentwin("schema", "--command", "simulte").error
    assert "--command has no effect" in tokentwin("schema", "sweep", "--command", "simulate").error


def test_every_command_with_options_has_a_configuration() -> None:
    every = {name for name, _ in schema._walk(make_app())}
    assert every - {name for name, _ in schema.commands_with_flags()} == WITHOUT_OPTIONS


def test_fields_of_a_deployment_are_described_and_limited_as_it_does() -> None:
    rows = schema.schema("config", "simulate")["properties"]
    for name, field in Deployment.model_fields.items():
        assert field.description, name
        assert field.description in rows[name]["description"]
    check = validator("config", "simulate")
    for name, value in (("max_num_seqs", 0), ("gpu_memory_utilization", 1.5), ("scheduling_policy", "lifo")):
        assert list(check.iter_errors({name: value})), name
        with pytest.raises(ValueError, match=name):
            Deployment.model_validate({"model": "x", name: value})


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_are_valid_for_the_schema_they_name_and_for_the_program(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    if "\noptuna:" in text:
        pytest.importorskip("optuna")
    named = text.splitlines()[0].removeprefix("# yaml-language-server: $schema=")
    published = json.loads((path.parent / named).read_text(encoding="utf-8"))
    jsonschema.validate(yaml.safe_load(text), published, jsonschema.Draft202012Validator)
    if named.endswith("workload.schema.json"):
        assert read_workload_file(path).tenants
    elif named.endswith("sweep.schema.json"):
        assert sweep_spec(path, {}).varied()
    else:
        assert read_config(path, SIMULATE)["model"] == "llama-3.1-8b"


def test_the_bundled_workload_is_valid() -> None:
    validator("workload").validate(yaml.safe_load(sample_path("sample").read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        ("config", {"modle": "x"}),
        ("config", {"model": "x", "max_num_seqs": "many"}),
        ("config", {"deployment": {"model": "x"}}),
        ("config", {"request_rate": [1, 2]}),
        ("sweep", {"base": {"model": "x"}}),
        ("sweep", {"grid": {"request_rate": 4}}),
        ("sweep", {"grid": {"request_rat": [4]}}),
        ("sweep", {"grid": {"request_rate": [4]}, "points": [{"seed": 3}]}),
        ("sweep", {"random": {"points": 3, "space": {"request_rate": {"low": 1}}}}),
        ("workload", {"tenants": []}),
        ("workload", {"tenants": [{"dataset": {"name": "random"}, "request_rate": 4}]}),
    ],
)
def test_what_the_program_refuses_the_schema_refuses_too(
    kind: schema.Kind, content: dict[str, Any], tmp_path: Path
) -> None:
    assert list(validator(kind).iter_errors(content))
    path = tmp_path / "bad.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    with pytest.raises(UsageError):
        {
            "config": lambda: read_config(path, SIMULATE),
            "sweep": lambda: sweep_spec(path, {}),
            "workload": lambda: read_workload_file(path),
        }[kind]()


def test_dashes_aliases_and_null_are_valid() -> None:
    check = validator("config", "simulate")
    check.validate({"max-num-seqs": 4, "tp": 2, "isl": 100, "quantization": None, "goodput": {"ttft": 500}})
    assert list(check.iter_errors({"tp": 0}))


def test_keywords_for_editors_are_those_of_the_functions() -> None:
    from tokentwin import api, api_planning, keywords

    for known, flags in (
        (api.KNOWN, keywords.SimulateFlags),
        (api_planning.CAPACITY, keywords.CapacityFlags),
        (api_planning.PLAN, keywords.PlanFlags),
        (api_planning.SWEEP, keywords.SweepFlags),
    ):
        named = {name for flag in known.values() for name in keyword_names(flag)}
        assert set(get_type_hints(flags)) == named
