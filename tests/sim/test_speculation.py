"""Drafts in the twin: how many steps they save, what they cost in time and memory, and what is recorded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodel.formats import gemm_format
from costmodel.memory import weight_bytes
from costmodel.model import load_model
from costmodel.pricer import StepPricer
from costmodel.profile import load_profile
from costmodel.speculation import DraftPrices, closed_form_speedup, expected_tokens, verification_s
from serving.config import SchedulerConfig
from serving.errors import UsageError
from serving.speculative_config import parse_speculative_config
from sim.deployment import Deployment, build, simulate
from sim.latency import inter_token_gaps, token_seconds
from sim.metrics import summarise
from sim.record import RunRecord, Status
from sim.speculation import Speculation
from sim.workload.types import Workload
from sim.world import run_world
from tests.sim.worlds import LinearPricer, make_workload

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "acceptance": 0.5}
ROOMY = SchedulerConfig(num_pages=4096, page_tokens=16, max_num_seqs=32, max_model_len=4096)


def drafts(k: int = 4, acceptance: Any = 0.7, method: str = "ngram", **more: Any) -> Speculation:
    own = {"draft_model": {"model": "draft"}, "self": {"num_layers": 1}}.get(method, {})
    config = parse_speculative_config(
        {"method": method, "num_speculative_tokens": k, "acceptance": acceptance, **own, **more}
    )
    prices = None
    if method in ("draft_model", "self"):
        prices = DraftPrices(LinearPricer(fixed_s=0.001), own_cache=method == "draft_model", pass_s=0.0)
    return Speculation(config, 4, prices, verify_s=0.0)


def run(
    workload: Workload, speculation: Speculation | None, config: SchedulerConfig = ROOMY, **how: Any
) -> RunRecord:
    if speculation is not None:
        config = speculation.config.limits(config)
    return run_world(workload, config, LinearPricer(), speculation=speculation, **how)


def deployment(config: Any, **more: Any) -> Deployment:
    return Deployment(model="llama-3.1-8b", gpu="h200", speculative_config=config, **more)


def one(output: int = 100, count: int = 1) -> Workload:
    return make_workload([0.0] * count, [20] * count, [output] * count)


# ---- how many steps ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(("k", "output"), [(1, 21), (4, 101), (3, 50)])
def test_drafts_that_always_stand_give_k_plus_1_tokens_a_step(
    k: int, output: int, asynchronous: bool
) -> None:
    config = replace(ROOMY, async_scheduling=asynchronous)
    record = run(one(output), drafts(k, 1.0, "draft_model"), config)
    # One step for the prompt and its first token; the last step may give fewer.
    assert len(record.steps) == 1 + -(-(output - 1) // (k + 1))
    assert record.requests.output_tokens.tolist() == [output]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_drafts_that_never_stand_give_one_token_a_step(asynchronous: bool) -> None:
    config = replace(ROOMY, async_scheduling=asynchronous)
    record = run(one(40), drafts(4, 0.0, "draft_model"), config)
    assert len(record.steps) == 40
    assert record.tokens.per_step is not None
    assert record.tokens.per_step.tolist() == [1]


def test_the_mean_length_is_that_of_the_geometric_law() -> None:
    record = run(one(400, 20), drafts(3, 0.6))
    assert record.drafts is not None
    assert record.drafts.mean_acceptance_length == pytest.approx(expected_tokens(0.6, 3), rel=0.02)
    assert record.drafts.acceptance_per_pos == pytest.approx([0.6, 0.36, 0.216], abs=0.02)
    assert record.drafts.conditional_per_pos == pytest.approx([0.6, 0.6, 0.6], abs=0.03)


def test_load_and_failure_shorten_drafts() -> None:
    for more, most in (
        ({"disable_by_batch_size": 7}, 0),
        ({"num_speculative_tokens_per_batch_size": [[1, 4, 4], [5, 32, 2]]}, 2),
    ):
        record = run(one(40, 8), drafts(4, 0.5, **more))
        assert record.drafts is not None
        # Eight run together until one of them ends.
        assert record.drafts.num_draft_tokens <= most * record.drafts.num_drafts + 4 * 40
    whole = run(one(200, 8), drafts(6, 0.4)).drafts
    careful = run(one(200, 8), drafts(6, 0.4, min_draft_acceptance=0.3)).drafts
    assert whole is not None
    assert careful is not None
    assert careful.acceptance_rate > 1.5 * whole.acceptance_rate
    assert careful.mean_acceptance_length > 0.85 * whole.mean_acceptance_length


def test_requests_under_beta_differ() -> None:
    record = run(one(300, 12), drafts(4, {"beta": [1, 1]}))
    lengths_s = record.requests.engine_done_s - record.requests.prefill_done_s
    assert lengths_s.max() > 2 * lengths_s.min()


# ---- what is recorded ----------------------------------------------------------------------------------------------


@st.composite
def runs(draw: st.DrawFn) -> tuple[Workload, Speculation, SchedulerConfig]:
    count = draw(st.integers(1, 9))
    workload = make_workload(
        np.cumsum(draw(st.lists(st.sampled_from([0.0, 0.01, 0.4]), min_size=count, max_size=count))).tolist(),
        draw(st.lists(st.integers(1, 60), min_size=count, max_size=count)),
        draw(st.lists(st.integers(1, 60), min_size=count, max_size=count)),
        segments=[[(20, 1)] if draw(st.booleans()) else [] for _ in range(count)],
    )
    asynchronous = draw(st.booleans())
    method = "draft_model" if asynchronous else draw(st.sampled_from(["ngram", "draft_model", "self"]))
    acceptance = draw(st.sampled_from([0.0, 0.5, 1.0, {"beta": [2, 1]}, {"rates": 0.8, "draft_rate": 0.5}]))
    more = draw(st.sampled_from([{}, {"disable_by_batch_size": 2}, {"min_draft_acceptance": 0.4}]))
    config = SchedulerConfig(
        num_pages=draw(st.integers(20, 40)),
        page_tokens=8,
        max_num_seqs=draw(st.integers(1, 6)),
        max_num_batched_tokens=draw(st.integers(16, 64)),
        max_model_len=160,
        async_scheduling=asynchronous,
        enable_prefix_caching=draw(st.booleans()),
    )
    return workload, drafts(draw(st.integers(1, 5)), acceptance, method, **more), config


@settings(max_examples=60, deadline=None)
@given(runs())
def test_every_token_has_its_time_and_nothing_is_lost(
    case: tuple[Workload, Speculation, SchedulerConfig],
) -> None:
    workload, speculation, config = case
    record = run(workload, speculation, config)
    r, t = record.requests, record.tokens
    assert (r.status == Status.FINISHED).all()
    assert (r.output_tokens == np.minimum(r.max_output_tokens, 160 - r.prompt_tokens)).all()
    assert t.per_step is not None
    owner = np.repeat(np.arange(len(r)), np.diff(t.offsets))
    assert (np.bincount(owner, t.count * t.per_step, len(r)) == r.output_tokens).all()
    for row in range(len(r)):
        times_s, events_s = record.engine_token_times_s(row), record.event_times_s(row)
        assert len(times_s) == r.output_tokens[row]
        assert (np.diff(times_s) >= 0).all()
        assert (np.diff(events_s) > 0).all()
        assert np.unique(times_s).tolist() == events_s.tolist()
        assert times_s[0] == r.prefill_done_s[row]
        assert times_s[-1] == r.engine_done_s[row]
    everyone = np.ones(len(r), np.bool_)
    assert len(token_seconds(record, everyone)) == r.output_tokens.sum()
    gaps = inter_token_gaps(record)
    assert gaps.size == sum(len(record.event_times_s(row)) - 1 for row in range(len(r)))
    d = record.drafts
    assert d is not None
    assert 0 <= d.num_accepted_tokens <= d.num_draft_tokens
    assert sum(d.accepted_per_pos) == d.num_accepted_tokens
    again = run(workload, speculation, config)
    assert again.steps.end_s.tolist() == record.steps.end_s.tolist()
    assert again.tokens.first_step.tolist() == t.first_step.tolist()


def test_tpot_counts_tokens_and_itl_counts_events() -> None:
    record = run(one(101), drafts(4, 1.0))
    summary = summarise(record)
    steps_s = np.diff(record.steps.end_s)
    assert summary.tpot.mean_s == pytest.approx(steps_s.sum() / 100)
    assert summary.itl.count == 20
    assert summary.itl.mean_s == pytest.approx(steps_s.mean())


def test_plain_runs_say_nothing_of_drafts() -> None:
    record = run(one(), None)
    assert record.drafts is None
    assert record.tokens.per_step is None


# ---- what it costs -------------------------------------------------------------------------------------------------


def test_a_step_costs_its_verification_and_the_passes_that_draft() -> None:
    k, context = 3, 21
    target, draft = LinearPricer(), LinearPricer(fixed_s=0.001)
    record = run(one(60), drafts(k, 1.0, "draft_model"))
    # The second step: one known token and k drafts, over 20 + 4 tokens of context.
    verified = target.step_s(1 + k, 1 + k, (), 1, context + k, context + k)
    end = context + k
    first = draft.step_s(1 + k + 1, 1, (), 1, end + 1, end + 1)
    later = sum(draft.step_s(1, 1, (), 1, end + n, end + n) for n in range(2, k + 1))
    assert record.steps.gpu_s[1] == pytest.approx(verified + first + later, rel=1e-12)
    own = run(one(60), drafts(k, 1.0, "self"))
    passes = sum(draft.step_s(1, 1, (), 1, end + n, end + n) for n in range(1, k + 1))
    assert own.steps.gpu_s[1] == pytest.approx(verified + passes, rel=1e-12)


def test_a_draft_that_needs_a_second_query_tile_reads_the_cache_twice() -> None:
    pricer = LinearPricer(fixed_s=0.0, token_s=0.0, context_s=1.0)
    how: dict[str, Any] = {
        "num_tokens": 8, "num_sampled": 8, "prefills": (), "num_decodes": 2,
        "decode_context_sum": 100, "decode_context_max": 60, "verify_s": 0.0,
    }  # fmt: skip
    assert verification_s(pricer, 8, longest_draft=7, **how) == 100.0  # 8 x 8 rows: one tile of 64
    assert verification_s(pricer, 8, longest_draft=8, **how) == 200.0


def test_the_draft_model_takes_memory_for_weights_and_for_every_page() -> None:
    plain = build(Deployment(model="llama-3.1-8b", gpu="h100"))
    config = (
        '{"method": "draft_model", "model": "llama-3.2-1b", "num_speculative_tokens": 4, "acceptance": 0.7}'
    )
    both = build(Deployment(model="llama-3.1-8b", gpu="h100", speculative_config=config))
    draft = load_model("llama-3.2-1b")
    weights = weight_bytes(draft, gemm_format("bfloat16", None))
    left = plain.memory.kv_cache_bytes - weights
    page_bytes = 16 * (plain.model.kv_bytes_per_token() + draft.kv_bytes_per_token())
    assert both.memory.num_blocks == pytest.approx(left / page_bytes, abs=1)
    assert both.limits.draft_has_kv
    ngram = config.replace("draft_model", "ngram").replace('"model": "llama-3.2-1b", ', "")
    assert (
        build(Deployment(model="llama-3.1-8b", speculative_config=ngram, gpu="h100")).memory == plain.memory
    )


@pytest.mark.parametrize(("seqs", "most"), [(16, 128), (100, 512), (1024, 512)])
def test_graphs_are_captured_for_tokens_and_not_for_sequences(seqs: int, most: int) -> None:
    """vLLM captures up to min(2 x sequences x (1 + k), 512) tokens."""
    built = build(deployment(NGRAM, max_num_seqs=seqs))
    assert built.pricer._graphs[-1] == most
    assert built.limits.max_num_seqs == seqs


EAGLE = {2: (2.10, 4.37), 3: (2.29, 4.29), 4: (2.39, 4.48), 5: (2.43, 4.71), 6: (2.45, 4.94), 7: (2.47, 5.20)}
EAGLE3 = {
    2: (2.36, 4.32),
    3: (2.79, 4.09),
    4: (3.08, 4.05),
    5: (3.32, 4.13),
    6: (3.46, 4.20),
    7: (3.54, 4.29),
}


@pytest.mark.parametrize(("measured", "vocabulary"), [(EAGLE, 128256), (EAGLE3, 32000)])
def test_the_price_of_eagle_on_an_h100_is_near_what_was_measured(
    measured: dict[int, tuple[float, float]], vocabulary: int
) -> None:
    """vLLM's issue 20780: mean acceptance length and TPOT in ms of Llama-3.1-8B at batch 1; 7.07 ms without drafts."""
    model, profile = load_model("llama-3.1-8b"), load_profile("h100")
    head = model.model_copy(update={"num_layers": 1, "vocab_size": vocabulary})
    target, draft = StepPricer(model, profile), DraftPrices(StepPricer(head, profile), own_cache=True)
    context = 400
    rest_s = 7.07e-3 - target.step_s(1, 1, (), 1, context, context)
    for k, (length, tpot_ms) in measured.items():
        step_s = rest_s + verification_s(
            target, 4, num_tokens=k + 1, num_sampled=k + 1, prefills=(), num_decodes=1,
            decode_context_sum=context, decode_context_max=context, longest_draft=k,
        )  # fmt: skip
        step_s += draft.first_pass_s(
            num_tokens=k + 1, prefills=(), num_decodes=1, decode_context_sum=context, decode_context_max=context,
            num_drafting=1, drafting_context_sum=context,
        )  # fmt: skip
        step_s += sum(draft.later_pass_s(1, context + n, context + n) for n in range(1, k))
        assert step_s / length * 1e3 == pytest.approx(tpot_ms, rel=0.18), k


def test_the_closed_form_at_its_ends() -> None:
    assert closed_form_speedup(1.0, 4, 0.0) == 5.0
    assert closed_form_speedup(0.0, 4, 0.25) == 0.5
    assert expected_tokens(0.5, 3) == pytest.approx(1 + 0.5 + 0.25 + 0.125)


# ---- the deployment ------------------------------------------------------------------------------------------------


def test_scheduling_is_asynchronous_where_vllm_makes_it_so() -> None:
    draft = {**NGRAM, "method": "draft_model", "model": "llama-3.2-1b"}
    assert not build(deployment(NGRAM)).limits.async_scheduling
    assert build(deployment(draft)).limits.async_scheduling
    assert not build(deployment(draft, async_scheduling=False)).limits.async_scheduling
    with pytest.raises(UsageError, match="made between steps"):
        build(deployment(NGRAM, async_scheduling=True))


@pytest.mark.parametrize(
    ("config", "more", "words"),
    [
        ({"method": "ngram", "num_speculative_tokens": 3}, {}, '"acceptance" is missing'),
        ({**NGRAM, "num_speculativ_tokens": 3}, {}, "did you mean 'num_speculative_tokens'"),
        ({**NGRAM, "model": "llama-3.2-1b"}, {}, "only with method draft_model"),
        ({**NGRAM, "method": "self"}, {}, "num_layers"),
        ({**NGRAM, "method": "self", "num_layers": 32}, {}, "not less than the 32 layers"),
        ({**NGRAM, "method": "draft_model", "model": "qwen2.5-0.5b"}, {}, "vocabulary"),
        ({**NGRAM, "num_speculative_tokens": 0}, {}, "1 or more"),
        ({**NGRAM, "prompt_lookup_min": 4, "prompt_lookup_max": 2}, {}, "above prompt_lookup_max"),
        ({**NGRAM, "num_speculative_tokens_per_batch_size": [[1, 4, 9]]}, {}, "tokens of 0 to 3"),
        (NGRAM, {"policy": "static"}, "no meaning for --policy static"),
        ('{"method": ', {}, "speculative"),
    ],
)
def test_what_cannot_be_is_an_error_of_one_line(config: Any, more: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError if isinstance(config, str) else UsageError, match=words):
        build(deployment(config, **more))


def test_replicas_share_the_luck_of_a_seed_and_another_seed_has_another() -> None:
    workload = make_workload(np.arange(40) * 0.02, [100] * 40, [60] * 40)
    one_replica = simulate(workload, deployment(NGRAM))
    two = simulate(workload, deployment(NGRAM, data_parallel_size=2))
    assert one_replica.drafts is not None
    assert two.drafts is not None
    # Whoever serves a request, its drafts stand where they stand.
    assert two.drafts.num_accepted_tokens == one_replica.drafts.num_accepted_tokens
    other = simulate(workload, deployment(NGRAM), seed=1)
    assert other.drafts is not None
    assert other.drafts.num_accepted_tokens != one_replica.drafts.num_accepted_tokens
