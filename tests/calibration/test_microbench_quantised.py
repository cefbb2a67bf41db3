"""Steps with quantised weights and caches, measured, fitted and priced; pages and bytes of every format."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from calibration.device_calibrate import Plan, calibrate, prepare  # noqa: E402
from calibration.device_memory import predict_pages, weight_bytes  # noqa: E402
from calibration.live import Live  # noqa: E402
from calibration.microbench_run import Store  # noqa: E402
from calibration.tables import read_table  # noqa: E402
from costmodel import memory  # noqa: E402
from costmodel.formats import GEMM_FORMATS, KV_DTYPES  # noqa: E402
from costmodel.model import ModelShape  # noqa: E402
from costmodel.pricer import StepPricer  # noqa: E402
from costmodel.profile import load_profile  # noqa: E402
from realengine.architecture import Architecture, Rope  # noqa: E402
from realengine.build import EngineOptions, pages_that_fit  # noqa: E402
from realengine.checkpoint import DummyCheckpoint  # noqa: E402
from realengine.load import Source, load  # noqa: E402
from realengine.quant_kv import ENGINE_KV_DTYPES  # noqa: E402
from realengine.runner import allocate_caches  # noqa: E402
from serving.config import SchedulerConfig  # noqa: E402

SHAPE = ModelShape(
    name="small",
    family="llama",
    hidden_size=64,
    intermediate_size=128,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=128,
    max_position_embeddings=128,
)
SOURCE = Source(Architecture(SHAPE, Rope(), 1e-6), DummyCheckpoint(SHAPE), None)
CPU = torch.device("cpu")
FORMATS = [("int8_wo", "int4"), ("int4_wo", "int8")]


def options(quantization: str | None, kv_cache_dtype: str) -> EngineOptions:
    return EngineOptions(
        "small", dtype="bfloat16", device="cpu", quantization=quantization, kv_cache_dtype=kv_cache_dtype
    )


@pytest.mark.parametrize(("quantization", "kv"), FORMATS)
def test_a_profile_of_quantised_steps_prices_them(quantization: str | None, kv: str, tmp_path: Path) -> None:
    """Everything that the twin needs of this format is measured: nothing borrowed, nothing from a datasheet."""
    out = tmp_path / "here.json"
    calibrate(
        Plan(options(quantization, kv), 4, 32, 64, budget_s=0.0, rounds=1, repeats=1), out, source=SOURCE
    )
    profile = load_profile(out)
    assert set(profile.gemm) == {quantization or "bfloat16", "bfloat16"}
    assert set(profile.decode) == set(profile.prefill) == {KV_DTYPES[kv]}
    pricer = StepPricer(
        SHAPE,
        profile,
        quantization=quantization,
        kv_cache_dtype=kv,
        max_num_batched_tokens=32,
        max_num_seqs=4,
        cuda_graphs=False,
    )
    assert 0 < pricer.step_s(4, 4, (), 4, 200, 60) < 1
    assert not [line for line in pricer.extrapolations(64) if "not measured" in line]
    rows = read_table(out.with_suffix(".parquet")).rows
    dtypes = {(row["kind"], row["dtype"]) for row in rows if row["kind"] in ("gemm", "decode")}
    assert dtypes == {("gemm", quantization or "bfloat16"), ("gemm", "bfloat16"), ("decode", KV_DTYPES[kv])}


def test_the_live_twin_has_the_formats_of_the_engine(tmp_path: Path) -> None:
    bench = prepare(Plan(options("int4_wo", "int8"), 4, 32, 64), SOURCE)
    live = Live(bench, Store(bench.header()), tmp_path)
    built = live.deployment(load_profile("h200"))
    assert (built.deployment.quantization, built.deployment.kv_cache_dtype) == ("int4_wo", "int8")
    assert built.limits.num_pages == bench.limits.num_pages


@pytest.mark.parametrize("kv", [name for name in ENGINE_KV_DTYPES if name != "float16"])
def test_pages_of_every_cache_are_counted_alike(kv: str) -> None:
    """Tensors that the engine allocates, the twin's formula, and the prediction of the engine's page count."""
    model = load(SOURCE, device=CPU, dtype=torch.bfloat16, max_positions=64, kv_cache_dtype=kv)
    caches = allocate_caches(model, 3, 16, device=CPU, dtype=torch.bfloat16)
    page_bytes = sum(tensor[0].nbytes for cache in caches for tensor in cache.tensors)
    plan = memory.plan_memory(SHAPE, load_profile("h200"), kv_cache_dtype=kv, max_model_len=128)
    assert plan.kv_bytes_per_token * 16 == page_bytes
    limits = SchedulerConfig(num_pages=1, max_num_seqs=10**6, max_model_len=128)
    predicted = predict_pages(SHAPE, limits, device="cpu", kv_cache_dtype=kv)
    assert predicted.page_bytes == page_bytes
    assert predicted.num_pages == pages_that_fit(model, limits, torch.bfloat16, CPU, 0.9) < 8 * 10**6


@pytest.mark.parametrize("name", ["int8_wo", "int4_wo", "fp8", "fp8_block"])
def test_the_predicted_weights_are_those_of_the_memory_plan(name: str) -> None:
    for shape in (SHAPE, SHAPE.model_copy(update={"tie_word_embeddings": True})):
        assert weight_bytes(shape, 2, 1, name) == memory.weight_bytes(shape, GEMM_FORMATS[name])


def test_steps_of_another_format_are_measured_anew(tmp_path: Path) -> None:
    plan = Plan(options("int8_wo", "auto"), 4, 32, 64, budget_s=0.0, rounds=1, repeats=1)
    first = prepare(plan, SOURCE).header()
    assert first != prepare(replace(plan, options=options(None, "auto")), SOURCE).header()
    assert first != prepare(replace(plan, options=options("int8_wo", "int8")), SOURCE).header()
