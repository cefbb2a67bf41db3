"""A cache of mixed precision: who reads what, whatever the schedule; the twin's plans; its memory to the byte."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from calibration.microbench_steps import Composition, StepBench
from realengine.batch import LayerCache
from realengine.build import pages_that_fit, recent_bytes
from realengine.complete import complete
from realengine.generation import Sampling
from realengine.inputs import Moves, StepInputs
from realengine.kernels import operators
from realengine.kernels.kv_quant_ref import dequantize_kv, quantize_kv
from realengine.load import load
from realengine.models import Model
from realengine.ops import KernelOps
from realengine.ops_torch import TorchOps
from realengine.quant_kv import cache_layout, kv_bytes_per_token
from realengine.quant_recent import RecentTokens, check_recent
from realengine.runner import StepRunner
from serving.config import SchedulerConfig
from serving.errors import UsageError
from serving.policies import Chunked
from tests.realengine.engines import CPU, running, tiny_model, tiny_source
from tests.realengine.test_parity import TINY_CACHE, Load, assert_same_plans, record_and_replay

HEADS, KV_HEADS, DIM, PAGE = 4, 2, 8, 4
WINDOW = 6


def expected(q: Tensor, k: Tensor, v: Tensor, bits: int, first: int = 0) -> Tensor:
    """Query p over keys 0 to p, one by one: as they are from max(p - WINDOW + 1, first) on, rounded before."""
    k_old, v_old = (dequantize_kv(*quantize_kv(x, bits), bits) for x in (k, v))
    out = torch.empty_like(q)
    for p in range(len(q)):
        edge = max(p - WINDOW + 1, first)
        keys = torch.cat((k_old[:edge], k[edge : p + 1])) if edge <= p else k_old[: p + 1]
        values = torch.cat((v_old[:edge], v[edge : p + 1])) if edge <= p else v_old[: p + 1]
        for head in range(HEADS):
            kv = head // (HEADS // KV_HEADS)
            scores = keys[:, kv] @ q[p, head] / math.sqrt(DIM)
            out[p, head] = scores.softmax(0) @ values[:, kv]
    return out


class Bench:
    """One layer's attention without rotation, over several sequences that sit in given seats."""

    def __init__(self, bits: int, sequences: int, device_ops: str = "torch", seed: int = 0) -> None:
        torch.manual_seed(seed)
        name = "int8" if bits == 8 else "int4"
        layout = cache_layout(name, DIM, torch.float32)
        self.cache = LayerCache(
            *(torch.zeros((40, PAGE, KV_HEADS, *last), dtype=kind) for last, kind in layout)
        )
        self.rings = RecentTokens([self.cache], 2 * sequences, WINDOW, DIM, torch.float32, CPU)
        ones, zeros = torch.ones(64, DIM // 2), torch.zeros(64, DIM // 2)
        by_kernels = KernelOps(ones, zeros, operators("cpu"))
        self.ops = TorchOps(ones, zeros) if device_ops == "torch" else by_kernels
        self.qkv = torch.randn(sequences, 32, HEADS + 2 * KV_HEADS, DIM)
        self.done, self.seats = [0] * sequences, list(range(sequences))
        self.turns = [1] * sequences
        self.out = torch.zeros(sequences, 32, HEADS, DIM)

    def step(self, counts: Sequence[int]) -> None:
        """The next `counts[i]` tokens of sequence i."""
        rows = sorted((i for i, count in enumerate(counts) if count), key=lambda i: counts[i] > 1)
        tokens = [(i, p) for i in rows for p in range(self.done[i], self.done[i] + counts[i])]
        decodes = sum(counts[i] == 1 for i in rows)
        positions = np.array([p for _, p in tokens])
        pages = np.array([[1 + 9 * i + page for page in range(8)] for i in rows], np.int32)
        row_of = {i: row for row, i in enumerate(rows)}
        slots = np.array([int(pages[row_of[i], p // PAGE]) * PAGE + p % PAGE for i, p in tokens])
        starts = np.cumsum([0] + [counts[i] for i in rows])[decodes:] - decodes
        inputs = StepInputs(
            index=0, ids=positions, in_flight=None, token_seats=np.array([self.seats[i] for i, _ in tokens]),
            positions=positions, kv_slots=slots, page_table=pages,
            context_len=np.array([self.done[i] + counts[i] for i in rows], np.int32),
            query_start=starts.astype(np.int32), num_decodes=decodes, max_query=max(counts), longest=32,
            sample_rows=np.arange(len(tokens)), sample_seats=np.arange(0), sample_positions=np.arange(0),
            plan_rows=np.arange(0), moves=Moves(), turns=np.array([self.turns[i] for i, _ in tokens]),
        )  # fmt: skip
        step = StepRunner.__new__(StepRunner)
        step.recent = self.rings
        step.prepare(inputs)
        batch = StepRunner.batch(step, inputs, torch.from_numpy)
        attend = self.ops.attention(batch, HEADS, KV_HEADS)
        new = torch.stack([self.qkv[i, p] for i, p in tokens]).flatten(1)
        for (i, p), row in zip(tokens, attend(new, self.cache, None), strict=True):
            self.out[i, p] = row.view(HEADS, DIM)
        for i in rows:
            self.done[i] += counts[i]

    def wanted(self, i: int, bits: int, first: int = 0) -> Tensor:
        q, k, v = self.qkv[i].split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        n = self.done[i]
        return expected(q[:n], k[:n], v[:n], bits, first)


DEVICE_OPS = pytest.mark.parametrize("device_ops", ["torch", "kernels"])


@DEVICE_OPS
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(
    "steps",
    [
        pytest.param([(20,)], id="in one piece"),
        pytest.param([(1,)] * 20, id="one by one"),
        pytest.param([(3,), (2,), (9,), (1,), (1,), (4,)], id="in pieces shorter and longer than the window"),
        pytest.param([(5, 0), (2, 9), (1, 1), (7, 1), (1, 3), (1, 1), (3, 6)], id="two side by side"),
    ],
)
def test_each_query_reads_its_last_tokens_as_they_were(
    steps: list[tuple[int, ...]], bits: int, device_ops: str
) -> None:
    bench = Bench(bits, len(steps[0]), device_ops)
    for counts in steps:
        bench.step(counts)
    for i, n in enumerate(bench.done):
        torch.testing.assert_close(bench.out[i, :n], bench.wanted(i, bits), rtol=1e-4, atol=1e-5)


@DEVICE_OPS
def test_what_was_not_computed_in_the_seat_is_read_from_pages(device_ops: str) -> None:
    """After 7 tokens the sequence moves to another seat: there the ring begins with the next token."""
    bench = Bench(4, 1, device_ops)
    bench.step((7,))
    before = bench.out[0, :7].clone()
    bench.seats[0], bench.turns[0] = 1, 1
    bench.step((2,))
    bench.step((1,))
    bench.step((4,))
    torch.testing.assert_close(bench.out[0, :7], before)
    torch.testing.assert_close(bench.out[0, 7:14], bench.wanted(0, 4, first=7)[7:], rtol=1e-4, atol=1e-5)


@DEVICE_OPS
def test_a_seat_forgets_who_sat_there(device_ops: str) -> None:
    """Two sequences one after the other in one seat; the second begins where the first ended, from cached pages."""
    bench = Bench(4, 2, device_ops)
    bench.seats = [0, 1]
    bench.step((6, 6))
    bench.seats[1], bench.turns[1] = 0, 2
    bench.step((0, 3))
    torch.testing.assert_close(bench.out[1, 6:9], bench.wanted(1, 4, first=6)[6:], rtol=1e-4, atol=1e-5)


@st.composite
def schedules(draw: st.DrawFn) -> list[tuple[int, int]]:
    """Tokens of two sequences in each step, up to 30 of each."""
    left, steps = [30, 30], []
    for _ in range(draw(st.integers(1, 10))):
        counts = tuple(draw(st.integers(0, min(9, tokens))) for tokens in left)
        if any(counts):
            steps.append(counts)
            left = [tokens - count for tokens, count in zip(left, counts, strict=True)]
    return steps  # type: ignore[return-value]


@settings(max_examples=40, deadline=None)
@given(schedules(), st.sampled_from([8, 4]), st.integers(0, 8))
def test_both_ways_read_the_same_whatever_the_steps(
    steps: list[tuple[int, int]], bits: int, moved: int
) -> None:
    """At step `moved` the second sequence goes to another seat, as after a preemption that kept its pages."""
    benches = [Bench(bits, 2, way) for way in ("torch", "kernels")]
    first = 0
    for number, counts in enumerate(steps):
        for bench in benches:
            if number == moved:
                first = bench.done[1]
                bench.seats[1], bench.turns[1] = 3, 2
            bench.step(counts)
    for bench in benches:
        for i, n in enumerate(bench.done):
            wanted = bench.wanted(i, bits)
            if i == 1 and first:
                wanted = torch.cat((wanted[:first], bench.wanted(1, bits, first)[first:]))
            torch.testing.assert_close(bench.out[i, :n], wanted, rtol=1e-4, atol=1e-5)


# ---- in the engine -----------------------------------------------------------------------------------------

PROMPTS = [[(7 * i + j * j) % 60 + 1 for j in range(20 + 3 * i)] for i in range(5)]
SAMPLING = Sampling(max_tokens=24, temperature=1.0, seed=5, ignore_eos=True)
FEW = {"num_pages": 13, "page_tokens": 8, "max_num_seqs": 5, "max_num_batched_tokens": 24}


def tiny(tokens: int, kv: str = "int4") -> Model:
    return load(
        tiny_source(),
        device=CPU,
        dtype=torch.float32,
        max_positions=256,
        kv_cache_dtype=kv,
        kv_recent_tokens=tokens,
    )


def texts(model: Model, **limits: int | bool) -> list[list[int]]:
    with running(model, **{"enable_prefix_caching": False} | limits) as engine:
        return [answer.token_ids for (answer,) in complete(engine, PROMPTS, SAMPLING)]


def test_text_does_not_depend_on_the_schedule_without_a_prefix_cache() -> None:
    model = tiny(12)
    plain = texts(model)
    assert texts(model, max_num_batched_tokens=11) == plain
    assert texts(model, **FEW) == plain  # preempted and recomputed
    assert texts(model, async_scheduling=True, max_num_seqs=2) == plain
    assert plain != texts(tiny(0)), "the window must show"


def test_a_window_as_long_as_the_context_is_the_unquantised_engine() -> None:
    assert texts(tiny(256)) == texts(tiny_model())


@pytest.mark.parametrize("limits", [{}, {"swap_pages": 12}], ids=["recomputed", "swapped"])
def test_the_twin_repeats_every_plan(limits: dict[str, int]) -> None:
    _, decided, twin = record_and_replay(
        tiny(8), Load(seed=4, count=14), Chunked, 0.003, **{**TINY_CACHE, **limits}
    )
    assert_same_plans(decided, twin.decisions)
    assert any(decision["preempted"] for decision in decided)


def test_rings_take_the_bytes_that_are_counted() -> None:
    model = tiny(12)
    for asynchronous in (False, True):
        limits = SchedulerConfig(num_pages=9, max_num_seqs=3, max_model_len=64, async_scheduling=asynchronous)
        with running(
            model, num_pages=9, max_num_seqs=3, async_scheduling=asynchronous, start=False
        ) as engine:
            caches = engine.runner.step.caches  # type: ignore[attr-defined]
        rings = [ring for cache in caches for ring in (cache.recent_k, cache.recent_v)]
        assert sum(ring.nbytes for ring in rings) == recent_bytes(model, limits, torch.float32)


def test_on_a_gpu_rings_come_out_of_what_pages_would_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10**9, 10**9))
    limits = SchedulerConfig(num_pages=9, page_tokens=4, max_num_seqs=3, max_model_len=64)
    plain, ringed = tiny(0), tiny(1000)
    shape = plain.architecture.shape
    kinds = (plain.num_kv_heads, shape.head_dim, "int4", torch.float32)
    page_bytes = kv_bytes_per_token(shape.num_layers, *kinds) * limits.page_tokens
    pages = [
        pages_that_fit(model, limits, torch.float32, torch.device("cuda"), 0.9) for model in (plain, ringed)
    ]
    rings = recent_bytes(ringed, limits, torch.float32)
    assert (pages[0] - pages[1]) * page_bytes == pytest.approx(rings, abs=page_bytes)


def test_steps_that_are_measured_have_their_rings() -> None:
    """A step described by itself is one in the middle of service: the ring is full, and takes the new token."""
    with running(tiny(12), start=False) as engine:
        step = engine.runner.step  # type: ignore[attr-defined]
        bench = StepBench(step, engine.config.page_tokens)
        rows = step.recent.rows(bench.inputs(Composition((40, 5))))
        bench.run(Composition((40, 5)))
    assert rows.first.tolist() == [0, 0]
    for cache in step.caches:
        written = cache.recent_k.flatten(1).any(dim=1).nonzero().squeeze(1)
        assert written.tolist() == [39 % 12, 12 + 4]


@pytest.mark.parametrize(
    ("tokens", "kv", "speculative", "words"),
    [
        (8, "auto", False, "only with --kv-cache-dtype"),
        (8, "int8", True, "leave out --speculative-config"),
        (-1, "int8", False, "0 or more"),
    ],
)
def test_where_it_cannot_be_is_said(tokens: int, kv: str, speculative: bool, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        check_recent(tokens, kv, speculative=speculative)
    check_recent(0, "auto", speculative=speculative)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_twin_counts_the_same_rings(asynchronous: bool) -> None:
    from costmodel.memory import plan_memory
    from costmodel.profile import load_profile

    shape = tiny_source().architecture.shape
    model = load(
        tiny_source(),
        device=CPU,
        dtype=torch.bfloat16,
        max_positions=256,
        kv_cache_dtype="int4",
        kv_recent_tokens=12,
    )
    limits = SchedulerConfig(num_pages=9, max_num_seqs=3, max_model_len=64, async_scheduling=asynchronous)
    plan = plan_memory(
        shape,
        load_profile("h200"),
        max_num_seqs=3,
        kv_cache_dtype="int4",
        kv_recent_tokens=12 * (2 if asynchronous else 1),
    )
    assert plan.recent_bytes == recent_bytes(model, limits, torch.bfloat16)
    spent = (
        plan.weight_bytes
        + plan.activation_bytes
        + plan.non_torch_bytes
        + plan.graph_bytes
        + plan.recent_bytes
    )
    assert 0 <= plan.budget_bytes - spent - plan.kv_cache_bytes < plan.block_size * plan.kv_bytes_per_token


def test_the_twin_pays_for_the_bytes_that_a_decode_reads() -> None:
    """Bound by memory, N recent tokens of 2 bytes and the others of w cost as c + N (2 / w - 1) tokens of w."""
    from costmodel.model import load_model
    from costmodel.pricer import StepPricer
    from costmodel.profile import load_profile

    shape, profile = load_model("llama-3.1-8b"), load_profile("h200")

    def decode_s(context: int, recent: int) -> float:
        pricer = StepPricer(shape, profile, kv_cache_dtype="int4", kv_recent_tokens=recent, max_num_seqs=64)
        empty = pricer.step_s(64, 64, (), 64, 64, 1)
        return pricer.step_s(64, 64, (), 64, 64 * context, context) - empty

    # A context that is recent as a whole is 2 / 0.53125 times as many bytes.
    ratio = 2.0 / (0.5 + 4 / 128)
    assert decode_s(4096, 10**6) == pytest.approx(decode_s(round(4096 * ratio), 0), rel=0.03)
    assert decode_s(8192, 1024) == pytest.approx(decode_s(round(8192 + 1024 * (ratio - 1)), 0), rel=0.03)
    assert decode_s(4096, 0) < decode_s(4096, 256) < decode_s(4096, 1024)


def test_the_deployment_says_what_has_no_effect() -> None:
    from sim.deployment import Deployment, build

    with pytest.raises(UsageError, match="only with --kv-cache-dtype"):
        build(Deployment(model="llama-3.1-8b", kv_cache_recent_tokens=64))
    one, two = (
        build(
            Deployment(
                model="llama-3.1-8b",
                kv_cache_dtype="int8",
                kv_cache_recent_tokens=64,
                max_num_seqs=64,
                async_scheduling=asynchronous,
            )
        )
        for asynchronous in (False, True)
    )
    assert two.memory.recent_bytes == 2 * one.memory.recent_bytes > 0
