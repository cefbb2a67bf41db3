"""A deployment that names its engine's version: what it changes, what is said, and what stays as it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from calibration.observed import with_engine
from costmodel.formats import hardware
from costmodel.predict import Kernel
from costmodel.profile import DeviceProfile, load_profile
from experiments.public_results import read
from experiments.results import result_json
from sim.deployment import Deployment, build, simulate
from sim.metrics import summarise
from sim.pipeline_build import _engines, of_version
from sim.workload import WorkloadSpec, load_workload

STEP = (64, 64, (), 64, 64 * 1000, 1000)


def two(**fields: Any) -> Deployment:
    return Deployment(**{"model": "qwen3-8b", "gpu": "rtxpro6000", "tensor_parallel_size": 2, **fields})


def reduce_s(profile: DeviceProfile, num_bytes: int) -> float:
    return float(Kernel("all_reduce", profile.all_reduce, hardware(profile.facts)).seconds((2,), num_bytes))


def test_without_a_version_nothing_is_another() -> None:
    for gpu in ("rtxpro6000", "h100"):
        built, newest = build(two(gpu=gpu)), build(two(gpu=gpu, engine_version="0.24"))
        assert built.profile is load_profile(gpu)
        assert newest.profile == built.profile
        assert newest.pricer.step_s(*STEP) == built.pricer.step_s(*STEP)
        assert built.warnings == newest.warnings == ()


def test_an_earlier_version_takes_its_own_all_reduces_alone() -> None:
    """Qwen3-8B sums 64 rows of 4,096 in 16 bit twice in each of 36 layers and once before, and gathers logits once."""
    old, new = (build(two(engine_version=v)) for v in ("0.20", "0.24"))
    assert old.memory == new.memory
    assert old.limits == new.limits
    slower_s = old.pricer.step_s(*STEP) - new.pricer.step_s(*STEP)
    logits = 64 * old.model.vocab_size
    gather_s = sum(sign * reduce_s(b.profile, logits) for sign, b in ((1, old), (-1, new)))
    assert slower_s == pytest.approx(
        73 * (55.544 - 17.621) * 1e-6 + gather_s, rel=0.03
    )  # as vLLM measured 512 KiB
    alone = two(tensor_parallel_size=1)
    assert build(alone).pricer.step_s(*STEP) == (
        build(alone.model_copy(update={"engine_version": "0.20"})).pricer.step_s(*STEP)
    )


def test_an_engine_with_cuda_12_takes_its_own_products() -> None:
    """Llama 3.1 8B at 896 tokens: of the four products of a layer two were measured with either library."""
    old, new = (
        build(Deployment(model="llama-3.1-8b", gpu="rtxpro6000", engine_version=v)).pricer.step_s(
            896, 0, (), 0, 0, 0
        )
        for v in ("0.19", "0.20")
    )
    measured_s = 32 * (140.298 / 1.074 - 95.264 + 153.909 / 1.074 - 123.808) * 1e-6
    assert 0.8 * measured_s < old - new < 6 * measured_s


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"gpu": "h100", "tensor_parallel_size": 1},
            "--engine-version 0.19 has no effect: h100 has bfloat16 products of one version only, and one GPU",
        ),
        (
            {"gpu": "h200"},
            "--engine-version 0.19 has no effect: h200 has bfloat16 products and all-reduces of one version only",
        ),
        (
            {"tensor_parallel_size": 1, "quantization": "fp8"},
            "--engine-version 0.19 has no effect: rtxpro6000 has fp8 products of one version only, and one GPU",
        ),
        ({"engine_version": "0.10.2"}, "all-reduces are those of 0.19.0, the oldest version"),
        ({"tensor_parallel_size": 4}, "those of 0.24.0, the oldest version that was measured over so many"),
        (
            {"pools": [{"name": "a", "gpu": "h200"}, {"name": "b"}]},
            "pool a: --engine-version 0.19 has no effect",
        ),
    ],
)
def test_a_version_that_changes_nothing_or_is_not_measured_is_said(
    fields: dict[str, Any], words: str
) -> None:
    """Warnings and no errors: searches over GPUs go on."""
    (warning,) = build(two(**{"engine_version": "0.19", **fields})).warnings
    assert words in warning


@pytest.mark.parametrize("tp", [1, 2])
def test_a_profile_without_the_exchange_of_experts_prices_it_as_an_all_reduce_of_that_version(
    tp: int, tmp_path: Path
) -> None:
    whole = load_profile("rtxpro6000")
    own = tmp_path / "own.json"
    own.write_text(whole.model_copy(update={"expert_exchange": None}).to_json(), encoding="utf-8")
    fields = {"model": "qwen3-30b-a3b", "tensor_parallel_size": tp, "data_parallel_size": 2}
    old, new = (build(two(**fields, gpu=str(own), engine_version=v)) for v in ("0.19", "0.24"))
    for built, version in ((old, "0.19.0"), (new, "0.24.0")):
        assert any(f"priced as an all-reduce of {version}" in w for w in built.warnings)
        assert version in of_version(built)["all_reduce"]
        assert not any("has no effect" in w for w in built.warnings)
    assert old.pricer.step_s(*STEP) > new.pricer.step_s(*STEP)
    measured = build(two(**fields, engine_version="0.19"))
    assert not any("expert_exchange" in w for w in measured.warnings)


def test_what_is_no_version_is_refused() -> None:
    for wrong in ("latest", "0,19", "", 0.19):
        with pytest.raises(ValidationError, match="is no version; write one as text"):
            two(engine_version=wrong)


def test_results_say_whose_all_reduces_were_used() -> None:
    spec = {"tenants": [{"dataset": {"name": "random", "input_len": 16, "output_len": 4}, "num_prompts": 4}]}
    workload = load_workload(WorkloadSpec.model_validate(spec), seed=0)
    for version, source in (
        (None, None),
        ("0.19", "vLLM_custom_graph 0.19.0"),
        ("0.30", "vLLM_custom_graph 0.24.0"),
    ):
        record = simulate(workload, two(engine_version=version))
        result = result_json(record, summarise(record))
        said = result.get("sim_all_reduce")
        assert said == (None if source is None else f"kernels_comm_rtx_pro_6000_server.csv: {source}")
        library = result.get("sim_products")
        assert (
            library is None
            if version is None
            else library.startswith(f"of engines {'before 0.20' if version == '0.19' else 'from 0.20 on'}: ")
        )


def test_products_that_no_version_changes_are_not_named() -> None:
    """On RTX PRO 6000 those of bfloat16 have versions; nvfp4, of which nothing was measured, takes their efficiencies."""
    assert set(of_version(build(two(engine_version="0.19")))) == {"products", "all_reduce"}
    assert set(of_version(build(two(engine_version="0.19", quantization="nvfp4")))) == {
        "products",
        "all_reduce",
    }
    assert set(of_version(build(two(engine_version="0.19", quantization="fp8")))) == {"all_reduce"}
    alone = two(engine_version="0.19", quantization="fp8", tensor_parallel_size=1)
    assert build(alone).profile is load_profile("rtxpro6000")
    draft = {"method": "draft_model", "model": "qwen3-0.6b", "num_speculative_tokens": 2, "acceptance": 0.7}
    drafting = build(alone.model_copy(update={"speculative_config": json.dumps(draft)}))
    assert set(of_version(drafting)) == {"products"}, "the draft is in 16 bit"
    assert not any("has no effect" in warning for warning in drafting.warnings)


def test_a_profile_with_three_libraries_names_the_engines_of_each() -> None:
    shipped = load_profile("rtxpro6000")
    three = shipped.model_copy(
        update={"other_gemms": {**shipped.other_gemms, "0.9": shipped.other_gemms["0.19"]}}
    )
    said = {
        version: _engines(three.for_engine(version, 1))
        for version in ("0.8", "0.9.2", "0.18", "0.19.1", "0.20")
    }
    assert said == {
        "0.8": "before 0.19",
        "0.9.2": "before 0.19",
        "0.18": "before 0.19",
        "0.19.1": "from 0.19 on and before 0.20",
        "0.20": "from 0.20 on",
    }


def test_runs_name_the_version_where_it_prices_something() -> None:
    assert with_engine(two(), "0.19.0").engine_version == "0.19.0"
    assert with_engine(two(tensor_parallel_size=1), "0.19.0").engine_version == "0.19.0"
    assert with_engine(two(gpu="h100", tensor_parallel_size=1), "0.19.0").engine_version is None
    assert with_engine(two(tensor_parallel_size=1, quantization="fp8"), "0.19.0").engine_version is None
    assert with_engine(two(), "nightly").engine_version is None
    named = {(r.source, r.flags.get("engine_version")) for r in read() if r.flags["gpu"] == "rtxpro6000"}
    assert {version for _, version in named} == {"0.19.0", "0.28.0"}
