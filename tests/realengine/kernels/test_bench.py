"""The benchmark runs where there is no GPU, says what it lacks, and computes shares as it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from realengine.kernels import bench
from realengine.kernels.bench_cases import Case


def test_help_needs_no_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        bench.main(["--help"])
    assert stopped.value.code == 0
    assert "--tune" in capsys.readouterr().out


def test_every_case_runs_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "figures.json"
    bench.main(["--device", "cpu", "--quick", "--json", str(path)])
    result = json.loads(path.read_text())
    names = " ".join(figure["name"] for figure in result["kernels"])
    for word in (
        "decode",
        "prefill",
        "int8",
        "int4",
        "RMSNorm",
        "SiLU",
        "rotary",
        "8-bit KV, last 16 as they were",
        "write to rings",
        "sample",
        "verify",
        "pages",
    ):
        assert word in names
    assert all(figure["ms"] > 0 and figure["share"] > 0 for figure in result["kernels"])
    assert "copies" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("arguments", [[], ["--device", "cpu", "--tune"]])
def test_what_needs_a_gpu_says_so(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main(arguments)
    assert "GPU" in capsys.readouterr().err


def test_the_floor_is_the_larger_of_bytes_and_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "seconds", lambda *_, **__: 4e-3)
    ceiling = bench.Ceilings(copy_gb_s=1000, product_tflops=100)
    cpu = torch.device("cpu")
    figure = bench.measure(Case("a", lambda: None, 2e9, 1e11), ceiling, cpu, quick=True)
    assert (figure.floor_ms, figure.share, figure.bound) == (pytest.approx(2), pytest.approx(0.5), "bytes")
    figure = bench.measure(Case("b", lambda: None, 1e9, 3e11), ceiling, cpu, quick=True)
    assert (figure.floor_ms, figure.share, figure.bound) == (
        pytest.approx(3),
        pytest.approx(0.75),
        "operations",
    )
