"""vLLM's defaults, its 2025 switch, and values that cannot work."""

from __future__ import annotations

from typing import Any

import pytest

from serving.config import SchedulerConfig
from serving.errors import UsageError


def test_defaults_are_those_of_vllm() -> None:
    config = SchedulerConfig(num_pages=10)
    assert config.page_tokens == 16
    assert config.enable_prefix_caching
    assert config.enable_chunked_prefill
    assert config.queue_order == "fcfs"
    assert config.long_prefill_token_threshold == 0
    assert config.watermark == 0.0
    assert config.reserve_full_isl
    assert config.max_num_batched_tokens == 8192


def test_the_engine_of_2025_lacks_what_is_newer() -> None:
    config = SchedulerConfig(num_pages=10, watermark=0.1, async_scheduling=True, max_num_seqs=7).vllm_2025()
    assert not config.reserve_full_isl
    assert config.watermark == 0.0
    assert not config.prepend_unhashed
    assert not config.async_scheduling
    assert config.max_num_seqs == 7


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_pages", 0),
        ("page_tokens", 0),
        ("max_num_seqs", 0),
        ("max_num_batched_tokens", -1),
        ("max_model_len", 0),
        ("long_prefill_token_threshold", -1),
        ("watermark", 1.0),
        ("watermark", -0.1),
        ("watermark", float("nan")),
        ("queue_order", "lifo"),
        ("num_speculative_tokens", -1),
    ],
)
def test_a_value_that_cannot_work_is_named(field: str, value: Any) -> None:
    with pytest.raises(UsageError, match=field):
        SchedulerConfig(**{"num_pages": 10, field: value})


@pytest.mark.parametrize(("draft_has_kv", "least"), [(False, 4), (True, 5)])
def test_a_budget_that_no_verification_fits_is_an_error(draft_has_kv: bool, least: int) -> None:
    # One known token and three drafts, and a slot for a draft model's own input.
    fields = {"num_pages": 10, "num_speculative_tokens": 3, "draft_has_kv": draft_has_kv}
    SchedulerConfig(**fields, max_num_batched_tokens=least)
    with pytest.raises(UsageError, match="max_num_batched_tokens is"):
        SchedulerConfig(**fields, max_num_batched_tokens=least - 1)
