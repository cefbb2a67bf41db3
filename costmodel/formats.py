"""Number formats: how many bytes a weight takes, which arithmetic multiplies it, and vLLM's names for
them."""

from __future__ import annotations

from dataclasses import dataclass

from costmodel.kernels import Hardware
from costmodel.profile import DeviceFacts
from serving.errors import UsageError, nearest


@dataclass(frozen=True, slots=True)
class GemmFormat:
    """How a linear layer is stored and multiplied. Bytes include scales; activations as the product reads them."""

    name: str
    weight_bytes: float
    activation_bytes: float
    arithmetic: str
    """Key of `DeviceFacts.peak_flops`; devices without it multiply in bfloat16."""


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
KV_DTYPES: dict[str, tuple[str, float]] = {
    "auto": ("bfloat16", 2.0),
    "bfloat16": ("bfloat16", 2.0),
    "float16": ("bfloat16", 2.0),
    "fp8": ("fp8", 1.0),
    "fp8_e4m3": ("fp8", 1.0),
    "fp8_e5m2": ("fp8", 1.0),
    "int8": ("fp8", 1.0),
    "int4": ("fp8", 0.5625),
}
"""`--kv-cache-dtype` names to (kernel fit, bytes per element); int8 is priced as fp8, int4 keeps a scale
per 16."""


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


def kv_format(kv_cache_dtype: str) -> tuple[str, float]:
    """(name of the attention fit, bytes per cached element); `UsageError` for an unknown name."""
    if kv_cache_dtype not in KV_DTYPES:
        raise UsageError(
            f"--kv-cache-dtype {kv_cache_dtype!r} is not modelled; {nearest(kv_cache_dtype, KV_DTYPES)}"
        )
    return KV_DTYPES[kv_cache_dtype]


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
