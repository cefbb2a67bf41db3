"""Kernels run on the GPU where there is one, else under Triton's interpreter, which must be chosen before its import."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator

import pytest

collect_ignore_glob: list[str] = []
if not all(importlib.util.find_spec(name) for name in ("torch", "triton", "ml_dtypes")):
    collect_ignore_glob = ["test_*.py"]  # the extra `engine` is not installed
else:
    import torch

    if not torch.cuda.is_available():
        if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
            raise pytest.UsageError("Triton was imported before TRITON_INTERPRET could be set")
        os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small tensors: threads would only disturb the tests beside this one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """The same random tensors in every run and order."""
    torch.manual_seed(0)
