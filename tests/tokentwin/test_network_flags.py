"""`--network` on the command line, in files and from Python; what it says of mistakes, and what `compare` finds."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import yaml

import tokentwin as tt
from sim.deployment import Deployment
from sim.workload import load_workload, read_workload_file, sample_path
from tests.tokentwin.shell import Command

RUN = ("--model", "llama-3.1-8b", "--gpu", "h200", "--dataset-name", "random", "--isl", "200", "--osl", "40",
       "--num-prompts", "40", "--request-rate", "8", "--replications", "1")  # fmt: skip
SLOW_APP = {"clients": 1, "protocol": "http/1.1-pipelined", "reader_tokens_per_s": 60, "window_kib": 4}


@pytest.mark.parametrize(
    ("network", "said"),
    [
        ("{bandwith_mbit_s: 5}", "did you mean 'bandwidth_mbit_s'"),
        ("{rtt: 5}", "unknown key 'rtt' in --network; did you mean 'rtt_ms'?"),
        (
            "{tenants: {clients: {rtt: 5}}}",
            "unknown key 'rtt' in --network.tenants.clients; did you mean 'rtt_ms'?",
        ),
        ("{protocol: http/3}", "--network.protocol: must be"),
        ("{protocol: http/1.1}", "protocol has an effect only with clients"),
        ("{clients: 2, connections: 3}", "connections has an effect only with protocol http/1.1"),
        (
            "{tenants: {mobile: {protocol: http/2}}}",
            "tenants: mobile: protocol has an effect only with clients",
        ),
        ("{tenants: {defalt: {rtt_ms: 5}}}", "no tenant or class is called 'defalt'; did you mean 'default'"),
        ("{rtt_ms: 5, without: reader}", "reader is not there to be left out"),
        ("{without: rtt}", "rtt is not there to be left out; set rtt_ms or drop it"),
        ("{rtt_ms: 0, without: [rtt]}", "rtt is not there to be left out"),
        ("{rtt_ms: 5, without: gateway}", "gateway is not there to be left out; set gateway_event_us"),
        ("{buffer_kib: 5}", "buffer_kib has an effect only with reader_tokens_per_s or bandwidth_mbit_s"),
        ("{send_timeout_s: 5}", "send_timeout_s has an effect only with buffer_kib"),
        ("{shared: true}", "shared has an effect only with clients"),
        ("{clients: 1, shared: true, tenants: {default: {rtt_ms: 5}}}", "rtt_ms is that of the clients"),
        ("{rtt_ms: -5}", "--network.rtt_ms"),
        ("fast", "is not a mapping"),
    ],
)
def test_mistakes(tokentwin: Command, network: str, said: str) -> None:
    answer = tokentwin("simulate", *RUN, "--network", network)
    assert answer.code == 2
    assert said in answer.err
    assert "--network" in answer.err
    assert len(answer.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--stream-interval", "4", "--stream-slice-ms", "50"), "use one of them"),
        (
            ("--network", "{rtt_ms: 5}", "--failures", "{mtbf_s: 100, mttr_s: 5}"),
            "leave --failures or --network out",
        ),
        (
            (
                "--network",
                "{reader_tokens_per_s: 5, buffer_kib: 9}",
                "--autoscaler",
                "{outstanding: 4, max_replicas: 2}",
            ),
            "buffer_kib: clients are cut off only from fixed replicas",
        ),
    ],
)
def test_what_does_not_go_together(tokentwin: Command, flags: tuple[str, ...], said: str) -> None:
    answer = tokentwin("simulate", *RUN, *flags)
    assert answer.code == 2
    assert said in answer.err


def test_the_engine_and_servers_have_a_network_of_their_own(tokentwin: Command) -> None:
    for command in (("serve", "--engine", "twin"), ("run", "--dataset-name", "random")):
        answer = tokentwin(*command, "--model", "llama-3.1-8b", "--network", "{rtt_ms: 5}", "--print-config")
        assert answer.code == 2
        assert "--network" in answer.err
    answer = tokentwin(
        "serve", "--engine", "twin", "--model", "llama-3.1-8b", "--stream-interval", "4", "--print-config"
    )
    assert "\nstream_interval: 4\n" in answer.out


def test_the_round_trip_of_the_workload_can_be_left_out() -> None:
    job = {"model": "llama-3.1-8b", "gpu": "h200", "dataset_name": "random", "isl": 200, "osl": 4, "num_prompts": 5,
           "replications": 1, "rtt_ms": 40}  # fmt: skip
    with_it = tt.simulate(**job, network={}).summary.stage_mean_s["network"]
    without = tt.simulate(**job, network={"without": ["rtt"]}).summary.stage_mean_s["network"]
    assert with_it == pytest.approx(0.04)
    assert without == 0


def test_readers_of_the_example_do_not_break_limits_on_their_own() -> None:
    path = Path(__file__).parents[2] / "docs" / "examples" / "network.yaml"
    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    readers = config["network"]["tenants"]
    workload = load_workload(read_workload_file(sample_path(config["dataset_name"])), seed=0)
    tenants = {tenant.name: tenant for tenant in workload.tenants}
    for name, way in readers.items():
        assert 1 / way["reader_tokens_per_s"] < (tenants[name].goodput_tpot_s or math.inf)


def test_a_printed_configuration_gives_the_same_run(tokentwin: Command, tmp_path: Path) -> None:
    flags = (
        "--network",
        json.dumps({"rtt_ms": 30, "tenants": {"default": SLOW_APP}}),
        "--stream-slice-ms",
        "40",
    )
    printed = tokentwin("simulate", *RUN, *flags, "--print-config").out
    (tmp_path / "run.yaml").write_text(printed)
    first = tokentwin("simulate", *RUN, *flags, "--disable-tqdm")
    again = tokentwin("simulate", "--config", str(tmp_path / "run.yaml"), "--disable-tqdm")
    assert first.code == again.code == 0
    assert first.out == again.out
    for row in ("Blocked (ms):", "Reader (ms):", "Waiting for text:"):
        assert row in first.out


def test_each_part_can_be_left_out_to_see_its_share() -> None:
    network = {**SLOW_APP, "rtt_ms": 50, "bandwidth_mbit_s": 2, "gateway_event_us": 500}
    job = {"model": "llama-3.1-8b", "gpu": "h200", "dataset_name": "random", "isl": 200, "osl": 40, "num_prompts": 40,
           "request_rate": 8, "replications": 1, "frontend_overhead_ms": 3}  # fmt: skip

    def stages(*without: str) -> dict[str, float]:
        return dict(tt.simulate(**job, network={**network, "without": list(without)}).summary.stage_mean_s)

    everything = stages()
    assert min(everything[name] for name in ("blocked", "network", "gateway", "reader")) > 0
    assert everything["gateway"] == pytest.approx(0.0035)
    assert everything["network"] == pytest.approx(0.050 + 250 * 8 / 2e6, rel=0.01)
    assert stages("gateway")["gateway"] == 0
    assert stages("reader")["reader"] == 0
    assert stages("rtt")["network"] == pytest.approx(250 * 8 / 2e6, rel=0.05)
    assert stages("bandwidth")["network"] == pytest.approx(0.05)
    # Without a pipeline each answer is only in the way of the others' bytes on the line.
    assert stages("connections")["blocked"] < 0.01 * everything["blocked"]


def test_compare_finds_what_a_pipeline_costs(tokentwin: Command, tmp_path: Path) -> None:
    base = dict(zip((name.strip("-").replace("-", "_") for name in RUN[::2]), RUN[1::2], strict=True))
    for name, protocol in (("base", "http/1.1-pipelined"), ("variant", "http/2")):
        content = {**base, "replications": "4", "network": {**SLOW_APP, "protocol": protocol}}
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(content))
    answer = tokentwin("compare", str(tmp_path / "base.yaml"), str(tmp_path / "variant.yaml"), "--json")
    assert answer.code == 0, answer.err
    (variant,) = json.loads(answer.out)["variants"]
    found = variant["changes"]
    for metric in ("mean_blocked", "p95_ttft", "p95_e2el", "p95_first_word"):
        assert found[metric]["effect"] == "gain", metric
    assert found["mean_blocked"]["variant"] == 0
    assert found["mean_queue"]["effect"] != "gain"


def test_a_deployment_comes_back_from_the_file_of_a_run() -> None:
    """And from what a printed configuration makes of it, where keys that are not set are left out."""
    network = {
        "clients": 2,
        "shared": True,
        "protocol": "http/1.1",
        "tenants": {"a": {"reader_tokens_per_s": 5}},
    }
    d = Deployment(model="llama-3.1-8b", network=network)  # type: ignore[arg-type]
    assert Deployment.model_validate(d.model_dump(mode="json")) == d
    assert Deployment.model_validate(d.model_dump(mode="json", exclude_none=True)) == d
    assert len({d, Deployment.model_validate(d.model_dump(mode="json"))}) == 1


def test_a_followed_run_is_read_as_it_came(tokentwin: Command, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert tokentwin("simulate", *RUN, "--stream-interval", "8", "-o", str(folder)).code == 0
    (way,) = json.loads(tokentwin("reading", str(folder), "--json").out)
    saved = json.loads((folder / "result.json").read_text())["sim_perceived"]
    assert way["first_word_ms"]["p95"] == pytest.approx(saved["p95_first_word_ms"])
    assert way["stalled_share"]["mean"] == pytest.approx(saved["waiting_share"])
    answer = tokentwin("reading", str(folder), "--stream-interval", "4")
    assert answer.code == 2
    assert "followed over a network" in answer.err


def test_a_sweep_over_networks(tmp_path: Path) -> None:
    flags = {"model": "llama-3.1-8b", "gpu": "h200", "dataset_name": "random", "isl": 200, "osl": 40,
             "num_prompts": 30, "request_rate": 30}  # fmt: skip
    ways = [{**SLOW_APP, "tenants": {"default": {"rtt_ms": 5}}}, {"clients": 1}, None]
    found = tt.sweep(**flags, network=ways, stream_interval=[1, 4], output_dir=tmp_path / "sweep", jobs=1)
    assert len(found) == 6
    assert found.failed == 0
