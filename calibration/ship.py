"""Make the shipped profiles: `python -m calibration.ship --data ../shared/data/kernels [NAME ...]`.

Reads the public kernel tables, fits, and writes `costmodel/profiles/NAME.json`. The tables stay outside the
project. The last digits depend on how many threads add up: the shipped ones are made with OMP_NUM_THREADS=1.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

from calibration.assemble import fit_profile
from calibration.fit import DEFAULT_OPTIONS, Options
from calibration.other_library import fit_other
from calibration.sources import read_sources
from costmodel.profile import DeviceProfile, FitErrors, Provenance

AIC = "github.com/ai-dynamo/aiconfigurator 095f58a51c4c (Apache-2.0)"
FITTED_ON = "2026-11-30"
"""Day of the shipped fits; change it when tables, formulas or options change."""

LSS = "github.com/casys-kaist/LLMServingSim 5daddb21a545 (MIT)"
AGENT_SERVE_SIM = "github.com/rajibrhasan/agentservesim 5a73df777a59 (products of vLLM up to 0.19, CUDA 12)"


@dataclass(frozen=True, slots=True)
class Recipe:
    """Which tables make a profile. `dtypes` limits a GEMM table to some formats; newer engines are
    preferred."""

    tables: tuple[tuple[str, tuple[str, ...]], ...]
    repositories: tuple[str, ...]
    engine_versions: tuple[str, ...]
    context_splits: float = 1.0
    borrow: tuple[tuple[str, str, str], ...] = ()
    """(group, name, device): a fit that no table of this device gives, taken from a related one."""
    gemm_version: str = ""
    other_gemms: tuple[tuple[str, str], ...] = ()
    """(first engine version, stem in `calibration/data`): products of engines with another library."""


RECIPES: dict[str, Recipe] = {
    "h200": Recipe(
        (
            ("gemm_h200_sxm_vllm-0.24.0", ("bfloat16", "fp8")),
            # vLLM 0.24's fp8_block rows were timed eagerly (a 55 us floor); 0.14's were not.
            ("gemm_h200_sxm_vllm-0.14.0", ("fp8_block",)),
            ("gemm_h200_sxm_trtllm-1.2.0rc5-woquant", ("int8_wo", "int4_wo", "sq")),
            ("attn_ctx_h200_sxm_vllm-0.24.0", ()),
            ("attn_gen_h200_sxm_vllm-0.24.0", ()),
            ("comm_h200_sxm", ()),
        ),
        (AIC,),
        ("vLLM 0.24.0", "vLLM 0.14.0 (fp8_block)", "TensorRT-LLM 1.2.0rc5 (int8_wo, int4_wo, sq)"),
        context_splits=32.0,
        borrow=(
            ("elementwise", "", "rtxpro6000"),
            ("sampler", "", "rtxpro6000"),
            ("moe", "bfloat16", "rtxpro6000"),
        ),
    ),
    "h100": Recipe(
        (
            ("gemm_h100_sxm_vllm-0.24.0", ("bfloat16", "fp8")),
            ("gemm_h100_sxm_vllm-0.14.0", ("fp8_block",)),
            ("attn_ctx_h100_sxm_vllm-0.24.0", ()),
            ("attn_gen_h100_sxm_vllm-0.24.0", ()),
            ("comm_h100_sxm", ()),
        ),
        (AIC,),
        ("vLLM 0.24.0", "vLLM 0.14.0 (fp8_block, all-reduce of earlier engines)"),
        context_splits=32.0,
        borrow=(
            ("gemm", "int8_wo", "h200"),
            ("gemm", "int4_wo", "h200"),
            ("gemm", "sq", "h200"),
            ("elementwise", "", "rtxpro6000"),
            ("sampler", "", "rtxpro6000"),
            ("moe", "bfloat16", "rtxpro6000"),
        ),
    ),
    "a100": Recipe(
        (
            ("gemm_a100_sxm_vllm-0.14.0", ()),
            ("attn_ctx_a100_sxm_vllm-0.14.0", ()),
            ("attn_gen_a100_sxm_vllm-0.14.0", ()),
            ("comm_a100_sxm", ()),
        ),
        (AIC,),
        ("vLLM 0.14.0",),
        borrow=(
            ("gemm", "int8_wo", "l40s"),
            ("gemm", "int4_wo", "l40s"),
            ("gemm", "sq", "l40s"),
            ("decode_mixed", "bfloat16", "rtx4090"),
            ("elementwise", "", "rtx4090"),
            ("sampler", "", "rtx4090"),
            ("moe", "bfloat16", "rtxpro6000"),
        ),
    ),
    "b200": Recipe(
        (
            ("gemm_b200_sxm_vllm-0.24.0", ()),
            ("attn_ctx_b200_sxm_vllm-0.24.0", ()),
            ("attn_gen_b200_sxm_vllm-0.24.0", ()),
            ("comm_b200_sxm", ()),
        ),
        (AIC,),
        ("vLLM 0.24.0",),
        context_splits=32.0,
        borrow=(
            ("gemm", "int8_wo", "h200"),
            ("gemm", "int4_wo", "h200"),
            ("gemm", "sq", "h200"),
            ("elementwise", "", "rtxpro6000"),
            ("sampler", "", "rtxpro6000"),
            ("moe", "bfloat16", "rtxpro6000"),
        ),
    ),
    "l40s": Recipe(
        (
            ("gemm_l40s_vllm-0.24.0", ()),
            ("gemm_l40s_trtllm-1.0.0-woquant", ()),
            ("attn_ctx_l40s_vllm-0.24.0", ()),
            ("attn_gen_l40s_vllm-0.24.0", ()),
            ("comm_l40s", ()),
        ),
        (AIC,),
        ("vLLM 0.24.0", "TensorRT-LLM 1.0.0 (int8_wo, int4_wo, sq)", "vLLM 0.14.0 (all-reduce)"),
        borrow=(
            ("decode_mixed", "bfloat16", "rtx4090"),
            ("elementwise", "", "rtx4090"),
            ("sampler", "", "rtx4090"),
            ("moe", "bfloat16", "rtxpro6000"),
        ),
    ),
    "rtx4090": Recipe(
        tuple((f"lss_rtx4090_llama-3.1-8b_tp1_{t}", ()) for t in ("dense", "per_sequence", "attention")),
        (LSS,),
        ("vLLM 0.19.0",),
        borrow=(
            ("gemm", "fp8", "l40s"),
            ("gemm", "int8_wo", "l40s"),
            ("gemm", "int4_wo", "l40s"),
            ("gemm", "sq", "l40s"),
            ("all_reduce", "", "l40s"),
            ("nccl_all_reduce", "", "l40s"),
            ("moe", "bfloat16", "rtxpro6000"),
        ),
    ),
    "rtxpro6000": Recipe(
        (
            *((f"lss_rtxpro6000_llama-3.1-8b_tp1_{t}", ()) for t in ("dense", "per_sequence", "attention")),
            *(
                (f"lss_rtxpro6000_qwen3-30b-a3b-instruct-2507_tp1_{t}", ())
                for t in ("dense", "per_sequence", "attention", "moe")
            ),
            *((f"lss_rtxpro6000_qwen3-32b_tp2_{t}", ()) for t in ("dense", "per_sequence", "attention")),
            ("comm_rtx_pro_6000_server", ()),
        ),
        (LSS, AIC, AGENT_SERVE_SIM),
        (
            "vLLM 0.19.0 (products with CUDA 13, which vLLM has by default since 0.20)",
            "vLLM 0.19.0 with CUDA 12 (products of engines before 0.20)",
            "vLLM 0.24.0 (all-reduce, over two GPUs of 0.19.0 too)",
        ),
        gemm_version="0.20",
        other_gemms=(("0.19", "gemm_rtxpro6000_cuda12"),),
        borrow=(
            ("gemm", "fp8", "l40s"),
            ("gemm", "int8_wo", "l40s"),
            ("gemm", "int4_wo", "l40s"),
            ("gemm", "sq", "l40s"),
        ),
    ),
}


def table_paths(recipe: Recipe, data: Path) -> tuple[list[Path], dict[str, tuple[str, ...]]]:
    """Files of a recipe under `data`, and the number formats to read of each file."""
    paths = [data / f"kernels_{stem}.csv" for stem, _ in recipe.tables]
    return paths, {p.name: formats for p, (_, formats) in zip(paths, recipe.tables, strict=True) if formats}


def build(name: str, data: Path, options: Options = DEFAULT_OPTIONS) -> DeviceProfile:
    """The profile `name` from the tables in `data`, without anything borrowed."""
    recipe = RECIPES[name]
    paths, formats = table_paths(recipe, data)
    profile = fit_profile(
        paths,
        name,
        options=options,
        formats=formats,
        context_splits=recipe.context_splits,
        provenance=Provenance(
            measured="public kernel timings (CUDA-graph replay for AIConfigurator, eager for LLMServingSim)",
            repositories=list(recipe.repositories),
            engine_versions=list(recipe.engine_versions),
            fitted_on=FITTED_ON,
            fitted_by="python -m calibration.ship",
            notes=[
                f"{group} {fit} borrowed from {device}".replace("  ", " ")
                for group, fit, device in recipe.borrow
            ],
        ),
        progress=_say,
    )
    tables = read_sources(paths, profile.name).tables if recipe.other_gemms else []
    others = {
        version: fit_other(stem, tables, profile.facts, options) for version, stem in recipe.other_gemms
    }
    for version, fits in others.items():
        for dtype, fit in fits.items():
            _say(f"{name} gemm {dtype} {version}: {fit.errors} ({fit.num_points:,} points; {fit.source})")
    return profile.model_copy(update={"gemm_version": recipe.gemm_version, "other_gemms": others})


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")


def borrow(profile: DeviceProfile, lender: DeviceProfile, group: str, name: str) -> DeviceProfile:
    """`profile` with a fit of `lender`: coefficients are efficiencies and scale with the device's own facts.

    The residual table comes along only between devices with as many multiprocessors: it is about their waves.
    """
    fit = getattr(lender, group)
    fit = fit[name] if name else fit
    keep = profile.facts.num_sms == lender.facts.num_sms
    lent = fit.model_copy(
        update={
            "residual": fit.residual if keep else None,
            "num_points": 0,
            "errors": FitErrors(),
            "hull": {},
            "cleaning": {},
            "source": f"borrowed from {lender.name}: {fit.source}",
        }
    )
    value = {**getattr(profile, group), name: lent} if name else lent
    return profile.model_copy(update={group: value})


def main(arguments: list[str] | None = None) -> int:
    """Fit and write the named profiles, all of them by default."""
    parser = argparse.ArgumentParser(prog="python -m calibration.ship", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[[], *RECIPES], metavar="NAME", help=", ".join(RECIPES))
    parser.add_argument("--data", type=Path, default=Path("../shared/data/kernels"))
    parser.add_argument("--out", type=Path, default=Path("costmodel/profiles"))
    given = parser.parse_args(arguments)
    wanted = given.names or list(RECIPES)
    needed = sorted({d for n in wanted for _, _, d in RECIPES[n].borrow} | set(wanted))
    bare = {name: build(name, given.data, Options(folds=4 if name in wanted else 0)) for name in needed}
    given.out.mkdir(parents=True, exist_ok=True)
    for name in wanted:
        profile = bare[name]
        for group, fit_name, device in RECIPES[name].borrow:
            profile = borrow(profile, bare[device], group, fit_name)
        file = given.out / f"{name}.json"
        file.write_text(profile.to_json() + "\n", encoding="utf-8")
        sys.stderr.write(f"{file}: {file.stat().st_size / 1e3:.0f} kB, hash {profile.content_hash}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
