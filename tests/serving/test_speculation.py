"""Speculative decoding as the scheduler sees it: drafts are scheduled, verified, rolled back, and never trusted early."""

from __future__ import annotations

from typing import Any

import pytest

from tests.serving.driver import Engine, answer_token, own_tokens


def speculating(k: int = 3, **config: Any) -> Engine:
    engine = Engine(num_speculative_tokens=k, **config)
    engine.propose = k
    return engine


def test_a_decode_verifies_its_drafts_in_the_same_step() -> None:
    engine = speculating(3)
    engine.add("a", 5, max_tokens=20)
    assert engine.step().drafts == {}
    decided = engine.step()
    assert decided.sched == {"a": 4}
    assert decided.drafts == {"a": 3}


@pytest.mark.parametrize("accepted", [0, 1, 2, 3])
def test_rejected_drafts_are_taken_back(accepted: int) -> None:
    engine = speculating(3)
    engine.accept = lambda _, drafts: accepted
    engine.add("a", 5, max_tokens=20)
    engine.step()
    engine.step()
    # 5 prompt tokens, then 1 + 3 scheduled of which 3 - accepted are taken back.
    assert engine.computed("a") == 5 + 1 + accepted
    assert len(engine.answers["a"]) == 1 + 1 + accepted


def test_drafts_proposed_for_an_unfinished_chunk_are_ignored() -> None:
    engine = speculating(3, max_num_batched_tokens=10)
    request = engine.add("a", 25)
    engine.step()
    engine.scheduler.propose(request, 3)
    decided = engine.step()
    assert decided.sched == {"a": 10}
    assert decided.drafts == {}
    assert engine.step().sched == {"a": 5}


def test_drafts_are_cut_to_the_token_budget() -> None:
    engine = speculating(3, max_num_batched_tokens=6)
    engine.add("a", 1, max_tokens=20)
    engine.add("b", 1, max_tokens=20)
    engine.step()
    decided = engine.step()
    assert decided.sched == {"a": 4, "b": 2}
    assert decided.drafts == {"a": 3, "b": 1}


def test_drafts_do_not_reach_past_max_model_len() -> None:
    # 7 of 10 tokens are known and 6 computed. One position stays for the token sampled: n <= 10 - 6 - 1 = 3.
    engine = speculating(5, max_model_len=10)
    engine.add("a", 6, max_tokens=20)
    engine.step()
    decided = engine.step()
    assert decided.sched == {"a": 3}
    assert decided.drafts == {"a": 2}
    assert decided.finished == ["a"]
    assert len(engine.answers["a"]) == 4


def test_nothing_after_max_tokens_is_emitted_or_counted() -> None:
    engine = speculating(3)
    request = engine.add("a", 5, max_tokens=3)
    engine.step()
    # One token is out; four more were accepted, two are wanted.
    assert engine.step().finished == ["a"]
    assert request.output_tokens == 3
    assert request.reason == "length"


def test_nothing_after_a_stop_token_inside_the_accepted_drafts_is_emitted_or_counted() -> None:
    engine = speculating(4)
    request = engine.add("a", 5, max_tokens=50, stop_at=2)
    engine.step()
    assert engine.step().finished == ["a"]
    assert request.output_tokens == 3
    assert request.reason == "stop"
    assert engine.idle


def test_preemption_drops_drafts() -> None:
    engine = speculating(2, num_pages=4, page_tokens=4, enable_prefix_caching=False)
    engine.accept = lambda *_: 0
    engine.add("a", 4, max_tokens=6)
    engine.add("b", 4, max_tokens=6)
    engine.step()
    engine.step()  # 1 + 2 drafts each: two pages each
    # 5 computed, 6 to 8 wanted: fits. Then a wants token 9.
    history = engine.run()
    preempted_at = next(i for i, d in enumerate(history) if d.preempted)
    resumed = next(d for d in history[preempted_at:] if d.resumed)
    assert history[preempted_at].preempted == ["b"]
    assert resumed.drafts == {}
    assert engine.idle


def test_pages_full_of_drafts_are_not_registered_before_they_are_verified() -> None:
    # Page of 4. After the prompt (4 tokens) 5 are known; a step computes token 5 and drafts 6 to 8: page 2 is full of
    # what nobody has verified.
    engine = speculating(3, page_tokens=4)
    engine.add("a", 4, max_tokens=20)
    engine.step()
    prompt = [*own_tokens("a", 4), *(answer_token("a", i) for i in range(5))]
    engine.plan()
    engine.add("b", prompt, max_tokens=1)
    assert engine.plan().hits == {"b": 4}


def test_pages_full_of_drafts_are_not_registered_where_a_trace_names_them_either() -> None:
    engine = speculating(3, page_tokens=4)
    engine.accept = lambda *_: 0
    engine.add("a", 4, max_tokens=20, keys=["k0", "k1", "k2"])
    engine.step()
    engine.step()
    engine.add("b", 12, max_tokens=1, keys=["k0", "k1", "k2"])
    # 6 tokens of a are known and 5 computed: one full page, though drafts of this very step fill the second.
    decided = engine.step()
    assert decided.drafts == {"a": 3}
    assert decided.hits == {"b": 4}


def test_pages_of_verified_drafts_are_registered() -> None:
    engine = speculating(3, page_tokens=4)
    engine.add("a", 4, max_tokens=20)
    engine.step()
    engine.step()
    prompt = [*own_tokens("a", 4), *(answer_token("a", i) for i in range(5))]
    engine.add("b", prompt, max_tokens=1)
    assert engine.step().hits == {"b": 8}


def test_pages_of_rejected_drafts_are_registered_only_with_their_final_tokens() -> None:
    engine = speculating(3, page_tokens=4)
    engine.accept = lambda *_: 1
    engine.add("a", 4, max_tokens=20)
    engine.step()
    engine.step()  # 4 + 1 + 1 tokens are computed: page 2 holds rejected drafts at its end
    prompt = [*own_tokens("a", 4), *(answer_token("a", i) for i in range(5))]
    engine.add("b", prompt, max_tokens=1)
    decided = engine.step()  # a computes 7 (known) and drafts 8 to 10; page 2 ends with an unverified draft
    assert decided.hits == {"b": 4}


# ---- padding to a uniform decode batch -----------------------------------------------------------------------------


def test_a_one_token_admission_beside_decodes_is_padded_with_placeholder_drafts() -> None:
    engine = speculating(3)
    engine.add("a", 5, max_tokens=20)
    engine.step()
    engine.add("b", 1)
    decided = engine.step()
    assert decided.sched == {"a": 4, "b": 4}
    assert decided.drafts == {"a": 3, "b": 3}
    # The padding gave no token beyond the one sampled, and its three positions are taken back.
    assert len(engine.answers["b"]) == 1
    assert engine.computed("b") == 1


def test_a_prompt_that_is_all_cached_but_for_one_token_is_padded_even_when_alone() -> None:
    engine = speculating(3)
    prompt = own_tokens("shared", 17)
    engine.add("a", prompt, max_tokens=1)
    engine.step()
    engine.add("b", prompt, max_tokens=5)
    decided = engine.step()
    assert decided.hits == {"b": 16}
    assert decided.sched == {"b": 4}


def test_one_token_prompts_that_start_a_batch_are_not_padded() -> None:
    # Nothing was running when the step began, so there is no decode batch to keep uniform.
    engine = speculating(3)
    engine.add("a", 1)
    engine.add("b", 1)
    assert engine.step().sched == {"a": 1, "b": 1}


def test_nothing_is_padded_beside_a_running_prompt_chunk() -> None:
    engine = speculating(3, long_prefill_token_threshold=8)
    engine.add("a", 20)
    engine.add("b", 5)
    engine.step()
    engine.add("c", 1)
    assert engine.step().sched == {"a": 8, "b": 4, "c": 1}


def test_padding_that_does_not_fit_the_budget_stops_admission() -> None:
    engine = speculating(3, max_num_batched_tokens=7)
    engine.add("a", 5, max_tokens=20)
    engine.step()
    engine.add("b", 1)
    decided = engine.step()
    assert decided.sched == {"a": 4}
    assert decided.waiting == ["b"]


def test_no_padding_where_max_model_len_leaves_no_room_for_it() -> None:
    # 1 + 3 padded tokens and one to sample need max_model_len 5.
    for max_model_len, count in ((5, 4), (4, 1)):
        engine = speculating(3, max_model_len=max_model_len)
        engine.propose = 0
        engine.add("a", 1)
        engine.step()
        engine.add("b", 1)
        assert engine.step().sched["b"] == count


# ---- a drafter with KV of its own ------------------------------------------------------------------------------------


def test_a_draft_model_takes_an_input_slot_from_each_scheduled_request() -> None:
    for draft_has_kv, second in ((False, 3), (True, 1)):
        engine = speculating(2, draft_has_kv=draft_has_kv, max_num_batched_tokens=10)
        engine.add("a", 7)
        engine.add("b", 7)
        # 10 - 7 = 3 are left; with a draft model a costs 8, and b one slot of the remaining 2.
        assert engine.step().sched == {"a": 7, "b": second}


def test_a_draft_model_that_leaves_no_input_slot_ends_the_step() -> None:
    engine = speculating(2, draft_has_kv=True, max_num_batched_tokens=9)
    engine.add("a", 7)
    engine.add("b", 7)
    # 9 - 8 = 1 slot, which b's own drafting would take: nothing of b can be scheduled.
    assert engine.step().sched == {"a": 7}


def test_a_draft_model_has_look_ahead_slots_allocated() -> None:
    for draft_has_kv, pages in ((False, 1), (True, 2)):
        engine = speculating(2, draft_has_kv=draft_has_kv, page_tokens=4)
        engine.add("a", 3)
        engine.plan()
        # 3 tokens fit one page of 4; 3 + 2 look-ahead slots need two.
        assert len(engine.pages("a")) == pages
