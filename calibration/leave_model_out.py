"""Steps of a model that no fit has seen: `python -m calibration.leave_model_out [--device h200 ...]`.

For each model in turn every shape that it has on 1, 2, 4 or 8 ranks is taken out of the tables: (n, k) of its four
linear layers, (heads, KV heads) of its attention. Formulas and residuals are fitted to the rest and predict the model's
decode and prefill steps, which are set beside the sums of what was measured. Linear layers and attention are most of a
step; norms, collectives and the LM head are not in it. Needs the public kernel tables.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from calibration.assemble import all_samples
from calibration.doc_tables import markdown, write_between
from calibration.fit import DEFAULT_OPTIONS, Kriging, choose_coefficients, formula_seconds, residual_table
from calibration.ship import RECIPES, table_paths
from calibration.tables import Samples, read_table
from costmodel.datasheet import device_facts
from costmodel.formats import hardware
from costmodel.kernels import Hardware
from costmodel.model import ModelShape, load_model
from costmodel.predict import Kernel
from costmodel.profile import KernelFit, KernelKind, load_profile
from serving.errors import UsageError

Floats = npt.NDArray[np.float64]
Shape = tuple[float, float]

MODELS = ("llama-3.1-8b", "llama-3.1-70b", "qwen3-0.6b", "qwen3-8b", "qwen3-14b", "qwen3-32b")
"""Shipped models with at least half of their linear layers among the measured shapes."""

DEVICES = ("h200", "h100", "a100", "b200")
RANKS = (1, 2, 4, 8)
CONTEXTS = (512, 1024, 2048, 4096, 8192, 16384)
MOST_SEQUENCES = 256
_SECTION = "models left out"


@dataclass(frozen=True, slots=True)
class Left:
    """One model on `tp` ranks of a device: signed relative errors of its steps, and how much of it was measured."""

    device: str
    model: str
    tp: int
    products: int
    """How many of its four linear layers are among the measured shapes; the step is made of these."""
    decode: Floats
    prefill: Floats


def gemm_shapes(model: ModelShape, tp: int) -> list[Shape]:
    """(n, k) of the four linear layers of one rank."""
    return [(float(g.n), float(g.k)) for g in (*model.attention_gemms(tp), *model.mlp_gemms(tp))]


def _ranks(model: ModelShape) -> Iterator[int]:
    for tp in RANKS:
        try:
            model.check_tensor_parallel(tp)
        except UsageError:
            continue
        yield tp


def _kernel(
    kind: KernelKind, samples: Samples, without: set[Shape], hw: Hardware, shipped: KernelFit
) -> Kernel:
    """Fitted to `samples` of other shapes. How far residuals carry is as in the shipped profile."""
    kept = samples.subset(np.array([tuple(shape) not in without for shape in samples.shape.tolist()]))
    fixed = {c: shipped.coefficients[c] for c in ("context_splits",) if c in shipped.coefficients}
    coefficients = choose_coefficients(kind, kept, hw, DEFAULT_OPTIONS, fixed)
    residual = shipped.residual
    assert residual is not None, "every measured kernel has a table of residuals"
    ratio = np.log(kept.seconds / formula_seconds(kind, coefficients, hw, kept))
    table = residual_table(kept, ratio, Kriging.of(residual))
    fit = KernelFit(kind=kind, coefficients=coefficients, residual=table, num_points=len(kept))
    return Kernel(kind, fit, hw)


def _measured(samples: Samples) -> dict[Shape, dict[tuple[float, ...], float]]:
    found: dict[Shape, dict[tuple[float, ...], float]] = {}
    rows = zip(samples.shape.tolist(), samples.grid.tolist(), samples.seconds.tolist(), strict=True)
    for (a, b), grid, seconds in rows:
        found.setdefault((a, b), {})[tuple(grid)] = seconds
    return found


def leave_out(device: str, data: Path, models: Sequence[str] = MODELS) -> list[Left]:
    """Errors of the steps of each of `models` on `device`, each predicted without any of its own shapes.

    Raises `UsageError` when the device's tables are not in `data`.
    """
    facts, profile = device_facts(device), load_profile(device)
    paths, _ = table_paths(RECIPES[device], data)
    wanted = [p for p in paths if not p.stem.startswith("kernels_comm")]
    samples = all_samples([read_table(p) for p in wanted], facts)
    kinds: tuple[KernelKind, ...] = ("gemm", "prefill", "decode")
    missing = [kind for kind in kinds if (kind, "bfloat16") not in samples]
    if missing:
        raise UsageError(f"{data}: no bfloat16 {missing[0]} timings of {device}")
    known = {kind: _measured(samples[kind, "bfloat16"]) for kind in kinds}
    found = []
    for name in models:
        model = load_model(name)
        tps = list(_ranks(model))
        products = {shape for tp in tps for shape in gemm_shapes(model, tp)}
        heads = {_heads(model, tp) for tp in tps}
        kernels = {
            kind: _kernel(
                kind,
                samples[kind, "bfloat16"],
                products if kind == "gemm" else heads,
                hardware(facts, head_dim=model.head_dim),
                getattr(profile, kind)["bfloat16"],
            )
            for kind in kinds
        }
        for tp in tps:
            shapes = [shape for shape in gemm_shapes(model, tp) if shape in known["gemm"]]
            if len(shapes) >= 2 and _heads(model, tp) in known["decode"]:
                found.append(_steps(device, name, tp, shapes, _heads(model, tp), known, kernels))
    return found


def _heads(model: ModelShape, tp: int) -> Shape:
    return float(model.heads_per_rank(tp)), float(model.kv_heads_per_rank(tp))


def _steps(
    device: str,
    name: str,
    tp: int,
    shapes: Sequence[Shape],
    heads: Shape,
    known: dict[KernelKind, dict[Shape, dict[tuple[float, ...], float]]],
    kernels: dict[KernelKind, Kernel],
) -> Left:
    gemm = known["gemm"]
    tokens = sorted({m for (m,) in gemm[shapes[0]] if all((m,) in gemm[shape] for shape in shapes)})
    linear = {m: sum(gemm[shape][m,] for shape in shapes) for m in tokens}
    guessed = {m: sum(float(kernels["gemm"].seconds(shape, m)) for shape in shapes) for m in tokens}

    def errors(kind: KernelKind, points: Sequence[tuple[float, tuple[float, ...]]]) -> Floats:
        attention = known[kind].get(heads, {})
        there = [(m, grid) for m, grid in points if m in linear and grid in attention]
        real = np.array([linear[m] + attention[grid] for m, grid in there])
        twin = np.array([guessed[m] + float(kernels[kind].seconds(heads, *grid)) for m, grid in there])
        return np.asarray(twin / real - 1.0)

    decode = [(m, (m, float(c))) for m in tokens if m <= MOST_SEQUENCES for c in CONTEXTS]
    prefill = [(m, (1.0, m, 0.0)) for m in tokens if m >= 128]
    return Left(device, name, tp, len(shapes), errors("decode", decode), errors("prefill", prefill))


def table(found: Sequence[Left]) -> str:
    """One row per device and model, over its numbers of ranks; the last row of a device is over all of it."""
    rows = []
    for device in dict.fromkeys(left.device for left in found):
        mine = [left for left in found if left.device == device]
        for model in dict.fromkeys(left.model for left in mine):
            some = [left for left in mine if left.model == model]
            covered = ", ".join(f"{left.tp} ({left.products})" for left in some)
            rows.append([device, model, covered, *_cells(some)])
        rows.append([device, "all", "", *_cells(mine)])
    return markdown(
        ["device", "model left out", "ranks (linear layers of 4)", "decode steps", "prefill steps"], rows
    )


def _cells(some: Sequence[Left]) -> list[str]:
    cells = []
    for steps in ([left.decode for left in some], [left.prefill for left in some]):
        errors = np.concatenate(steps)
        cells.append(f"{np.mean(np.abs(errors)):.1%} ({np.mean(errors):+.1%}, worst {_worst(errors):+.0%})")
    return cells


def _worst(errors: Floats) -> float:
    return float(errors[np.argmax(np.abs(errors))])


def main(arguments: list[str] | None = None) -> int:
    """Print the table, and write it into a page if asked to."""
    parser = argparse.ArgumentParser(prog="python -m calibration.leave_model_out", description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("../shared/data/kernels"))
    parser.add_argument("--device", nargs="+", default=list(DEVICES), choices=DEVICES, metavar="NAME")
    parser.add_argument("--model", nargs="+", default=list(MODELS), metavar="NAME")
    parser.add_argument(
        "--write", type=Path, metavar="PAGE", help="put the table between its marks in this page"
    )
    given = parser.parse_args(arguments)
    try:
        text = table([left for device in given.device for left in leave_out(device, given.data, given.model)])
        if given.write is not None:
            write_between(given.write, _SECTION, text)
    except UsageError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    sys.stdout.write(text + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
