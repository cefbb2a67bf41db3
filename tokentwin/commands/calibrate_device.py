"""`tokentwin calibrate --device auto --model … -o …`: this machine becomes a profile."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from serving.errors import UsageError
from tokentwin.config_file import configurable
from tokentwin.outputs import check_file

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


@configurable
def device(
    *,
    model: Annotated[
        str, Parameter(help="A Hugging Face folder or GGUF file; with dummy weights also a known name.")
    ],
    output: Annotated[Path, Parameter(alias="-o", help="The profile file to write; samples go beside it.")],
    device: Annotated[str, Parameter(help="cpu, cuda, cuda:N, or auto: CUDA where there is one.")] = "auto",
    budget: Annotated[str, Parameter(help="Time to measure, such as 90s or 8m.")] = "8m",
    load_format: Annotated[str, Parameter(help="auto, or dummy for random weights.")] = "auto",
    dtype: Annotated[str, Parameter(help="auto, bfloat16 or float16.")] = "auto",
    quantization: Annotated[
        str | None,
        Parameter(help="Weights to measure with: int8_wo, int4_wo, fp8 or fp8_block; 16 bit by default."),
    ] = None,
    kv_cache_dtype: Annotated[
        str, Parameter(help="KV cache to measure with: auto, int8, int4 or fp8.")
    ] = "auto",
    max_num_seqs: Annotated[int, Parameter(help="Largest batch to measure.")] = 16,
    max_num_batched_tokens: Annotated[int, Parameter(help="Most tokens in a step.")] = 512,
    max_model_len: Annotated[int, Parameter(help="Longest context.")] = 1024,
    rounds: Annotated[int, Parameter(help="Times that all points are gone over.")] = 2,
    enforce_eager: Annotated[bool, Parameter(help="Record no CUDA graphs.")] = False,
) -> int:
    """Measure the engine's own steps on this machine and fit a profile to them.

    Measured points are kept in a file beside the profile; the same command goes on from there.
    Example: tokentwin calibrate --device auto --model models/smollm2 -o profiles/here.json --budget 2m
    """
    from costmodel.render import render_profile

    seconds = parse_budget(budget)
    for name, value, least in (
        ("--max-num-seqs", max_num_seqs, 1),
        ("--max-num-batched-tokens", max_num_batched_tokens, 8),
        ("--max-model-len", max_model_len, 32),
        ("--rounds", rounds, 1),
    ):
        if value < least:
            raise UsageError(f"{name} must be at least {least}, got {value}")
    if output.suffix != ".json":
        raise UsageError(f"--output {output}: a profile is a .json file")
    try:
        from calibration.device_calibrate import Plan, calibrate
        from calibration.pinning import pinned
        from realengine.build import EngineOptions
    except ModuleNotFoundError as error:
        raise UsageError(
            f"calibrating a device runs the engine, which needs {error.name}: pip install 'tokentwin[engine]'"
        ) from None
    check_file(output)
    options = EngineOptions(
        model,
        load_format=load_format,
        dtype=dtype,
        device=device,
        enforce_eager=enforce_eager,
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
    )
    plan = Plan(options, max_num_seqs, max_num_batched_tokens, max_model_len, budget_s=seconds, rounds=rounds)
    on_cpu = options.torch_device().type == "cpu"
    with _bar() as progress, pinned() if on_cpu else nullcontext():
        done = calibrate(plan, output, progress=progress, say=_say)
    text = render_profile(done.profile)
    notes = "\n".join(f"- {note}" for note in done.notes)
    sys.stdout.write(f"{text}\n\n{notes}\n\nWrote {output}; use it with --gpu {output}\n")
    return 0


def parse_budget(text: str) -> float:
    """Seconds of `90s`, `8m`, `1h` or a plain number of seconds. Raises UsageError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text.strip())
    if found is None:
        raise UsageError(f"--budget must look like 90s, 8m or 1h, got {text!r}")
    return float(found[1]) * _UNITS[found[2] or "s"]


@contextmanager
def _bar() -> Iterator[Callable[[int, int, str], None] | None]:
    """A bar of points on standard error, or nothing where nobody would see it."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    bar = Progress(
        TextColumn("Measuring"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[what]}"),
        console=console,
        transient=True,
    )
    with bar:
        task = bar.add_task("points", total=None, what="")

        def told(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, what=what)

        yield told


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
