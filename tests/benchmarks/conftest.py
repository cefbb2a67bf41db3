"""Figures that a reader wants (requests per CPU-second, µs per step) in one table after pytest-benchmark's own."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sim.deployment import Built, simulate
from sim.record import RunRecord
from sim.workload.types import Workload
from tests.benchmarks.azure import CONVERSATIONS, conversations, deployment

Note = Callable[[str, str, str], None]
_figures: list[tuple[str, str, str]] = []


@pytest.fixture
def note() -> Note:
    """Add a line to the closing table: what, figure, remark."""
    return lambda what, figure, remark="": _figures.append((what, figure, remark))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not _figures:
        return
    widths = [max(len(row[i]) for row in _figures) for i in (0, 1)]
    terminalreporter.section("figures, in CPU time of one process")
    for what, figure, remark in _figures:
        terminalreporter.write_line(f"{what:<{widths[0]}}  {figure:>{widths[1]}}  {remark}".rstrip())


@pytest.fixture(scope="session")
def built() -> Built:
    return deployment()


@pytest.fixture(scope="session")
def azure() -> Workload:
    if not CONVERSATIONS.exists():
        pytest.skip("needs the measured data in ../shared/data/traces")
    return conversations()


@pytest.fixture(scope="session")
def azure_run(azure: Workload, built: Built) -> RunRecord:
    return simulate(azure, built)
