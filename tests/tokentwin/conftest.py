"""Fixtures of the command line's tests."""

from __future__ import annotations

import pytest

from tests.tokentwin.shell import Command, caller


@pytest.fixture
def tokentwin(capsys: pytest.CaptureFixture[str]) -> Command:
    """`tokentwin("simulate", "--model", …)` in this process."""
    return caller(capsys)
