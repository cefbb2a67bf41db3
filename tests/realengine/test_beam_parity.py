"""Beam searches of the engine in the twin: a recorded run replayed, and the twin's own searches told what is likely."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from realengine.answer import Output
from realengine.beam import beam_search
from realengine.complete import complete
from realengine.engine import Engine
from realengine.generation import Sampling, one_token
from serving.beams import Beams, Hypothesis
from serving.config import SchedulerConfig
from serving.plan import StepPlan
from serving.policies import Chunked
from serving.request import Request
from serving.scheduler import Scheduler
from sim.beam import NextTokens
from sim.record import Floats
from sim.world import run_world
from tests.realengine.engines import EOS, running, smollm2, tiny_model
from tests.realengine.test_parity import Load, assert_same_plans, record_and_replay
from tests.sim.worlds import LinearPricer, make_workload

TINY_CACHE = {"num_pages": 14, "page_tokens": 8, "max_num_seqs": 6, "max_num_batched_tokens": 24}


# ---- a run beside other traffic, replayed ------------------------------------------------------------------


class Searching(Load):
    """Two searches from threads of their own, while the usual load comes and goes."""

    def send(self, engine: Engine, gap_s: float) -> None:
        self.found: dict[int, list[Hypothesis]] = {}

        def search(width: int) -> None:
            prompt = [3 + width, *range(5, 20)]
            self.found[width] = beam_search(
                engine, prompt, width=width, max_tokens=24, eos_token_ids=frozenset({EOS})
            )

        threads = [threading.Thread(target=search, args=(width,)) for width in (2, 4)]
        for thread in threads:
            thread.start()
        super().send(engine, gap_s)
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("limits", [{}, {"swap_pages": 12}, {"host_cache_pages": 8}], ids=str)
def test_the_twin_repeats_every_plan_of_a_run_with_searches(
    limits: dict[str, Any], asynchronous: bool
) -> None:
    load = Searching(seed=4, count=14, aborts=2)
    _, decided, twin = record_and_replay(
        tiny_model(), load, Chunked, 0.002, **{**TINY_CACHE, "async_scheduling": asynchronous, **limits}
    )
    assert_same_plans(decided, twin.decisions)
    assert any(decision["preempted"] for decision in decided), "the cache was meant to be too small"
    with running(tiny_model()) as roomy:
        for width, found in load.found.items():
            alone = beam_search(
                roomy, [3 + width, *range(5, 20)], width=width, max_tokens=24, eos_token_ids=frozenset({EOS})
            )
            assert [h.token_ids for h in found] == [h.token_ids for h in alone]


# ---- the twin's own searches -------------------------------------------------------------------------------


def name_plans(scheduler: Scheduler) -> list[dict[str, Any]]:
    """What this scheduler plans from now on; requests are named by their order of arrival."""
    names: dict[Request, int] = {}
    plans: list[dict[str, Any]] = []
    add, plan_step = scheduler.add, scheduler.plan

    def named_add(request: Request) -> bool:
        names[request] = len(names)
        return add(request)

    def plan(now_s: float) -> StepPlan | None:
        plan = plan_step(now_s)
        if plan is not None:
            seqs, rows = scheduler.seqs, zip(plan.slots.tolist(), plan.num_new.tolist(), strict=True)
            plans.append(
                {
                    "rows": [(names[seqs.request(s)], n, seqs.pages_of(s).tolist()) for s, n in rows],
                    "context": plan.context.tolist(),
                    "admitted": [(names[a.request], a.cached_tokens, a.resumed) for a in plan.admitted],
                    "preempted": [names[request] for request in plan.preempted],
                    "waiting": plan.num_waiting,
                    "used_pages": plan.used_pages,
                }
            )
        return plan

    scheduler.add, scheduler.plan = named_add, plan  # type: ignore[method-assign]
    return plans


class Client:
    """A search whose client answers at once: what it sends is there at the next boundary, as in the twin."""

    def __init__(
        self, engine: Engine, prompt: list[int], width: int, length: int, said: deque[Floats]
    ) -> None:
        self.beams, self.over = Beams(width, length), threading.Event()
        self._engine, self._prompt, self._said = engine, prompt, said
        self._one = one_token(width)
        self.send()

    def send(self) -> None:
        live = self.beams.live
        self._tops: list[Any] = [None] * len(live)
        for place, hypothesis in enumerate(live):
            listen = lambda output, place=place: self._take(place, output)  # noqa: E731
            self._engine.add([*self._prompt, *hypothesis.token_ids], self._one, listen)

    def _take(self, place: int, output: Output) -> None:
        self._tops[place] = output.logprobs[0].top
        if any(top is None for top in self._tops):
            return
        self.beams.grow(self._tops)
        self._said.append(np.array([[logprob for _, logprob in top] for top in self._tops]))
        if self.beams.over:
            self.over.set()
        else:
            self.send()


class Said(NextTokens):
    """What a model really found likely, step by step."""

    def __init__(self, said: Sequence[Floats]) -> None:
        super().__init__()
        object.__setattr__(self, "left", deque(said))

    def logprobs(self, rng: np.random.Generator, hypotheses: int, count: int) -> Floats:
        drawn: Floats = self.left.popleft()  # type: ignore[attr-defined]
        assert drawn.shape == (hypotheses, count)
        return drawn


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(
    ("searches", "others", "pages"),
    [
        ([(4, 20, 30)], [], 64),
        ([(3, 9, 40)], [(17, 60), (5, 70)], 64),
        ([(4, 11, 40)], [(20, 70), (30, 60), (9, 75)], 14),
        ([(2, 30, 25), (5, 16, 30)], [(12, 64), (25, 50)], 16),
    ],
    ids=["alone", "beside others", "tiny cache", "two searches, tiny cache"],
)
def test_the_twins_own_searches_make_the_engines_plans(
    searches: list[tuple[int, int, int]], others: list[tuple[int, int]], pages: int, asynchronous: bool
) -> None:
    """Page for page, when the twin is told nothing but lengths and how likely the tokens were."""
    limits = TINY_CACHE | {"num_pages": pages, "async_scheduling": asynchronous}
    rng = np.random.default_rng(pages)
    said: deque[Floats] = deque()
    with running(tiny_model(), policy=Chunked(), start=False, **limits) as engine:
        theirs = name_plans(engine.scheduler)
        clients = [
            Client(engine, rng.integers(3, 61, prompt).tolist(), width, length, said)
            for width, prompt, length in searches
        ]
        ended = threading.Semaphore(0)
        for prompt, length in others:
            sampling = Sampling(max_tokens=length, temperature=1.0, seed=prompt, ignore_eos=True)
            engine.add(
                rng.integers(3, 61, prompt).tolist(), sampling, lambda o: o.finish_reason and ended.release()
            )
        engine.start()
        for client in clients:
            assert client.over.wait(60)
        for _ in others:
            assert ended.acquire(timeout=60)
    ours: list[dict[str, Any]] = []

    def told(world: Any) -> None:
        nonlocal ours
        world.server.beams._next_tokens = Said(said)
        ours = name_plans(world.replicas[0].scheduler)

    lengths = [*((prompt, length) for _, prompt, length in searches), *others]
    workload = make_workload([0.0] * len(lengths), *map(list, zip(*lengths, strict=True)))
    widths = np.array([*(width for width, *_ in searches), *(0 for _ in others)], np.int64)
    run_world(
        replace(workload, beam_width=widths),
        SchedulerConfig(max_model_len=256, **limits),
        LinearPricer(),
        make_policy=Chunked,
        fast_forward=False,
        watch=told,
    )
    for step, (engines, twins) in enumerate(zip(theirs, ours, strict=False)):
        assert engines == twins, f"step {step}"
    assert len(theirs) == len(ours)
    if pages < 20:
        assert any(plan["preempted"] for plan in theirs), "the cache was meant to be too small"


def test_a_made_up_model_is_as_sure_as_smollm2() -> None:
    """What docs/engine.md says of beams of SmolLM2, on a fraction of them: how sure it is, and how soon beams part."""
    source, model = smollm2(torch.float32)
    assert source.tokenizer is not None
    texts = ("Once upon a time in a small village there lived", "Explain briefly why the sky is blue.")
    width, steps = 4, 16
    sure: list[float] = []
    parents: list[int] = []
    with running(model, num_pages=128, page_tokens=16, max_model_len=256) as engine:
        for text in texts:
            prompt, beams = source.tokenizer.encode(text), Beams(width, steps)
            while not beams.over:
                prompts = [[*prompt, *hypothesis.token_ids] for hypothesis in beams.live]
                tops = [answer.logprobs[0].top for (answer,) in complete(engine, prompts, one_token(width))]
                beams.grow(tops)
                if beams.num_steps > 1:
                    sure += [math.exp(top[0][1]) for top in tops]
                    parents.append(len({hypothesis.parents[-1] for hypothesis in beams.live}))
    rng = np.random.default_rng(0)
    ours = np.exp(NextTokens().logprobs(rng, 10_000, 1)[:, 0])
    assert np.mean(sure) == pytest.approx(ours.mean(), abs=0.12)
    assert np.std(sure) == pytest.approx(ours.std(), abs=0.08)
    assert np.mean(parents) == pytest.approx(3.1, abs=0.5)
