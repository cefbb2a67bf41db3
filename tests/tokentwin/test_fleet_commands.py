"""Fleets from the command line: mappings in files and as JSON, what cannot be together, tables and files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import yaml

from experiments.saved import open_run
from sim.deployment import Deployment, build
from sim.fleet.build import FLEET_FIELDS, devices, num_gpus, num_replicas
from tests.tokentwin.shell import SMALL, Command

ROOT = Path(__file__).parents[2]
POOLS = [{"name": "fast", "gpu": "h200"}, {"name": "cheap", "gpu": "l40s", "replicas": 2}]
FLEET = {
    "pools": POOLS,
    "router": "least_outstanding",
    "autoscaler": {"outstanding": 4, "max_replicas": 3, "interval_s": 0.5},
    "cold_start": {"seconds": 0.25},
    "failures": {"schedule": [{"time_s": 0.6, "replica": 0, "down_s": 0.2}]},
    "admission": {"max_waiting": 50},
}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "fleet.yaml"
    path.write_text(yaml.safe_dump(FLEET), encoding="utf-8")
    return path


def as_json(content: dict[str, object]) -> list[str]:
    words = []
    for name, value in content.items():
        text = value if isinstance(value, str) else json.dumps(value)
        words += ["--" + name.replace("_", "-"), text]
    return words


def test_a_file_and_json_mean_the_same(tokentwin: Command, config: Path, tmp_path: Path) -> None:
    quiet = ("--replications", "1")
    by_file = tokentwin("simulate", *SMALL, *quiet, "--config", config)
    by_json = tokentwin("simulate", *SMALL, *quiet, *as_json(FLEET))
    assert by_file.code == by_json.code == 0, by_file.err + by_json.err
    assert by_file.out == by_json.out
    again = tmp_path / "again.yaml"
    again.write_text(
        tokentwin("simulate", *SMALL, *quiet, "--config", config, "--print-config").out, encoding="utf-8"
    )
    assert tokentwin("simulate", "--config", again).out == by_file.out


def test_every_mapping_can_be_set(tokentwin: Command) -> None:
    assert set(FLEET_FIELDS) - set(FLEET) == {"kv_transfer"}
    assert set(FLEET_FIELDS) < set(Deployment.model_fields)
    apart = {
        "pools": [{"role": "prefill", "replicas": 2}, {"role": "decode", "max_num_seqs": 32}],
        "kv_transfer": {"bandwidth_gb_per_s": 10},
    }
    answer = tokentwin("simulate", *SMALL, "--replications", "1", *as_json(apart))
    assert answer.code == 0, answer.err
    assert "KV transfers 12," in answer.out
    hashed = (
        "--dp",
        "2",
        "--router",
        "prefix_hash",
        "--router-prefix-tokens",
        "64",
        "--router-load-factor",
        "2",
    )
    printed = tokentwin("simulate", *SMALL, *hashed, "--print-config").out
    assert "\nrouter_prefix_tokens: 64\nrouter_load_factor: 2.0\n" in printed


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"autoscaler": {"outstandin": 3, "max_replicas": 2}}, "did you mean 'outstanding'"),
        ({"autoscaler": {"max_replicas": 2}}, "needs a target"),
        ({"autoscaler": "fast"}, "is not a mapping"),
        ({"pools": [{"gpu": "h20"}]}, "pool pool0: --gpu 'h20' is not a shipped profile; did you mean"),
        ({"pools": POOLS, "data_parallel_size": "2"}, "--data-parallel-size has no effect with pools"),
        ({"pools": [{"name": "a"}, {"name": "a"}]}, "two are called 'a'"),
        ({"pools": [{"weight": 2}, {}]}, "some have a weight and some do not"),
        ({"pools": [{"role": "prefill"}]}, "role prefill without a pool of role decode"),
        ({"kv_transfer": {"latency_ms": 1}}, "only with pools of role prefill and decode"),
        ({"cold_start": {"seconds": 1}}, "only with --autoscaler or --failures"),
        ({"failures": {"schedule": [{"time_s": 1, "replica": 3}]}}, "replica 3 does not exist"),
        ({"data_parallel_size": "2", "router_prefix_tokens": "32"}, "only with --router prefix_hash"),
        ({"router": "least_kv"}, "no effect on one replica"),
        ({"router": "rond_robin", "data_parallel_size": "2"}, "did you mean 'round_robin'"),
        (
            {"data_parallel_size": "4", "autoscaler": {"outstanding": 3, "max_replicas": 2}},
            "is above the autoscaler's max_replicas 2",
        ),
    ],
)
def test_what_cannot_be_is_one_line(tokentwin: Command, given: dict[str, object], words: str) -> None:
    answer = tokentwin("simulate", *SMALL, *as_json(given))
    assert answer.code == 2
    assert words in answer.error


def test_other_commands_say_what_they_do_not_have(tokentwin: Command) -> None:
    scaled = as_json({"autoscaler": {"outstanding": 3, "max_replicas": 2}})
    model = ("--model", "llama-3.1-8b")
    answer = tokentwin("capacity", *model, "--dataset-name", "random", "--slo", "chat", *scaled)
    assert answer.code == 2
    assert "have no meaning here" in answer.error
    answer = tokentwin("serve", *model, "--engine", "twin", *scaled)
    assert answer.code == 2
    assert "fixed replicas" in answer.error
    answer = tokentwin("serve", *model, "--engine", "twin", "--dp", "2", "--router", "session")
    assert "name no session" in answer.error


def test_tables_and_files_say_which_pool_served_what(
    tokentwin: Command, config: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    answer = tokentwin("simulate", *SMALL, "--replications", "1", "--config", config, "-o", folder)
    assert answer.code == 0, answer.err
    table = answer.out.split(" Fleet ")[1].split(" Certainty ")[0].split(" Verdict ")[0]
    assert all(word in table for word in ("fast", "cheap", "replica 2", "Replica-hours", "example prices"))
    result = json.loads((folder / "result.json").read_text())
    fleet = result["sim_fleet"]
    assert [pool["name"] for pool in fleet["pools"]] == ["fast", "cheap"]
    assert sum(pool["requests"] for pool in fleet["pools"]) == 12 == result["completed"]
    assert sum(pool["output_tokens"] for pool in fleet["pools"]) == result["total_output_tokens"]
    # Series and shares agree: replica-seconds are the area under what is paid for.
    series = fleet["replicas_over_time"]
    times = [*(entry["time_s"] for entry in series), result["sim_duration"]]
    paid = [sum(entry[name] for name in ("ready", "starting", "draining", "down")) for entry in series]
    area_s = float(np.dot(np.maximum(np.diff(times), 0), paid))
    assert fleet["replica_hours"] * 3600 == pytest.approx(area_s)
    # And the folder reads back as the same run.
    opened = open_run(folder)
    assert opened.record.fleet is not None
    assert opened.summary.batch_occupancy_mean == pytest.approx(result["sim_batch_occupancy_mean"])
    assert "Pools and replicas" in (folder / "report.html").read_text()


def test_a_capacity_of_pools_names_their_devices() -> None:
    pools = [{"gpu": "h200", "tensor_parallel_size": 2}, {"gpu": "l40s", "replicas": 2}, {"gpu": "h200"}]
    built = build(Deployment.model_validate({"model": "llama-3.1-8b", "pools": pools}))
    assert devices(built) == "3 x h200 + 2 x l40s"
    assert num_gpus(built.deployment) == 5
    assert num_replicas(built.deployment) == 4


def test_the_example_of_the_docs_runs(tokentwin: Command) -> None:
    example = ROOT / "docs" / "examples" / "fleet.yaml"
    page = (ROOT / "docs" / "fleet.md").read_text(encoding="utf-8")
    shown = page.split("```yaml")[1].split("```")[0]
    assert yaml.safe_load(shown) == yaml.safe_load(example.read_text(encoding="utf-8"))
    answer = tokentwin("simulate", "--config", example, "--num-prompts", "60", "--replications", "1")
    assert answer.code == 0, answer.err
    assert " Fleet " in answer.out
