"""Number formats: how many bytes a weight or a cached number takes, which arithmetic multiplies it, and vLLM's names
for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from costmodel.kernels import Hardware
from costmodel.profile import DeviceFacts, KernelFit
from serving.errors import UsageError, nearest


@dataclass(frozen=True, slots=True)
class GemmFormat:
    """How a linear layer is stored and multiplied. Bytes include scales; activations as the product reads them."""

    name: str
    weight_bytes: float
    activation_bytes: float
    arithmetic: str
    """Key of `DeviceFacts.peak_flops`; devices without it multiply in bfloat16."""

    def matrix_bytes(self, n: int, k: int) -> int:
        """Memory of an [n, k] matrix, scales and zero points to the byte: what the engine holds.

        int8_wo and fp8 keep a float32 scale per channel, fp8_block one per 128 x 128 block, int4_wo a 16-bit scale and
        an 8-bit zero point per group and channel.
        """
        if self.name in ("int8_wo", "fp8"):
            return n * k + 4 * n
        if self.name == "fp8_block":
            return n * k + 4 * -(-n // FP8_BLOCK) * -(-k // FP8_BLOCK)
        if self.name == "int4_wo" and (group := int4_group(k)) is not None:
            return n * k // 2 + 3 * n * (k // group)
        return int(n * k * self.weight_bytes)


FP8_BLOCK = 128
"""Side of a block of weights with one scale."""


def int4_group(k: int) -> int | None:
    """Inputs that share a scale: 128, or the largest of 64 and 32 that divides `k`; None where none does."""
    return next((group for group in (128, 64, 32) if k % group == 0), None)


GEMM_FORMATS: dict[str, GemmFormat] = {
    f.name: f
    for f in (
        GemmFormat("bfloat16", 2.0, 2.0, "bfloat16"),
        GemmFormat("fp8", 1.0, 1.0, "fp8"),
        # 128 x 128 blocks: one float32 scale per 16,384 weights.
        GemmFormat("fp8_block", 1.0 + 4 / 16384, 1.0, "fp8"),
        # 16-weight groups with an 8-bit scale: 4.5 bits.
        GemmFormat("nvfp4", 0.5625, 0.5625, "nvfp4"),
        GemmFormat("int8_wo", 1.0, 2.0, "bfloat16"),
        # Groups of 128 with a 16-bit scale and a 4-bit zero: 4.16 bits.
        GemmFormat("int4_wo", 0.52, 2.0, "bfloat16"),
        GemmFormat("sq", 1.0, 1.0, "int8"),
    )
}

QUANTIZATIONS: dict[str, str] = {
    "fp8": "fp8",
    "fp8_block": "fp8_block",
    "nvfp4": "nvfp4",
    "modelopt_fp4": "nvfp4",
    "int8": "int8_wo",
    "int8_wo": "int8_wo",
    "int4": "int4_wo",
    "int4_wo": "int4_wo",
    "awq": "int4_wo",
    "awq_marlin": "int4_wo",
    "gptq": "int4_wo",
    "gptq_marlin": "int4_wo",
    "w8a8": "sq",
    "smoothquant": "sq",
}
"""`--quantization` names to GEMM formats; awq and gptq are taken as 4 bit in groups of 128."""

DTYPES = ("auto", "bfloat16", "float16", "half")


@dataclass(frozen=True, slots=True)
class KvFormat:
    """How K and V are cached. `name` is the attention fit's; `scale_bytes` are per token and head."""

    name: str
    bits: int
    scale_bytes: int = 0

    def element_bytes(self, head_dim: int) -> float:
        """Bytes per cached number, its share of the scale included."""
        return self.bits / 8 + self.scale_bytes / head_dim


KV_FORMATS: dict[str, KvFormat] = {
    f.name: f
    for f in (
        KvFormat("bfloat16", 16),
        KvFormat("fp8", 8),
        # A float32 scale per token and head: written with the token, so that shared pages never change.
        KvFormat("int8", 8, 4),
        KvFormat("int4", 4, 4),
    )
}
KV_DTYPES: dict[str, str] = {
    "auto": "bfloat16",
    "bfloat16": "bfloat16",
    "float16": "bfloat16",
    "fp8": "fp8",
    "fp8_e4m3": "fp8",
    "fp8_e5m2": "fp8",
    "int8": "int8",
    "int4": "int4",
}
"""`--kv-cache-dtype` names to formats."""


def gemm_format(dtype: str, quantization: str | None) -> GemmFormat:
    """The format of the linear layers; `UsageError` for an unknown name."""
    if dtype not in DTYPES:
        raise UsageError(f"--dtype {dtype!r} is not modelled; {nearest(dtype, DTYPES)}")
    if quantization is None or quantization == "none":
        return GEMM_FORMATS["bfloat16"]
    if quantization not in QUANTIZATIONS:
        raise UsageError(
            f"--quantization {quantization!r} is not modelled; {nearest(quantization, QUANTIZATIONS)}"
        )
    return GEMM_FORMATS[QUANTIZATIONS[quantization]]


def kv_format(kv_cache_dtype: str) -> KvFormat:
    """The format of the KV cache; `UsageError` for an unknown name."""
    if kv_cache_dtype not in KV_DTYPES:
        raise UsageError(
            f"--kv-cache-dtype {kv_cache_dtype!r} is not modelled; {nearest(kv_cache_dtype, KV_DTYPES)}"
        )
    return KV_FORMATS[KV_DTYPES[kv_cache_dtype]]


def attention_fit(fits: Mapping[str, KernelFit], kv_name: str) -> tuple[KernelFit | None, str | None]:
    """The fit that prices a cache format, and the format that it is borrowed from (None: its own, or there is none).

    int8 takes fp8's as it is (as many bytes); other formats take efficiencies without the residuals of measured shapes.
    """
    own = fits.get(kv_name)
    if own is not None:
        return own, None
    if kv_name in ("int8", "int4") and "fp8" in fits:
        fit = fits["fp8"]
        return (fit if kv_name == "int8" else fit.model_copy(update={"residual": None})), "fp8"
    if "bfloat16" in fits:
        return fits["bfloat16"].model_copy(update={"residual": None}), "bfloat16"
    return None, None


def hardware(
    facts: DeviceFacts,
    fmt: GemmFormat = GEMM_FORMATS["bfloat16"],
    *,
    kv_bytes: float = 2.0,
    head_dim: int = 128,
) -> Hardware:
    """The figures of a device that a formula needs, for one number format."""
    return Hardware(
        num_sms=facts.num_sms,
        peak_flops=facts.peak_flops.get(fmt.arithmetic, facts.peak_flops["bfloat16"]),
        hbm_bytes_per_s=facts.hbm_bytes_per_s,
        l2_bytes=facts.l2_bytes,
        link_bytes_per_s=facts.link_bytes_per_s,
        weight_bytes=fmt.weight_bytes,
        activation_bytes=fmt.activation_bytes,
        kv_bytes=kv_bytes,
        head_dim=head_dim,
    )
