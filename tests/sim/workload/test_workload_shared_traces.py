"""The public traces themselves: known averages, known cache hits, and that nothing of them is lost."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sim.workload import Workload, load_workload, shared_prefix_tokens, spec_from_flags

TRACES = Path(__file__).resolve().parents[3].parent / "shared" / "data" / "traces"
pytestmark = [
    pytest.mark.shared,
    pytest.mark.skipif(not TRACES.is_dir(), reason=f"the measured traces are not at {TRACES}"),
]


def load(name: str, **flags: object) -> Workload:
    return load_workload(spec_from_flags({"dataset_path": TRACES / name, **flags}), seed=0)


def test_azure_conversation_averages_1155_prompt_and_211_output_tokens() -> None:
    workload = load("AzureLLMInferenceTrace_conv.csv")
    assert len(workload) == 19_366
    assert round(workload.prompt_tokens.mean()) == 1155
    assert round(workload.output_tokens.mean()) == 211
    assert workload.warnings == ()
    # The first and the last line: 18:15:46.6805900 and 19:14:08.4025270.
    assert workload.sent_s[0] == 0
    assert workload.sent_s[-1] == pytest.approx(58 * 60 + 21.721937, abs=1e-9)
    assert (workload.prompt_tokens[-1], workload.output_tokens[-1]) == (197, 183)


def test_azure_code_keeps_its_last_line_that_lacks_a_newline() -> None:
    workload = load("AzureLLMInferenceTrace_code.csv")
    assert len(workload) == 8819
    assert (workload.prompt_tokens[-1], workload.output_tokens[-1]) == (549, 173)


def test_rate_scale_divides_every_time() -> None:
    plain, double = (load("AzureLLMInferenceTrace_conv.csv", rate_scale=scale) for scale in (1, 2))
    np.testing.assert_allclose(double.sent_s, plain.sent_s / 2, rtol=1e-15)


def block_hit_rate(workload: Workload, block: int) -> float:
    """Share of blocks, partial last ones included, that an infinite cache has when a request comes.

    A block is hit when its segment's stream came before at the same end: streams stand for whole prefixes.
    """
    seen: set[tuple[int, int]] = set()
    hits = 0
    for row in range(len(workload)):
        part = slice(int(workload.segment_offsets[row]), int(workload.segment_offsets[row + 1]))
        blocks = list(
            zip(workload.segment_streams[part].tolist(), workload.segment_ends[part].tolist(), strict=True)
        )
        assert len(blocks) == -(-int(workload.prompt_tokens[row]) // block)
        keys = workload.page_keys(row, block)
        assert len(keys) == int(workload.prompt_tokens[row]) // block
        hits += next((i for i, key in enumerate(blocks) if key not in seen), len(blocks))
        seen.update(blocks)
    return hits / len(workload.segment_ends)


@pytest.mark.parametrize(("name", "percent"), [("conversation", 36.6), ("synthetic", 64.0)])
def test_mooncake_blocks_hit_an_infinite_cache_as_published(name: str, percent: float) -> None:
    workload = load(f"mooncake_{name}_trace.jsonl")
    assert round(100 * block_hit_rate(workload, 512), 1) == percent


@pytest.mark.parametrize("page", [16, 512])
def test_mooncake_pages_agree_with_the_bound_of_the_summary(page: int) -> None:
    workload = load("mooncake_synthetic_trace.jsonl", num_prompts=400)
    cache: set[int] = set()
    bound = shared_prefix_tokens(workload, page_tokens=page)
    for row in range(len(workload)):
        keys = workload.page_keys(row, page)
        hit = next((i for i, key in enumerate(keys) if key not in cache), len(keys))
        assert bound[row] == min(hit, (int(workload.prompt_tokens[row]) - 1) // page) * page
        cache.update(keys)


def test_mooncake_times_are_milliseconds() -> None:
    workload = load("mooncake_conversation_trace.jsonl")
    assert len(workload) == 12_031
    assert workload.sent_s[-1] == pytest.approx(3536.999)


def test_vllm_timed_trace_needs_its_unit_and_block_size() -> None:
    flags = {
        "dataset_name": "timed_trace",
        "timed_trace_chunk_hash_size": 16,
        "timed_trace_sec_multiplier": 0.001,
    }
    workload = load("lss_sharegpt_llama31_block16.jsonl", **flags)
    assert len(workload) == 300
    assert workload.sent_s[-1] == pytest.approx(29.136836)
    assert len(workload.page_keys(0, 16)) == 2358 // 16


def test_length_pairs_are_read_whole() -> None:
    assert len(load("lengths_sharegpt_8k_llama2tok.csv")) == 20_000
