"""Keep the README's first example true: run it, and put its output into the README (or `--check` that it is there).

Sections of the table that the README leaves out are replaced by an ellipsis.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).resolve().parents[1] / "README.md"
SHOWN = ("Serving Benchmark Result", "Time to First Token", "Stages (mean)", "Verdict")
BLOCK = re.compile(
    r"(?<=<!-- example -->\n)```console\n\$ (?P<command>(?:[^\n]*\\\n)*[^\n]*)\n.*?```\n", re.S
)


def output_of(command: str) -> str:
    """What the command prints; `-o` is left out, so that nothing is written."""
    words = re.sub(r" -o \S+", "", command.replace("\\\n", " ")).split()
    program = Path(sys.executable).with_name(words[0])
    env = {**os.environ, "COLUMNS": "80", "NO_COLOR": "1"}
    done = subprocess.run([program, *words[1:]], capture_output=True, text=True, env=env)
    if done.returncode:
        sys.exit(f"{command} ended with {done.returncode}: {done.stderr}")
    return done.stdout


def excerpt(output: str) -> str:
    """The sections to show."""
    parts = re.split(r"^=+ (.+?) =+$", output, flags=re.M)[1:]
    lines: list[str] = []
    for heading, body in zip(parts[::2], parts[1::2], strict=True):
        if heading in SHOWN:
            lines += [
                f" {heading} ".center(80, "="),
                *(line.rstrip() for line in body.strip("\n").splitlines()),
            ]
        elif lines[-1] != "...":
            lines.append("...")
    return "\n".join(lines)


def main() -> None:
    text = README.read_text(encoding="utf-8")
    found = BLOCK.search(text)
    if found is None:
        sys.exit("README.md has no ```console block after <!-- example -->")
    command = found["command"]
    block = f"```console\n$ {command}\n{excerpt(output_of(command))}\n```\n"
    if "--check" in sys.argv:
        if block != found[0]:
            sys.exit("README.md shows another output than the command prints now; run `make example`")
    else:
        README.write_text(text[: found.start()] + block + text[found.end() :], encoding="utf-8")


if __name__ == "__main__":
    main()
