"""Whose all-reduces price an engine version: the rule, what shipped profiles have, and what they leave as it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodel.engine_version import is_newer, is_version, parse_version, standing_for
from costmodel.formats import hardware
from costmodel.predict import Kernel
from costmodel.profile import DeviceProfile, load_profile
from serving.errors import UsageError

NUMBERS = st.tuples(st.integers(0, 3), st.integers(0, 30), st.integers(0, 3))
VERSIONS = NUMBERS.map(lambda parts: ".".join(map(str, parts)))


@given(st.lists(VERSIONS, min_size=1, max_size=6, unique=True), NUMBERS, st.integers(2, 3))
def test_the_newest_that_is_not_newer_or_the_oldest(
    measured: list[str], numbers: tuple[int, int, int], named: int
) -> None:
    """A name of two parts stands for its last patch, so that versions compare as numbers."""
    last = (*numbers[:2], numbers[2] if named == 3 else 99)
    chosen = standing_for(".".join(map(str, numbers[:named])), measured)
    values = sorted(parse_version(v) for v in measured)
    below = [v for v in values if v <= last]
    assert parse_version(chosen) == (below[-1] if below else values[0])
    assert is_newer(chosen, ".".join(map(str, numbers[:named]))) is not bool(below)


def test_what_is_a_version() -> None:
    for text in ("0.19", "v0.10.2", "0.24.0rc1", "0.9.1.dev3", "0.19.0+cu128", "0.8.5.post1"):
        assert is_version(text), text
    for text in ("", "19", "0,19", "0.", ".19", "vllm", "0.19 ", "latest", "0.1.2.3.4"):
        assert not is_version(text), text
    assert parse_version("V0.10.2") == parse_version("v0.10.2") == (0, 10, 2)


def shared_s(profile: DeviceProfile, num_gpus: int, num_bytes: int) -> float:
    kernel = Kernel("all_reduce", profile.all_reduce, hardware(profile.facts))
    return float(kernel.seconds((num_gpus,), num_bytes))


@pytest.mark.parametrize(
    ("gpu", "version", "num_gpus", "measured_us"),
    [  # vLLM's own all-reduce of 1 MiB in a CUDA graph, as AIConfigurator's tables have it
        ("rtxpro6000", "0.19", 2, 91.519),
        ("rtxpro6000", "0.23.9", 2, 91.519),
        ("rtxpro6000", "0.10", 2, 91.519),
        ("rtxpro6000", "0.24", 2, 30.146),
        ("rtxpro6000", "0.28.0", 2, 30.146),
        ("rtxpro6000", "0.19", 4, 87.657),  # 0.19 was measured over two GPUs alone
        ("h100", "0.10.2", 8, 17.257),
        ("h100", "0.24", 8, 14.968),
        ("h200", "0.10.2", 8, 14.074),
    ],
)
def test_all_reduces_of_an_engine_are_those_measured_with_it(
    gpu: str, version: str, num_gpus: int, measured_us: float
) -> None:
    profile = load_profile(gpu).for_engine(version, num_gpus)
    assert shared_s(profile, num_gpus, 2**20) * 1e6 == pytest.approx(measured_us, rel=2e-3)


def test_choosing_loses_nothing_and_touches_nothing_else() -> None:
    shipped = load_profile("rtxpro6000")
    old = shipped.for_engine("0.19", 2)
    assert old.content_hash != shipped.content_hash
    assert dict(old.kernels())["all_reduce/0.24.0"] == shipped.all_reduce
    assert old.for_engine("0.28", 2) == shipped
    chosen = {"all_reduce", "all_reduce_version", "other_all_reduces", "gemm", "gemm_version", "other_gemms"}
    kept = set(DeviceProfile.model_fields) - chosen
    assert all(getattr(old, name) == getattr(shipped, name) for name in kept)
    assert dict(old.kernels())["gemm/bfloat16/0.20"] == shipped.gemm["bfloat16"]
    assert {f: old.gemm[f] for f in old.gemm if f != "bfloat16"} == {
        f: shipped.gemm[f] for f in shipped.gemm if f != "bfloat16"
    }


@pytest.mark.parametrize(
    ("version", "measured_us"),
    [  # output projection of Llama 3.1 8B at 896 tokens: CUDA 12 until vLLM 0.19, CUDA 13 since 0.20
        ("0.10.2", 140.298 / 1.074),
        ("0.19.1", 140.298 / 1.074),
        ("0.20.0", 95.264),
        ("0.28", 95.264),
    ],
)
def test_products_of_an_engine_are_those_of_its_library(version: str, measured_us: float) -> None:
    profile = load_profile("rtxpro6000").for_engine(version, 1)
    kernel = Kernel("gemm", profile.gemm["bfloat16"], hardware(profile.facts))
    assert float(kernel.seconds((4096.0, 4096.0), 896.0)) * 1e6 == pytest.approx(measured_us, rel=2e-3)
    assert profile.products == ("0.19" if measured_us > 100 else "")


@pytest.mark.parametrize("gpu", ["a100", "b200", "h200", "l40s", "rtx4090"])
def test_a_profile_of_one_version_says_nothing_of_versions(gpu: str) -> None:
    profile = load_profile(gpu)
    assert profile.for_engine("0.10", 2) is profile
    assert "other_all_reduces" not in profile.to_json()
    assert "other_gemms" not in profile.to_json()


def test_one_gpu_reduces_nothing_by_any_version() -> None:
    shipped = load_profile("rtxpro6000")
    assert shipped.for_engine("0.20", 1) is shipped
    assert shipped.for_engine("0.19", 1).all_reduce is shipped.all_reduce


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"gemm_version": "new"}, "the document: gemm_version and the keys of other_gemms are versions"),
        ({"gemm": {}}, "other_gemms has bfloat16, which gemm lacks"),
    ],
)
def test_a_profile_file_whose_versions_cannot_be_told_apart_is_one_line(
    changed: dict[str, Any], words: str, tmp_path: Path
) -> None:
    path = tmp_path / "own.json"
    path.write_text(json.dumps(json.loads(load_profile("rtxpro6000").to_json()) | changed))
    with pytest.raises(UsageError, match=words) as error:
        load_profile(path)
    assert "\n" not in str(error.value)
