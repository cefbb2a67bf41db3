"""The machine code for Ampere and Hopper, made without a GPU: no spills, wide loads, warpgroup products."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from realengine.kernels.compiled import Compiled, faults, markdown, read_figures

ROOT = Path(__file__).resolve().parents[3]


def compiled(path: Path) -> list[Compiled]:
    """In a process of its own: interpreted and compiled kernels do not mix."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "realengine.kernels.compiled", "--quick", "--json", str(path)]
    out = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
    return read_figures(path)[0]


@pytest.mark.slow
def test_nothing_in_the_machine_code_costs_speed(tmp_path: Path) -> None:
    """No spills, no loads of single 16-bit numbers, 16-byte copies, warpgroup products on Hopper, several programs."""
    results = compiled(tmp_path / "kernels.json")
    assert {result.arch for result in results} == {80, 90}
    assert faults(results) == []
    for result in results:
        attention = result.kernel in ("decode_attention_kernel", "prefill_attention_kernel")
        if attention or result.kernel.startswith("gemm"):
            assert result.async_copies >= 4, result
            assert result.wgmma + result.mma, result
        if result.kernel == "decode_attention_kernel" and result.arch == 90:
            # Three programs fit a multiprocessor: 227 KB of shared memory, 64 k registers.
            assert 3 * result.shared <= 227 * 1024, result
            assert 3 * result.registers * 32 * result.warps <= 65536, result
    recorded, _ = read_figures(ROOT / "docs" / "kernels.json")
    known = {(result.case, result.kernel, result.arch) for result in recorded}
    assert {(result.case, result.kernel, result.arch) for result in results} <= known


def test_the_table_in_the_documentation_is_of_the_recorded_figures() -> None:
    recorded, version = read_figures(ROOT / "docs" / "kernels.json")
    assert faults(recorded) == []
    assert (ROOT / "docs" / "kernels.md").read_text() == markdown(recorded, version)


def test_faults_are_named() -> None:
    slow = Compiled(
        "prefill, 32/8 heads of 128, bf16",
        "prefill_attention_kernel",
        90,
        4,
        1,
        255,
        624,
        1 << 20,
        0,
        0,
        3,
        0,
        64,
    )
    assert [fault.partition("sm_90): ")[2] for fault in faults([slow])] == [
        "624 bytes of registers spilled",
        "3 loads of a single 16-bit number",
        "1048576 bytes of shared memory are more than a program can have",
        "no 16-byte copies or loads",
        "no warpgroup products",
    ]
