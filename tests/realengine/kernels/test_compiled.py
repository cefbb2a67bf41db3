"""The machine code for Ampere and Hopper, made without a GPU: no spills, wide loads, warpgroup products."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from realengine.kernels.compiled import Compiled, faults, markdown, read_figures

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[Compiled]:
    """In a process of its own: interpreted and compiled kernels do not mix."""
    path = tmp_path_factory.mktemp("compiled") / "kernels.json"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "realengine.kernels.compiled", "--quick", "--json", str(path)]
    out = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
    return read_figures(path)[0]


def test_nothing_in_the_machine_code_costs_speed(compiled: list[Compiled]) -> None:
    assert {result.arch for result in compiled} == {80, 90}
    assert faults(compiled) == []


def test_attention_and_products_stage_their_tiles_by_asynchronous_copies(compiled: list[Compiled]) -> None:
    for result in compiled:
        if (
            result.kernel in ("decode_attention_kernel", "prefill_attention_kernel")
            or "gemm" in result.kernel
        ):
            assert result.async_copies >= 4, result
            assert result.wgmma + result.mma, result


def test_several_programs_of_decode_attention_fit_a_multiprocessor(compiled: list[Compiled]) -> None:
    for result in compiled:
        if result.kernel == "decode_attention_kernel" and result.arch == 90:
            assert 3 * result.shared <= 227 * 1024
            assert 3 * result.registers * 32 * result.warps <= 65536


def test_faults_are_named() -> None:
    slow = Compiled(
        "prefill, 32/8 heads of 128, bf16", "prefill_attention_kernel", 90, 4, 1, 255, 624, 0, 0, 0, 3, 0, 64
    )
    assert [fault.partition("sm_90): ")[2] for fault in faults([slow])] == [
        "624 bytes of registers spilled",
        "3 loads of a single 16-bit number",
        "no 16-byte copies or loads",
        "no warpgroup products",
    ]


def test_the_table_in_the_documentation_is_of_the_kernels_that_there_are(compiled: list[Compiled]) -> None:
    recorded, version = read_figures(ROOT / "docs" / "kernels.json")
    known = {(result.case, result.kernel, result.arch) for result in recorded}
    assert {(result.case, result.kernel, result.arch) for result in compiled} <= known
    assert faults(recorded) == []
    assert (ROOT / "docs" / "kernels.md").read_text() == markdown(recorded, version)
