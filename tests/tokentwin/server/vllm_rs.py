"""The client of `vllm bench serve` as one binary, out of vLLM's wheel: where it is, and how to get it.

`python -m tests.tokentwin.server.vllm_rs` downloads the wheel (336 MB) by pip, once, keeps the binary in the user's
cache folder and prints its path. Nothing else of vLLM is installed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

VERSION = "0.33.0"
VARIABLE = "TOKENTWIN_VLLM_RS"
_MEMBER = "vllm/vllm-rs"


def cached() -> Path:
    """Where the binary is kept."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "tokentwin" / f"vllm-rs-{VERSION}"


def found() -> Path | None:
    """The binary that the environment names, or the one in the cache; None where there is neither."""
    named = os.environ.get(VARIABLE)
    path = Path(named) if named else cached()
    return path if path.is_file() and os.access(path, os.X_OK) else None


def fetch() -> Path:
    """The binary, downloaded first where it is missing."""
    if (path := found()) is not None:
        return path
    path = cached()
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
        subprocess.run([*command, "--dest", scratch, f"vllm=={VERSION}"], check=True)
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            binary = Path(archive.extract(_MEMBER, scratch))
        binary.chmod(0o755)
        binary.replace(path)
    return path


if __name__ == "__main__":
    sys.stdout.write(f"{fetch()}\n")
