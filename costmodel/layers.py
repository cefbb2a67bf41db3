"""Everything in a step that depends on its number of tokens alone: linear layers, norms, collectives, LM
head, sampler.

Vectorised over token counts; `costmodel.pricer` tabulates it once per deployment.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from costmodel.experts import Routing
from costmodel.formats import GemmFormat, hardware
from costmodel.kernels import Hardware
from costmodel.model import Gemm, ModelShape
from costmodel.predict import Kernel
from costmodel.profile import DeviceProfile, KernelFit

Floats = npt.NDArray[np.float64]


STREAMING = 0.95
"""Share of the HBM bandwidth that streaming weights reach at best: 0.94 on RTX 4090 and RTX PRO 6000 (tables)."""


def elementwise_bytes(model: ModelShape, tp: int) -> dict[str, float]:
    """Bytes of memory traffic per token of each elementwise operation of one layer of one rank, 16-bit
    activations."""
    heads = (model.heads_per_rank(tp) + model.kv_heads_per_rank(tp)) * model.head_dim
    found = {
        # Residual add and RMS norm: read both inputs, write the sum and the normalised row. Twice a layer.
        "layernorm": model.hidden_size * 2.0 * 4.0,
        "rotary_emb": heads * 2.0 * 2.0,
        # SiLU(gate) * up: read both, write one.
        "act_fn": model.intermediate_size / tp * 2.0 * 3.0,
    }
    if model.qk_norm:
        found["qk_norm"] = heads * 2.0 * 2.0
    return found


def embedding_bytes(model: ModelShape) -> float:
    """Bytes per token of the embedding look-up: read a row, write it."""
    return model.hidden_size * 2.0 * 2.0


def final_norm_bytes(model: ModelShape) -> float:
    """Bytes per token of the last norm."""
    return model.hidden_size * 2.0 * 4.0


def monotone(values: Floats, axis: int = -1) -> Floats:
    """The middle of the non-decreasing envelopes of `values` from above and from below.

    Real kernels get faster here and there as work grows (a better tile), and timings are noisy; a price that
    falls with more work would reward padding. The middle keeps the level unbiased.
    """
    above = np.maximum.accumulate(values, axis=axis)
    below = np.flip(np.minimum.accumulate(np.flip(values, axis), axis=axis), axis)
    return np.asarray((above + below) * 0.5)


class LinearLayers:
    """Seconds of all layers' token-wise work on one rank of a tensor-parallel group.

    `overlap` is the share of a layer's collectives that hides behind its other work. `routing` spreads tokens over
    experts. With `data_parallel_size` above 1 these lie on the ranks of all data-parallel replicas, whose tokens meet in
    every layer; all replicas are taken to have as many. Of a pipeline only the first stage embeds and only the last has
    the last norm and the head.
    """

    def __init__(
        self,
        model: ModelShape,
        profile: DeviceProfile,
        tp: int,
        fmt: GemmFormat,
        *,
        overlap: float = 0.0,
        routing: Routing | None = None,
        data_parallel_size: int = 1,
        first_stage: bool = True,
        last_stage: bool = True,
    ) -> None:
        self._model, self._tp, self._dp = model, tp, data_parallel_size
        self._overlap, self._first, self._last = overlap, first_stage, last_stage
        self._routing = routing or (
            Routing(model.num_experts, model.experts_per_token) if model.num_experts else None
        )
        self.notes: list[str] = []
        self._hw = hardware(profile.facts, fmt)
        self._hw16 = hardware(profile.facts)
        self._gemm = Kernel("gemm", self._gemm_fit(profile, fmt), self._hw)
        self._gemm16 = (
            self._gemm if fmt.name == "bfloat16" else Kernel("gemm", profile.gemm.get("bfloat16"), self._hw16)
        )
        self._elementwise = Kernel("elementwise", profile.elementwise, self._hw16)
        self._sampler = Kernel("sampler", profile.sampler, self._hw16)
        self._all_reduce = Kernel("all_reduce", profile.all_reduce, self._hw16)
        self._exchanged = Kernel("all_reduce", profile.expert_exchange or profile.all_reduce, self._hw16)
        self._moe = Kernel("moe", profile.moe.get("bfloat16"), self._hw)
        self._launch_s = profile.host.launch_s
        if data_parallel_size > 1 and profile.expert_exchange is None:
            self.notes.append(f"expert_exchange: not measured on {profile.name}; priced as an all-reduce")
        for kernel in (
            self._gemm,
            *((self._all_reduce,) if tp > 1 else ()),
            *((self._exchanged,) if data_parallel_size > 1 else ()),
            *((self._moe,) if model.num_experts else ()),
        ):
            if kernel.fit is None or not kernel.fit.fitted:
                self.notes.append(_unfitted(kernel, profile.name, fmt))

    def _gemm_fit(self, profile: DeviceProfile, fmt: GemmFormat) -> KernelFit | None:
        fit = profile.gemm.get(fmt.name)
        if fit is None and "bfloat16" in profile.gemm:
            # The same kernels' efficiencies at this format's bytes and peak, without the other's residuals.
            self.notes.append(
                f"gemm/{fmt.name}: not measured on {profile.name}; bfloat16 efficiencies at its own peak"
            )
            return profile.gemm["bfloat16"].model_copy(update={"residual": None})
        return fit

    def _product(self, gemm: Gemm, tokens: Floats, kernel: Kernel, hw: Hardware) -> Floats:
        """One GEMM, never faster than its arithmetic at peak nor its weights from HBM.

        A benchmark that repeats a few layers finds small weights in L2; in a model's step they come from HBM.
        """
        seconds = kernel.seconds((gemm.n, gemm.k), tokens)
        floor = np.maximum(
            2.0 * gemm.n * gemm.k * tokens / hw.peak_flops,
            gemm.weights * hw.weight_bytes / (hw.hbm_bytes_per_s * STREAMING),
        )
        return np.maximum(seconds, floor)

    def num_kernels(self) -> int:
        """Kernel launches of a step without CUDA graphs, roughly: those priced here and two of attention,
        per layer."""
        collectives = (2 if self._tp > 1 else 0) + (2 if self._dp > 1 else 0)
        per_layer = len(elementwise_bytes(self._model, self._tp)) + 1 + 4 + 2 + collectives
        return self._model.num_layers * per_layer

    @property
    def launches_s(self) -> float:
        """What the host needs to launch the kernels of a step without CUDA graphs."""
        return self.num_kernels() * self._launch_s

    def seconds(self, tokens: Floats) -> Floats:
        """All layers, the embedding and the last norm for `tokens` tokens in a step, launched from a CUDA
        graph."""
        model, tp = self._model, self._tp
        layer = sum(
            (self._product(g, tokens, self._gemm, self._hw) for g in model.attention_gemms(tp)), np.zeros(())
        )
        widths = elementwise_bytes(model, tp)
        if model.num_experts:
            layer = layer + self._product(model.router_gemm(), tokens, self._gemm16, self._hw16)
            layer = layer + self._experts(tokens * self._dp)
            if self._dp > 1:
                layer = layer + self._exchange(tokens * self._dp)
            del widths["act_fn"]
        else:
            for gemm in model.mlp_gemms(tp):
                layer = layer + self._product(gemm, tokens, self._gemm, self._hw)
        for name, width in widths.items():
            layer = layer + self._elementwise.seconds((width,), tokens) * (
                2.0 if name == "layernorm" else 1.0
            )
        ends = np.zeros(())
        if self._first:
            ends = self._elementwise.seconds((embedding_bytes(model),), tokens)
        if self._last:
            ends = ends + self._elementwise.seconds((final_norm_bytes(model),), tokens)
        if tp > 1:
            reduce_s = self._all_reduce.seconds((tp,), tokens * model.hidden_size * 2.0)
            collectives = 2.0 * reduce_s
            if self._overlap:
                collectives = collectives - np.minimum(self._overlap * collectives, layer)
            layer = layer + collectives
            if self._first:
                ends = ends + reduce_s
        return np.asarray(layer * model.num_layers + ends)

    def eager_seconds(self, tokens: Floats) -> Floats:
        """The same outside CUDA graphs: at least what the host needs to launch the kernels."""
        return np.maximum(self.seconds(tokens), self.launches_s)

    def shared_seconds(self, tokens: Floats) -> Floats:
        """Of `seconds`, what data-parallel ranks of `tokens` tokens each do together: experts and exchange."""
        tokens = tokens * self._dp
        return np.asarray((self._experts(tokens) + self._exchange(tokens)) * self._model.num_layers)

    def _exchange(self, tokens: Floats) -> Floats:
        """All-gather of `tokens` hidden states and router logits, 16 bit, and reduce-scatter of what experts return.

        Where a profile has not measured the pair it is priced as an all-reduce of the same bytes, which moves as much.
        """
        gathered = 2.0 * (self._model.hidden_size + self._model.num_experts)
        returned = 2.0 * self._model.hidden_size
        return self._exchanged.seconds((self._dp,), tokens * (gathered + returned) / 2.0)

    def _experts(self, tokens: Floats) -> Floats:
        """Routed experts: slices of all of them, or under expert parallelism the rank with the most to do."""
        model = self._model
        assert self._routing is not None
        rows, touched = self._routing.on_busiest_rank(tokens)
        width = model.intermediate_size / (self._tp * self._dp if self._routing.num_ranks == 1 else 1)
        seconds = self._moe.seconds((model.hidden_size, width), rows, touched)
        weights = touched * 3.0 * model.hidden_size * width
        flops = 6.0 * rows * model.hidden_size * width
        floor = np.maximum(
            flops / self._hw.peak_flops, weights * self._hw.weight_bytes / self._hw.hbm_bytes_per_s
        )
        return np.maximum(seconds, floor)

    def head_seconds(self, rows: Floats) -> Floats:
        """LM head (16 bit), gathering of logits and sampling for `rows` sequences."""
        model, tp = self._model, self._tp
        if not self._last:
            return np.zeros_like(rows)
        seconds = self._product(model.lm_head_gemm(tp), rows, self._gemm16, self._hw16)
        if tp > 1:
            # A gather moves each rank's share once: half of what an all-reduce of the same bytes moves.
            seconds = seconds + self._all_reduce.seconds((tp,), rows * model.vocab_size)
        return seconds + self._sampler.seconds((model.vocab_size,), rows)

    def unmeasured(self, most_tokens: int, most_rows: int) -> list[str]:
        """What lies outside the measured hull, in words."""
        model, tp = self._model, self._tp
        mlp = () if model.num_experts else model.mlp_gemms(tp)
        found = list(self.notes)
        for gemm in (*model.attention_gemms(tp), *mlp, model.lm_head_gemm(tp)):
            kernel = self._gemm16 if gemm.name == "lm_head" else self._gemm
            if kernel.fit is None or not kernel.fit.fitted or kernel.measured((gemm.n, gemm.k)):
                continue
            outside = kernel.outside_hull(n=(gemm.n, gemm.n), k=(gemm.k, gemm.k), m=(1, most_tokens))
            found += [f"{gemm.name} ({line})" for line in outside]
        for name, kernel, ranks in (
            ("all_reduce", self._all_reduce, tp),
            ("expert_exchange", self._exchanged, self._dp),
        ):
            if ranks > 1 and kernel.fit is not None and kernel.fit.fitted:
                found += [
                    line.replace("all_reduce", name) for line in kernel.outside_hull(num_gpus=(ranks, ranks))
                ]
        return found


def _unfitted(kernel: Kernel, device: str, fmt: GemmFormat) -> str:
    what = f"gemm/{fmt.name}" if kernel.kind == "gemm" else kernel.kind
    how = "datasheet roofline" if kernel.fit is None else kernel.fit.source
    return f"{what}: not measured on {device} ({how})"
