"""Add int8 and int4 weights and an int8 KV cache to a profile: the kernels alone, at Llama-3.1-8B's shapes.

The engine serves 16 bit only so far, so these are timings of its kernels outside a step.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import torch

from calibration.fit import Options, fit_kernel, grid_groups
from calibration.tables import Samples
from costmodel.formats import GEMM_FORMATS, hardware
from costmodel.kernels import Hardware
from costmodel.profile import KernelFit, KernelKind, load_profile
from realengine.kernels.bench import seconds
from realengine.kernels.bench_cases import Shape, decode_case, gemm_case

Timings = dict[tuple[tuple[float, ...], tuple[float, ...]], float]
"""Seconds by (shape, grid)."""
SOURCE = "microbenchmarks of the engine's kernels alone (scripts/quant_profile.py)"
LLAMA_GEMMS = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
SMALL_GEMMS = ((256, 128), (128, 128))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--profile", type=Path, required=True)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    device = torch.device(options.device)
    small = device.type == "cpu"
    if small:
        torch.set_num_threads(1)
    profile = load_profile(options.profile)
    tokens = (1, 16, 64) if small else (1, 8, 16, 32, 64, 65, 128, 256, 512, 1024, 2048)
    gemm = dict(profile.gemm)
    for bits, name in ((8, "int8_wo"), (4, "int4_wo")):
        found: Timings = {}
        for n, k in SMALL_GEMMS if small else LLAMA_GEMMS:
            for m in tokens:
                case = gemm_case(_shape(small), device, m, n, k, bits)
                found[(float(n), float(k)), (float(m),)] = seconds(case.run, device, quick=options.quick)
        gemm[name] = fit("gemm", found, hardware(profile.facts, GEMM_FORMATS[name]))
        sys.stdout.write(f"gemm/{name}: {gemm[name].errors}\n")
    shape = _shape(small)
    decoded: Timings = {}
    for batch in (1, 4) if small else (1, 4, 16, 64):
        for context in (32, 128) if small else (128, 1024, 4096):
            case = decode_case(shape, device, batch, context, 8)
            heads = (float(shape.heads), float(shape.kv_heads))
            decoded[heads, (float(batch), float(context))] = seconds(case.run, device, quick=options.quick)
    hw = hardware(profile.facts, kv_bytes=1.0, head_dim=shape.dim)
    eight = fit("decode", decoded, hw).model_copy()
    hull = {**eight.hull, "head_dim": (float(shape.dim), float(shape.dim))}
    decode = {**profile.decode, "fp8": eight.model_copy(update={"hull": hull})}
    sys.stdout.write(f"decode/int8 (the twin's fp8): {eight.errors}\n")
    done = profile.model_copy(update={"gemm": gemm, "decode": decode})
    options.output.write_text(done.to_json() + "\n", encoding="utf-8")
    sys.stdout.write(f"wrote {options.output}\n")


def fit(kind: KernelKind, found: Timings, hw: Hardware) -> KernelFit:
    """One kernel's fit."""
    samples = Samples(
        kind,
        np.array([shape for shape, _ in found], np.float64),
        np.array([grid for _, grid in found], np.float64),
        np.array(list(found.values())),
        source=SOURCE,
    )
    return fit_kernel(kind, samples, hw, options=Options(folds=0, max_evaluations=40), groups=grid_groups)


def _shape(small: bool) -> Shape:
    from realengine.kernels import bench_cases

    return bench_cases.TINY if small else bench_cases.LLAMA_8B


if __name__ == "__main__":
    main()
