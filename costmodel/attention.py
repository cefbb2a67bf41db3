"""Attention of a step as tables: prefill by chunk length, decode as piecewise-linear curves over the mean
context.

All numbers are for all layers of the model together, on one rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from costmodel.formats import attention_fit, hardware
from costmodel.kernels import empty_tile_s
from costmodel.layers import monotone
from costmodel.model import ModelShape
from costmodel.predict import Kernel
from costmodel.profile import DeviceProfile, KernelFit

Floats = npt.NDArray[np.float64]

_FAR_CONTEXT = 8192.0
"""Context at which the slope of a chunk's time in earlier context is taken, unless a fit says `far_context`."""

SHORT_CHUNK = 16.0
"""Tokens of a chunk that is one thread block per head and walks its context as a decode does."""

_ONE_GRID_S = 1e-12
"""A fit with less for an empty block is of kernels that do not share a grid, so that there are none."""

_CROWD = 64.0
"""Chunks side by side at which a chunk's share of a busy device is taken."""


@dataclass(frozen=True, slots=True)
class DecodeCurve:
    """Decode attention of one batch size: `values[i] + (x - knots[i]) * slopes[i]` for mean context x in knot
    i.

    `longest_s + longest_slope * longest context` is when the longest sequence alone would be done: the whole
    kernel takes at least that.
    """

    values: list[float]
    slopes: list[float]
    values_array: Floats
    slopes_array: Floats
    longest_slope: float


class Attention:
    """Prefill and decode attention of one model on one rank."""

    def __init__(
        self,
        model: ModelShape,
        profile: DeviceProfile,
        tp: int,
        kv_name: str,
        kv_bytes: float,
        max_context: int,
        max_batch: int,
        recent_tokens: int = 0,
    ) -> None:
        """`recent_tokens` of each sequence are read in 16 bit, whatever `kv_bytes` the others have."""
        self._recent = float(recent_tokens)
        self._recent_more = 2.0 / kv_bytes - 1.0
        self._layers = float(model.num_layers)
        self._max_batch = max_batch
        self._shape = (float(model.heads_per_rank(tp)), float(model.kv_heads_per_rank(tp)))
        self._hw = hardware(profile.facts, kv_bytes=kv_bytes, head_dim=model.head_dim)
        self.notes: list[str] = []
        self._prefill = Kernel("prefill", self._fit(profile, "prefill", kv_name), self._hw)
        self._decode = Kernel("decode", self._fit(profile, "decode", kv_name), self._hw)
        mixed, lender = attention_fit(profile.decode_mixed, kv_name)
        if lender == "bfloat16":
            mixed = profile.decode_mixed[lender]
        self._mixed = Kernel("decode_mixed", mixed, self._hw) if mixed else None
        fit = self._decode.fit
        measured = int(fit.hull.get("head_dim", (128.0, 128.0))[0]) if fit is not None else 128
        if model.head_dim != measured:
            self.notes.append(
                f"attention: head_dim {model.head_dim} was not measured ({measured} was), "
                "scaled by bytes and FLOPs"
            )
        octaves = int(np.ceil(4 * np.log2(max(max_context, 131072)))) + 1
        self.knots_array = np.unique(np.rint(2.0 ** (np.arange(octaves + 1) / 4.0)))
        self.knots: list[float] = self.knots_array.tolist()
        self._curves: dict[int, DecodeCurve] = {}
        self._mixed_curves: dict[int, DecodeCurve] = {}
        self._tables: dict[str, tuple[Floats, Floats]] = {}
        self._apart = self._prefill.coefficients.get("chunks_apart")
        """0 where a step's chunks are one kernel, 1 where each is one of its own and takes what it takes alone; None of
        kernels that were not measured in steps."""
        self._launch_s = self._prefill.launch_s * self._layers
        self.launch_s = self._launch_s * (1.0 - (self._apart or 0.0))
        self.decode_launch_s = self._decode.launch_s * self._layers
        self.longest_share = self._decode.coefficients.get("longest_share", 0.0)
        """0 where a batch's mean context sets its time, 1 where its longest does (rows padded to the longest)."""
        self.empty_tile_s = 0.0
        """One query tile of a varlen kernel that has nothing to do (`costmodel.kernels.empty_tile_s`)."""
        self.tail_token_s = 0.0
        """One context token of a thread block alone on a multiprocessor, where chunks and decodes share a grid."""
        self.heads = self._shape[0]
        self.row_load = self._shape[0] / self._hw.num_sms
        """Thread blocks of one decode per multiprocessor."""
        if self._mixed is not None:
            self.empty_tile_s = (
                empty_tile_s(self._mixed.coefficients, self._hw, self._shape[0]) * self._layers
            )
            if self._mixed.coefficients["empty_block_s"] >= _ONE_GRID_S:
                far = self._prefill.coefficients.get("far_context", _FAR_CONTEXT)
                ends = self._prefill_at(1.0, np.full(2, SHORT_CHUNK), np.array([0.0, far]))
                self.tail_token_s = max(float(ends[1] - ends[0]), 0.0) / far

    def _fit(self, profile: DeviceProfile, group: str, kv_name: str) -> KernelFit | None:
        fit, lender = attention_fit(getattr(profile, group), kv_name)
        if lender is not None:
            self.notes.append(
                f"{group}/{kv_name}: not measured on {profile.name}; {lender} efficiencies at its own bytes"
            )
            return fit
        if fit is None or not fit.fitted:
            how = "datasheet roofline" if fit is None else fit.source
            self.notes.append(f"{group}/{kv_name}: not measured on {profile.name} ({how})")
        return fit

    # -- prefill ---------------------------------------------------------------------------------------------

    def prefill_tables(self, max_tokens: int) -> tuple[Floats, ...]:
        """Six tables over chunk length 0..max_tokens, in seconds and seconds per earlier context token.

        `alone` is a prompt's first chunk by itself, `begun + alone_slope * context` a later one; `share` and
        `begun_share + share_slope * context` are what they add to a kernel that is full of other work.
        """
        steps = np.unique(
            np.concatenate([[1.0], np.arange(16.0, 64.0, 16.0), np.arange(64.0, max_tokens + 64.0, 64.0)])
        )
        far = self._prefill.coefficients.get("far_context", _FAR_CONTEXT)
        contexts = np.empty(0)
        if (
            self._apart is not None
            and self._prefill.fit is not None
            and self._prefill.fit.residual is not None
        ):
            _, tokens, contexts = (np.asarray(axis, np.float64) for axis in self._prefill.fit.residual.grid)
            steps = np.union1d(steps, tokens[tokens <= steps[-1]])
            contexts = contexts[(contexts > 0.0) & (contexts <= far)]
        lone = self._prefill_at(1.0, steps, 0.0)
        crowd = self._prefill_at(_CROWD, steps, 0.0)
        begun, begun_crowd = lone, crowd
        if len(contexts) > 1:
            begun, slope = self._line(1.0, steps, contexts)
            begun_crowd, crowd_slope = self._line(_CROWD, steps, contexts)
        else:
            slope = np.maximum(self._prefill_at(1.0, steps, far) - lone, 0.0) / far
            crowd_slope = np.maximum(self._prefill_at(_CROWD, steps, far) - crowd, 0.0) / far
        tables = []
        for alone, full in ((lone, crowd), (begun, begun_crowd)):
            alone = monotone(alone)
            share = monotone(np.minimum(np.maximum(full - self._launch_s, 0.0) / _CROWD, alone))
            tables += [alone, self._mixed_with(share, alone)]
        slope = monotone(slope)
        share_slope = np.minimum(monotone(crowd_slope / _CROWD), slope)
        tables += [slope, self._mixed_with(share_slope, slope)]
        every = np.arange(max_tokens + 1, dtype=np.float64)
        return tuple(np.interp(every, steps, table) for table in tables)

    def _mixed_with(self, share: Floats, alone: Floats) -> Floats:
        """Between the share of one kernel and what a kernel of its own takes."""
        return share if self._apart is None else np.maximum(share + self._apart * (alone - share), 0.0)

    def _line(self, batch: float, steps: Floats, contexts: Floats) -> tuple[Floats, Floats]:
        """Seconds without and per token of earlier context, of the line with the least relative error at `contexts`.

        A prompt's first chunk lies below it where kernels skip what causality hides.
        """
        at = np.stack([self._prefill_at(batch, steps, context) for context in contexts.tolist()])
        weight = at**-2.0 / (at**-2.0).sum(0)
        mean, middle = (weight * at).sum(0), (weight * contexts[:, None]).sum(0)
        away = contexts[:, None] - middle
        slope = np.maximum((weight * away * at).sum(0) / (weight * away**2).sum(0), 0.0)
        return np.maximum(mean - slope * middle, 0.0), slope

    def _prefill_at(self, batch: float, tokens: Floats, context: float | Floats) -> Floats:
        seconds = self._prefill.seconds(self._shape, batch, tokens, context)
        pairs = batch * (tokens * context + tokens * (tokens + 1.0) / 2.0)
        floor = 4.0 * self._shape[0] * self._hw.head_dim * pairs / self._hw.peak_flops
        return np.maximum(seconds, floor) * self._layers

    # -- decode -----------------------------------------------------------------------------------------------

    def decode_curve(self, batch: int) -> DecodeCurve:
        """The curve of a batch of decodes alone in a step."""
        curve = self._curves.get(batch)
        if curve is None:
            curve = self._curves[batch] = self._curve(self._decode, batch, self.decode_launch_s, 0.0)
        return curve

    def mixed_curve(self, batch: int) -> DecodeCurve:
        """What a batch of decodes adds to the work of a step that also prefills."""
        curve = self._mixed_curves.get(batch)
        if curve is None:
            if self._mixed is None:
                curve = self._curve(self._decode, batch, 0.0, self.decode_launch_s)
            else:
                curve = self._curve(self._mixed, batch, 0.0, 0.0)
            self._mixed_curves[batch] = curve
        return curve

    def _curve(self, kernel: Kernel, batch: int, launch_s: float, less: float) -> DecodeCurve:
        batches, table = self._decode_table(kernel, batch)
        high = int(np.searchsorted(batches, batch))
        row = table[high]
        if batches[high] != batch:
            share = (batch - batches[high - 1]) / (batches[high] - batches[high - 1])
            row = table[high - 1] * (1.0 - share) + row * share
        row = np.maximum(row - less, 0.0)
        slopes = np.diff(row) / np.diff(self.knots_array)
        # At equal contexts the longest sequence never decides: the measurement already includes it.
        cap = float(np.min((row - launch_s) / self.knots_array))
        longest = max(0.0, min(self._longest_slope(kernel, batch), cap))
        return DecodeCurve(row.tolist(), slopes.tolist(), row, slopes, longest)

    def _decode_table(self, kernel: Kernel, batch: int) -> tuple[Floats, Floats]:
        """Batch sizes (B,) up to at least `batch`, and seconds (B, knots), rising along both axes."""
        found = self._tables.get(kernel.kind)
        if found is not None and found[0][-1] >= batch:
            return found
        # Sized by the engine's limit at once: curves must not depend on which batch was asked for first.
        most = 2.0 ** np.ceil(np.log2(max(self._max_batch, batch, 64)))
        dense = np.concatenate([np.arange(1, 32), np.arange(32, 256, 8), np.arange(256, most + 16, 16)])
        batches = _measured_or(kernel, 0, dense[dense <= most])
        contexts = _measured_or(kernel, 1, self.knots_array)
        at = kernel.seconds(self._shape, batches[:, None], self._read(contexts)[None, :])
        seconds = np.stack([np.interp(self.knots_array, contexts, row) for row in at])
        kv_bytes = 2.0 * self._shape[1] * self._hw.head_dim * self._hw.kv_bytes
        floor = batches[:, None] * self._read(self.knots_array)[None, :] * kv_bytes / self._hw.hbm_bytes_per_s
        table = monotone(monotone(np.maximum(seconds, floor), axis=1), axis=0)
        found = self._tables[kernel.kind] = (batches, np.maximum(table, floor) * self._layers)
        return found

    def _read(self, contexts: Floats) -> Floats:
        """Tokens of the cache's format that have as many bytes as a decode reads of each context."""
        if not self._recent:
            return contexts
        return np.asarray(contexts + self._recent_more * np.minimum(contexts, self._recent))

    def _longest_slope(self, kernel: Kernel, batch: int) -> float:
        """Seconds per context token of one sequence's thread blocks, when they are alone on the device.

        A lone block walks a token in the fitted `token_s`; the kernel splits a sequence over as many blocks as its
        batch leaves idle multiprocessors (FlashDecoding), but not inside a mixed kernel.
        """
        heads, kv_heads = self._shape
        c = kernel.coefficients
        if kernel.kind == "decode_mixed":
            return c["token_s"] * self._layers
        alone = heads == kv_heads
        most = c["mha_splits"] if alone else 128.0
        splits = min(max(self._hw.num_sms // (batch * kv_heads), 1.0), most)
        return c["mha_token_s" if alone else "token_s"] * self._layers / splits

    def unmeasured(self, most_batch: int, most_context: int, most_tokens: int) -> list[str]:
        """What lies outside the measured hull, in words."""
        found = list(self.notes)
        heads, kv_heads = self._shape
        if self._decode.fit is not None and self._decode.fit.fitted:
            found += self._decode.outside_hull(
                heads=(heads, heads),
                kv_heads=(kv_heads, kv_heads),
                batch=(1, most_batch),
                context=(16, most_context),
            )
        if self._prefill.fit is not None and self._prefill.fit.fitted:
            found += self._prefill.outside_hull(tokens=(16, most_tokens))
        return found


def _measured_or(kernel: Kernel, axis: int, wanted: Floats) -> Floats:
    """Grid of an axis: the measured values, and `wanted` outside them.

    Attention is a sum over sequences and tokens, so between measurements time runs straight; a residual interpolated
    in logarithms would bulge above the line.
    """
    if kernel.fit is None or kernel.fit.residual is None:
        return np.asarray(wanted, np.float64)
    measured = np.asarray(kernel.fit.residual.grid[axis], np.float64)
    inside = measured[(measured >= wanted[0]) & (measured <= wanted[-1])]
    outside = wanted[(wanted < measured[0]) | (wanted > measured[-1])]
    return np.unique(np.concatenate([inside, outside, wanted[[0, -1]]]))
