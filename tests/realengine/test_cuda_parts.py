"""What the CUDA path does besides CUDA: packing a step into one upload, and padding decodes to a recorded size."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from realengine.batch import LayerCache
from realengine.cuda import DecodeGraphs, Recording, Uploads, graph_sizes, padded_size
from realengine.inputs import Moves, StepInputs
from realengine.kernels import operators
from realengine.models import Model
from realengine.ops import KernelOps, rotary_tables
from realengine.runner import StepRunner, allocate_caches
from tests.realengine.engines import CPU, tiny_model


def test_graph_sizes_are_dense_where_batches_are_small() -> None:
    assert graph_sizes(1) == (1,)
    assert graph_sizes(20) == (1, 2, 4, 8, 16, 20)
    assert graph_sizes(256)[-3:] == (240, 248, 256)
    assert graph_sizes(4096)[-2:] == (496, 512)


def test_a_batch_is_padded_to_the_next_size() -> None:
    sizes = graph_sizes(64)
    assert [padded_size(rows, sizes) for rows in (1, 3, 8, 9, 64)] == [1, 4, 8, 16, 64]
    assert padded_size(65, sizes) is None


def test_all_arrays_of_a_step_arrive_by_one_upload() -> None:
    arrays = [
        np.arange(5, dtype=np.int64),
        np.array([True, False, True]),
        np.arange(6, dtype=np.int32).reshape(2, 3)[:, ::2],
        np.array([0.5, 1.5], np.float32),
        np.empty(0, np.int64),
    ]
    uploads = Uploads(CPU, num_bytes=8)  # too small: it grows
    for _ in range(4):
        sent = uploads.send(arrays)
        for array in arrays:
            assert np.array_equal(sent[id(array)].numpy(), array)
            assert sent[id(array)].numpy().dtype == array.dtype


class Rerun:
    """In place of a CUDA graph: runs the forward again into the result that was handed out."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def __call__(self, forward: Callable[[], Tensor]) -> Recording:
        result = forward()
        self.rows.append(len(result))

        def compute_again() -> None:
            result.copy_(forward())

        return compute_again, result


@pytest.fixture
def step() -> StepRunner:
    model = tiny_model()
    shape = model.architecture.shape
    cos, sin = rotary_tables(model.architecture.rope, shape.head_dim, 256, CPU)
    model = Model(model.architecture, model.weights, KernelOps(cos, sin, operators("cpu")))
    caches = allocate_caches(model, 20, 4, device=CPU, dtype=torch.float32)
    torch.manual_seed(0)
    for cache in caches:
        cache.k.normal_()
        cache.v.normal_()
    return StepRunner(model, caches, None, 8, CPU)


def decode_step(rows: int, in_flight: bool) -> StepInputs:
    lengths = np.array([5, 8, 9, 1, 12])[:rows]
    table = np.zeros((rows, 3), np.int32)
    page = 1
    for row, length in enumerate(lengths.tolist()):
        count = -(-length // 4)
        table[row, :count] = range(page, page + count)
        page += count
    positions = lengths - 1
    every = np.arange(rows)
    return StepInputs(
        index=0,
        ids=np.array([7, 8, 9, 10, 11])[:rows],
        in_flight=np.array([True, False, True, False, True])[:rows] if in_flight else None,
        token_seats=every + 1,
        positions=positions,
        kv_slots=table[every, positions // 4].astype(np.int64) * 4 + positions % 4,
        page_table=table,
        context_len=lengths.astype(np.int32),
        query_start=np.zeros(1, np.int32),
        num_decodes=rows,
        max_query=1,
        longest=int(lengths.max()),
        sample_rows=every,
        sample_seats=every + 1,
        sample_positions=lengths,
        plan_rows=every,
        moves=Moves(),
    )


@pytest.mark.parametrize("in_flight", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 5])
def test_a_padded_step_is_the_step_itself(step: StepRunner, rows: int, in_flight: bool) -> None:
    step.last_token[:] = torch.arange(30, 38)
    inputs = decode_step(rows, in_flight)
    before = [LayerCache(cache.k.clone(), cache.v.clone()) for cache in step.caches]
    with torch.inference_mode():
        expected = step.model.forward(step.batch(inputs, torch.from_numpy), before)
        rerun = Rerun()
        graphs = DecodeGraphs(step, (1, 2, 4, 8), 6, rerun)
        graphs.record()
        logits = graphs.replay(inputs)
    assert rerun.rows == [8, 4, 2, 1]
    assert logits is not None
    torch.testing.assert_close(logits, expected)
    for plain, padded in zip(before, step.caches, strict=True):
        torch.testing.assert_close(padded.k[1:], plain.k[1:])
        torch.testing.assert_close(padded.v[1:], plain.v[1:])


def test_steps_with_chunks_or_too_many_rows_are_not_replayed(step: StepRunner) -> None:
    with torch.inference_mode():
        graphs = DecodeGraphs(step, (1, 2), 6, Rerun())
        graphs.record()
        assert graphs.replay(decode_step(3, False)) is None
        chunked = decode_step(1, False)
        chunked.max_query = 2
        assert graphs.replay(chunked) is None
