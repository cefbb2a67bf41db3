"""`tokentwin quality`: what quantised weights and caches do to answers, to speed and to memory, in one table."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from serving.errors import UsageError
from tokentwin.config_file import configurable

if TYPE_CHECKING:
    from calibration.device_calibrate import Bench
    from realengine.build import EngineOptions
    from realengine.load import Source
    from realengine.quant_quality import Divergence

PLAIN = (None, "auto")
USUAL = (PLAIN, ("int8_wo", "auto"), ("int4_wo", "auto"), (None, "int8"), (None, "int4"))
"""What is compared unless told otherwise."""
BATCH, PROMPT = 8, 256
"""Sequences of a decode step and tokens of a prompt, for the speeds."""
REPEATS = 7
LEAST_WINDOW = 16


@dataclass(frozen=True)
class Row:
    """One format: answers, speed (one thread of the CPU, or the GPU) and memory."""

    quantization: str
    kv_cache_dtype: str
    answers: Divergence
    decode_tokens_per_s: float
    batch_tokens_per_s: float
    prefill_tokens_per_s: float
    weight_bytes: int
    kv_bytes_per_token: int


@configurable
def quality(
    *,
    model: Annotated[str, Parameter(help="A Hugging Face folder or a GGUF file.")],
    quantization: Annotated[
        list[str] | None,
        Parameter(
            help="Weight formats: none, int8_wo, int4_wo, fp8, fp8_block.",
            consume_multiple=True,
            negative_iterable=(),
        ),
    ] = None,
    kv_cache_dtype: Annotated[
        list[str] | None,
        Parameter(
            help="KV cache formats: auto, int8, int4, fp8.", consume_multiple=True, negative_iterable=()
        ),
    ] = None,
    kv_cache_recent_tokens: Annotated[
        int, Parameter(help="Of a quantised cache, the last tokens that are kept as they are.")
    ] = 0,
    reference: Annotated[
        str | None,
        Parameter(
            help="Model to compare with, where --model is a quantised checkpoint. [default: --model itself]",
            show_default=False,
        ),
    ] = None,
    text: Annotated[
        Path | None,
        Parameter(
            help="UTF-8 text to read. [default: 650 words that come with TokenTwin]", show_default=False
        ),
    ] = None,
    window: Annotated[
        int | None,
        Parameter(
            help="Tokens that are read at once, from an empty cache. [default: up to 512]", show_default=False
        ),
    ] = None,
    max_tokens: Annotated[int, Parameter(help="Tokens of the text to read.")] = 2048,
    device: Annotated[str, Parameter(help="cpu, cuda, cuda:N, or auto: CUDA where there is one.")] = "auto",
    dtype: Annotated[str, Parameter(help="auto, bfloat16 or float16.")] = "auto",
    json: Annotated[bool, Parameter(help="Print JSON.", negative=())] = False,
) -> int:
    """Compare quantised weights and KV caches with the model as it is: perplexity, logits, speed, memory.

    All combinations of the formats named are measured, and the plain model before them. Perplexity is of a text read in
    windows; speeds are of the engine's own steps.
    Example: tokentwin quality --model models/smollm2 --quantization int8_wo int4_wo --kv-cache-dtype auto int8
    """
    for name, value in (("--window", window), ("--max-tokens", max_tokens)):
        if value is not None and value < LEAST_WINDOW:
            raise UsageError(f"{name} must be at least {LEAST_WINDOW}, got {value}")
    formats = pairs_of(quantization, kv_cache_dtype)
    try:
        from realengine.build import EngineOptions
        from realengine.load import find_model
    except ModuleNotFoundError as error:
        raise UsageError(
            f"tokentwin quality runs the engine, which needs {error.name}: pip install 'tokentwin[engine]'"
        ) from None
    options = EngineOptions(model, dtype=dtype, device=device, kv_cache_recent_tokens=kv_cache_recent_tokens)
    if kv_cache_recent_tokens and all(kv == "auto" for _, kv in formats):
        raise UsageError(
            "--kv-cache-recent-tokens has an effect only with --kv-cache-dtype int8, int4 or fp8"
        )
    source = find_model(model)
    plain = source if reference is None else find_model(reference)
    if reference is None and source.packing is not None:
        _say(f"note: {model} is quantised by {source.packing.method}; give the 16-bit model with --reference")
    room = source.architecture.shape.max_position_embeddings - LEAST_WINDOW
    if window is not None and window > room:
        raise UsageError(f"--window {window} is beyond the model's positions; use at most {room}")
    window = window or min(512, room)
    windows = _windows(plain, _text(text), window, max_tokens)
    rows = measure(options, source, plain, formats, windows, window, _say)
    if json:
        sys.stdout.write(_json(model, rows) + "\n")
    else:
        sys.stdout.write("\n".join(table(source.architecture.shape.name, rows, options)) + "\n")
    return 0


def pairs_of(
    quantization: Sequence[str] | None, kv_cache_dtype: Sequence[str] | None
) -> list[tuple[str | None, str]]:
    """Formats to compare, the plain one first. Raises `UsageError` for one that the engine does not have."""
    if quantization is None and kv_cache_dtype is None:
        return list(USUAL)
    weights = [None if name == "none" else name for name in quantization or ("none",)]
    found = [PLAIN, *product(weights, kv_cache_dtype or ("auto",))]
    return list(dict.fromkeys(found))


def measure(
    options: EngineOptions,
    source: Source,
    reference: Source,
    formats: Sequence[tuple[str | None, str]],
    windows: Sequence[Any],
    window: int,
    say: Any = lambda line: None,
) -> list[Row]:
    """A row per format. The first is the reference's."""
    from calibration.device_calibrate import Plan, prepare
    from costmodel.formats import GEMM_FORMATS
    from costmodel.memory import weight_bytes
    from realengine.load import weight_format
    from realengine.quant import scheme_of
    from realengine.quant_kv import cache_layout, kv_bytes_per_token
    from realengine.quant_quality import divergence, read_window
    from realengine.quant_recent import check_recent

    shape, dtype = source.architecture.shape, options.torch_dtype()
    for weights, kv in formats:  # all names before any model is loaded
        packed = source.packing.method if source.packing is not None else None
        scheme_of(weights, packed)
        cache_layout(kv, shape.head_dim, dtype)
    base: list[Any] = []
    rows = []
    first = [] if source is reference else [(None, "auto", reference)]
    for weights, kv, model in (*first, *((w, k, source) for w, k in formats)):
        name = weight_format(model, weights)
        say(f"{name}, KV {kv} …")
        recent = 0 if kv == "auto" else options.kv_cache_recent_tokens
        check_recent(recent, kv)
        chosen = replace(options, quantization=weights, kv_cache_dtype=kv, kv_cache_recent_tokens=recent)
        longest = max(window, PROMPT) + 16
        bench = prepare(Plan(chosen, BATCH, longest, longest), model)
        found = [read_window(bench.runner.step, ids) for ids in windows]  # type: ignore[attr-defined]
        base = base or found
        fast = speeds(bench)
        rows.append(
            Row(
                "none" if name == "bfloat16" else weights or name,
                f"{kv}+{recent}" if recent else kv,
                divergence(windows, base, found),
                *fast,
                weight_bytes(shape, GEMM_FORMATS[name]),
                kv_bytes_per_token(shape.num_layers, shape.num_kv_heads, shape.head_dim, kv, dtype),
            )
        )
        bench.runner.close()
    return rows


def speeds(bench: Bench) -> tuple[float, float, float]:
    """Tokens a second of a decode, of a batch of decodes, and of a prompt: medians of the engine's steps."""
    from calibration.microbench_steps import Composition

    steps = (Composition((PROMPT,)), Composition((PROMPT,) * BATCH), Composition(chunks=((PROMPT, 0),)))
    found = []
    for what in steps:
        bench.steps.run(what)
        times = sorted(bench.steps.run(what)["total"] for _ in range(REPEATS))
        found.append(what.num_tokens / times[REPEATS // 2])
    return found[0], found[1], found[2]


def table(model: str, rows: Sequence[Row], options: EngineOptions) -> list[str]:
    """The comparison as printed."""
    on_cpu = options.torch_device().type == "cpu"
    first = rows[0]
    lines = [
        f"{model}: {first.answers.num_tokens} tokens of text, against the first row",
        "",
        f"{'weights':<10}{'KV':<9}{'perplexity':>11}{'':>8}{'logit err':>10}{'KL (nats)':>10}{'same top':>9}"
        f"{'decode':>9}{f'x{BATCH}':>9}{'prompt':>9}{'weights':>10}{'KV/token':>10}",
        f"{'':<10}{'':<9}{'':>11}{'change':>8}{'':>10}{'':>10}{'':>9}{'tok/s':>9}{'tok/s':>9}{'tok/s':>9}"
        f"{'MB':>10}{'bytes':>10}",
    ]
    for row in rows:
        a = row.answers
        change = "" if row is first else f"{a.perplexity / first.answers.perplexity - 1:+.1%}"
        lines.append(
            f"{row.quantization:<10}{row.kv_cache_dtype:<9}{a.perplexity:>11.3f}{change:>8}{a.logit_error:>10.4f}"
            f"{a.kl_nats:>10.5f}{a.same_choice:>9.1%}{row.decode_tokens_per_s:>9.1f}{row.batch_tokens_per_s:>9.1f}"
            f"{row.prefill_tokens_per_s:>9.0f}{row.weight_bytes / 1e6:>10.1f}{row.kv_bytes_per_token:>10,}"
        )
    where = "CPU seconds of one thread" if on_cpu else "the GPU's time"
    lines += [
        "",
        "logit err: RMS of the change over that of the logits (1.4: unrelated). Embedding and LM head stay in 16 bit.",
        f"Speeds: steps of 1 and {BATCH} decodes at a context of {PROMPT}, and of a prompt of {PROMPT}, in {where}.",
    ]
    return lines


def _windows(source: Source, text: str, window: int, max_tokens: int) -> list[Any]:
    from realengine.quant_quality import windows_of

    if source.tokenizer is None:
        raise UsageError(
            "--model: there is no tokenizer.json beside the weights; a text cannot be read without one"
        )
    longest = source.architecture.shape.max_position_embeddings
    if window > longest - LEAST_WINDOW:
        raise UsageError(
            f"--window {window} is beyond the model's {longest} positions; use at most {longest - 16}"
        )
    found = windows_of(source.tokenizer.encode(text)[:max_tokens], window)
    if not found:
        raise UsageError("--text: fewer than two tokens; give a longer text")
    return found


def _text(path: Path | None) -> str:
    if path is None:
        from realengine.quant_quality import bundled_text

        return bundled_text()
    return path.read_text(encoding="utf-8")


def _json(model: str, rows: Sequence[Row]) -> str:
    plain = [asdict(row) for row in rows]
    return json.dumps({"model": model, "rows": [{**row, **row.pop("answers")} for row in plain]}, indent=1)


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
