"""The real client of `vllm bench serve` against the twin. Runs where `vllm_rs.py` finds the binary."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from sim.deployment import Deployment
from tests.tokentwin.server import vllm_rs
from tests.tokentwin.server.harness import Running, serving, twin, word_tokenizer
from tests.tokentwin.server.load import errors, read_detailed
from tests.tokentwin.server.test_agreement import DEPLOYMENT, PROMPTS, RATE, SCALES
from tokentwin.commands.serve import twin_codec

BINARY = vllm_rs.found()
pytestmark = pytest.mark.skipif(
    BINARY is None, reason=f"needs {vllm_rs.VARIABLE}, or the binary in the cache"
)


def bench(server: Running, tokenizer: Path, folder: Path, *arguments: str) -> dict[str, Any]:
    """The result of one `bench serve`."""
    command = [str(BINARY), "bench", "serve", "--base-url", server.url, "--model", DEPLOYMENT["model"]]
    command += ["--tokenizer", str(tokenizer), "--disable-tqdm", "--save-result", "--save-detailed"]
    command += ["--result-dir", str(folder), "--result-filename", "result.json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((folder / "result.json").read_text())
    assert not any(result.get("errors", ())), result["errors"]
    return result  # type: ignore[no-any-return]


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_every_request_is_answered_at_full_length(backend: str, tmp_path: Path) -> None:
    folder = word_tokenizer(tmp_path)
    with serving(twin(time_scale=20, codec=twin_codec(folder), options={"root": str(folder)})) as server:
        traffic = ("--dataset-name", "random", "--random-input-len", "64", "--random-output-len", "16")
        result = bench(server, folder, tmp_path, "--backend", backend, "--num-prompts", "60", "--request-rate", "60",
                       "--goodput", "ttft:2000", "tpot:500", *traffic)  # fmt: skip
        assert result["completed"] == 60
        assert result["total_output_tokens"] == 60 * 16
        if backend == "openai":
            assert set(result["input_lens"]) == {64}


def test_a_timed_trace_finds_its_shared_blocks_in_the_prefix_cache(tmp_path: Path) -> None:
    """Rows two and three begin with the 1,024 and 512 tokens of the first."""
    rows = [(0, 1030, [1, 2, 3]), (300, 1500, [1, 2, 4]), (600, 600, [1, 9])]
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        "".join(
            json.dumps({"timestamp": at, "input_length": tokens, "output_length": 8, "hash_ids": ids}) + "\n"
            for at, tokens, ids in rows
        )
    )
    folder = word_tokenizer(tmp_path)
    with serving(twin(time_scale=5, codec=twin_codec(folder))) as server:
        traffic = ("--dataset-name", "timed_trace", "--dataset-path", str(trace), "--num-prompts", "3")
        blocks = ("--timed-trace-chunk-hash-size", "512", "--timed-trace-sec-multiplier", "0.001")
        result = bench(server, folder, tmp_path, "--backend", "openai", *traffic, *blocks)
        assert result["completed"] == 3
        assert server.backend.stats().prefix_hits_tokens == 1024 + 512


def test_it_measures_what_simulate_says(tmp_path: Path) -> None:
    folder = word_tokenizer(tmp_path)
    mean = sum(PROMPTS) // 2
    traffic = ("--dataset-name", "random", "--random-input-len", str(mean), "--random-output-len", "20",
               "--random-range-ratio", json.dumps({"input": 1 - PROMPTS[0] / mean, "output": 0}))  # fmt: skip
    for scale in SCALES:
        with serving(twin(time_scale=scale, codec=twin_codec(folder), **DEPLOYMENT)) as server:
            result = bench(server, folder, tmp_path, "--backend", "openai", "--num-prompts", "14",
                           "--request-rate", str(RATE * scale), *traffic)  # fmt: skip
        off = errors(read_detailed(result), Deployment(**DEPLOYMENT), scale)
        if max(map(abs, off.values())) < 0.1:
            return
    raise AssertionError(f"even at time scale {scale}: {off}")
