"""FLOPs and bytes of drafts against sums done by hand: passes of a drafter, tokens and pairs of a verification."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodel.model import ModelShape, load_model
from experiments.report_figures import step_roofline
from experiments.results import save_run
from experiments.saved import load_record
from experiments.utilisation import engine_work, step_shares, twin_work
from serving.draft_steps import DraftLog, draft_steps
from sim.deployment import Built, Deployment, build, simulate
from sim.metrics import summarise
from sim.record import RunRecord
from sim.workload import TenantSpec, WorkloadSpec, load_workload

PROMPT, ANSWER, K = 64, 13, 3
DRAFT = {"method": "draft_model", "model": "llama-3.2-1b", "num_speculative_tokens": K, "acceptance": 1.0}
SELF = {"method": "self", "num_layers": 4, "num_speculative_tokens": K, "acceptance": 1.0}


def made(config: dict[str, object] | None, count: int = 1, **changes: object) -> tuple[RunRecord, Built]:
    """One request at a time, unless told: the first token, then three verifications of three drafts that all stand."""
    tenant = {"dataset": {"name": "random", "input_len": PROMPT, "output_len": ANSWER}, "num_prompts": count}
    spec = WorkloadSpec(tenants=(TenantSpec.model_validate(tenant),), max_concurrency=1)
    drafts = {} if config is None else {"speculative_config": json.dumps(config)}
    known = {"model": "llama-3.1-8b", "gpu": "h200", "async_scheduling": False, **drafts, **changes}
    built = build(Deployment.model_validate(known))
    return simulate(load_workload(spec, seed=0), built), built


def by_hand(m: ModelShape, tokens: int, sampled: int, pairs: int, read: int) -> tuple[float, float]:
    """One pass of a dense model in 16 bit: FLOPs, bytes. `read` counts the tokens whose KV is read."""
    heads, kv = m.num_heads * m.head_dim, 2 * m.num_kv_heads * m.head_dim
    layer = m.linear_params_per_layer()
    head = m.vocab_size * m.hidden_size
    flops = m.num_layers * (2 * tokens * layer + 4 * heads * pairs) + 2 * sampled * head
    weights = 2 * (m.num_layers * layer + (head if sampled else 0))
    cache = 2 * m.num_layers * kv * (read + tokens)
    return flops, weights + cache + 2 * m.num_layers * tokens * (4 * m.hidden_size + 3 * heads)


def total(*passes: tuple[float, float]) -> tuple[float, float]:
    return sum(p[0] for p in passes), sum(p[1] for p in passes)


def test_a_draft_model_computes_the_step_once_more_and_a_token_a_pass() -> None:
    record, built = made(DRAFT)
    work = twin_work(record, built)
    target, draft = load_model("llama-3.1-8b"), load_model("llama-3.2-1b")
    triangle = PROMPT * (PROMPT + 1) // 2
    prompt = total(
        by_hand(target, PROMPT, 1, triangle, PROMPT),
        by_hand(draft, PROMPT + 1, 1, triangle + PROMPT + 1, PROMPT + 1),
        by_hand(draft, 1, 1, PROMPT + 2, PROMPT + 2),
        by_hand(draft, 1, 1, PROMPT + 3, PROMPT + 3),
    )
    assert (work.flops[0], work.bytes[0]) == pytest.approx(prompt)
    after = PROMPT + 1 + K  # tokens with KV in the target after the first verification
    seen = sum(range(after - K, after + 1))
    verification = total(
        by_hand(target, 1 + K, 1 + K, seen, after),
        by_hand(draft, 2 + K, 1, seen + after + 1, after + 1),
        by_hand(draft, 1, 1, after + 2, after + 2),
        by_hand(draft, 1, 1, after + 3, after + 3),
    )
    assert record.steps.num_tokens[1] == 1 + K
    assert (work.flops[1], work.bytes[1]) == pytest.approx(verification)


def test_first_layers_draft_one_token_a_pass_and_read_no_prompt() -> None:
    record, built = made(SELF)
    work = twin_work(record, built)
    target = load_model("llama-3.1-8b")
    first = target.model_copy(update={"num_layers": 4})
    passes = [by_hand(first, 1, 1, PROMPT + n, PROMPT + n) for n in (1, 2, 3)]
    prompt = by_hand(target, PROMPT, 1, PROMPT * (PROMPT + 1) // 2, PROMPT)
    assert (work.flops[0], work.bytes[0]) == pytest.approx(total(prompt, *passes))


def test_ngrams_add_the_verification_alone() -> None:
    record, built = made({"method": "ngram", "num_speculative_tokens": K, "acceptance": 1.0})
    work, after = twin_work(record, built), PROMPT + 1 + K
    seen = sum(range(after - K, after + 1))
    assert (work.flops[1], work.bytes[1]) == pytest.approx(
        by_hand(load_model("llama-3.1-8b"), 1 + K, 1 + K, seen, after)
    )


def test_roofline_and_shares_are_of_the_same_work_and_plain_runs_have_no_columns() -> None:
    record, built = made(DRAFT)
    plain, _ = made(None)
    assert plain.draft_steps is None
    twin, roofline = twin_work(record, built), step_roofline(record, built)
    np.testing.assert_array_equal(twin.flops, roofline.flops)
    mfu, mbu = step_shares(record, twin)
    assert (mfu < 1).all()
    assert (mbu < 1).all()


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 6), st.floats(0.0, 1.0), st.booleans(), st.booleans())
def test_every_drafted_token_is_drawn_once_and_verified_once(
    k: int, rate: float, self_drafting: bool, asynchronous: bool
) -> None:
    """Rows through the drafter's head are the drafts that were made; pairs bound what d tokens can see."""
    base = SELF if self_drafting else DRAFT
    known = {} if self_drafting else {"async_scheduling": asynchronous}
    record, _ = made({**base, "num_speculative_tokens": k, "acceptance": rate}, 4, **known)
    s, d = record.steps, record.draft_steps
    assert d is not None
    assert record.drafts is not None
    verified = s.num_tokens - s.num_prefill_tokens - s.num_decodes
    assert verified.sum() >= record.drafts.num_draft_tokens
    assert (
        d.draft_sampled.sum() >= verified.sum()
    )  # what is drafted for a request that has ended is never verified
    assert (d.draft_passes <= k).all()
    assert (d.draft_tokens >= d.draft_sampled).all()
    assert (d.verified_pairs <= verified * s.decode_context_sum).all()
    assert ((d.verified_pairs > 0) == (verified > 0)).all()


def test_replicas_that_fail_keep_rows_beside_their_steps() -> None:
    """A step that was planned and lost gives its number to the next one."""
    log = DraftLog()
    log.add(0, (1,) * 6)
    log.add(1, (2,) * 6)  # lost
    log.add(1, (3,) * 6)
    log.add(4, (5,) * 6)
    found = draft_steps([None, log], [2, 5])
    assert found is not None
    assert found.draft_passes.tolist() == [0, 0, 1, 3, 0, 0, 5]
    outage = {"schedule": [{"time_s": 0.05, "replica": 0, "down_s": 0.01}]}
    record, _ = made(DRAFT, 12, data_parallel_size=2, failures=outage, cold_start={"seconds": 0.01})
    assert record.draft_steps is not None
    s, d = record.steps, record.draft_steps
    assert len(d.draft_passes) == len(s)
    verified = s.num_tokens - s.num_prefill_tokens - s.num_decodes
    assert ((d.verified_pairs > 0) == (verified > 0)).all()


def test_they_are_saved_and_read_back(tmp_path: Path) -> None:
    record, built = made(DRAFT)
    save_run(record, summarise(record), tmp_path, steps=True, date="2026-01-01")
    back = load_record(tmp_path)
    np.testing.assert_array_equal(twin_work(back, built).bytes, twin_work(record, built).bytes)
    assert load_record(tmp_path).draft_steps is not None


def test_the_engine_counts_its_drafter_from_its_shape() -> None:
    record, built = made(DRAFT)
    shapes = [load_model(name).model_dump(mode="json") for name in ("llama-3.1-8b", "llama-3.2-1b")]
    facts = {
        "shape": shapes[0],
        "bytes_per_number": 2.0,
        "device": "",
        "draft": {"shape": shapes[1], "own_cache": True},
    }
    work = engine_work(replace(record, meta={"engine": {"work": facts}}))
    assert work is not None
    np.testing.assert_allclose(work.flops, twin_work(record, built).flops)
    np.testing.assert_allclose(work.bytes, twin_work(record, built).bytes)


def test_a_run_of_the_engine_writes_its_passes_down(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from tokentwin.commands.run import make_plan, run_plan

    shape = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128,
        "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "torch_dtype": "float32",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(shape))
    config = json.dumps({"method": "self", "num_layers": 2, "num_speculative_tokens": K})
    asked = {
        "model": str(tmp_path / "config.json"), "load_format": "dummy", "device": "cpu", "dtype": "float32",
        "dataset_name": "random", "random_input_len": 12, "random_output_len": 10, "num_prompts": 2, "max_concurrency": 1,
        "num_gpu_blocks_override": 20, "max_model_len": 64, "speculative_config": config,
    }  # fmt: skip
    record = run_plan(make_plan(asked)).record
    s, d = record.steps, record.draft_steps
    assert d is not None
    assert len(d.draft_passes) == len(s)
    verified = s.num_tokens - s.num_prefill_tokens - s.num_decodes
    assert ((d.verified_pairs > 0) == (verified > 0)).all()
    assert d.draft_passes.max() == K
    both = engine_work(record)
    alone = engine_work(replace(record, draft_steps=replace(d, **{n: 0 * c for n, c in d.columns().items()})))
    assert both is not None
    assert alone is not None
    drafter = ModelShape.model_validate(record.meta["engine"]["work"]["draft"]["shape"])
    assert drafter.num_layers == 2
    one = 2 * (2 * drafter.linear_params_per_layer() + drafter.vocab_size * drafter.hidden_size)
    assert (both.flops - alone.flops).sum() > one * d.draft_tokens.sum()  # attention comes on top
