"""Where a result comes from: the command, the version, and the commit of the checkout that made it."""

from __future__ import annotations

import subprocess
from contextvars import ContextVar
from functools import lru_cache
from pathlib import Path

from tokentwin import __version__

VERSION = __version__
ARGV: ContextVar[tuple[str, ...]] = ContextVar("ARGV", default=())
"""The command being run, program name first; empty outside the command line."""


@lru_cache(maxsize=1)
def git_commit() -> str | None:
    """The commit of the checkout this package lies in, with "-dirty" when files differ; None when installed."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    commit = _git(root, "rev-parse", "HEAD")
    if not commit:
        return None
    return commit + ("-dirty" if _git(root, "status", "--porcelain", "--untracked-files=no") else "")


def _git(root: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=5, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
