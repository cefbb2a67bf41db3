"""Run the commands of docs/planning.md again and put what they print under them: `python docs/planning.py [TRACE]`."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

PAGE = Path(__file__).with_name("planning.md")
TRACE = PAGE.parents[2] / "shared" / "data" / "traces" / "AzureLLMInferenceTrace_conv.csv"
CONSOLE = re.compile(r"```console\n(.*?)```", re.DOTALL)
YAML = re.compile(r"```yaml\n# (\S+\.yaml)\n(.*?)```", re.DOTALL)


def again(page: str, trace: Path, without: str | None = None) -> str:
    """The page with the commands of its console blocks run again, in a folder with its YAML files and the trace.

    A block with a command that begins as `without` does stays as it is. Raises CalledProcessError where a command fails.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "AzureLLMInferenceTrace_conv.csv").symlink_to(trace.resolve())
        for file, content in YAML.findall(page):
            (folder / file).write_text(content, encoding="utf-8")

        def ran(block: re.Match[str]) -> str:
            if without is not None and f"$ {without}" in block[1]:
                return block[0]
            commands = [line[2:] for line in block[1].splitlines() if line.startswith("$ ")]
            parts = [f"$ {command}\n{run(command, folder)}\n" for command in commands]
            return "```console\n" + "".join(parts) + "```"

        return CONSOLE.sub(ran, page)


def run(command: str, folder: Path) -> str:
    """What a command prints, in a folder, in 80 columns."""
    words = shlex.split(command)
    program = {"tokentwin": [sys.executable, "-m", "tokentwin"], "python": [sys.executable]}[words[0]]
    path = os.pathsep.join([str(PAGE.parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*program, *words[1:]],
        cwd=folder,
        env=os.environ | {"COLUMNS": "80", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    return "\n".join(line.rstrip() for line in done.stdout.strip().splitlines())


def main() -> None:
    trace = Path(sys.argv[1]) if len(sys.argv) > 1 else TRACE
    PAGE.write_text(again(PAGE.read_text(encoding="utf-8"), trace), encoding="utf-8")


if __name__ == "__main__":
    main()
