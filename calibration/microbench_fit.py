"""From measured steps to a device profile: each part of a step becomes samples of the kernel that prices it.

A step's attention holds rotation and the writing of K and V as well (`calibration.microbench_attention`), which become
the profile's elementwise part; attention is what is left. Whatever lies between operators goes with the embedding,
which also happens once a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from calibration.fit import Options, fit_kernel, grid_groups
from calibration.microbench_attention import (
    LEAST_SHARE,
    Beside,
    attention_means,
    chunks_apart,
    longest_share,
    rotation,
    saved_beside_chunks,
)
from calibration.microbench_run import Store, steadied
from calibration.microbench_steps import GEMMS, repeated
from calibration.microbench_straight import straight
from calibration.tables import Samples
from costmodel.formats import GEMM_FORMATS, KV_FORMATS, hardware
from costmodel.kernels import FORMULAS, Hardware
from costmodel.layers import elementwise_bytes, embedding_bytes
from costmodel.model import ModelShape
from costmodel.predict import Kernel
from costmodel.profile import (
    SCHEMA,
    DeviceFacts,
    DeviceProfile,
    HostTerms,
    KernelFit,
    KernelKind,
    Provenance,
)
from serving.errors import UsageError

Point = tuple[tuple[float, ...], tuple[float, ...]]
"""(shape, grid) of a sample."""

OPTIONS = Options(folds=4, max_evaluations=40)


@dataclass(frozen=True, slots=True)
class Row:
    """One sample: the mean of its repeats."""

    kind: KernelKind
    point: Point
    seconds: float
    repeats: int
    spread: float


def rows_of(
    store: Store, shape: ModelShape, *, rounds: set[int] | None = None, key: str | None = None
) -> list[Row]:
    """Samples of every kernel, from the runs of `rounds` (all by default).

    `key` names the reference step, by whose wander the others are corrected.
    """
    found: dict[tuple[KernelKind, Point], list[float]] = {}

    def add(kind: KernelKind, shape_: tuple[float, ...], grid: tuple[float, ...], seconds: float) -> None:
        if seconds > 0:
            found.setdefault((kind, (shape_, grid)), []).append(seconds)

    layers = float(shape.num_layers)
    widths = elementwise_bytes(shape, 1)
    gemms = {g.name: g for g in (*shape.attention_gemms(), *shape.mlp_gemms(), shape.lm_head_gemm())}
    heads = (float(shape.num_heads), float(shape.num_kv_heads))
    runs = [run for run in store.runs if rounds is None or run.round in rounds]
    if key is not None:
        runs = steadied(runs, key)
    rotate = rotation(attention_means(runs, layers))
    for run in runs:
        what, parts, tokens = run.what, run.parts, float(run.what.num_tokens)
        for name in GEMMS[:4]:
            add("gemm", (gemms[name].n, gemms[name].k), (tokens,), parts[name] / layers)
        rows = float(what.num_sampled)
        head = gemms["lm_head"]
        add("gemm", (head.n, head.k), (rows,), parts["lm_head"])
        norms = 2.0 * layers + rows / tokens
        add("elementwise", (widths["layernorm"],), (tokens,), parts["norm"] / norms)
        add("elementwise", (widths["act_fn"],), (tokens,), parts["act"] / layers)
        add("elementwise", (embedding_bytes(shape),), (tokens,), parts["embed"] + parts["rest"])
        add("sampler", (float(shape.vocab_size),), (rows,), parts["sample"])
        whole = parts["attention"] / layers
        kernel = max(whole - rotate(tokens), LEAST_SHARE * whole)
        contexts = set(what.decodes)
        if what.sampled is not None:
            add("elementwise", (widths["rotary_emb"],), (tokens,), rotate.share * whole)
        elif not what.chunks and len(contexts) == 1:
            add("decode", heads, (len(what.decodes), float(contexts.pop())), kernel)
        elif not what.decodes and len(what.chunks) == 1:
            chunk, before = what.chunks[0]
            add("prefill", heads, (1.0, float(chunk), float(before)), kernel)
    for num_ranks, num_bytes, seconds in store.extras.get("collectives", ()):
        add("all_reduce", (float(num_ranks),), (float(num_bytes),), seconds)
    return [Row(kind, point, *_middle(values)) for (kind, point), values in sorted(found.items(), key=str)]


def _middle(values: Sequence[float]) -> tuple[float, int, float]:
    seconds, spread = repeated(values)
    return seconds, len(values), spread


def fit_steps(
    store: Store,
    shape: ModelShape,
    facts: DeviceFacts,
    host: HostTerms,
    provenance: Provenance,
    *,
    gemm_format: str = "bfloat16",
    kv_dtype: str = "bfloat16",
    rounds: set[int] | None = None,
    key: str | None = None,
    wander: float = 0.0,
    options: Options = OPTIONS,
) -> DeviceProfile:
    """The profile of the measured steps. `wander` is the log spread of the machine itself, which no fit removes.

    Raises `UsageError` when a kernel that every step needs was not measured.
    """
    rows = rows_of(store, shape, rounds=rounds, key=key)
    layers, head = _without_head(rows, shape)
    kv_bytes = KV_FORMATS[kv_dtype].element_bytes(shape.head_dim)
    fits: dict[str, KernelFit] = {}
    runs = [run for run in store.runs if rounds is None or run.round in rounds]
    steady = Store(store.header, runs=steadied(runs, key) if key is not None else runs)
    for kind in ("gemm", "prefill", "decode", "elementwise", "sampler"):
        mine = [row for row in (layers if gemm_format != "bfloat16" else rows) if row.kind == kind]
        if not mine:
            raise UsageError(
                f"no measured step has {kind} work; measure again with a larger --budget or --max-model-len"
            )
        fmt = GEMM_FORMATS[gemm_format if kind == "gemm" else "bfloat16"]
        hw = hardware(facts, fmt, kv_bytes=kv_bytes, head_dim=shape.head_dim)
        fits[kind] = _fit(kind, mine, hw, shape, wander, options, steady)
    hw = hardware(facts, kv_bytes=kv_bytes, head_dim=shape.head_dim)
    alone = (Kernel("prefill", fits["prefill"], hw), Kernel("decode", fits["decode"], hw))
    beside = mixed_rows(steady, shape, *alone)
    mixed = {kv_dtype: _fit("decode_mixed", beside, hw, shape, wander, options, steady)} if beside else {}
    sums = [row for row in rows if row.kind == "all_reduce"]
    # The LM head stays in 16 bit whatever the layers' format.
    plain = (
        {}
        if gemm_format == "bfloat16"
        else {"bfloat16": _fit("gemm", head, hw, shape, wander, options, steady)}
    )
    return DeviceProfile(
        schema=SCHEMA,
        facts=facts,
        all_reduce=_fit("all_reduce", sums, hw, shape, wander, options, steady) if sums else None,
        gemm={gemm_format: fits["gemm"]} | plain,
        prefill={kv_dtype: fits["prefill"]},
        decode={kv_dtype: fits["decode"]},
        decode_mixed=mixed,
        elementwise=fits["elementwise"],
        sampler=fits["sampler"],
        host=host,
        provenance=provenance,
    )


def _without_head(rows: list[Row], shape: ModelShape) -> tuple[list[Row], list[Row]]:
    """All rows but the LM head's, and the LM head's."""
    gemm = shape.lm_head_gemm()
    head = [row for row in rows if row.kind == "gemm" and row.point[0] == (gemm.n, gemm.k)]
    return [row for row in rows if row not in head], head


def _fit(
    kind: KernelKind,
    rows: list[Row],
    hw: Hardware,
    shape: ModelShape,
    wander: float,
    options: Options,
    store: Store,
) -> KernelFit:
    samples = Samples(
        kind,
        np.array([row.point[0] for row in rows], np.float64),
        np.array([row.point[1] for row in rows], np.float64),
        np.array([row.seconds for row in rows]),
        source=f"microbenchmarks of the engine's own steps ({sum(row.repeats for row in rows):,} runs)",
        head_dim=shape.head_dim,
    )
    fixed = {"context_splits": 1.0} if kind == "prefill" else None
    # Held out are sizes, not shapes: every shape of the model is measured, between sizes one interpolates.
    fit = fit_kernel(kind, samples, hw, options=options, groups=grid_groups, fixed=fixed)
    if hw.num_sms == 1 and kind in ("gemm", "prefill"):
        fit = straight(fit, samples, hw)
    noise = float(np.median([row.spread for row in rows if row.repeats > 2] or [0.03]))
    errors = fit.errors.model_copy(
        update={"measured": round(float(np.hypot(fit.errors.measured or 0.0, wander)), 5)}
    )
    hull = dict(fit.hull)
    coefficients = dict(fit.coefficients)
    if kind in ("prefill", "decode", "decode_mixed"):
        hull["head_dim"] = (float(shape.head_dim), float(shape.head_dim))
    if kind in ("prefill", "decode"):
        means = attention_means(store.runs, float(shape.num_layers))
        rest = (
            means,
            rotation(means),
            Kernel(kind, fit, hw),
            (float(shape.num_heads), float(shape.num_kv_heads)),
        )
        if kind == "decode":
            coefficients["longest_share"] = longest_share(*rest)
        else:
            coefficients["chunks_apart"] = chunks_apart(*rest)
            if (far := _far_context(rows)) > 0:
                coefficients["far_context"] = far
    if kind == "decode_mixed":
        # Chunks and decodes are kernels of their own here: no grid that they share, no empty blocks in it.
        coefficients["empty_block_s"] = 1e-15
    return fit.model_copy(
        update={
            "noise_log_std": round(max(noise, 0.003), 4),
            "errors": errors,
            "hull": hull,
            "coefficients": coefficients,
        }
    )


def mixed_rows(store: Store, shape: ModelShape, prefill: Kernel, decode: Kernel) -> list[Row]:
    """What decodes add to a step with a chunk: what they take alone, less a constant for each size of batch.

    Sizes and contexts are those of decodes alone: beside chunks they are as uneven as anywhere, and as far apart.
    """
    heads = (float(shape.num_heads), float(shape.num_kv_heads))
    means = attention_means(store.runs, float(shape.num_layers))
    beside = Beside(prefill, heads, prefill.coefficients.get("chunks_apart", 0.0))
    saved = saved_beside_chunks(means, rotation(means), beside, decode, heads)
    known = list(saved)
    rows = []
    for what in means if saved else ():
        if what.chunks or what.sampled is not None or len(set(what.decodes)) != 1:
            continue
        batch, context = float(len(what.decodes)), float(what.decodes[0])
        alone = float(decode.seconds(heads, batch, context))
        left = max(alone - float(np.interp(batch, known, [saved[b][0] for b in known])), LEAST_SHARE * alone)
        errors = saved[min(known, key=lambda b: abs(b - batch))][1]
        spread = _middle(np.exp(errors).tolist())[2]
        rows.append(Row("decode_mixed", (heads, (batch, context)), left, len(errors), spread))
    return sorted(rows, key=lambda row: row.point)


def _far_context(rows: Sequence[Row]) -> float:
    """The longest earlier context that at least half of the chunk sizes met, from which a slope can be taken; or 0."""
    chunks: dict[float, set[float]] = {}
    for row in rows:
        _, tokens, before = row.point[1]
        if before > 0:
            chunks.setdefault(before, set()).add(tokens)
    sizes = len(set().union(*chunks.values())) if chunks else 0
    return max((before for before, met in chunks.items() if 2 * len(met) >= sizes), default=0.0)


def fastest(
    store: Store, shape: ModelShape, *, gemm_format: str = "bfloat16", kv_dtype: str = "bfloat16"
) -> tuple[float, float]:
    """(FLOP/s, weight and KV bytes/s) that any measured part reached."""
    head = shape.lm_head_gemm()
    kv_bytes = KV_FORMATS[kv_dtype].element_bytes(shape.head_dim)
    flops, read = 0.0, 0.0
    for row in rows_of(store, shape):
        if row.kind == "gemm":
            (n, k), (m,) = row.point
            flops = max(flops, 2.0 * n * k * m / row.seconds)
            fmt = GEMM_FORMATS["bfloat16" if (n, k) == (head.n, head.k) else gemm_format]
            read = max(read, n * k * fmt.weight_bytes / row.seconds)
        elif row.kind == "decode":
            (_, kv_heads), (batch, context) = row.point
            read = max(read, batch * context * kv_heads * shape.head_dim * 2.0 * kv_bytes / row.seconds)
        elif row.kind == "prefill":
            (heads, _), (batch, tokens, before) = row.point
            pairs = batch * (tokens * before + tokens * (tokens + 1) / 2.0)
            flops = max(flops, 4.0 * heads * shape.head_dim * pairs / row.seconds)
    return flops, read


def table_rows(
    rows: Sequence[Row], shape: ModelShape, *, gemm_format: str = "bfloat16", kv_dtype: str = "bfloat16"
) -> list[dict[str, object]]:
    """Samples as rows of our own microbenchmark table (`calibration.bench_table`)."""
    out: list[dict[str, object]] = []
    _, head = _without_head(list(rows), shape)
    for row in rows:
        dtype = gemm_format if row.kind == "gemm" and row not in head else "bfloat16"
        if row.kind in ("prefill", "decode"):
            dtype = kv_dtype
        _, _, shape_axes, grid_axes = FORMULAS[row.kind]
        cells = dict(zip((*shape_axes, *grid_axes), (*row.point[0], *row.point[1]), strict=True))
        out.append(
            {
                "kind": row.kind,
                "dtype": dtype,
                **cells,
                **({"head_dim": shape.head_dim} if row.kind in ("prefill", "decode") else {}),
                "latency_s": row.seconds,
                "repeats": row.repeats,
                "noise": round(row.spread, 5),
            }
        )
    return out
