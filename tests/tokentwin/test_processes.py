"""What only a process shows: interrupts, broken pipes, and the same bytes from another process."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from tests.tokentwin.shell import SMALL, Command, spawn

LONG = (*SMALL[:4], "--num-prompts", "3000000", "--request-rate", "20")
"""Minutes of work, were it not interrupted."""


def cpu_s(pid: int) -> float:
    """Processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.slow
def test_ctrl_c_keeps_what_happened_and_marks_it_partial(tmp_path: Path) -> None:
    process = spawn("simulate", *LONG, "-o", "out", folder=tmp_path)
    deadline = time.monotonic() + 60
    while not (tmp_path / "out").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    busy_since_s = cpu_s(process.pid)
    while cpu_s(process.pid) < busy_since_s + 4 and time.monotonic() < deadline + 120:
        time.sleep(0.05)  # into the simulation, however busy the machine
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert err.startswith("error: interrupted; "), err
    assert err.count("\n") == 1, err
    assert "interrupted; these results are partial" in out
    result = json.loads((tmp_path / "out" / "result.json").read_text(encoding="utf-8"))
    assert result["partial"] is True
    assert 0 < result["completed"] < 3_000_000
    assert json.loads((tmp_path / "out" / "run.json").read_text(encoding="utf-8"))["partial"] is True
    assert (tmp_path / "out" / "requests.parquet").exists()


def test_ctrl_c_before_the_simulation_says_so(tokentwin: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def press(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tokentwin.commands.simulate.make_job", press)
    answer = tokentwin("simulate", *SMALL)
    assert (answer.code, answer.error) == (130, "error: interrupted")


@pytest.mark.slow
def test_the_same_seed_gives_the_same_bytes_in_every_file(tmp_path: Path) -> None:
    arguments = (
        *("simulate", "--model", "llama-3.1-8b", "--dataset-name", "sample", "--seed", "3", "-o", "out"),
        *("--goodput", "ttft:500", "tpot:50", "--slo", "chat", "--save-detailed", "--plot-timeline"),
    )
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    processes = [
        spawn(*arguments, folder=folder, PYTHONHASHSEED=seed, SOURCE_DATE_EPOCH="1700000000")
        for folder, seed in zip(folders, ("1", "2"), strict=True)
    ]
    outputs = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert outputs[0] == outputs[1]
    names = sorted(path.name for path in (folders[0] / "out").iterdir())
    assert len(names) == 10
    for name in names:
        first, second = ((folder / "out" / name).read_bytes() for folder in folders)
        assert first == second, name


def test_a_closed_pipe_is_quiet(tmp_path: Path) -> None:
    process = spawn("profile", "show", "h200", "--json", folder=tmp_path)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    process.wait(timeout=60)
    assert "Traceback" not in process.stderr.read()
    process.stderr.close()


def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full here")
    with full.open("w") as out:
        process = spawn("profile", "list", folder=tmp_path, stdout=out)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert err == "error: No space left on device\n"
