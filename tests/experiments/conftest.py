"""The hand-made runs of the metrics' tests serve here too; one small sweep serves all that look at sweeps."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "sim"))


@pytest.fixture(scope="session")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of `explored.SPEC`, run. Copy it to change it."""
    from explored import make_sweep

    return make_sweep(tmp_path_factory.mktemp("explore"))
