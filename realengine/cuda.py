"""Steps on a CUDA device: one upload, one forward (a recorded graph where all rows decode), one small download.

The host never waits inside a step: inputs travel from pinned memory, a token that the host does not know yet is read
from the device, and an event tells when the drawn tokens have arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from realengine.batch import Batch, RecentWindow
from realengine.inputs import StepInputs
from realengine.quant_recent import RecentRows
from realengine.runner import Drawn, StepRunner
from realengine.seats import Draws

_ALIGN = 16
_RING = 3
"""Pinned buffers in turn: one being filled, one or two whose steps are in flight."""

Array = npt.NDArray[np.generic]


def graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Padded batch sizes for which graphs are recorded: 1, 2, 4, then every 8, from 256 on every 16."""
    sizes = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))
    if max_num_seqs >= sizes[-1]:
        return sizes
    return (*(size for size in sizes if size < max_num_seqs), max_num_seqs)


def padded_size(rows: int, sizes: Sequence[int]) -> int | None:
    """The smallest recorded size that holds `rows`; None when none does."""
    return next((size for size in sizes if size >= rows), None)


@dataclass(frozen=True, slots=True)
class Packing:
    """Where each array lies in one upload."""

    offsets: tuple[int, ...]
    num_bytes: int


def packing(arrays: Sequence[Array]) -> Packing:
    """Arrays one behind the other, each on a 16-byte boundary."""
    offsets, end = [], 0
    for array in arrays:
        offsets.append(end)
        end += -(-array.nbytes // _ALIGN) * _ALIGN
    return Packing(tuple(offsets), end)


def pack(arrays: Sequence[Array], into: npt.NDArray[np.uint8]) -> Packing:
    """Copy `arrays` into a byte buffer."""
    layout = packing(arrays)
    for array, offset in zip(arrays, layout.offsets, strict=True):
        into[offset : offset + array.nbytes] = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
    return layout


def view_as(buffer: Tensor, offset: int, array: Array) -> Tensor:
    """The part of a byte tensor that holds `array`, in its type and shape."""
    kind = torch.from_numpy(np.empty(0, array.dtype)).dtype
    return buffer[offset : offset + array.nbytes].view(kind).view(array.shape)


class Uploads:
    """Host arrays to the device, all arrays of a step in one transfer."""

    def __init__(self, device: torch.device, num_bytes: int = 1 << 16) -> None:
        self._device = device
        self._next = 0
        self._pinned = [self._pin(num_bytes) for _ in range(_RING)]

    @staticmethod
    def _pin(num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available())

    def send(self, arrays: Sequence[Array], into: Tensor | None = None) -> dict[int, Tensor]:
        """Device tensors by `id` of their array; `into` is a device buffer to reuse."""
        turn, self._next = self._next, (self._next + 1) % _RING
        needed = packing(arrays).num_bytes
        if len(self._pinned[turn]) < needed:
            self._pinned[turn] = self._pin(2 * needed)
        pinned = self._pinned[turn][:needed]
        layout = pack(arrays, pinned.numpy())
        if into is None:
            buffer = pinned.to(self._device, non_blocking=True)
        else:
            buffer = into[:needed]
            buffer.copy_(pinned, non_blocking=True)
        return {
            id(array): view_as(buffer, offset, array)
            for array, offset in zip(arrays, layout.offsets, strict=True)
        }


def arrays_of(record: StepInputs | Draws | RecentRows) -> list[Array]:
    """Every array of a step's description."""
    values = (getattr(record, field.name) for field in fields(record))
    arrays = [value for value in values if isinstance(value, np.ndarray)]
    if isinstance(record, StepInputs) and record.recent is not None:
        arrays += arrays_of(record.recent)
    return arrays


Recording = tuple[Callable[[], None], Tensor]
"""What computes a recorded forward again, and the tensor that then holds its result."""


class CudaRecorder:
    """Records forwards as CUDA graphs that share one pool of memory."""

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, forward: Callable[[], Tensor]) -> Recording:
        forward()  # compiles kernels and fills allocators, which a recording must not
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = forward()
        self._pool = self._pool or graph.pool()
        return graph.replay, result


class DecodeGraphs:
    """The forward of a pure decode step, recorded once for each padded batch size over fixed input buffers."""

    def __init__(
        self,
        step: StepRunner,
        sizes: Sequence[int],
        table_width: int,
        recorder: Callable[[Callable[[], Tensor]], Recording] | None = None,
    ) -> None:
        self.sizes = tuple(sizes)
        self._step = step
        self._width = table_width
        self._uploads = Uploads(step.device)
        most = packing(self._arrays(self.sizes[-1])).num_bytes
        self._buffer = torch.zeros(most, dtype=torch.uint8, device=step.device)
        self._recorder = recorder if recorder is not None else CudaRecorder()
        self._recordings: dict[int, Recording] = {}

    def _arrays(self, size: int) -> list[Array]:
        integers = [np.zeros(size, np.int64) for _ in range(4)]
        arrays: list[Array] = [
            *integers,
            np.zeros(size, np.bool_),
            np.zeros((size, self._width), np.int32),
            np.zeros(size, np.int32),
        ]
        if self._step.recent is not None:  # padding rows write to no ring
            arrays += [np.zeros(size, np.int64), np.full(size, -1, np.int64)]
        return arrays

    def record(self) -> None:
        """Record every size, the largest first, so that the smaller ones reuse its memory."""
        for size in reversed(self.sizes):
            self._record(size)

    def _record(self, size: int) -> None:
        arrays = self._arrays(size)
        layout = packing(arrays)
        ids, seats, positions, slots, in_flight, table, lengths, *recent = (
            view_as(self._buffer, offset, array) for offset, array in zip(layout.offsets, arrays, strict=True)
        )
        step = self._step
        window = None
        if step.recent is not None:
            first, ring_slots = recent
            nothing = seats[:0]
            window = RecentWindow(step.recent.tokens, seats, first, ring_slots, nothing, nothing)

        def forward() -> Tensor:
            known = torch.where(in_flight, step.last_token[seats], ids)
            starts = torch.zeros(1, dtype=torch.int32, device=step.device)
            batch = Batch(known, positions, slots, table, lengths, starts, size, 1, 0, None, window)
            return step.model.forward(batch, step.caches)

        self._recordings[size] = self._recorder(forward)

    def replay(self, inputs: StepInputs) -> Tensor | None:
        """Logits [B, vocabulary] of a pure decode step; None when no recorded size holds it."""
        rows = inputs.num_tokens
        size = padded_size(rows, self.sizes)
        if inputs.max_query > 1 or size is None:
            return None
        arrays = self._arrays(size)
        sources = (inputs.ids, inputs.token_seats, inputs.positions, inputs.kv_slots)
        for array, source in zip(arrays[:4], sources, strict=True):
            array[:rows] = source
        if inputs.in_flight is not None:
            arrays[4][:rows] = inputs.in_flight
        arrays[5][:rows, : inputs.page_table.shape[1]] = inputs.page_table
        arrays[6][:rows] = inputs.context_len  # padding rows have context 0 and write to page 0
        if inputs.recent is not None:
            arrays[7][:rows], arrays[8][:rows] = inputs.recent.first, inputs.recent.slots
        self._uploads.send(arrays, self._buffer)
        compute_again, logits = self._recordings[size]
        compute_again()
        return logits[:rows]


class CudaRunner:
    """Launches steps on one stream. `max_num_seqs` bounds the rows of a decode step."""

    def __init__(self, step: StepRunner, max_num_seqs: int, table_width: int, *, graphs: bool = True) -> None:
        self.step = step
        self._stream: Any = torch.cuda.Stream(step.device)  # type: ignore[no-untyped-call]
        self._uploads = Uploads(step.device)
        self._graphs: DecodeGraphs | None = None
        if graphs:
            with torch.cuda.stream(self._stream), torch.inference_mode():
                self._graphs = DecodeGraphs(step, graph_sizes(max_num_seqs), table_width)
                self._graphs.record()

    def launch(self, inputs: StepInputs, draws: Draws) -> Callable[[], Drawn]:
        begun, arrived = _timer(), _timer()
        with torch.cuda.stream(self._stream), torch.inference_mode():
            begun.record(self._stream)
            self.step.prepare(inputs)
            self.step.move_pages(inputs.moves)
            logits = self._graphs.replay(inputs) if self._graphs is not None else None
            arrays = arrays_of(draws) + (arrays_of(inputs) if logits is None else sampling_arrays(inputs))
            sent = self._uploads.send(arrays)

            def put(array: Array) -> Tensor:
                return sent[id(array)]

            if logits is None:
                logits = self.step.model.forward(self.step.batch(inputs, put), self.step.caches)
            elif len(inputs.sample_rows) < inputs.num_tokens:
                logits = logits[put(inputs.sample_rows)]
            drawn = self.step.draw(logits, inputs, draws, put) if len(inputs.sample_rows) else ()
            landed = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in drawn]
            for here, there in zip(landed, drawn, strict=True):
                here.copy_(there, non_blocking=True)
            arrived.record(self._stream)

        def wait() -> Drawn:
            arrived.synchronize()
            device_s = begun.elapsed_time(arrived) / 1e3
            tokens, *rest = [t.numpy() for t in landed] or [np.empty(0, np.int64)]
            return Drawn(tokens, device_s, *rest)

        return wait

    def close(self) -> None:
        torch.cuda.synchronize(self.step.device)


def sampling_arrays(inputs: StepInputs) -> list[Array]:
    """What drawing needs of a step whose forward has its inputs already."""
    return [inputs.sample_seats, inputs.sample_positions, inputs.sample_rows]


def _timer() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
