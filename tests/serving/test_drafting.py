"""How long drafts are: all that is allowed, fewer under load, fewer where they keep failing."""

from __future__ import annotations

import numpy as np
import pytest

from serving.config import SchedulerConfig
from serving.draft_counts import DraftCounts, total
from serving.drafting import DraftLengths
from serving.errors import UsageError
from serving.speculative_config import parse_speculative_config

SLOTS = np.arange(4, dtype=np.intp)


def lengths(k: int = 5, **more: object) -> DraftLengths:
    return DraftLengths(SchedulerConfig(num_pages=64, num_speculative_tokens=k, **more), 4)  # type: ignore[arg-type]


def test_load_shortens_drafts() -> None:
    plain = lengths()
    assert plain.after(SLOTS, 400).tolist() == [5] * 4
    capped = lengths(disable_by_batch_size=8)
    assert [int(capped.after(SLOTS, n)[0]) for n in (1, 8, 9)] == [5, 5, 0]
    steps = lengths(num_speculative_tokens_per_batch_size=((1, 4, 5), (5, 16, 2), (17, 64, 0)))
    assert [int(steps.after(SLOTS, n)[0]) for n in (1, 4, 5, 16, 17, 65)] == [5, 5, 2, 2, 0, 5]


@pytest.mark.parametrize(
    ("rate", "least", "wanted"), [(0.5, 0.3, 1), (0.6, 0.3, 2), (0.9, 0.7, 3), (0.95, 0.5, 5)]
)
def test_a_draft_ends_where_its_last_token_would_stand_too_seldom(
    rate: float, least: float, wanted: int
) -> None:
    """The longest j with rate^j at or above `least`, from 1 to k."""
    adaptive = lengths(min_draft_acceptance=least)
    rng = np.random.default_rng(1)
    seen = []
    for _ in range(3000):
        drafts = int(adaptive.after(SLOTS[:1], 1)[0])
        seen.append(drafts)
        stands = rng.random(drafts) < rate
        adaptive.verified(0, drafts, int(np.logical_and.accumulate(stands).sum()))
    assert np.median(seen[50:]) == wanted
    assert min(seen) >= 1
    assert max(seen) <= 5


def test_one_sequence_does_not_shorten_anothers_drafts() -> None:
    adaptive = lengths(min_draft_acceptance=0.5)
    for _ in range(10):
        adaptive.verified(2, 5, 0)
    assert adaptive.after(SLOTS, 1).tolist() == [5, 5, 1, 5]
    adaptive.enter(2)
    assert adaptive.after(SLOTS, 1).tolist() == [5, 5, 5, 5]


def test_counts_by_position() -> None:
    counts = DraftCounts()
    counts.count(np.array([3, 0, 3, 1]), np.array([1, 0, 3, 1]))
    assert (counts.num_drafts, counts.num_draft_tokens, counts.num_accepted_tokens) == (3, 7, 5)
    assert counts.accepted_per_pos == [3, 1, 1]
    assert counts.tried_per_pos == [3, 2, 1]
    assert counts.acceptance_per_pos == pytest.approx([1, 1 / 3, 1 / 3])
    assert counts.conditional_per_pos == pytest.approx([1, 1 / 2, 1])
    assert counts.mean_acceptance_length == pytest.approx(1 + 5 / 3)
    both = total([counts, None, counts])
    assert both is not None
    assert both.accepted_per_pos == [6, 2, 2]
    assert total([None]) is None


@pytest.mark.parametrize(
    ("given", "wanted"),
    [({}, (5, 5)), ({"prompt_lookup_max": 3}, (3, 3)), ({"prompt_lookup_min": 2}, (2, 2)),
     ({"prompt_lookup_min": 2, "prompt_lookup_max": 4}, (2, 4))],
)  # fmt: skip
def test_one_bound_of_the_lookup_stands_for_both_as_in_vllm(
    given: dict[str, int], wanted: tuple[int, int]
) -> None:
    config = parse_speculative_config({"method": "ngram", "num_speculative_tokens": 2, **given})
    assert config.lookup_range == wanted


def test_vllms_shorter_spellings() -> None:
    assert parse_speculative_config('{"model": "small", "num_speculative_tokens": 2}').method == "draft_model"
    assert parse_speculative_config('{"model": "ngram", "num_speculative_tokens": 2}').method == "ngram"
    for text in ("{", "[1]", '{"num_speculative_tokens": 2}', '{"method": "ngram"}', '{"method": "eagle"}'):
        with pytest.raises(UsageError, match="--speculative-config"):
            parse_speculative_config(text)
