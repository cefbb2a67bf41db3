"""The repairs of Triton's interpreter are needed, work, and fail loudly where they do not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from realengine.kernels import interpreter
from realengine.kernels.launch import INTERPRETING

ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.skipif(not INTERPRETING, reason="kernels run on the GPU")


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )


def test_the_self_test_passes_once_repaired() -> None:
    interpreter.repair()
    interpreter._self_test()


def test_the_self_test_fails_loudly_without_the_repair_of_bfloat16() -> None:
    code = "from realengine.kernels import interpreter as i; i._repair_bfloat16 = lambda _: None; i.repair()"
    out = run(code)
    assert out.returncode != 0
    assert "RuntimeError: Triton's interpreter" in out.stderr


def test_importing_the_package_loads_neither_torch_nor_triton_and_the_references_no_triton() -> None:
    code = "import sys, realengine.kernels as k; print('torch' in sys.modules or 'triton' in sys.modules)"
    assert run(code).stdout.strip() == "False"
    code = (
        "import sys, realengine.kernels as k; operators = k.operators('cpu');"
        "[getattr(operators, name) for name in k.MODULES]; print('triton' in sys.modules)"
    )
    assert run(code).stdout.strip() == "False"


def test_a_kernel_asked_to_run_on_the_cpu_without_the_interpreter_says_what_to_do() -> None:
    code = "import torch; from realengine.kernels.norm import rms_norm; rms_norm(torch.ones(2, 16), torch.ones(16), 1e-5)"
    out = run(code, TRITON_INTERPRET="0")
    assert "RuntimeError: Triton kernels need tensors on a GPU" in out.stderr


def test_an_operator_that_does_not_exist_is_named() -> None:
    from realengine.kernels import operators

    with pytest.raises(AttributeError, match="no operator 'flash'"):
        _ = operators("cpu").flash
