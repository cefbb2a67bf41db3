"""JSON readers: Mooncake and timed_trace with block hashes, ShareGPT, custom lines."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from serving.errors import UsageError
from sim.workload import Workload, load_workload, parse_spec
from sim.workload.jsonl_traces import read_mooncake, read_timed_trace
from sim.workload.spec import CustomSpec, MooncakeSpec, ShareGptSpec, TimedTraceSpec
from sim.workload.text_datasets import ESTIMATE, estimate_tokens, read_custom, read_sharegpt

same_file = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None
)


def one_line(error: UsageError) -> None:
    assert "\n" not in str(error)


def put(tmp_path: Path, content: Any, name: str = "trace.jsonl") -> Path:
    path = tmp_path / name
    if isinstance(content, list):
        content = "\n".join(json.dumps(entry) for entry in content)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def line(ms: float, prompt: Any, output: Any, ids: Any) -> dict[str, Any]:
    return {"timestamp": ms, "input_length": prompt, "output_length": output, "hash_ids": ids}


@st.composite
def traces(draw: st.DrawFn) -> tuple[int, list[dict[str, Any]]]:
    """Prompts as paths through a small tree of blocks, so that prefixes are often shared."""
    block = draw(st.integers(1, 40))
    rows = []
    for _ in range(draw(st.integers(1, 12))):
        ids = draw(st.lists(st.integers(0, 3), min_size=1, max_size=6))
        missing = draw(st.integers(0, block - 1))
        rows.append(
            line(draw(st.integers(0, 10**9)), len(ids) * block - missing, draw(st.integers(1, 99)), ids)
        )
    return block, sorted(rows, key=lambda row: row["timestamp"])


def prompt_of(row: dict[str, Any], block: int) -> list[tuple[int, int]]:
    """Each token as (what its block is drawn from, offset); as in vLLM a partial block has its own content."""
    sizes = [min(block, row["input_length"] - i * block) for i in range(len(row["hash_ids"]))]
    return [(hash((i, size)), k) for i, size in zip(row["hash_ids"], sizes, strict=True) for k in range(size)]


def assert_keys_match_prefixes(workload: Workload, prompts: list[list[Any]], page: int) -> None:
    """Two pages have one key exactly when they and everything before them are equal."""
    identity: dict[int, tuple[Any, ...]] = {}
    key_of: dict[tuple[Any, ...], int] = {}
    for row, prompt in enumerate(prompts):
        keys = workload.page_keys(row, page)
        assert len(keys) == len(prompt) // page
        for i, key in enumerate(keys):
            prefix = tuple(prompt[: (i + 1) * page])
            assert identity.setdefault(key, prefix) == prefix
            assert key_of.setdefault(prefix, key) == key


@given(traces(), st.integers(1, 60))
@same_file
def test_page_keys_are_equal_exactly_where_prefixes_are(
    tmp_path: Path, trace: tuple[int, list[dict[str, Any]]], page: int
) -> None:
    """Also for pages that straddle blocks."""
    block, rows = trace
    dataset = {"name": "mooncake", "path": put(tmp_path, rows), "block_tokens": block}
    workload = load_workload(parse_spec({"tenants": [{"dataset": dataset}]}), seed=0)
    assert_keys_match_prefixes(workload, [prompt_of(row, block) for row in rows], page)


@given(traces())
@same_file
def test_mooncake_round_trip(tmp_path: Path, trace: tuple[int, list[dict[str, Any]]]) -> None:
    block, entries = trace
    rows = read_mooncake(MooncakeSpec(path=put(tmp_path, entries), block_tokens=block))
    assert rows.prompt_tokens.tolist() == [entry["input_length"] for entry in entries]
    assert rows.output_tokens.tolist() == [entry["output_length"] for entry in entries]
    assert rows.time_s is not None
    expected_s = np.array([entry["timestamp"] - entries[0]["timestamp"] for entry in entries]) * 0.001
    np.testing.assert_array_equal(rows.time_s, expected_s)
    assert rows.warnings == ()


def read_any(tmp_path: Path, content: bytes) -> list[Callable[[], Any]]:
    path = put(tmp_path, content)
    return [
        lambda: read_mooncake(MooncakeSpec(path=path)),
        lambda: read_timed_trace(TimedTraceSpec(path=path)),
        lambda: read_sharegpt(ShareGptSpec(path=path)),
        lambda: read_sharegpt(ShareGptSpec(path=path, multi_turn=True)),
        lambda: read_custom(CustomSpec(path=path)),
    ]


TRACE_KEYS = ["timestamp", "input_length", "output_length", "hash_ids"]
CUSTOM_KEYS = ["prompt", "prompt_tokens", "output_tokens", "arrival_s", "prefix_group", "prefix_tokens"]
KEYS = st.sampled_from([*TRACE_KEYS, *CUSTOM_KEYS, "conversations", "value", "from"])
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(KEYS, children, max_size=5),
    max_leaves=12,
)


@given(
    st.binary(max_size=200)
    | st.lists(json_values, max_size=4).map(lambda v: "\n".join(map(json.dumps, v)).encode())
)
@example(b'{"timestamp": 0, "input_length": 1' + b"0" * 5000 + b', "output_length": 1, "hash_ids": [1]}')
@example(b"[" * 100_000)
@example(b"\x0b")
@example(b'[{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt"}]}]')
@same_file
def test_fuzzed_bytes_and_fuzzed_json_raise_nothing_but_usage_errors(tmp_path: Path, junk: bytes) -> None:
    for read in read_any(tmp_path, junk):
        try:
            rows = read()
        except UsageError as error:
            one_line(error)
        else:
            assert rows.prompt_tokens.min() >= 1
            assert rows.output_tokens.min() >= 1


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (
            [line(0, 513, 1, [1, 2]), line(1, 1025, 1, [1, 2])],
            "line 2, column 'hash_ids': 2 ids of 512 tokens do not cover",
        ),
        ([line(0, 5, 1, [])], "line 1, column 'hash_ids': no block ids"),
        ([line(0, 5, 1, [1.5])], "line 1, column 'hash_ids': [1.5] is not a list of block ids"),
        ([line(0, 5, 1, "1")], "is not a list of block ids"),
        (
            [line(0, 5, 1, [1]), {"timestamp": 3, "input_length": 4}],
            "line 2: no key 'output_length'; found timestamp",
        ),
        ([line(0, "5x", 1, [1])], "line 1, column 'input_length': '5x' is not a number of tokens"),
        ([line(0, 5, True, [1])], "line 1, column 'output_length': True is not a number of tokens"),
        ([line(0, 5, 2.5, [1])], "line 1, column 'output_length': 2.5 is not a whole number"),
        ([line(1e300, 5, 2, [1])], "line 1, column 'timestamp': 1e+300 is too large"),
        ('{"a": 1}\n\n{"a": ', "line 3: not JSON"),
        ("[1, 2]", "line 1: [1, 2] is not a JSON object"),
        ([line(0, 5, 0, [1])], "no usable rows (1 of 1 rows dropped: output_length is 0)"),
    ],
)
def test_broken_mooncake_files_name_line_and_column(tmp_path: Path, entries: Any, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_mooncake(MooncakeSpec(path=put(tmp_path, entries)))
    assert message in str(caught.value)


def test_ids_beyond_the_prompt_are_ignored_with_a_count(tmp_path: Path) -> None:
    rows = read_mooncake(MooncakeSpec(path=put(tmp_path, [line(0, 512, 1, [1, 2]), line(0, 513, 1, [1, 2])])))
    assert rows.warnings == ("1 of 2 rows have more hash_ids than their prompt fills; the rest ignored",)
    assert rows.segments is not None
    assert rows.segments.ends.tolist() == [512, 512, 513]


def test_dropped_and_unsorted_lines_keep_their_own_prefixes(tmp_path: Path) -> None:
    entries = [
        line(30, 1024, 1, [7, 8]),
        line(20, 512, -1, [9]),
        line(10, 512, 1, [7]),
        line(None, 5, 1, [1]),
    ]  # type: ignore[arg-type]
    rows = read_mooncake(MooncakeSpec(path=put(tmp_path, entries)))
    assert rows.prompt_tokens.tolist() == [512, 1024]
    assert rows.segments is not None
    assert rows.segments.offsets.tolist() == [0, 1, 3]
    assert rows.segments.streams[0] == rows.segments.streams[1]
    assert rows.warnings == (
        "1 of 4 rows dropped: timestamp is empty or NaN",
        "1 of 4 rows dropped: output_length is negative",
        "1 of 2 rows out of time order; sorted",
    )


def test_ids_may_be_strings_or_larger_than_64_bits(tmp_path: Path) -> None:
    for ids in (["a", "b"], [2**70, 2**70 + 1]):
        rows = read_mooncake(
            MooncakeSpec(path=put(tmp_path, [line(0, 600, 1, ids), line(1, 512, 1, ids[:1])]))
        )
        assert rows.segments is not None
        assert rows.segments.streams.tolist() == [0, 1, 0]


def test_timed_trace_with_labels_and_unit_of_its_own(tmp_path: Path) -> None:
    entries = [{"t": 1.5, "in": 40, "out": 3, "h": [1, 2, 3]}, {"t": 1.75, "in": 10, "out": 2}]
    spec = TimedTraceSpec(
        path=put(tmp_path, entries),
        sec_multiplier=60,
        label_timestamp="t",
        label_input_length="in",
        label_output_length="out",
        label_hash_ids="h",
    )
    rows = read_timed_trace(spec)
    assert rows.time_s is not None
    assert rows.time_s.tolist() == [0, 15]
    assert rows.segments is not None
    assert rows.segments.ends.tolist() == [16, 32, 40]


def chat(*turns: tuple[str, int]) -> dict[str, Any]:
    return {"conversations": [{"from": who, "value": "word " * words} for who, words in turns]}


def test_sharegpt_takes_the_first_question_and_answer_as_vllm_does(tmp_path: Path) -> None:
    entries = [
        chat(("human", 6), ("gpt", 9), ("human", 30), ("gpt", 3)),
        chat(("human", 6)),
        chat(("system", 3), ("human", 6), ("gpt", 30)),
        chat(("gpt", 99), ("human", 30), ("gpt", 12)),
        chat(("human", 1), ("gpt", 12)),
        chat(("human", 1200), ("gpt", 12)),
    ]
    rows = read_sharegpt(ShareGptSpec(path=put(tmp_path, json.dumps(entries), "chats.json")))
    assert rows.prompt_tokens.tolist() == [8, 12, 40]  # 4 tokens for 3 words
    assert rows.output_tokens.tolist() == [12, 40, 16]
    assert rows.meta["token_count"] == ESTIMATE
    assert rows.warnings == (
        "1 of 6 conversations dropped: fewer than 2 turns",
        "1 of 6 conversations dropped: a turn under 4 tokens",
        "1 of 6 conversations dropped: a prompt over 1,024 tokens",
        f"token counts are an {ESTIMATE}; a tokenizer file counts exactly",
    )


def test_sharegpt_conversations_become_sessions(tmp_path: Path) -> None:
    entries = [
        chat(("human", 3), ("gpt", 6), ("human", 9), ("gpt", 12)),
        chat(("human", 30), ("gpt", 0)),
        chat(("human", 15), ("gpt", 18)),
    ]
    path = put(tmp_path, json.dumps(entries), "chats.json")
    dataset = {"name": "sharegpt", "path": path, "multi_turn": True}
    workload = load_workload(parse_spec({"tenants": [{"dataset": dataset}]}), seed=0)
    assert workload.prompt_tokens.tolist() == [4, 4 + 8 + 12, 20]
    assert workload.output_tokens.tolist() == [8, 16, 24]
    assert workload.after.tolist() == [-1, 0, -1]
    assert workload.warnings[0] == "1 of 3 conversations dropped: an empty turn"


def test_words_and_ideographs_are_counted() -> None:
    assert estimate_tokens("") == 0
    assert estimate_tokens(" \n") == 0
    assert estimate_tokens("three short words") == 4
    assert estimate_tokens("日本語") == 3


def test_a_missing_tokenizer_file_is_named(tmp_path: Path) -> None:
    path = put(tmp_path, json.dumps([chat(("human", 9), ("gpt", 9))]), "chats.json")
    with pytest.raises(UsageError, match="no such tokenizer file"):
        read_sharegpt(ShareGptSpec(path=path, tokenizer=tmp_path / "tokenizer.json"))


def test_custom_lines_with_counts_times_and_prefix_groups(tmp_path: Path) -> None:
    entries = [
        {"prompt_tokens": 50, "output_tokens": 5, "arrival_s": 2.5, "prefix_group": "a", "prefix_tokens": 32},
        {
            "prompt_tokens": 60,
            "output_tokens": 6,
            "arrival_s": 1.25,
            "prefix_group": "a",
            "prefix_tokens": 16,
        },
        {"prompt_tokens": 70, "output_tokens": 7, "arrival_s": 3.0},
    ]
    workload = load_workload(
        parse_spec({"tenants": [{"dataset": {"name": "custom", "path": put(tmp_path, entries)}}]}), seed=0
    )
    assert workload.sent_s.tolist() == [0, 1.25, 1.75]
    assert workload.prompt_tokens.tolist() == [60, 50, 70]
    assert workload.page_keys(0, 16) == workload.page_keys(1, 16)[:1]
    assert workload.page_keys(2, 16) == []


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([{"prompt": "a b c"}], "line 1: no key 'output_tokens'; add it or set --custom-output-len"),
        ([{"output_tokens": 4}], "line 1: no key 'prompt'"),
        ([{"prompt": 5, "output_tokens": 4}], "line 1, column 'prompt': 5 is not text"),
        (
            [{"prompt": "a", "output_tokens": 4, "arrival_s": 1}, {"prompt": "a", "output_tokens": 4}],
            "line 2: no key 'arrival_s'",
        ),
        (
            [{"prompt_tokens": 5, "output_tokens": 4, "prefix_group": "g", "prefix_tokens": 6}],
            "6 exceeds the prompt's 5",
        ),
        ([{"prompt_tokens": 5, "output_tokens": 4, "prefix_tokens": 6}], "give a prefix_group"),
    ],
)
def test_broken_custom_lines_name_line_and_key(tmp_path: Path, entries: Any, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_custom(CustomSpec(path=put(tmp_path, entries)))
    assert message in str(caught.value)


def test_a_tokenizer_file_counts_exactly(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is optional")
    words = tokenizers.models.WordLevel({"word": 0, "?": 1}, unk_token="?")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    path = put(tmp_path, json.dumps([chat(("human", 9), ("gpt", 11))]), "chats.json")
    for given_path in (tmp_path, tmp_path / "tokenizer.json"):
        rows = read_sharegpt(ShareGptSpec(path=path, tokenizer=given_path))
        assert (rows.prompt_tokens.tolist(), rows.output_tokens.tolist()) == ([9], [11])
        assert rows.meta["token_count"] == f"tokenizer: {tmp_path / 'tokenizer.json'}"
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UsageError, match="not a tokenizer file"):
        read_sharegpt(ShareGptSpec(path=path, tokenizer=tmp_path))
