"""What is shipped, what an import costs, and which way imports point."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
HEAVY = ("torch", "triton", "simpy", "plotly", "pyarrow", "scipy", "duckdb")


def loaded_by(code: str) -> set[str]:
    """Top-level modules that a fresh interpreter has loaded after `code`."""
    program = f"import sys\n{code}\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    out = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(out.stdout.splitlines()[-1].split())


def test_importing_the_public_package_loads_nothing_heavy() -> None:
    assert not loaded_by("import tokentwin") & set(HEAVY)


def test_a_scheduler_needs_numpy_alone() -> None:
    loaded = loaded_by("import serving.scheduler, serving.policies, serving.leap")
    assert "numpy" in loaded
    assert not loaded & {*HEAVY, "pydantic", "yaml", "costmodel", "sim"}


def test_simulating_needs_no_plots_files_or_torch() -> None:
    assert not loaded_by("import sim.deployment, sim.verdict") & {
        "torch",
        "triton",
        "plotly",
        "pyarrow",
        "rich",
    }


def test_imports_point_one_way() -> None:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert out.returncode == 0, out.stdout + out.stderr


def test_the_wheel_holds_every_module_profile_and_sample(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    shipped = set(zipfile.ZipFile(wheel).namelist())
    for package in PACKAGES:
        assert f"{package}/py.typed" in shipped
        ours = {
            path.relative_to(ROOT).as_posix()
            for pattern in ("*.py", "*.json", "*.yaml")
            for path in (ROOT / package).rglob(pattern)
        }
        assert ours <= shipped
    assert any(name.startswith("costmodel/profiles/") for name in shipped)
    assert any(name.startswith("sim/workload/samples/") for name in shipped)
    assert not [name for name in shipped if name.startswith(("tests/", "docs/"))]
    assert any(name.endswith("licenses/LICENSE") for name in shipped)


def test_every_dependency_has_a_tested_pin() -> None:
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and line[0] != "#"]
    assert all("==" in pin for pin in pins)
    pinned = {pin.partition("==")[0].lower().replace("_", "-") for pin in pins}
    extras = PROJECT["project"]["optional-dependencies"]
    wanted = [*PROJECT["project"]["dependencies"], *extras["dev"], *extras["serve"]]
    names = {re.split(r"[^\w.-]", item)[0].lower().replace("_", "-") for item in wanted} - {"tokentwin"}
    assert names <= pinned
