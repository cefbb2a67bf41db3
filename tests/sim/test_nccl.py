"""Without vLLM's own all-reduce: NCCL's prices, of the same bytes at the same places."""

from __future__ import annotations

from pathlib import Path

import pytest

from costmodel.formats import hardware
from costmodel.predict import Kernel
from costmodel.profile import load_profile
from serving.errors import UsageError
from sim.deployment import Deployment, build
from sim.pipeline_build import of_version

STEP = (64, 64, (), 64, 64 * 1000, 1000)


def qwen(**fields: object) -> Deployment:
    given = {"model": "qwen3-32b", "gpu": "rtxpro6000", "tensor_parallel_size": 2, **fields}
    return Deployment.model_validate(given)


@pytest.mark.parametrize(
    ("gpu", "num_bytes", "measured_us"),
    [  # nccl-tests over two RTX PRO 6000 and eight H200
        ("rtxpro6000", 2**20, 44.4),
        ("rtxpro6000", 2**22, 129.4),
        ("h200", 2**22, 51.37),
        ("h200", 2**27, 564.5),
    ],
)
def test_prices_are_those_nccl_was_measured_at(gpu: str, num_bytes: int, measured_us: float) -> None:
    num_gpus = 2 if gpu == "rtxpro6000" else 8
    built = build(qwen(gpu=gpu, tensor_parallel_size=num_gpus, disable_custom_all_reduce=True))
    kernel = Kernel("all_reduce", built.profile.all_reduce, hardware(built.profile.facts))
    assert float(kernel.seconds((num_gpus,), num_bytes)) * 1e6 == pytest.approx(measured_us, rel=5e-3)
    assert "NCCL" in of_version(built)["all_reduce"]


def test_a_step_waits_longer_by_its_reduces_alone() -> None:
    """64 rows of 5,120 in 16 bit twice in each of 64 layers and once before, and logits gathered once."""
    own, by_nccl = build(qwen()), build(qwen(disable_custom_all_reduce=True))
    assert own.memory == by_nccl.memory
    one, other = (
        Kernel("all_reduce", b.profile.all_reduce, hardware(b.profile.facts)) for b in (own, by_nccl)
    )
    rows, logits = 64 * 5120 * 2.0, 64.0 * own.model.vocab_size
    more_s = 129 * (other.seconds((2,), rows) - one.seconds((2,), rows))
    more_s = more_s + other.seconds((2,), logits) - one.seconds((2,), logits)
    assert by_nccl.pricer.step_s(*STEP) - own.pricer.step_s(*STEP) == pytest.approx(float(more_s), rel=0.02)


def test_an_engine_version_does_not_bring_its_own_back() -> None:
    old = build(qwen(disable_custom_all_reduce=True, engine_version="0.19"))
    assert old.profile.all_reduce == load_profile("rtxpro6000").nccl_all_reduce
    assert old.profile.products == "0.19"


def test_where_nothing_is_reduced_it_is_said() -> None:
    (warning,) = build(
        qwen(tensor_parallel_size=1, disable_custom_all_reduce=True, model="qwen3-8b")
    ).warnings
    assert warning.startswith("--disable-custom-all-reduce has no effect")


def test_a_profile_without_nccl_is_refused(tmp_path: Path) -> None:
    own = tmp_path / "own.json"
    bare = load_profile("rtxpro6000").model_copy(update={"nccl_all_reduce": None})
    own.write_text(bare.to_json(), encoding="utf-8")
    with pytest.raises(UsageError, match="no prices of NCCL's all-reduce"):
        build(qwen(gpu=str(own), disable_custom_all_reduce=True))
