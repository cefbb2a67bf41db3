"""The engine's kernels: each in Triton, with a PyTorch reference of the same name and arguments beside it.

`decode_attention.py` holds the Triton kernel, `decode_attention_ref.py` what it must equal. On the CPU the references
are the operators. Importing this package loads neither torch nor Triton; `operators(device)` loads what that device
runs.

Layout shared by all: a layer's cache is `k_cache, v_cache [num_pages, page_tokens, kv_heads, head_dim]` (half that many
bytes in the last axis for int4) and page 0 is never read, so that padding may be written there. A batch is
`query_start int32 [B+1]`, `context_len int32 [B]` (tokens after this step), `page_table int32 [B, max_pages]` and
`slots [T]` (page × page_tokens + offset of each new token; negative: nowhere). Beside quantised pages there may be rings
of recent tokens (`recent_ref`).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

MODULES = {
    "paged_decode_attention": "decode_attention",
    "paged_prefill_attention": "prefill_attention",
    "rms_norm": "norm",
    "rotary_write_kv": "rotary",
    "silu_mul": "activation",
    "quant_gemm_int8": "quant_gemm",
    "quant_gemm_int4": "quant_gemm",
    "quantize_kv": "kv_quant",
    "dequantize_kv": "kv_quant",
    "sample": "sampling",
    "sampling_probs": "sampling",
    "verify": "verification",
    "copy_pages": "page_copy",
    "write_recent": "recent",
}
"""Operator -> the module that holds it (and, with `_ref` appended, its reference)."""


class Operators:
    """The operators of one kind of device, as attributes: `operators(device).rms_norm(x, weight, eps)`."""

    def __init__(self, *, triton: bool) -> None:
        self.triton = triton

    def __getattr__(self, name: str) -> Any:
        if name not in MODULES:
            raise AttributeError(f"no operator {name!r}; there are {', '.join(MODULES)}")
        suffix = "" if self.triton else "_ref"
        operator = getattr(import_module(f"{__name__}.{MODULES[name]}{suffix}"), name)
        setattr(self, name, operator)
        return operator


def operators(device: torch.device | str) -> Operators:
    """Triton's kernels on CUDA, the references anywhere else."""
    kind = device if isinstance(device, str) else device.type
    return Operators(triton=kind.partition(":")[0] == "cuda")
