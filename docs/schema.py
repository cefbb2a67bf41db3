"""Write what is made of the table of flags: docs/schema/*.json, and tokentwin/keywords.py with types for editors."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from tokentwin.api import KNOWN as SIMULATE
from tokentwin.api import keyword_names
from tokentwin.api_planning import CAPACITY, PLAN, SWEEP
from tokentwin.commands.sweep import SWEEP as OF_A_SWEEP
from tokentwin.flags import Flag
from tokentwin.schema import KINDS, schema

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "schema"
KEYWORDS = ROOT / "tokentwin" / "keywords.py"
NAMES = {"config": "tokentwin.schema.json", "workload": "workload.schema.json", "sweep": "sweep.schema.json"}

HEAD = '''"""Keywords of `tt.simulate`, `tt.capacity`, `tt.plan` and `tt.sweep`, with their types.

Made of the table of flags by `python docs/schema.py`; not to be edited. `tokentwin COMMAND --help` explains each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict

from sim.slo import Goodput

Several = str | Sequence[Any] | Mapping[str, Any]
"""A list of values, one text with spaces, or pairs such as {"ttft": 500}."""
'''


def files() -> dict[Path, str]:
    """Every file with what it should say."""
    out = {
        FOLDER / NAMES[kind]: json.dumps(schema(kind), indent=1, ensure_ascii=False) + "\n" for kind in KINDS
    }
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "format", "--stdin-filename", str(KEYWORDS), "-"],
        input=keywords(),
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    return out | {KEYWORDS: done.stdout}


def keywords() -> str:
    """The module of keywords: what three functions share, then the rest of each."""
    shared = {name: flag for name, flag in SIMULATE.items() if name in CAPACITY and name in PLAN}
    single = {flag.name for flag in OF_A_SWEEP}
    parts = [
        HEAD,
        _class("SharedFlags", "TypedDict, total=False", shared),
        _class("SimulateFlags", "SharedFlags, total=False", _less(SIMULATE, shared)),
        _class("CapacityFlags", "SharedFlags, total=False", _less(CAPACITY, shared)),
        _class("PlanFlags", "SharedFlags, total=False", _less(PLAN, shared)),
        _class("SweepFlags", "TypedDict, total=False", SWEEP, listed=set(SWEEP) - single),
    ]
    return "\n\n".join(parts)


def _less(flags: Mapping[str, Flag], known: Mapping[str, Flag]) -> dict[str, Flag]:
    return {name: flag for name, flag in flags.items() if name not in known}


def _class(name: str, bases: str, flags: Mapping[str, Flag], listed: set[str] | None = None) -> str:
    lines = [
        f"    {spelled}: {_kind(flag, in_list=flag.name in (listed or ()))}"
        for flag in flags.values()
        for spelled in keyword_names(flag)
    ]
    words = "What a sweep takes: one value, or a list of them as an axis." if listed else ""
    return "\n".join([f"class {name}({bases}):", *([f'    """{words}"""', ""] if words else []), *lines, ""])


def _kind(flag: Flag, *, in_list: bool) -> str:
    kind = flag.kind
    parts: list[str] = []
    if flag.name == "goodput":
        parts = ["Goodput", "Several"]
    elif flag.structured:
        parts = ["str", "Mapping[str, Any]", "Sequence[Any]"]
    elif flag.several:
        parts = ["Several"]
    elif flag.name == "metric_percentiles":
        parts = ["str", "Sequence[float]"]
    else:
        for leaf in get_args(kind) if get_origin(kind) not in (None, Literal) else (kind,):
            parts += _leaf(leaf)
    parts = [part for part in dict.fromkeys(parts) if part != "None"]
    if in_list and not flag.several:
        parts.append(f"Sequence[{' | '.join([*parts, 'None'])}]")
    return " | ".join([*parts, "None"])


def _leaf(kind: Any) -> list[str]:
    if kind is type(None):
        return ["None"]
    if kind is Path:
        return ["str", "Path"]
    if get_origin(kind) is Literal:
        return [f"Literal[{', '.join(map(repr, get_args(kind)))}]"]
    return [kind.__name__]


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for path, text in files().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
