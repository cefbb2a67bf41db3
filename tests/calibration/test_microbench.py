"""The engine's own steps, measured: which points, where their time goes, what becomes of a budget, a drift or a stop."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from calibration import bench_table  # noqa: E402
from calibration.device_calibrate import Plan, calibrate, prepare  # noqa: E402
from calibration.device_facts import known_gpu  # noqa: E402
from calibration.device_memory import predict_pages, weight_bytes  # noqa: E402
from calibration.microbench_fit import rows_of  # noqa: E402
from calibration.microbench_host import fit_host  # noqa: E402
from calibration.microbench_points import Bounds, corners_first, next_cut, plan_points, reference  # noqa: E402
from calibration.microbench_run import Measured, Store, drift, measure_round, open_store, steadied  # noqa: E402
from calibration.microbench_steps import PARTS, Composition  # noqa: E402
from calibration.tables import read_table  # noqa: E402
from costmodel.model import ModelShape  # noqa: E402
from costmodel.pricer import StepPricer  # noqa: E402
from costmodel.profile import load_profile  # noqa: E402
from realengine.architecture import Architecture, Rope  # noqa: E402
from realengine.build import EngineOptions, pages_that_fit  # noqa: E402
from realengine.checkpoint import DummyCheckpoint  # noqa: E402
from realengine.load import Source  # noqa: E402
from serving.config import SchedulerConfig  # noqa: E402
from serving.errors import UsageError  # noqa: E402

SMALL = ModelShape(
    name="small",
    family="llama",
    hidden_size=64,
    intermediate_size=128,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=97,
    max_position_embeddings=128,
    tie_word_embeddings=True,
)
SOURCE = Source(Architecture(SMALL, Rope(), 1e-6), DummyCheckpoint(SMALL), None)
OPTIONS = EngineOptions("small", dtype="bfloat16", device="cpu")
PLAN = Plan(
    OPTIONS,
    max_num_seqs=4,
    max_num_batched_tokens=32,
    max_model_len=64,
    budget_s=60,
    rounds=1,
    repeats=2,
)
BOUNDS = Bounds(4, 32, 64, 1024)


def test_any_beginning_of_the_points_covers_the_range() -> None:
    assert corners_first([1, 2, 4, 8, 16]) == [16, 1, 4, 2, 8]
    points = plan_points(Bounds(16, 512, 1024, 100_000))
    first = points[:8]
    assert any(len(p.decodes) == 16 for p in first)
    assert any(p.chunks and p.chunks[0][0] == 512 for p in first)
    assert len(points) == len(set(points))


def test_every_point_can_happen_in_the_engine() -> None:
    assert all(BOUNDS.allows(p) for p in plan_points(BOUNDS))


@pytest.mark.parametrize("step", [40, 100, 200])
def test_cuts_close_in_on_a_jump(step: int) -> None:
    """Time doubles at one size: bisecting from octaves brackets it within the least gap."""
    times = {m: 2.0 if m > step else 1.0 for m in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)}
    while (cut := next_cut(times)) is not None:
        times[cut] = 2.0 if cut > step else 1.0
    below, above = max(m for m in times if m <= step), min(m for m in times if m > step)
    assert above - below <= 8


def test_a_smooth_curve_is_not_cut() -> None:
    assert next_cut({m: 0.1 * m**0.8 for m in (1, 2, 4, 8, 16, 32, 64)}) is None


def test_the_parts_of_a_step_add_up_to_it() -> None:
    bench = prepare(PLAN, SOURCE)
    for what in (Composition((5, 9)), Composition(chunks=((8, 4),)), Composition((3,), ((8, 0), (4, 4)))):
        parts = bench.steps.run(what)
        assert parts["total"] == pytest.approx(sum(parts[name] for name in PARTS), rel=1e-6)
        assert all(parts[name] > 0 for name in PARTS[:-1])


def test_watching_a_step_does_not_change_what_it_computes() -> None:
    bench = prepare(PLAN, SOURCE)
    inputs = bench.steps.inputs(Composition((5, 9), ((8, 4),)))
    from calibration.microbench_steps import _greedy

    plain = bench.runner.step.run(inputs, _greedy(3), torch.from_numpy)  # type: ignore[attr-defined]
    watched = bench.steps._step.run(inputs, _greedy(3), torch.from_numpy)
    assert plain.tokens.tolist() == watched.tokens.tolist()


def test_a_small_budget_still_gives_a_profile_that_prices_steps(tmp_path: Path) -> None:
    out = tmp_path / "here.json"
    done = calibrate(Plan(OPTIONS, 4, 32, 64, budget_s=0.0, rounds=1, repeats=1), out, source=SOURCE)
    profile = load_profile(out)
    assert profile == done.profile
    pricer = StepPricer(SMALL, profile, max_num_batched_tokens=32, max_num_seqs=4, cuda_graphs=False)
    decode = pricer.step_s(4, 4, (), 4, 200, 60)
    prompt = pricer.step_s(32, 1, [(32, 0)], 0, 0, 0)
    assert 0 < decode < 1
    assert 0 < prompt < 1
    assert pricer.host_s(4, 4) > 0


def test_samples_are_kept_beside_the_profile_and_a_second_run_goes_on_from_them(tmp_path: Path) -> None:
    out = tmp_path / "here.json"
    plan = Plan(OPTIONS, 2, 16, 32, budget_s=60, rounds=1, repeats=1)
    first = calibrate(plan, out, source=SOURCE)
    table = read_table(out.with_suffix(".parquet"))
    kinds = {row["kind"] for row in table.rows}
    assert {"gemm", "prefill", "decode", "elementwise", "sampler"} <= kinds
    assert all(row["kind"] in bench_table.AXES for row in table.rows)
    said: list[str] = []
    second = calibrate(plan, out, source=SOURCE, say=said.append)
    assert "going on" in said[0]
    # Nothing but the closing reference is measured again.
    assert len(second.store.runs) <= len(first.store.runs) + 2
    assert second.profile.host == first.profile.host


def test_a_store_of_another_model_is_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "x.steps.jsonl"
    store = open_store(path, {"model": "a"})
    store.add(Measured(Composition((1,)), {"total": 1.0}, 1.0, 0))
    assert len(open_store(path, {"model": "a"}).runs) == 1
    assert open_store(path, {"model": "b"}).runs == []


def test_a_broken_store_is_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "x.steps.jsonl"
    path.write_text("{not json\n")
    assert open_store(path, {"model": "a"}).runs == []
    assert json.loads(path.read_text())["model"] == "a"


def test_drift_of_the_reference_is_flagged_and_divided_out() -> None:
    """The machine slows down by half between the references; a step between them took 1.25 times its time."""
    mark = reference(BOUNDS)
    other = Composition((7,))
    store = Store({"device": "cpu"})
    for what, seconds in (
        [(mark, 1.0)] * 2 + [(other, 2.5)] + [(mark, 1.5)] * 2 + [(other, 3.0)] + [(mark, 1.5)] * 2
    ):
        store.add(Measured(what, {"total": seconds}, seconds, 0))
    found = drift(store, BOUNDS)
    assert found is not None
    assert found.trend == pytest.approx(0.5)
    assert any("wandered" in flag for flag in found.flags)
    times = [run.parts["total"] for run in steadied(store.runs, mark.key) if run.what == other]
    # References 1.0, 1.5, 1.5 have mean 4/3; from run 1 to run 4 the speed changes evenly in logarithms.
    assert times[1] == pytest.approx(3.0 / (1.5 / (4 / 3)))
    assert times[0] == pytest.approx(2.5 / (1.5 ** (1 / 3) / (4 / 3)))


def test_busy_neighbours_are_named() -> None:
    store = Store({"device": "cpu"})
    for _ in range(4):
        store.add(Measured(reference(BOUNDS), {"total": 1.0}, 3.0, 0))
    found = drift(store, BOUNDS)
    assert found is not None
    assert any("shared" in flag for flag in found.flags)


def test_host_terms_come_back_from_times_made_of_them() -> None:
    rows = [
        (s, t, 1e-4 + 5e-6 * s + 2e-7 * t) for s, t in itertools.product((1, 4, 16), (1, 64, 512)) if t >= s
    ]
    host = fit_host(rows, 0.0, "made up")
    assert (host.step_s, host.per_seq_s, host.per_token_s) == pytest.approx((1e-4, 5e-6, 2e-7), rel=1e-3)


@pytest.mark.parametrize("page_tokens", [8, 16])
@pytest.mark.parametrize("max_num_seqs", [2, 4096])
def test_the_page_count_on_the_cpu_is_predicted_exactly(page_tokens: int, max_num_seqs: int) -> None:
    limits = SchedulerConfig(1, page_tokens, max_num_seqs, 64, 128)
    bench = prepare(PLAN, SOURCE)
    real = pages_that_fit(bench.model, limits, torch.bfloat16, torch.device("cpu"), 0.92)
    assert predict_pages(SMALL, limits, device="cpu").num_pages == real


def test_weight_bytes_are_those_of_the_checkpoint() -> None:
    from realengine.checkpoint import tensor_shapes

    elements = sum(math.prod(size) for size in tensor_shapes(SMALL).values())
    assert weight_bytes(SMALL, 2) == 2 * elements


def test_pages_on_a_gpu_are_what_weights_and_activations_leave() -> None:
    """8 GiB, 90 %: less 0.5 GiB of context, weights rounded up to 2 MiB and a full step's activations."""
    limits = SchedulerConfig(1, 16, 10**6, 64, 128)
    plan = predict_pages(
        SMALL, limits, device="cuda", memory_bytes=8 * 2**30, utilization=0.9, context_bytes=2**29
    )
    page = 2 * 3 * 2 * 16 * 2 * 16
    activations = 64 * (3 * 128 + 4 * 64) * 2 + 10**6 * 97 * 10
    assert plan.num_pages == (int(8 * 2**30 * 0.9) - 2**29 - 2 * 2**20 - activations) // page


def test_float32_is_refused_because_the_twin_has_no_prices_for_it() -> None:
    with pytest.raises(UsageError, match="float32"):
        prepare(Plan(EngineOptions("small", dtype="float32", device="cpu")), SOURCE)


@pytest.mark.parametrize(
    ("product", "name"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA T4", None),
    ],
)
def test_a_gpu_is_known_by_what_its_driver_calls_it(product: str, name: str | None) -> None:
    found = known_gpu(product)
    assert (found.name if found else None) == name


def test_attention_is_what_rotation_leaves() -> None:
    """A step of 8 decodes takes 5 s of attention a layer, 2 of them without any context."""
    store = Store({})
    parts = dict.fromkeys(PARTS, 3.0) | {"total": 30.0}
    store.add(Measured(Composition((1,) * 8, sampled=1), parts | {"attention": 6.0}, 1.0, 0))
    store.add(Measured(Composition((50,) * 8), parts | {"attention": 15.0}, 1.0, 0))
    rows = {(r.kind, r.point[1]): r.seconds for r in rows_of(store, SMALL)}
    assert rows["decode", (8, 50.0)] == pytest.approx(3.0)
    assert rows["gemm", (8.0,)] == pytest.approx(1.0)
    assert np.isfinite(list(rows.values())).all()


def test_a_round_stops_when_its_time_is_up() -> None:
    bench = prepare(PLAN, SOURCE)
    store = Store(bench.header())
    assert measure_round(bench.steps, store, bench.bounds, repeats=1, until_s=0.0, cuts=0) == 8
