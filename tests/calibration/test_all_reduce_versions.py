"""All-reduces of several engine versions: which of them a profile keeps beside the newest, and a run that needs one."""

from __future__ import annotations

from pathlib import Path

import pytest

from calibration.assemble import all_reduce_samples
from calibration.tables import Table
from experiments.public_results import read, split
from sim.deployment import simulate
from sim.metrics import summarise
from sim.workload import load_workload

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
SIZES = [256 << i for i in range(20)]


def rows(version: str, gpus: tuple[int, ...], sizes: list[int], mode: str) -> list[dict[str, str]]:
    common = {"version": version, "op": "all_reduce", "mode": mode, "dtype": "bfloat16"}
    return [
        {**common, "n_gpus": str(n), "bytes": str(size), "latency_us": str(5 + size / 1e5)}
        for n in gpus
        for size in sizes
    ]


def table(*parts: list[dict[str, str]]) -> Table:
    return Table(Path("t.csv"), "comm", [row for part in parts for row in part], "")


def test_earlier_versions_are_kept_where_they_were_measured_about_as_finely() -> None:
    mode = "vLLM_custom_graph"
    found = all_reduce_samples(
        [
            table(
                rows("0.9.1", (2, 4), SIZES[:9], mode),
                rows("0.10.0", (2,), SIZES[:10], mode),
                rows("0.10.0", (4,), SIZES[:9], mode),
                rows("0.24.0", (2, 4, 8), SIZES, mode),
                rows("2.27.3", (2,), SIZES, "nccl-tests"),
            )
        ]
    )
    assert list(found) == ["0.24.0", "0.10.0", "0.9.1"]
    assert [len(samples) for samples in found.values()] == [60, 10, 0]
    assert set(found["0.10.0"].shape.ravel()) == {2.0}
    assert [sum(samples.dropped.values()) for samples in found.values()] == [0, 9, 18]


@pytest.mark.parametrize("mode", ["nccl-tests", "TRTLLM"])
def test_versions_of_what_is_not_the_engine_are_not_its_versions(mode: str) -> None:
    given = table(rows("1.2.0", (2,), SIZES, mode), rows("1.10.0", (2,), SIZES, mode))
    assert list(all_reduce_samples([given])) == ["1.10.0"]


@pytest.mark.shared
@pytest.mark.skipif(not DATA.is_dir(), reason="the trace (../shared/data/traces) is absent")
def test_two_gpus_over_pcie_are_as_fast_as_was_published_for_their_engine() -> None:
    """LLMServingSim's run of Qwen3-32B under vLLM 0.19: nothing was fitted to it."""
    (run,) = (r for r in read() if r.source == "LLMServingSim, Qwen3-32B on two RTX PRO 6000, vLLM 0.19")
    deployment, spec = split(run.flags, DATA)
    found = summarise(simulate(load_workload(spec, seed=0), deployment))
    assert found.tpot.mean_s * 1e3 == pytest.approx(run.figures["mean_tpot"], rel=0.03)
    assert found.ttft.mean_s * 1e3 == pytest.approx(run.figures["mean_ttft"], rel=0.03)
    newest = simulate(load_workload(spec, seed=0), deployment.model_copy(update={"engine_version": None}))
    assert summarise(newest).tpot.mean_s < 0.85 * found.tpot.mean_s
