"""Steps of chunks and decodes, priced by what was measured: on devices whose costs are known, to the per cent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

pytest.importorskip("torch")

from calibration.device_facts import raised
from calibration.fit import Options, fit_kernel
from calibration.microbench_attention import rotation
from calibration.microbench_fit import fastest, fit_steps
from calibration.microbench_points import Bounds
from calibration.microbench_run import Store, measure_round
from calibration.microbench_steps import PARTS, Composition
from calibration.microbench_straight import straight
from calibration.tables import Samples
from costmodel.formats import hardware
from costmodel.model import ModelShape
from costmodel.predict import Kernel
from costmodel.pricer import StepPricer
from costmodel.profile import DeviceFacts, HostTerms, Provenance

SHAPE = ModelShape(
    name="known",
    family="llama",
    hidden_size=512,
    intermediate_size=1536,
    num_layers=32,
    num_heads=8,
    num_kv_heads=4,
    head_dim=64,
    vocab_size=32000,
    max_position_embeddings=256,
    tie_word_embeddings=True,
)
BOUNDS = Bounds(16, 64, 256, 1 << 16, odd=True)
MIXTURES = (
    Composition((180,) * 4, ((60, 64),)),
    Composition((120,) * 8, ((30, 124),)),
    Composition((200,) * 2, ((20, 150),)),
    Composition((150,) * 6, ((58, 0),)),
    Composition((140, 180, 220), ((61, 64),)),
    Composition((150,), ((20, 168), (43, 64))),
    Composition(chunks=((30, 120), (30, 64))),
    Composition((100,) * 3, ((20, 0), (20, 64), (20, 128))),
)


@dataclass(frozen=True)
class Known:
    """A device with attention of so many seconds a layer; every other part takes 10 µs and 2 µs a token or row."""

    attention: Callable[[Composition], float]

    def fits(self, what: Composition) -> bool:
        return True

    def run(self, what: Composition) -> dict[str, float]:
        parts = {}
        for part in PARTS[:-1]:
            rows = what.num_sampled if part in ("lm_head", "sample") else what.num_tokens
            each = float(SHAPE.num_layers) if part in ("qkv", "o", "gate_up", "down", "act") else 1.0
            if part == "norm":  # the last one has only the rows that are sampled
                each = 2.0 * SHAPE.num_layers + what.num_sampled / what.num_tokens
            parts[part] = each * (1e-5 + 2e-6 * rows)
        parts["attention"] = SHAPE.num_layers * self.attention(what)
        parts["rest"] = 0.0
        return parts | {"total": sum(parts.values())}


def a_kernel_for_each(what: Composition) -> float:
    """Rotation once; then decodes padded to the longest in one call, and a call for each chunk.

    Rows of the decodes' call are dear, so that 64 of them take longer than a chunk of 64.
    """
    rotate = 3e-5 + 8e-7 * what.num_tokens
    batch, longest = len(what.decodes), max(what.decodes, default=0)
    decodes = 2e-5 + 4e-6 * batch + 1.2e-7 * batch * longest if batch else 0.0
    return rotate + decodes + sum(4e-5 + 1.5e-6 * t + 8e-9 * t * (b + t / 2) for t, b in what.chunks)


def later_chunks_dearer(what: Composition) -> float:
    """A kernel for each, and chunks with earlier context take a quarter more besides."""
    dearer = sum(0.25 * (4e-5 + 1.5e-6 * t) for t, b in what.chunks if b)
    return a_kernel_for_each(what) + dearer


def one_kernel_of_chunks(what: Composition) -> float:
    """The same, but all chunks in one launch, and decodes that take as long as their mean context says."""
    rotate = 2e-6 + 5e-8 * what.num_tokens
    decodes = 9e-6 + 1e-6 * len(what.decodes) + 2e-8 * sum(what.decodes) if what.decodes else 0.0
    chunks = 1e-5 + sum(3e-7 * t + 1e-9 * t * (b + t / 2) for t, b in what.chunks) if what.chunks else 0.0
    return rotate + decodes + chunks


FACTS = DeviceFacts(
    name="known",
    product="a device of known costs",
    memory_bytes=1 << 34,
    num_sms=1,
    peak_flops={"bfloat16": 1e12},
    hbm_bytes_per_s=1e12,
    l2_bytes=1 << 25,
    link_bytes_per_s=1e10,
    tdp_w=100.0,
    sources={},
)


@pytest.mark.parametrize("attention", [a_kernel_for_each, later_chunks_dearer, one_kernel_of_chunks])
def test_mixtures_cost_what_the_device_takes(attention: Callable[[Composition], float]) -> None:
    device = Known(attention)
    store = Store({})
    measure_round(device, store, BOUNDS, repeats=1, cuts=0)  # type: ignore[arg-type]
    profile = fit_steps(
        store,
        SHAPE,
        raised(FACTS, *fastest(store, SHAPE)),
        HostTerms(step_s=0, per_seq_s=0, launch_s=0, source="none"),
        Provenance(measured="a device of known costs"),
        options=Options(folds=0, max_evaluations=40),
    )
    pricer = StepPricer(SHAPE, profile, max_num_batched_tokens=64, max_num_seqs=16, cuda_graphs=False)
    for what in MIXTURES:
        longest = max(what.decodes, default=0)
        price = pricer.step_s(
            what.num_tokens, what.num_sampled, what.chunks, len(what.decodes), sum(what.decodes), longest
        )
        assert price == pytest.approx(device.run(what)["total"], rel=0.01), what.key


@pytest.mark.parametrize("attention", [a_kernel_for_each, one_kernel_of_chunks])
def test_rotation_is_what_several_kernels_save(attention: Callable[[Composition], float]) -> None:
    """Alone each kernel rotates for itself: together they take less by the rotations that are not done again."""
    parts = [Composition((100,) * 8), Composition(chunks=((40, 64),))]
    both = Composition((100,) * 8, ((40, 64),))
    rows = [Composition((1,) * tokens, sampled=1) for tokens in (1, 4, 8, 40, 48, 64)]
    rotate = rotation({what: attention(what) for what in (*parts, both, *rows)})
    again = rotate(8) + rotate(40) - rotate(48)
    assert again == pytest.approx(sum(map(attention, parts)) - attention(both), rel=1e-9)
    assert 0 < rotate(40) < attention(parts[1])


def test_without_mixtures_rotation_leaves_something_of_every_step() -> None:
    rows = [Composition((1,) * tokens, sampled=1) for tokens in (1, 64)]
    alone = [Composition(chunks=((64, 0),)), Composition((100,))]
    rotate = rotation({what: a_kernel_for_each(what) for what in (*rows, *alone)})
    assert all(0 < rotate(what.num_tokens) < a_kernel_for_each(what) for what in alone)


def test_one_worker_climbs_no_stairs_between_measured_sizes() -> None:
    """Products of 20 µs and 3 µs a row, measured at a few sizes: tiles of the formula do not show between these."""
    sizes = np.array([11.0, 63.0, 65.0, 127.0, 188.0, 255.0, 423.0])
    shape = np.tile([512.0, 1536.0], (len(sizes), 1))
    samples = Samples("gemm", shape, sizes[:, None], 2e-5 + 3e-6 * sizes)
    hw = hardware(FACTS, kv_bytes=2.0, head_dim=64)
    options = Options(folds=0, max_evaluations=20)
    fit = fit_kernel("gemm", samples, hw, options=options)
    rows = np.arange(70.0, 420.0, 7.0)
    took = 2e-5 + 3e-6 * rows
    stairs = Kernel("gemm", fit, hw).seconds((512, 1536), rows) / took - 1.0
    line = Kernel("gemm", straight(fit, samples, hw), hw).seconds((512, 1536), rows) / took - 1.0
    assert np.abs(line).max() < 0.01 < 0.05 < np.abs(stairs).max()
