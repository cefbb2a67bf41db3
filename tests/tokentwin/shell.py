"""Ways to call the command line in tests: in this process, or as a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import pytest

from tokentwin.cli import main

SMALL = ("--model", "llama-3.1-8b", "--dataset-name", "random", "--num-prompts", "12", "--request-rate", "8")
"""A run of a fraction of a second."""


@dataclass(frozen=True)
class Answer:
    """What a command printed and returned."""

    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The one line on stderr; fails the test when it is anything else."""
        assert self.err.startswith("error: "), self.err
        assert self.err.count("\n") == 1, self.err
        assert "Traceback" not in self.err
        return self.err.strip()


Command = Callable[..., Answer]


def caller(capsys: pytest.CaptureFixture[str]) -> Command:
    """A function that runs a command line in this process."""

    def call(*arguments: str | Path) -> Answer:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return Answer(code, out, err)

    return call


def spawn(
    *arguments: str | Path, folder: Path, stdout: int | IO[str] = subprocess.PIPE, **environment: str
) -> subprocess.Popen[str]:
    """The command line as a process, with interrupts as a terminal has them."""
    return subprocess.Popen(
        [sys.executable, "-m", "tokentwin", *map(str, arguments)],
        cwd=folder,
        env=os.environ | environment,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
