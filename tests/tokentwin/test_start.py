"""Starting is cheap: what is not needed is not imported. Modules are counted, seconds are not."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import tokentwin
from tests.tokentwin.shell import Command

HEAVY = ("numpy", "pydantic", "scipy", "simpy", "pyarrow", "plotly", "yaml", "torch", "pandas")


def modules_after(code: str) -> set[str]:
    """Names in sys.modules of a fresh process that ran `code`."""
    program = f"import sys, json, io\n{code}\nsys.__stdout__.write('\\n' + json.dumps(list(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_help_imports_nothing_heavy() -> None:
    modules = modules_after("from tokentwin.cli import main\nmain(['--help'])")
    assert not modules & set(HEAVY)
    assert not any(name.startswith(("sim.", "costmodel.", "experiments.")) for name in modules)
    assert "markdown_it" not in modules
    assert (
        len(modules) < 320
    )  # 235 when this was written, most of them cyclopts, rich and the standard library


def test_importing_the_package_imports_nothing_of_it() -> None:
    modules = modules_after("import tokentwin")
    assert not modules & set(HEAVY)
    assert not any(name.startswith(("sim", "costmodel", "tokentwin.")) for name in modules)


def test_simulate_imports_neither_scipy_nor_plotly_nor_torch_without_a_report() -> None:
    arguments = "'simulate', '--model', 'llama-3.1-8b', '--dataset-name', 'random', '--num-prompts', '2'"
    modules = modules_after(f"from tokentwin.cli import main\nmain([{arguments}])")
    assert not modules & {"scipy", "plotly", "torch", "pandas", "pyarrow"}


def test_every_public_name_resolves_and_is_listed() -> None:
    for name in tokentwin.__all__:
        assert getattr(tokentwin, name) is not None
    assert set(dir(tokentwin)) == set(tokentwin.__all__)
    with pytest.raises(AttributeError, match="no attribute 'simulat'"):
        _ = tokentwin.simulat


def test_version_is_the_projects(tokentwin: Command, pytestconfig: pytest.Config) -> None:
    text = (pytestconfig.rootpath / "pyproject.toml").read_text(encoding="utf-8")
    assert f'\nversion = "{tokentwin("--version").out.strip()}"\n' in text
