"""`tokentwin serve` as a command: what it takes, what it refuses, how it ends."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from sim.deployment import Deployment
from tests.tokentwin.server.harness import MODEL, PATIENCE_S, events, word_tokenizer
from tests.tokentwin.shell import Command, spawn
from tokentwin.commands.serve import MEASURED_HERE, SERVE, SERVER

TWIN = ("serve", "--engine", "twin", "--model", MODEL)


def test_help_names_every_flag_within_80_columns(tokentwin: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = tokentwin("serve", "--help").out
    for flag in SERVE.values():
        assert flag.option in text
    assert max(map(len, text.splitlines())) <= 80
    assert set(Deployment.model_fields) <= set(SERVE)


def test_every_flag_is_explained_in_a_sentence() -> None:
    for flag in SERVER:
        assert flag.help.endswith("."), flag.name
        assert 10 < len(flag.help) < 200, flag.name


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("serve", "--engine", "twin"), "--model is missing"),
        (("serve", "--engine", "twin", "--model", "llama-9"), "llama-9"),
        ((*TWIN, "--gpu", "h999"), "h999"),
        ((*TWIN, "--time-scale", "0"), "--time-scale must be a positive number"),
        ((*TWIN, "--time-scale", "nan"), "--time-scale must be a positive number"),
        ((*TWIN, "--time-scale", "inf"), "--time-scale must be a positive number"),
        ((*TWIN, "--stream-interval", "0"), "--stream-interval must be at least 1"),
        ((*TWIN, "--stream-slice-ms", "-1"), "--stream-slice-ms: must be greater than or equal to 0"),
        ((*TWIN, "--stream-slice-ms", "nan"), "--stream-slice-ms: must be a finite number"),
        ((*TWIN, "--stream-slice-ms", "9e9"), "--stream-slice-ms: must be less than or equal to 3600000"),
        ((*TWIN, "--stream-slice-ms", "50", "--stream-interval", "4"), "two ways to gather tokens"),
        (("serve", "--model", MODEL, "--stream-slice-ms", "50", "--stream-interval", "4"), "use one of them"),
        ((*TWIN, "--max-waiting", "0"), "--max-waiting must be at least 1"),
        ((*TWIN, "--answer-len", "0"), "--answer-len must be at least 1"),
        ((*TWIN, "--send-timeout", "-1"), "--send-timeout must be 0 or more"),
        ((*TWIN, "--port", "99999"), "--port 99999"),
        ((*TWIN, "--port", "-1"), "--port must be at least 0"),
        ((*TWIN, "--host", "256.1.1.1"), "--host 256.1.1.1"),
        ((*TWIN, "--tokenizer", "/nowhere"), "--tokenizer /nowhere"),
        ((*TWIN, "--device", "cpu"), "--device has an effect only with --engine real"),
        ((*TWIN, "--scheduling-policy", "edf"), "--scheduling-policy edf needs deadlines"),
        ((*TWIN, "--scheduling-policy", "fair"), "--scheduling-policy fair needs tenants"),
        (
            ("serve", "--model", MODEL, "--scheduling-policy", "edf"),
            "--scheduling-policy edf needs deadlines",
        ),
        ((*TWIN, "--static-batch-size", "4"), "--static-batch-size"),
        ((*TWIN, "--num-prompts", "4"), "--num-prompts"),
        (
            ("serve", "--model", "x", "--time-scale", "2"),
            "--time-scale has an effect only with --engine twin",
        ),
        (("serve", "--model", "x", "--gpu", "h200"), "--gpu has an effect only with --engine twin"),
        (("serve", "--model", "x", "--tp", "2"), "--tensor-parallel-size"),
        *(((*TWIN, SERVE[name].option, "2"), "has no effect on a server") for name in MEASURED_HERE),
    ],
)
def test_what_cannot_be_is_one_line(tokentwin: Command, arguments: tuple[str, ...], words: str) -> None:
    answer = tokentwin(*arguments)
    assert answer.code == 2
    assert words in answer.error


def test_a_taken_port_is_one_line(tokentwin: Command) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        answer = tokentwin(*TWIN, "--port", str(port))
    assert answer.code == 2
    assert f"--port {port}: " in answer.error


def test_without_the_extra_it_says_what_to_install(
    tokentwin: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "prometheus_client", None)
    answer = tokentwin(*TWIN)
    assert answer.code == 2
    assert "pip install 'tokentwin[serve]'" in answer.error


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Any]:
    """Starts servers as processes of their own; gives process and URL."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str, **environment: str) -> tuple[subprocess.Popen[str], str]:
        child = spawn(*TWIN, "--port", "0", *arguments, folder=Path.cwd(), **environment)
        started.append(child)
        assert child.stdout is not None
        line = child.stdout.readline()
        assert line.startswith("Serving "), line
        return child, line.split()[-1]

    yield start
    for child in started:
        child.kill()
        child.communicate()


def test_sigterm_drains_and_ends_with_0(process: Any, tmp_path: Path) -> None:
    folder = word_tokenizer(tmp_path)
    config = tmp_path / "serve.yaml"
    config.write_text(f"tokenizer: {folder}\nserved_model_name: mine\n")
    child, url = process("--config", str(config), TOKENTWIN_API_KEY="sesame")
    headers = {"authorization": "Bearer sesame"}
    with httpx.Client(base_url=url, headers=headers, timeout=PATIENCE_S) as client:
        (model,) = client.get("/v1/models").json()["data"]
        assert (model["id"], model["root"]) == ("mine", str(folder))
        assert client.get("/v1/models", headers={"authorization": "no"}).status_code == 401
        body = {
            "model": "mine",
            "messages": [{"role": "user", "content": "w1 w2"}],
            "max_tokens": 80,
            "stream": True,
        }
        got: list[str] = []
        begun = threading.Event()

        def ask() -> None:
            with client.stream("POST", "/v1/chat/completions", json=body) as answer:
                for piece in answer.iter_text():
                    got.append(piece)
                    begun.set()

        asking = threading.Thread(target=ask)
        asking.start()
        assert begun.wait(PATIENCE_S)
        child.send_signal(signal.SIGTERM)
        asking.join(PATIENCE_S)
    text = "".join(chunk["choices"][0]["delta"]["content"] for chunk in events("".join(got)))
    assert len(text) > 100
    assert child.wait(PATIENCE_S) == 0


def test_what_is_cut_short_by_a_second_ctrl_c_ends_with_1(process: Any) -> None:
    child, url = process()
    body = {"prompt": "a", "max_tokens": 50_000, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=PATIENCE_S) as answer:
        lines = answer.iter_lines()
        assert json.loads(next(lines).removeprefix("data: "))["choices"]
        child.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(0.5)
        child.send_signal(signal.SIGINT)
        assert child.wait(PATIENCE_S) == 1
