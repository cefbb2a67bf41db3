"""Failures that real engines had, as scenarios. Those of pools that are too small are in `test_never_fits`."""

from __future__ import annotations

import pytest

from serving.policies import BatchPolicy
from serving.request import TokenKeys
from serving.step import Step
from tests.serving.driver import Engine, own_tokens


def test_a_long_prompt_admitted_because_its_first_chunk_fits_is_not_thrown_out_for_ever() -> None:
    # Without the full-prompt gate: the long prompt starts, fills memory, is preempted by older decodes, starts again.
    engine = Engine(num_pages=12, page_tokens=4, max_num_batched_tokens=8, reserve_full_isl=False)
    for i in range(3):
        engine.add(i, 4, max_tokens=8)
    engine.add("long", 40, max_tokens=2)
    engine.run(limit=200)
    # Each time it is thrown out an older request had taken another of its at most 3 pages.
    assert engine.requests["long"].preemptions <= 3 * 3
    needed = 3 * (4 + 7) + 41
    assert engine.tokens_scheduled <= 3 * needed
    assert engine.idle


def test_a_preempted_request_comes_before_an_equal_one_that_arrived_later_and_never_ran() -> None:
    engine = Engine(num_pages=3, page_tokens=4, queue_order="priority")
    engine.add("a", 4, max_tokens=3)
    engine.add("b", 4, max_tokens=3)
    engine.step()
    engine.add("later", 4)
    # Equal priorities: arrival decides, whether somebody ran before or not.
    decided = engine.step()
    assert decided.preempted == ["b"]
    assert decided.waiting == ["b", "later"]
    engine.step()
    assert engine.step().resumed == ["b"]


def test_an_urgent_request_waits_for_a_seat_as_in_vllm() -> None:
    engine = Engine(max_num_seqs=1, queue_order="priority")
    engine.add("low", 4, max_tokens=3, priority=5)
    engine.step()
    engine.add("high", 4, priority=0)
    assert engine.step().running == ["low"]
    assert engine.step().finished == ["low"]
    assert engine.step().running == ["high"]


class Displacing(BatchPolicy):
    """vLLM's step, except that a more urgent request takes the seat of the least urgent running one."""

    def schedule(self, step: Step) -> None:
        waiting = step.scheduler.waiting
        if waiting and not step.seats:
            least = max(step.running, key=lambda r: (r.priority, r.arrival_s))
            if waiting.peek().priority < least.priority:
                step.preempt(least)
        step.continue_running()
        step.admit_waiting()


def test_a_policy_may_displace_a_less_urgent_request_and_equals_do_not_ping_pong() -> None:
    engine = Engine(Displacing(), max_num_seqs=1, queue_order="priority")
    low = engine.add("low", 4, max_tokens=3, priority=5)
    engine.step()
    engine.add("high", 4, max_tokens=3, priority=0)
    decided = engine.step()
    assert decided.preempted == ["low"]
    assert decided.running == ["high"]
    equal = engine.add("equal", 4, max_tokens=3, priority=0)
    history = engine.run()
    assert not any(d.preempted for d in history)
    assert [i for d in history for i in d.finished] == ["high", "equal", "low"]
    assert low.preemptions == 1
    assert equal.preemptions == 0


def test_requests_that_wait_hold_no_pages_so_a_blocked_head_cannot_block_for_ever() -> None:
    engine = Engine(num_pages=6, page_tokens=4, enable_prefix_caching=False)
    engine.add("a", 4, max_tokens=12)
    engine.add("b", 4, max_tokens=12)
    engine.add("big", 20, max_tokens=4)
    engine.add("small", 1, max_tokens=2)
    while engine.scheduler.num_unfinished:
        decided = engine.step()
        held = sum(len(engine.pages(r.id)) for r in engine.scheduler.running())
        assert held + engine.free == 6
        # The watchdog: somebody is always served.
        assert decided.sched
    assert engine.idle


@pytest.mark.parametrize("pages", [1, 2, 5])
def test_a_fully_cached_prompt_of_whole_pages_still_has_tokens_to_compute(pages: int) -> None:
    prompt = own_tokens("shared", 16 * pages)
    engine = Engine()
    for name in "ab":
        engine.add(name, prompt, max_tokens=1)
        decided = engine.step()
    assert decided.sched == {"b": 16}
    assert decided.hits == {"b": 16 * (pages - 1)}


@pytest.mark.parametrize("answer", range(1, 10))
@pytest.mark.parametrize("identity", ["tokens", "private"])
def test_a_preempted_request_that_hits_its_own_pages_never_counts_more_than_it_has(
    answer: int, identity: str
) -> None:
    # Preempted with any number of tokens around a page end; what it finds again plus what is computed is what it knows.
    keys = {"keys": ()} if identity == "private" else {}
    engine = Engine(num_pages=20, page_tokens=4)
    request = engine.add("a", 7, max_tokens=20, **keys)
    for _ in range(answer):
        engine.step()
    engine.scheduler.preempt(request.slot)
    decided = engine.step()
    assert decided.resumed == ["a"]
    assert decided.hits["a"] + decided.sched["a"] == 7 + answer
    # 7 + answer tokens are known and all but the last computed: every full page of those, but not the last token's.
    assert decided.hits["a"] == (7 + answer - 1) // 4 * 4


@pytest.mark.parametrize("known", range(14, 20))
@pytest.mark.parametrize("caching", [True, False])
def test_after_a_preemption_the_table_holds_exactly_the_pages_its_tokens_need(
    known: int, caching: bool
) -> None:
    # Recomputation around a page end (16): one less, equal, one more.
    engine = Engine(num_pages=20, page_tokens=4, enable_prefix_caching=caching)
    request = engine.add("a", 10, max_tokens=30)
    for _ in range(known - 10):
        engine.step()
    engine.scheduler.preempt(request.slot)
    for _ in range(8):
        engine.step()
        # The newest token is known and not yet computed, so it has no page of its own yet.
        assert len(engine.pages("a")) == -(-engine.computed("a") // 4)


@pytest.mark.parametrize("chunks", range(1, 7))
@pytest.mark.parametrize("committed", [True, False])
@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_request_aborted_after_any_chunk_leaves_no_trap_in_the_prefix_index(
    chunks: int, committed: bool, asynchronous: bool
) -> None:
    prompt = own_tokens("shared", 30)
    engine = Engine(num_pages=10, page_tokens=4, max_num_batched_tokens=5, async_scheduling=asynchronous)
    aborted = engine.add("aborted", prompt)
    for _ in range(chunks - 1):
        engine.step()
    engine.plan()
    if committed:
        engine.commit()
    engine.scheduler.abort(aborted)
    assert engine.free == 10
    engine.scheduler.check()
    while engine.in_flight:
        engine.commit()
    engine.add("again", prompt, max_tokens=5)
    decided = engine.plan()
    # Full pages of what was scheduled may be found, and nothing beyond.
    assert decided.hits["again"] == min(5 * chunks // 4 * 4, 28)
    if not asynchronous:
        engine.commit()
    engine.run()
    assert len(engine.answers["again"]) == 5
    assert engine.idle


def test_a_constant_hash_breaks_no_account() -> None:
    # The scheduler sees hashes only and cannot know that two equal ones stand for different tokens; an engine that
    # trusts them would read the wrong KV. What must hold all the same: lengths, pages and progress.
    class Constant:
        def __len__(self) -> int:
            return 8

        def __getitem__(self, page: int, /) -> str:
            return "always the same"

    engine = Engine(num_pages=12, page_tokens=4)
    for i in range(6):
        engine.add(i, 20 + i, max_tokens=1 + i, keys=Constant())
    engine.run(limit=200)
    assert [len(engine.answers[i]) for i in range(6)] == [1, 2, 3, 4, 5, 6]
    assert engine.idle


def test_page_hashes_are_whole_digests_and_chained() -> None:
    tokens = own_tokens("a", 48)
    keys = TokenKeys(16, tokens)
    assert len({keys[i] for i in range(3)}) == 3
    assert all(len(keys[i]) == 32 for i in range(3))  # SHA-256, not truncated
    moved = TokenKeys(16, [*tokens[16:32], *tokens[16:32]])
    # The same page of tokens under another parent, or under none, has another key.
    assert len({keys[1], moved[0], moved[1]}) == 3


def test_page_hashes_do_not_depend_on_how_tokens_were_appended() -> None:
    tokens = own_tokens("a", 40)
    at_once = TokenKeys(16, tokens)
    one_by_one = TokenKeys(16)
    for token in tokens:
        one_by_one.extend([token])
    assert len(at_once) == len(one_by_one) == 2
    assert [at_once[i] for i in range(2)] == [one_by_one[i] for i in range(2)]
