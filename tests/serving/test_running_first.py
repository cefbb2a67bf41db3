"""The first loop of a step: running sequences, in order of admission, and what happens when pages run out."""

from __future__ import annotations

from tests.serving.driver import Engine


def test_running_sequences_are_scheduled_in_order_of_admission() -> None:
    engine = Engine(max_num_batched_tokens=3)
    for name in "abc":
        engine.add(name, 1)
    assert engine.step().sched == {"a": 1, "b": 1, "c": 1}
    # All three decode; with a budget of 3 that is one token each, still in order of admission.
    assert list(engine.step().sched) == ["a", "b", "c"]


def test_an_earlier_prompt_chunk_comes_before_later_decodes() -> None:
    engine = Engine(max_num_batched_tokens=20, long_prefill_token_threshold=15)
    engine.add("a", 50)
    engine.add("b", 5)
    assert engine.step().sched == {"a": 15, "b": 5}
    # b decodes now, but there is no decode phase: a stands before it and its chunk is served first.
    assert list(engine.step().sched.items()) == [("a", 15), ("b", 1)]


def test_a_decode_behind_a_chunk_that_eats_the_budget_gets_nothing() -> None:
    engine = Engine(max_num_batched_tokens=10, long_prefill_token_threshold=8)
    engine.add("long", 40)
    engine.add("short", 1)
    engine.add("other", 30)
    assert engine.step().sched == {"long": 8, "short": 1, "other": 1}
    # 8 for long, 1 for short's decode, 1 of other's 29 remaining prompt tokens.
    assert engine.step().sched == {"long": 8, "short": 1, "other": 1}
    engine.add("last", 1)
    # The budget is used up before the queue is looked at.
    assert engine.step().waiting == ["last"]


def test_a_decode_that_the_budget_does_not_reach_gets_nothing_and_is_named() -> None:
    engine = Engine(max_num_batched_tokens=8, long_prefill_token_threshold=7)
    engine.add("long", 30)
    engine.add("short", 1)
    engine.add("other", 1)
    assert engine.step().sched == {"long": 7, "short": 1}
    assert engine.step().starved == []  # other waits; that is not a gap in anybody's stream
    engine.scheduler.abort(engine.requests["short"])
    assert engine.step().sched == {"long": 7, "other": 1}
    engine.scheduler.abort(engine.requests["other"])
    engine.add("late", 1)
    # 9 tokens of long are left: 7 and late's prompt, then 2 and late's first decode.
    assert engine.step().sched == {"long": 7, "late": 1}
    assert engine.step().sched == {"long": 2, "late": 1}

    # Alone long is not capped: it takes the whole budget, and a decode behind it, if there were one, nothing. With
    # speculation a decode wants 1 + k: three of them share a budget of 8 as 4, 4 and nothing.
    engine = Engine(max_num_batched_tokens=8, num_speculative_tokens=3)
    engine.propose = 3
    for name in "abc":
        engine.add(name, 1, max_tokens=20)
    engine.step()
    decided = engine.step()
    assert decided.sched == {"a": 4, "b": 4}
    assert decided.starved == ["c"]


def test_what_does_not_fit_the_budget_is_cut_to_it() -> None:
    engine = Engine(max_num_batched_tokens=16)
    engine.add("a", 10)
    engine.add("b", 10)
    assert engine.step().sched == {"a": 10, "b": 6}
    # One decode of a, then the 4 remaining prompt tokens of b.
    assert engine.step().sched == {"a": 1, "b": 4}


def test_long_prefill_threshold_caps_a_chunk_when_somebody_else_is_there() -> None:
    engine = Engine(long_prefill_token_threshold=10)
    engine.add("a", 50)
    engine.add("b", 25)
    assert engine.step().sched == {"a": 10, "b": 10}
    assert engine.step().sched == {"a": 10, "b": 10}
    assert engine.step().sched == {"a": 10, "b": 5}


def test_long_prefill_threshold_does_not_bind_a_lone_request() -> None:
    # The threshold protects others; alone there is nobody to protect.
    engine = Engine(long_prefill_token_threshold=10)
    engine.add("a", 50)
    assert engine.step().sched == {"a": 50}


def test_a_waiting_request_counts_as_somebody_to_protect() -> None:
    # One seat: b cannot run, yet it exists, so a's chunk is capped.
    engine = Engine(long_prefill_token_threshold=10, max_num_seqs=1)
    engine.add("a", 50)
    engine.add("b", 5)
    assert engine.step().sched == {"a": 10}


def test_num_computed_advances_when_a_step_is_planned() -> None:
    engine = Engine(max_num_batched_tokens=16)
    engine.add("a", 40)
    engine.plan()
    assert engine.computed("a") == 16


def test_an_unfinished_chunk_samples_nothing() -> None:
    engine = Engine(max_num_batched_tokens=16)
    engine.add("a", 40, max_tokens=1)
    for _ in range(2):
        engine.step()
        assert engine.answers["a"] == []
    # 8 tokens complete the prompt and give the only answer token.
    decided = engine.step()
    assert decided.sched == {"a": 8}
    assert decided.finished == ["a"]
    assert len(engine.answers["a"]) == 1


# ---- preemption ------------------------------------------------------------------------------------------------------
# Pages of 4 tokens throughout. A prompt of 4 takes one page and its first decode another.


def full_pool(**config: object) -> Engine:
    """Three requests of one full page each in a pool of four: the first decode takes the last free page."""
    engine = Engine(num_pages=4, page_tokens=4, **config)
    for name in "abc":
        engine.add(name, 4, priority={"a": 1, "b": 2, "c": 0}[name])
    assert set(engine.step().sched) == {"a", "b", "c"}
    assert engine.free == 1
    return engine


def test_fcfs_preempts_the_newest_running_sequence() -> None:
    engine = full_pool()
    # a takes the fourth page; b needs one: c, the newest, gives up its page, which b gets.
    decided = engine.step()
    assert decided.preempted == ["c"]
    assert decided.sched == {"a": 1, "b": 1}
    assert decided.running == ["a", "b"]


def test_fcfs_preempts_the_sequence_itself_when_it_is_the_newest() -> None:
    engine = Engine(num_pages=3, page_tokens=4)
    engine.add("a", 4)
    engine.add("b", 4)
    engine.step()
    # a takes the third page; b, last in order, finds none and is its own victim: the loop stops there.
    decided = engine.step()
    assert decided.preempted == ["b"]
    assert decided.sched == {"a": 1}
    assert decided.waiting == ["b"]


def test_fcfs_stops_the_loop_when_a_sequence_preempted_itself() -> None:
    # Nobody can stand behind the newest, so after a self-preemption nothing else is scheduled.
    engine = Engine(num_pages=3, page_tokens=4)
    for name in "abc":
        engine.add(name, 4)
    engine.step()
    # No page is free: a evicts c and takes its page; b then is the newest and preempts itself.
    decided = engine.step()
    assert decided.preempted == ["c", "b"]
    assert decided.sched == {"a": 1}


def test_preempted_requests_go_to_the_front_of_the_queue_the_oldest_first() -> None:
    engine = Engine(num_pages=3, page_tokens=4)
    for name in "abcd":
        engine.add(name, 4)
    assert engine.step().waiting == ["d"]
    # c is preempted first and b after it, each put in front: b, c, then d who never ran.
    assert engine.step().waiting == ["b", "c", "d"]


def test_nobody_is_admitted_in_a_step_with_a_preemption() -> None:
    engine = Engine(num_pages=5, page_tokens=4)
    engine.add("a", 4)
    engine.add("b", 12)  # three pages
    engine.step()
    engine.add("c", 1)
    # a takes the fifth page; b is full and preempts itself, which frees three pages; c fits but must wait one step.
    decided = engine.step()
    assert decided.preempted == ["b"]
    assert decided.free == 3
    assert decided.waiting == ["b", "c"]


def test_nobody_more_urgent_is_admitted_in_a_step_with_a_preemption_either() -> None:
    engine = Engine(num_pages=5, page_tokens=4, queue_order="priority")
    engine.add("high", 4, priority=0)
    engine.add("low", 12, priority=2)
    engine.step()  # 1 + 3 pages
    engine.add("middle", 1, priority=1)
    # high takes the fifth page; low is full and its own victim. middle is the head of the queue and would fit.
    decided = engine.step()
    assert decided.preempted == ["low"]
    assert decided.sched == {"high": 1}
    assert decided.waiting == ["middle", "low"]
    assert engine.step().sched == {"high": 1, "middle": 1}


def test_preemption_frees_all_pages_and_keeps_the_tokens_generated() -> None:
    engine = Engine(num_pages=4, page_tokens=4, enable_prefix_caching=False)
    engine.add("a", 4, max_tokens=9)
    engine.add("b", 3, max_tokens=9)
    engine.step()
    engine.step()  # a: 2 pages, b: its page is full with 4 tokens
    decided = engine.step()  # b takes the fourth page
    assert decided.free == 0
    for _ in range(2):
        decided = engine.step()
    # a has used its second page (tokens 5 to 8): token 9 needs a third page, so b is preempted.
    decided = engine.step()
    assert decided.preempted == ["b"]
    assert engine.requests["b"].num_tokens == 3 + len(engine.answers["b"]) == 3 + 5
    assert decided.free == 1
    engine.run()
    assert {name: len(answer) for name, answer in engine.answers.items()} == {"a": 9, "b": 9}
    assert engine.idle


def test_a_preempted_request_recomputes_prompt_and_answer() -> None:
    engine = Engine(num_pages=3, page_tokens=4, enable_prefix_caching=False)
    engine.add("a", 4, max_tokens=3)
    engine.add("b", 4, max_tokens=3)
    engine.step()
    assert engine.step().preempted == ["b"]
    assert engine.step().sched == {"a": 1}  # a finishes here
    # b had produced one token at its prefill: 5 tokens are computed again.
    decided = engine.step()
    assert decided.sched == {"b": 5}
    assert decided.resumed == ["b"]


def test_priority_victim_is_the_largest_priority_anywhere_in_the_batch() -> None:
    engine = full_pool(queue_order="priority")
    # Admitted in order of priority: c (0), a (1), b (2). c takes the fourth page; a needs one, b gives up its own.
    decided = engine.step()
    assert decided.preempted == ["b"]
    assert decided.sched == {"c": 1, "a": 1}


def test_priority_ties_are_broken_by_arrival_the_latest_is_preempted() -> None:
    engine = Engine(num_pages=4, page_tokens=4, queue_order="priority")
    engine.add("late", 4, arrival_s=9.0)
    engine.add("early", 4, arrival_s=1.0)
    engine.add("middle", 4, arrival_s=5.0)
    assert list(engine.step().sched) == ["early", "middle", "late"]
    assert engine.step().preempted == ["late"]


def test_a_priority_victim_already_in_the_step_gives_its_tokens_back() -> None:
    # Pages of 4, five of them. low (priority 2) runs first with 8 tokens, high (priority 0) joins with 8: one page free.
    engine = Engine(num_pages=5, page_tokens=4, queue_order="priority", max_num_batched_tokens=16)
    engine.add("low", 8, priority=2)
    engine.step()
    engine.add("high", 8, priority=0)
    # low takes page 3 for its decode, high pages 4 and 5.
    assert engine.step().sched == {"low": 1, "high": 8}
    # low's third page has room, so low is scheduled first (1 token); high needs a page, none is free: low, scheduled
    # though it is, is the victim; its token is refunded and it is not in the step.
    decided = engine.step()
    assert decided.sched == {"high": 1}
    assert decided.preempted == ["low"]


def test_a_refunded_victim_leaves_its_budget_to_those_behind_it() -> None:
    # Budget 2: low and high take one each, and mid would get nothing. As low is refunded, mid is served.
    engine = Engine(num_pages=6, page_tokens=4, queue_order="priority", max_num_batched_tokens=9)
    engine.add("low", 9, priority=2)
    engine.step()  # 3 pages, room for 3 tokens
    engine.add("high", 4, priority=0)
    engine.step()
    engine.add("mid", 4, priority=1)
    engine.step()  # low 11 tokens, high takes page 5 for its fifth token, mid takes page 6
    decided = engine.step()
    # low computes token 12 (fits), high token 6 (fits); mid needs a page: the victim is low, which was in the step.
    assert decided.preempted == ["low"]
    assert decided.sched == {"high": 1, "mid": 1}


def test_when_a_victim_before_it_is_removed_nobody_behind_is_skipped() -> None:
    engine = Engine(num_pages=6, page_tokens=4, queue_order="priority")
    engine.add("low", 8, priority=2)
    engine.step()
    engine.add("a", 4, priority=0)
    engine.add("b", 3, priority=1)
    engine.add("c", 1, priority=1)
    assert engine.step().sched == {"low": 1, "a": 4, "b": 3, "c": 1}  # 3 + 1 + 1 + 1 pages: none is left
    # a needs a page: low, first in order and already in the step, goes; b and c, behind a, are served all the same.
    decided = engine.step()
    assert decided.preempted == ["low"]
    assert decided.sched == {"a": 1, "b": 1, "c": 1}


def test_under_priority_a_self_preempted_sequence_does_not_end_the_loop() -> None:
    engine = Engine(num_pages=4, page_tokens=4, queue_order="priority")
    engine.add("low", 7, priority=2)
    engine.step()  # two pages, room for one token
    engine.add("high", 6, priority=0)
    assert engine.step().sched == {"low": 1, "high": 6}  # all four pages in use; high has room for two tokens
    # low, first in order, needs a page and is its own victim; high, behind it, is scheduled all the same.
    decided = engine.step()
    assert decided.preempted == ["low"]
    assert decided.sched == {"high": 1}


def test_a_preempted_request_waits_in_its_place_of_the_priority_order() -> None:
    engine = full_pool(queue_order="priority")
    engine.add("d", 4, priority=1)
    engine.add("e", 4, priority=3)
    # b (priority 2) is preempted: it stands behind d (1) and before e (3), not at the front.
    decided = engine.step()
    assert decided.preempted == ["b"]
    assert decided.waiting == ["d", "b", "e"]
