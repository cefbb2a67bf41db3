"""What one engine step costs: the answers the twin asks for millions of times, from tables made once.

`step_s` prices one step, `decode_run_s` a run of decode steps; both do the same operations on the same floats
in the same order, so a step priced alone and inside a run gives the identical number.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from costmodel.attention import Attention, DecodeCurve
from costmodel.experts import Routing
from costmodel.formats import gemm_format, kv_format
from costmodel.kernels import MIXED_QUERY_TILE
from costmodel.layers import LinearLayers, monotone
from costmodel.model import ModelShape
from costmodel.profile import DeviceProfile
from costmodel.work import step_work
from serving.errors import UsageError

Floats = npt.NDArray[np.float64]

_TILE_LESS_1 = MIXED_QUERY_TILE - 1
_ROWS = 16
"""Between this many tokens the table of linear layers runs straight: a matrix instruction takes as many rows."""

MAX_GRAPH_TOKENS = 512
"""Largest batch vLLM captures a CUDA graph for by default."""


def graph_sizes(max_num_seqs: int, max_num_batched_tokens: int) -> list[int]:
    """Token counts with a captured CUDA graph: 1, 2, 4, then by 8 to 256, by 16 to 512; at most twice the
    sequences.

    Source: vLLM's default `cudagraph_capture_sizes`.
    """
    most = min(2 * max_num_seqs, MAX_GRAPH_TOKENS, max_num_batched_tokens)
    return [s for s in (1, 2, 4, *range(8, 256, 8), *range(256, MAX_GRAPH_TOKENS + 1, 16)) if s <= most]


def _stairs(at: Floats, known: Floats, values: Floats) -> Floats:
    """Rising `values` of whole products at `known` row counts, carried to the counts `at`.

    A product that grew faster than its rows went up a stair, and did so right after the lower count: tiles are
    computed whole.
    """
    above = np.minimum(np.searchsorted(known, at), len(known) - 1)
    below = np.maximum(above - 1, 0)
    first = known[below] + 1.0
    risen = np.maximum(values[below], values[above] * first / known[above])
    run = np.maximum(known[above] - first, 1.0)
    between = risen + (values[above] - risen) * np.clip((at - first) / run, 0.0, 1.0)
    return np.asarray(np.where(at >= known[above], values[above], between))


class StepPricer:
    """Prices of steps of `model` on `tensor_parallel_size` devices of `profile`.

    Raises `UsageError` for an unknown dtype, quantisation or KV format, or a model that does not divide among
    ranks. `collective_overlap` is the share of a layer's all-reduces hidden behind its other work. With
    `data_parallel_size` above 1 as many replicas share their experts, and each is taken to do the same step.
    Of a pipeline's stages only the first embeds, and only the last has the head.
    """

    def __init__(
        self,
        model: ModelShape,
        profile: DeviceProfile,
        *,
        tensor_parallel_size: int = 1,
        data_parallel_size: int = 1,
        dtype: str = "bfloat16",
        quantization: str | None = None,
        kv_cache_dtype: str = "auto",
        kv_recent_tokens: int = 0,
        max_num_batched_tokens: int = 8192,
        max_num_seqs: int = 1024,
        cuda_graphs: bool = True,
        collective_overlap: float = 0.0,
        expert_load_imbalance: float = 1.0,
        enable_expert_parallel: bool = False,
        first_stage: bool = True,
        last_stage: bool = True,
    ) -> None:
        if max_num_batched_tokens < 1 or max_num_seqs < 1:
            raise UsageError("--max-num-batched-tokens and --max-num-seqs must be at least 1")
        model.check_tensor_parallel(tensor_parallel_size)
        self.model = model
        self.profile = profile
        self.tensor_parallel_size, self.data_parallel_size = tensor_parallel_size, data_parallel_size
        self._format = gemm_format(dtype, quantization)
        kv = kv_format(kv_cache_dtype)
        self._kv_bytes = kv.element_bytes(model.head_dim)
        routing = None
        if model.num_experts:
            ranks = tensor_parallel_size * data_parallel_size if enable_expert_parallel else 1
            routing = Routing(model.num_experts, model.experts_per_token, expert_load_imbalance, ranks)
        self._linear_layers = LinearLayers(
            model,
            profile,
            tensor_parallel_size,
            self._format,
            overlap=collective_overlap,
            routing=routing,
            data_parallel_size=data_parallel_size,
            first_stage=first_stage,
            last_stage=last_stage,
        )
        self._attention = Attention(
            model,
            profile,
            tensor_parallel_size,
            kv.name,
            self._kv_bytes,
            model.max_position_embeddings,
            max_num_seqs,
            recent_tokens=kv_recent_tokens,
        )
        self._max_tokens, self._max_seqs = max_num_batched_tokens, max_num_seqs
        self._graphs = graph_sizes(max_num_seqs, max_num_batched_tokens) if cuda_graphs else []
        self._window = float(model.sliding_window) if model.sliding_window else float("inf")
        self._knots, self._knots_array = self._attention.knots, self._attention.knots_array
        self._last_knot = len(self._knots) - 2
        self._decode_launch_s = self._attention.decode_launch_s
        self._prefill_launch_s = self._attention.launch_s
        self._longest_share = self._attention.longest_share
        self._empty_tile_s = self._attention.empty_tile_s
        self._tail_token_s = self._attention.tail_token_s
        self._half_heads = self._attention.heads * 2.0
        self._row_load = self._attention.row_load
        self._host = profile.host
        self.page_move_s = 0.0
        """Time to copy one KV page to host memory or back; set where a deployment swaps."""
        self._linear: list[float] = []
        self._head: list[float] = []
        self._alone: list[float] = []
        self._share: list[float] = []
        self._begun: list[float] = []
        self._begun_share: list[float] = []
        self._slope: list[float] = []
        self._share_slope: list[float] = []

    # -- the hot path ----------------------------------------------------------------------------------------

    def step_s(
        self,
        num_tokens: int,
        num_sampled: int,
        prefills: Sequence[tuple[int, int]],
        num_decodes: int,
        decode_context_sum: int,
        decode_context_max: int,
        /,
    ) -> float:
        """Device seconds of one step.

        `num_tokens` counts all tokens, `num_sampled` rows through the LM head; `prefills` holds (chunk
        tokens, context tokens before the chunk); contexts of the `num_decodes` decoding sequences include the
        current token.
        """
        if num_tokens >= len(self._linear):
            self._grow_linear(num_tokens)
        if num_sampled >= len(self._head):
            self._grow_head(num_sampled)
        total = self._linear[num_tokens] + self._head[num_sampled]
        if not prefills:
            if num_decodes:
                total = total + self._decode_s(num_decodes, decode_context_sum, decode_context_max)
            return total
        longest = reach = own = 0.0
        work = self._prefill_launch_s
        window = self._window
        most = tiles = 0
        for chunk, before in prefills:
            if chunk >= len(self._alone):
                self._grow_prefill(chunk)
            if before:
                seen = before if before < window else window
                by_itself = self._begun[chunk] + self._slope[chunk] * seen
                part = self._begun_share[chunk] + self._share_slope[chunk] * seen
            else:
                seen, by_itself, part = 0, self._alone[chunk], self._share[chunk]
            if by_itself > longest:
                longest = by_itself
            work = work + part
            if seen + chunk > reach:
                reach, own = seen + chunk, part
            if chunk > most:
                most = chunk
            tiles += (chunk + _TILE_LESS_1) // MIXED_QUERY_TILE
        # One kernel, as many query tiles for each sequence as for the longest chunk.
        grid = (len(prefills) + num_decodes) * ((most + _TILE_LESS_1) // MIXED_QUERY_TILE)
        work = work + (grid - tiles - num_decodes) * self._empty_tile_s
        if num_decodes:
            work, last = self._mixed_s(work, num_decodes, decode_context_sum, decode_context_max)
            if last > longest:
                longest = last
            if self._tail_token_s:
                work = work + self._tail_s(
                    work, reach, own, num_decodes, decode_context_sum, decode_context_max
                )
        return total + (longest if longest > work else work)

    def decode_run_s(self, num_decodes: int, context_sum: int, context_max: int, num_steps: int) -> Floats:
        """Device seconds of `num_steps` decode steps, shape (num_steps,); each context grows by one a step.

        Element j equals `step_s(num_decodes, num_decodes, (), num_decodes, context_sum + j * num_decodes,
        context_max + j)` exactly.
        """
        if num_decodes >= len(self._linear):
            self._grow_linear(num_decodes)
        if num_decodes >= len(self._head):
            self._grow_head(num_decodes)
        total = self._linear[num_decodes] + self._head[num_decodes]
        curve = self._attention.decode_curve(num_decodes)
        step = np.arange(num_steps)
        mean = (step * num_decodes + context_sum) / num_decodes
        mean = np.minimum(mean + self._longest_share * ((step + context_max) - mean), self._window)
        knot = np.minimum(np.searchsorted(self._knots_array, mean, side="right") - 1, self._last_knot)
        attention = curve.values_array[knot] + (mean - self._knots_array[knot]) * curve.slopes_array[knot]
        most = np.minimum(step + context_max, self._window)
        attention = np.maximum(attention, self._decode_launch_s + most * curve.longest_slope)
        return np.asarray(total + attention)

    def move_s(self, num_pages: int) -> float:
        """Time to copy KV pages between device and host memory before a step computes."""
        return num_pages * self.page_move_s

    def host_s(self, num_seqs: int, num_tokens: int) -> float:
        """Seconds of host work for a step: scheduling, input preparation, output handling."""
        host = self._host
        return host.step_s + num_seqs * host.per_seq_s + num_tokens * host.per_token_s

    def _decode_s(self, num_decodes: int, context_sum: int, context_max: int) -> float:
        curve = self._attention.decode_curve(num_decodes)
        attention = self._on_curve(curve, self._effective(num_decodes, context_sum, context_max))
        most = context_max if context_max < self._window else self._window
        longest = self._decode_launch_s + most * curve.longest_slope
        return longest if longest > attention else attention

    def _mixed_s(
        self, work: float, num_decodes: int, context_sum: int, context_max: int
    ) -> tuple[float, float]:
        """(all work of a kernel that prefills and decodes, when its longest decode would be done)."""
        curve = self._attention.mixed_curve(num_decodes)
        most = context_max if context_max < self._window else self._window
        longest = self._prefill_launch_s + most * curve.longest_slope
        return work + self._on_curve(curve, self._effective(num_decodes, context_sum, context_max)), longest

    def _tail_s(
        self, work: float, reach: float, own: float, num_decodes: int, context_sum: int, context_max: int
    ) -> float:
        """The wait for the longest sequence (`costmodel.kernels.tail_s`): the chunk that reaches furthest, which
        comes last, or the longest decode, anywhere in the order. None while decodes leave multiprocessors idle."""
        window = self._window
        mean = context_sum / num_decodes
        # One decode with over half of all context is most of the work itself.
        half = (context_sum + mean) / 2.0
        most = context_max if context_max < half else half
        if most > window:
            most = window
        if mean > window:
            mean = window
        if reach > window:
            reach = window
        tail = (reach - mean) * self._tail_token_s * (1.0 - own / work)
        decode = ((most - mean) * self._tail_token_s - work / self._half_heads) * (1.0 - most / context_sum)
        if decode > tail:
            tail = decode
        if tail <= 0.0:
            return 0.0
        load = num_decodes * self._row_load
        return tail * load if load < 1.0 else tail

    def _effective(self, num_decodes: int, context_sum: int, context_max: int) -> float:
        """The equal context that would take as long: the mean, or nearer to the longest where rows are padded."""
        mean = context_sum / num_decodes
        return mean + self._longest_share * (context_max - mean)

    def _on_curve(self, curve: DecodeCurve, mean: float) -> float:
        if mean > self._window:
            mean = self._window
        knot = bisect_right(self._knots, mean) - 1
        if knot > self._last_knot:
            knot = self._last_knot
        return curve.values[knot] + (mean - self._knots[knot]) * curve.slopes[knot]

    # -- tables ----------------------------------------------------------------------------------------------

    def _grow_linear(self, tokens: int) -> None:
        """(Re)build the table of linear layers up to at least `tokens`."""
        self._linear = self._by_tokens(tokens, self._linear_layers.seconds, self._linear_layers.eager_seconds)

    def _by_tokens(
        self, tokens: int, captured: Callable[[Floats], Floats], eager_s: Callable[[Floats], Floats]
    ) -> list[float]:
        """Seconds by number of tokens, to at least `tokens`: padded to CUDA graphs (`captured`), and beyond them."""
        most = max(tokens, self._max_tokens, 64)
        graphs = self._graphs
        edge = graphs[-1] if graphs else 0
        dense = np.arange(edge + 1, min(most, 256) + 1)
        coarse = np.arange(_ROWS, most + 2 * _ROWS, _ROWS)
        eager = np.unique(np.concatenate([dense, coarse[coarse > edge]]))
        at_graphs = captured(np.asarray(graphs, np.float64)) if graphs else np.empty(0)
        at_eager = eager_s(eager.astype(np.float64))
        values = monotone(np.concatenate([at_graphs, at_eager]))
        every = np.arange(most + 1, dtype=np.float64)
        known = np.concatenate([graphs[-1:], eager]).astype(np.float64)
        table = _stairs(every, known, values[-len(known) :])
        if graphs:
            padded = np.searchsorted(graphs, every[: edge + 1])
            table[: edge + 1] = values[padded]
        table[0] = 0.0
        values_s: list[float] = table.tolist()
        return values_s

    def _grow_head(self, rows: int) -> None:
        most = max(rows, self._max_seqs, 64)
        at = np.unique(np.concatenate([np.arange(1, 65), np.arange(64, most + 16, 16)]))
        values = monotone(self._linear_layers.head_seconds(at.astype(np.float64)))
        table = np.interp(np.arange(most + 1, dtype=np.float64), at, values)
        table[0] = 0.0
        self._head = table.tolist()

    def _grow_prefill(self, chunk: int) -> None:
        tables = self._attention.prefill_tables(max(chunk, self._max_tokens))
        (
            self._alone,
            self._share,
            self._begun,
            self._begun_share,
            self._slope,
            self._share_slope,
        ) = (table.tolist() for table in tables)

    # -- what a step does, and how sure we are ---------------------------------------------------------------

    @property
    def peak_flops(self) -> float:
        """Dense FLOP/s of one device in the arithmetic of the linear layers."""
        facts = self.profile.facts
        return facts.peak_flops.get(self._format.arithmetic, facts.peak_flops["bfloat16"])

    @property
    def peak_bytes_per_s(self) -> float:
        """Memory bandwidth of one device."""
        return self.profile.facts.hbm_bytes_per_s

    def step_work(
        self,
        num_tokens: npt.ArrayLike,
        num_sampled: npt.ArrayLike,
        prefill_attention_area: npt.ArrayLike,
        prefill_context_sum: npt.ArrayLike,
        decode_context_sum: npt.ArrayLike,
    ) -> tuple[Floats, Floats]:
        """(FLOPs, HBM bytes) of steps on one device; arguments are columns of a step table (`costmodel.work`)."""
        return step_work(
            self.model,
            num_tokens,
            num_sampled,
            prefill_attention_area,
            prefill_context_sum,
            decode_context_sum,
            tensor_parallel_size=self.tensor_parallel_size,
            data_parallel_size=self.data_parallel_size,
            weight_bytes=self._format.weight_bytes,
            kv_bytes=self._kv_bytes,
        )

    def extrapolations(
        self, max_context: int | None = None, max_batch: int | None = None, max_tokens: int | None = None
    ) -> list[str]:
        """What of this deployment lies outside the measured hull, one line each; empty when all was
        measured.

        The longest context, most sequences and most tokens in a step are the deployment's limits unless given.
        """
        context = max_context or self.model.max_position_embeddings
        batch, tokens = max_batch or self._max_seqs, max_tokens or self._max_tokens
        return [
            *self._linear_layers.unmeasured(tokens, batch),
            *self._attention.unmeasured(batch, context, tokens),
        ]
