"""What is generated does not depend on how it was scheduled: one set of requests under every policy and shortage.

Tokens are drawn at temperature 1 with a seed per request, in float64, where no rounding can turn a draw. The cache starts
out as NaN: whoever reads a slot that was not written gets no token at all.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from realengine.complete import Completion, complete
from realengine.engine import Engine
from realengine.generation import Sampling
from realengine.kernels import operators
from realengine.load import Source, load
from realengine.models import Model
from realengine.ops import KernelOps, rotary_tables
from serving.policies import BatchPolicy, Continuous, Static
from tests.realengine.engines import CPU, TINY, running, tiny_model, tiny_source

PROMPTS = 20


@pytest.fixture(scope="module")
def model() -> Model:
    source: Source = tiny_source()
    return load(source, device=CPU, dtype=torch.float64, max_positions=256)


def requests() -> tuple[list[list[int]], list[Sampling], list[int]]:
    """Prompts of which half begin alike, some with several answers; lengths hit page ends and what lies beside them."""
    rng = np.random.default_rng(3)
    shared = rng.integers(3, TINY.vocab_size, 40).tolist()
    prompts, samplings = [], []
    for number in range(PROMPTS):
        start = shared[: (8, 16, 17, 31)[number % 4]] if number % 2 else []
        prompts.append([*start, *rng.integers(3, TINY.vocab_size, int(rng.integers(1, 24))).tolist()])
        samplings.append(
            Sampling(max_tokens=int(rng.integers(1, 40)), seed=number, n=3 if number % 5 == 1 else 1)
        )
    prompts[2] = shared[:16]
    return prompts, samplings, rng.integers(0, 3, PROMPTS).tolist()


def generate(
    model: Model, policy: BatchPolicy | None = None, **limits: Any
) -> tuple[list[list[Completion]], Engine]:
    prompts, samplings, priorities = requests()
    limits = {"page_tokens": 8} | limits
    with running(model, policy=policy, dtype=torch.float64, poison=True, **limits) as engine:
        if limits.get("queue_order") == "priority":
            add = engine.add
            order = iter(priorities)
            engine.add = lambda *args, **kw: add(*args, **kw, priority=next(order))  # type: ignore[method-assign]
        answers = complete(engine, prompts, samplings)
    engine.scheduler.check()
    assert engine.scheduler.pool.num_free == engine.config.num_pages
    assert engine.scheduler.swap.num_free == engine.config.swap_pages
    return answers, engine


@pytest.fixture(scope="module")
def expected(model: Model) -> list[list[Completion]]:
    return generate(model, num_pages=400, max_num_seqs=1, enable_prefix_caching=False)[0]


SCARCE = {"num_pages": 12, "max_num_seqs": 6, "max_num_batched_tokens": 24}


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(
    ("policy", "limits"),
    [
        pytest.param(None, {"num_pages": 400, "max_num_seqs": 16}, id="enough memory"),
        pytest.param(None, SCARCE, id="preempted and recomputed"),
        pytest.param(None, SCARCE | {"swap_pages": 40}, id="preempted and swapped"),
        pytest.param(None, SCARCE | {"swap_pages": 4}, id="swap space too small"),
        pytest.param(None, SCARCE | {"host_cache_pages": 30}, id="forgotten prefixes kept on the host"),
        pytest.param(
            None, SCARCE | {"host_cache_pages": 5, "swap_pages": 6, "kv_eviction": "lfu"}, id="all at once"
        ),
        pytest.param(None, SCARCE | {"queue_order": "priority"}, id="by priority"),
        pytest.param(None, SCARCE | {"queue_order": "priority", "swap_pages": 20}, id="by priority, swapped"),
        pytest.param(None, SCARCE | {"enable_prefix_caching": False}, id="without prefix cache"),
        pytest.param(
            None,
            {"enable_prefix_caching": False, "num_pages": 30, "max_num_batched_tokens": 7},
            id="forks without prefix cache",
        ),
        pytest.param(None, {"page_tokens": 1, "num_pages": 150}, id="pages of one token"),
        pytest.param(Continuous, SCARCE | {"max_num_batched_tokens": 96}, id="continuous"),
        pytest.param(Static, {"num_pages": 60, "max_num_seqs": 4}, id="static"),
    ],
)
def test_tokens_do_not_depend_on_the_schedule(
    model: Model,
    expected: list[list[Completion]],
    policy: type[BatchPolicy] | None,
    limits: dict[str, Any],
    asynchronous: bool,
) -> None:
    answers, engine = generate(
        model, policy() if policy is not None else None, **limits, async_scheduling=asynchronous
    )
    for number, (got, wanted) in enumerate(zip(answers, expected, strict=True)):
        for answer, reference in zip(got, wanted, strict=True):
            assert answer.token_ids == reference.token_ids, f"request {number}"
            assert answer.finish_reason == reference.finish_reason
    preemptions = sum(row.preemptions for row in engine.recorder.requests)
    if limits["num_pages"] == SCARCE["num_pages"] and policy is None:
        assert preemptions > 0, "the cache was meant to be too small"


def test_forks_share_all_but_the_last_page_of_their_prompt(model: Model) -> None:
    prompt = list(range(3, 3 + 21))
    with running(
        model, dtype=torch.float64, poison=True, page_tokens=8, enable_prefix_caching=False, start=False
    ) as engine:
        used: list[int] = []
        plan_step = engine.scheduler.plan

        def plan(now_s: float) -> Any:
            plan = plan_step(now_s)
            if plan is not None:
                used.append(engine.scheduler.used_pages)
                if plan.index == 1:
                    # Two full pages are shared; the third, of which 4 tokens are written, is copied for each fork.
                    assert len(plan.copies) == 3
                    assert len({source for source, _ in plan.copies}) == 1
                    assert plan.num_tokens == 4
            return plan

        engine.scheduler.plan = plan  # type: ignore[method-assign]
        engine.start()
        sampling = Sampling(max_tokens=2, n=4, temperature=1.0, ignore_eos=True)
        complete(engine, [prompt], sampling)
    assert used[:2] == [3, 3 + 3]


def test_kernel_operators_give_the_tokens_of_the_cpu_operators() -> None:
    """Mixed steps through the kernels' interface (their references here), decodes first and longer chunks after."""
    model = tiny_model()
    shape, rope = model.architecture.shape, model.architecture.rope
    ops = KernelOps(*rotary_tables(rope, shape.head_dim, 256, CPU), operators("cpu"))
    kernels = Model(model.architecture, model.weights, ops)
    prompts, _, _ = requests()
    sampling = Sampling(max_tokens=12, temperature=0.0, ignore_eos=True)
    tokens = []
    for each in (model, kernels):
        with running(each, page_tokens=8, max_num_batched_tokens=24, poison=True) as engine:
            tokens.append([a.token_ids for (a,) in complete(engine, prompts, sampling)])
    assert tokens[0] == tokens[1]
