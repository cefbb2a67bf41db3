"""Prefix cache and page pool: identity, hits, and the order in which freed pages are reused."""

from __future__ import annotations

import pytest

from serving.request import TokenKeys
from tests.serving.driver import Engine, answer_token, own_tokens


def test_two_identical_prompts_of_40_tokens_in_one_step_the_second_hits_32() -> None:
    # Pages are findable from when they are scheduled, not from when they are computed. 40 tokens are two full pages.
    prompt = own_tokens("shared", 40)
    engine = Engine()
    engine.add("a", prompt)
    engine.add("b", prompt)
    decided = engine.step()
    assert decided.hits == {"a": 0, "b": 32}
    assert decided.sched == {"a": 40, "b": 8}
    assert engine.pages("a")[:2] == engine.pages("b")[:2]
    assert engine.pages("a")[2] != engine.pages("b")[2]


@pytest.mark.parametrize(
    ("prompt_tokens", "hit"),
    [(15, 0), (16, 0), (17, 16), (31, 16), (32, 16), (33, 32), (48, 32), (49, 48)],
)
def test_the_last_token_is_always_computed_again(prompt_tokens: int, hit: int) -> None:
    # Hits are whole pages within prompt - 1 tokens: a cached prompt of exactly n pages recomputes all of the last one.
    engine = Engine()
    prompt = own_tokens("shared", prompt_tokens)
    engine.add("a", prompt, max_tokens=1)
    engine.step()
    engine.add("b", prompt, max_tokens=1)
    decided = engine.step()
    assert decided.hits == {"b": hit}
    assert decided.sched == {"b": prompt_tokens - hit}


def test_only_full_pages_are_shared() -> None:
    engine = Engine()
    prompt = own_tokens("shared", 20)
    engine.add("a", prompt, max_tokens=1)
    engine.step()
    engine.add("b", [*prompt, 7, 8, 9], max_tokens=1)
    assert engine.step().hits == {"b": 16}


def test_equal_pages_after_different_beginnings_are_different() -> None:
    # The hash of a page includes its parent's: the second page of both prompts is equal, the first is not.
    same = own_tokens("same", 17)
    engine = Engine()
    engine.add("a", [*own_tokens("x", 16), *same], max_tokens=1)
    engine.step()
    engine.add("b", [*own_tokens("y", 16), *same], max_tokens=1)
    assert engine.step().hits == {"b": 0}


def test_a_salt_separates_equal_prompts() -> None:
    prompt = own_tokens("shared", 33)
    engine = Engine()
    engine.add("a", prompt, keys=TokenKeys(16, prompt, salt="tenant 1"), max_tokens=1)
    engine.step()
    engine.add("b", prompt, keys=TokenKeys(16, prompt, salt="tenant 2"), max_tokens=1)
    assert engine.step().hits == {"b": 0}
    engine.add("c", prompt, keys=TokenKeys(16, prompt, salt="tenant 2"), max_tokens=1)
    assert engine.step().hits == {"c": 32}


def test_a_gap_in_the_chain_ends_the_hit() -> None:
    engine = Engine(page_tokens=4)
    engine.add("a", 5, keys=["k0"], max_tokens=1)
    engine.add("c", 13, keys=["other", "k1", "k2"], max_tokens=1)
    engine.step()
    # k1 and k2 are cached, k1's page after another beginning would not be; the lookup is by key, and stops at the gap.
    engine.add("b", 17, keys=["k0", "missing", "k2", "k3"], max_tokens=1)
    assert engine.step().hits == {"b": 4}


def test_generated_tokens_extend_the_identity() -> None:
    # a's answer fills its second page; a prompt that repeats prompt and answer finds both.
    engine = Engine()
    prompt = own_tokens("a", 20)
    engine.add("a", prompt, max_tokens=20)
    engine.run()
    answer = [answer_token("a", i) for i in range(20)]
    engine.add("b", [*prompt, *answer], max_tokens=1)
    # The last token of an answer is never computed: 39 tokens have KV, two full pages.
    assert engine.step().hits == {"b": 32}


def test_one_key_may_lie_in_several_pages_and_tables_only_grow() -> None:
    # Two equal prompts whose first page was too short to be found (chunks of 2 in pages of 4) compute it twice.
    prompt = own_tokens("shared", 9)
    engine = Engine(page_tokens=4, long_prefill_token_threshold=2, num_pages=20)
    engine.add("a", prompt, max_tokens=2)
    engine.add("b", prompt, max_tokens=2)
    engine.step()
    first, second = engine.pages("a")[0], engine.pages("b")[0]
    assert first != second
    engine.step()  # both pages become full and are registered under one key; b keeps its own copy
    assert engine.pages("a")[0] == first
    assert engine.pages("b")[0] == second
    engine.add("c", prompt, max_tokens=1)
    # The first found, which is the first registered, is used.
    engine.step()
    assert engine.pages("c")[0] == first


def test_without_prefix_caching_nothing_is_found() -> None:
    engine = Engine(enable_prefix_caching=False)
    prompt = own_tokens("shared", 40)
    for name in "ab":
        engine.add(name, prompt)
    assert engine.step().hits == {"a": 0, "b": 0}


# ---- the free queue --------------------------------------------------------------------------------------------------


def test_pages_are_first_given_out_by_number_and_page_0_never() -> None:
    engine = Engine(num_pages=6, page_tokens=4)
    engine.add("a", 9)
    engine.add("b", 4)
    engine.step()
    assert engine.pages("a") == [1, 2, 3]
    assert engine.pages("b") == [4]
    assert engine.scheduler.pool.free_order() == [5, 6]


def test_freed_pages_without_hash_come_first_and_hashed_ones_last_tail_first() -> None:
    engine = Engine(num_pages=8, page_tokens=4)
    engine.add("a", 10, max_tokens=1)  # pages 1, 2 hashed, page 3 partly filled
    engine.step()
    assert engine.scheduler.pool.free_order() == [3, 4, 5, 6, 7, 8, 2, 1]


def test_in_the_engine_of_2025_freed_pages_all_queue_at_the_back_tail_first() -> None:
    engine = Engine(num_pages=8, page_tokens=4, prepend_unhashed=False)
    engine.add("a", 10, max_tokens=1)
    engine.step()
    assert engine.scheduler.pool.free_order() == [4, 5, 6, 7, 8, 3, 2, 1]


def test_without_caching_freed_pages_are_reused_at_once() -> None:
    # Nothing carries a hash, so the whole table is prepended, tail first: the last page is the next to go.
    engine = Engine(num_pages=8, page_tokens=4, enable_prefix_caching=False)
    engine.add("a", 10, max_tokens=1)
    engine.step()
    assert engine.scheduler.pool.free_order() == [3, 2, 1, 4, 5, 6, 7, 8]


def test_a_freed_page_stays_hittable_until_it_is_given_out_again() -> None:
    prompt = own_tokens("shared", 9)
    engine = Engine(num_pages=4, page_tokens=4)
    engine.add("a", prompt, max_tokens=1)  # pages 1, 2 hashed; 3 not
    engine.step()
    assert engine.scheduler.pool.free_order() == [3, 4, 2, 1]
    engine.add("x", 9, max_tokens=1)  # takes 3, 4 and 2, and with 2 the second page's hash
    engine.step()
    engine.add("b", prompt, max_tokens=1)
    assert engine.step().hits == {"b": 4}


def test_a_hit_takes_its_pages_out_of_the_middle_of_the_queue() -> None:
    prompt = own_tokens("a", 9)
    engine = Engine(num_pages=8, page_tokens=4)
    engine.add("a", prompt, max_tokens=1)
    engine.step()
    engine.add("x", 9, max_tokens=1)  # takes 3, 4, 5
    engine.step()
    assert engine.scheduler.pool.free_order() == [5, 6, 7, 8, 2, 1, 4, 3]
    engine.add("b", prompt)
    engine.plan()
    # Pages 1 and 2 leave from the middle, page 5 from the head.
    assert engine.pages("b") == [1, 2, 5]
    assert engine.scheduler.pool.free_order() == [6, 7, 8, 4, 3]


def test_the_free_count_includes_pages_that_only_cache() -> None:
    engine = Engine(num_pages=8, page_tokens=4)
    engine.add("a", 32, max_tokens=1)
    assert engine.step().free == 0
    assert engine.free == 8


def test_a_shared_page_is_free_only_when_its_last_holder_leaves() -> None:
    prompt = own_tokens("shared", 9)
    engine = Engine(num_pages=8, page_tokens=4)
    a = engine.add("a", prompt)
    b = engine.add("b", prompt)
    engine.step()
    assert engine.free == 8 - 3 - 1
    engine.scheduler.abort(a)
    assert engine.free == 8 - 3
    engine.scheduler.abort(b)
    assert engine.free == 8


def test_hits_of_a_private_sequence_after_preemption_are_its_own_surviving_pages() -> None:
    # Without token ids a sequence still finds, after a preemption, the full pages that nobody was given meanwhile.
    engine = Engine(num_pages=4, page_tokens=4)
    engine.add("a", 7, keys=(), max_tokens=4)
    engine.add("b", 7, keys=(), max_tokens=4)
    engine.step()  # two pages each, room for one token
    engine.step()
    # a and b are full; a preempts b, whose two full pages carry its claim; a takes the second (tail first).
    assert engine.step().preempted == ["b"]
    engine.step()
    decided = engine.step()  # a has ended; b has 7 + 2 tokens; of its two pages the first survived
    assert decided.resumed == ["b"]
    assert decided.hits == {"b": 4}
    assert decided.sched == {"b": 5}


def test_private_pages_are_found_again_only_behind_all_the_shared_ones() -> None:
    # Pages 1 and 2 are shared, 3 is the sequence's own; page 1 is lost while it is away. What lies in page 3 follows a
    # beginning that is gone, so nothing is hit.
    engine = Engine(num_pages=8, page_tokens=4)
    request = engine.add("a", 13, keys=["k0", "k1"])
    engine.step()
    assert engine.pages("a") == [1, 2, 3, 4]
    engine.scheduler.preempt(request.slot)
    # Free: 4 (not full), 5 to 8, then tail first 3, 2, 1.
    assert engine.scheduler.pool.free_order() == [4, 5, 6, 7, 8, 3, 2, 1]
    pool = engine.scheduler.pool
    pool.share([3])  # somebody holds 3, so that it outlives 2 and 1
    taken = pool.take(7)
    assert set(taken.tolist()) == {1, 2, 4, 5, 6, 7, 8}
    pool.release(taken, 0)
    pool.release(pool.refs.nonzero()[0].astype("int32"), 1)
    assert engine.step().hits == {"a": 0}
