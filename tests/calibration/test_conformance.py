"""Recorded schedules of the real vLLM scheduler are reproduced decision by decision, and departures are
reported."""

from __future__ import annotations

import copy
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from calibration.conformance import check_folder, check_trace, token_hash
from serving.errors import UsageError

RECORDED = Path(__file__).parents[3] / "shared" / "data" / "vllm_schedules"
needs_traces = pytest.mark.skipif(
    not RECORDED.is_dir(), reason=f"the recorded schedules of vLLM are not there ({RECORDED})"
)


@pytest.mark.shared
@needs_traces
def test_all_recorded_schedules_of_vllm_are_reproduced() -> None:
    result = check_folder(RECORDED)
    assert not result.differences, "\n".join(map(str, result.differences))
    assert (result.num_identical, result.num_traces) == (74, 74)
    assert str(result) == f"74 of 74 traces, {result.num_steps} steps identical"


def trace(**config: Any) -> dict[str, Any]:
    """Two requests in a pool of three pages of 4, written by hand from vLLM's rules.

    Step 0: both prompts of 4. Step 1: a takes the last page for token 5, b preempts itself (page 2, full and
    hashed, goes to the back of the free queue). Step 2: a computes its second token, and b's 5 known tokens
    find their page and need another, which nobody has: b waits. a ends with three tokens; step 3: b computes
    token 5 after a hit of 4.
    """
    out = {i: [token_hash(i, n, 7) % 50 for n in range(3)] for i in "ab"}
    steps = [
        {"sched": {"a": 4, "b": 4}, "new": {"a": 0, "b": 0}, "running": ["a", "b"], "waiting": [], "free": 1,
         "bt": {"a": [1], "b": [2]}, "out": {"a": out["a"][:1], "b": out["b"][:1]}, "finished": []},
        {"sched": {"a": 1}, "preempted": ["b"], "running": ["a"], "waiting": ["b"], "free": 1,
         "bt": {"a": [1, 3]}, "out": {"a": out["a"][1:2]}, "finished": []},
        {"sched": {"a": 1}, "running": ["a"], "waiting": ["b"], "free": 1, "out": {"a": out["a"][2:3]},
         "finished": ["a"]},
        {"sched": {"b": 1}, "new": {}, "resumed": ["b"], "running": ["b"], "waiting": [], "free": 1,
         "out": {"b": out["b"][1:2]}, "finished": []},
    ]  # fmt: skip
    return {
        "config": {
            "max_num_seqs": 4,
            "max_num_batched_tokens": 16,
            "block_size": 4,
            "num_blocks": 4,
            "max_model_len": 100,
            "prefix": True,
            "policy": "fcfs",
        }
        | config,
        "requests": [
            {"id": "a", "arrive": 0, "prompt": [1, 2, 3, 4], "max_tokens": 3, "priority": 0},
            {"id": "b", "arrive": 0, "prompt": [5, 6, 7, 8], "max_tokens": 3, "priority": 0},
        ],
        "steps": steps,
    }


def write(folder: Path, name: str, content: dict[str, Any]) -> None:
    with gzip.open(folder / name, "wt") as file:
        json.dump(content, file)


def test_a_schedule_written_by_hand_from_the_rules_is_reproduced() -> None:
    assert check_trace(trace()) is None


@pytest.mark.parametrize(
    ("step", "what", "wrong"),
    [
        (0, "sched", {"a": 4, "b": 3}),
        (0, "new", {"a": 0, "b": 4}),
        (0, "bt", {"a": [1], "b": [3]}),
        (1, "preempted", []),
        (1, "free", 2),
        (1, "running", ["b"]),
        (2, "finished", []),
        (3, "resumed", []),
        (3, "out", {"b": [99]}),
    ],
)
def test_a_corrupted_trace_is_reported_with_its_first_difference(
    tmp_path: Path, step: int, what: str, wrong: Any
) -> None:
    corrupt = copy.deepcopy(trace())
    right = corrupt["steps"][step][what]
    corrupt["steps"][step][what] = wrong
    if step < 3:
        corrupt["steps"][3]["free"] = -7  # a later difference, which is not the first
    write(tmp_path, "good.json.gz", trace())
    write(tmp_path, "bad.json.gz", corrupt)
    result = check_folder(tmp_path)
    assert str(result) == "1 of 2 traces, 4 steps identical"
    (difference,) = result.differences
    assert (difference.trace, difference.step, difference.what) == ("bad.json.gz", step, what)
    assert (difference.expected, difference.got) == (wrong, right)
    assert str(difference) == f"bad.json.gz step {step}: {what}: recorded {wrong}, ours {right}"


def test_a_difference_in_the_rules_is_found(tmp_path: Path) -> None:
    # The same decisions do not come of another configuration: without prefix caching b computes 5 tokens in step 3.
    difference = check_trace(trace(prefix=False))
    assert difference is not None
    assert (difference.step, difference.what) == (3, "sched")


def test_a_missing_or_empty_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a folder"):
        check_folder(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="holds no recorded schedules"):
        check_folder(tmp_path)


UNREADABLE = {
    "empty": b"",
    "not gzip": b"not gzip",
    "not JSON": gzip.compress(b"not json", mtime=0),
    "a list": gzip.compress(b"[]", mtime=0),
    "a number": gzip.compress(b"3", mtime=0),
    "no requests": gzip.compress(b'{"config": {}}', mtime=0),
    "cut off": gzip.compress(b"{}" * 100, mtime=0)[:20],
    "not UTF-8": gzip.compress(b"\xff\xfe{", mtime=0),
}


@pytest.mark.parametrize("content", UNREADABLE.values(), ids=UNREADABLE.keys())
def test_an_unreadable_trace_is_an_error_that_names_the_file(tmp_path: Path, content: bytes) -> None:
    write(tmp_path, "a.json.gz", trace())
    (tmp_path / "broken.json.gz").write_bytes(content)
    with pytest.raises(UsageError, match=r"broken\.json\.gz is not a recorded schedule"):
        check_folder(tmp_path)


@pytest.mark.parametrize("key", ["num_blocks", "block_size", "max_num_seqs"])
def test_a_trace_without_a_field_of_its_configuration_is_an_error_that_names_it(
    tmp_path: Path, key: str
) -> None:
    incomplete = trace()
    del incomplete["config"][key]
    write(tmp_path, "incomplete.json.gz", incomplete)
    with pytest.raises(UsageError, match=rf"incomplete\.json\.gz.*{key}"):
        check_folder(tmp_path)


def test_the_token_function_is_crc32_of_id_position_and_salt() -> None:
    # CRC-32 of "123456789" is the standard check value 0xCBF43926; here the text is "id:position:salt".
    import zlib

    assert zlib.crc32(b"123456789") == 0xCBF43926
    assert token_hash("r1", 2, 7) == zlib.crc32(b"r1:2:7")
