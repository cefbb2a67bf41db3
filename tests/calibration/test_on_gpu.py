"""The script for a GPU, rehearsed on the CPU: every stage runs, a failing one does not stop the others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

SCRIPT = Path(__file__).parents[2] / "scripts" / "on_gpu.sh"


def rehearse(folder: Path, *more: str) -> tuple[int, str]:
    done = subprocess.run(
        [str(SCRIPT), "--device", "cpu", "--quick", "-o", str(folder), *more],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "PYTHON": sys.executable},
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def stages(folder: Path) -> dict[str, str]:
    rows = [line.split("\t") for line in (folder / "stages.tsv").read_text().splitlines()]
    return {name: word for name, word, _ in rows}


@pytest.mark.slow
def test_the_whole_script_on_the_cpu(tmp_path: Path) -> None:
    code, text = rehearse(tmp_path)
    found = stages(tmp_path)
    assert code == 0, text
    assert found.pop("speculation") in ("absent", "ok")
    assert set(found.values()) == {"ok"}, text
    assert "profile.json" in {path.name for path in tmp_path.iterdir()}
    size = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert size < 16e6
    assert text.rstrip().splitlines()[-1].startswith(str(tmp_path))


@pytest.mark.slow
def test_a_failing_stage_is_reported_and_the_others_go_on(tmp_path: Path) -> None:
    code, text = rehearse(tmp_path, "--model", "no-such-model", "--only", "calibrate,quantised,speculation")
    found = stages(tmp_path)
    assert code == 1
    assert found["calibrate"].startswith("failed")
    assert list(found) == ["calibrate", "quantised", "speculation"]
    assert "no-such-model" in text


def test_an_unknown_option_is_refused(tmp_path: Path) -> None:
    done = subprocess.run([str(SCRIPT), "--fast"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--fast" in done.stderr
