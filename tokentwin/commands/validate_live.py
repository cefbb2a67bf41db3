"""`tokentwin validate PROFILE --live`: the engine here and its twin on the same requests, at several loads."""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from serving.errors import UsageError
from sim.workload import WorkloadSpec
from tokentwin.flag_tables import TRAFFIC
from tokentwin.flags import Flag
from tokentwin.outputs import check_folder

LIVE = (
    Flag("live", bool, "Run the engine here beside its twin, instead of replaying a run.", "Live", negative=False),
    Flag("sweep_load", str, "Loads to run, as shares of the measured capacity.", "Live", default="0.3,0.6,0.8,0.9"),
    Flag("dataset", str, "What is sent; as --dataset-name.", "Live", default="random"),
    Flag("device", str, "cpu, cuda or auto.", "Live", default="auto"),
    Flag("load_format", str, "auto, or dummy for random weights of a known shape.", "Live", default="auto"),
    Flag("clock", str, "wall, or cpu: CPU seconds of the engine's thread, which neighbours do not stretch.",
         "Live", default="cpu on the CPU, else wall"),
    Flag("interleave", bool, "Measure steps again between the loads and price each load's twin by the two rounds "
         "around it, instead of by PROFILE.", "Live", default="on the CPU"),
)  # fmt: skip
WORKLOAD = tuple(
    flag
    for flag in TRAFFIC
    if flag.name not in ("request_rate", "max_concurrency", "input_len", "beam_width", "best_of")
)
_LIMITS = ("max_num_seqs", "max_num_batched_tokens", "max_model_len")
_ENGINE = ("model", "dtype", *_LIMITS, "enforce_eager", "quantization", "kv_cache_dtype")


def run_live(profile: str | None, given: Mapping[str, Any]) -> int:
    """Serve, simulate, compare; 1 with --tolerance when the median error of TPOT and E2EL is above it."""
    from calibration.device_calibrate import Plan, prepare
    from calibration.live import Live, validate_live
    from calibration.microbench_run import Store
    from calibration.pinning import pinned
    from costmodel.profile import load_profile
    from experiments.live_report import live_lines, save_live
    from realengine.build import EngineOptions

    if "model" not in given:
        raise UsageError(
            "--model is missing; give a Hugging Face folder, a GGUF file or, with dummy weights, a name"
        )
    if "against" in given:
        raise UsageError("--against has no effect with --live; leave one of them out")
    known = {f.name for f in (*LIVE, *WORKLOAD)} | {*_ENGINE, "output", "seed", "tolerance", "profile"}
    if extra := sorted(set(given) - known):
        raise UsageError(f"--{extra[0].replace('_', '-')} has no effect with --live; leave it out")
    options = EngineOptions(
        given["model"],
        load_format=given.get("load_format", "auto"),
        dtype=given.get("dtype", "auto"),
        device=given.get("device", "auto"),
        enforce_eager=bool(given.get("enforce_eager")),
        quantization=given.get("quantization"),
        kv_cache_dtype=given.get("kv_cache_dtype", "auto"),
    )
    loads = parse_loads(given.get("sweep_load", "0.3,0.6,0.8,0.9"))
    on_cpu = options.torch_device().type == "cpu"
    clock = given.get("clock", "cpu" if on_cpu else "wall")
    if clock not in ("cpu", "wall") or (clock == "cpu" and not on_cpu):
        raise UsageError(f"--clock {clock!r}; use wall, or on the CPU cpu")
    interleave = bool(given.get("interleave", on_cpu))
    name = profile or given.get("profile")
    known_profile = load_profile(name) if name is not None else None
    spec_of(given, 1.0)  # what is wrong with it fails now
    folder = Path(given["output"]) if "output" in given else None
    if folder is not None:
        check_folder(folder)
    limits = {field: given[field] for field in _LIMITS if field in given}
    bench = prepare(Plan(options, **limits))
    with tempfile.TemporaryDirectory() as scratch, pinned() if clock == "cpu" else nullcontext():
        base = folder if folder is not None else Path(scratch)
        live = Live(bench, Store(bench.header()), base / "twin", clock=clock, profile=known_profile, say=_say)
        report = validate_live(
            live,
            lambda rate: spec_of(given, rate),
            loads,
            seed=int(given.get("seed", 0)),
            interleave=interleave,
        )
    sys.stdout.write("\n".join(live_lines(report)) + "\n")
    if folder is not None:
        for path in save_live(report, folder):
            sys.stdout.write(f"wrote {path}\n")
    tolerance = given.get("tolerance")
    if tolerance is None:
        return 0
    errors = sorted([*report.errors("tpot", up_to=0.8), *report.errors("e2el", up_to=0.8)])
    return 0 if errors and errors[len(errors) // 2] <= tolerance / 100 else 1


def spec_of(given: Mapping[str, Any], rate: float) -> WorkloadSpec:
    """The workload of the flags at a rate. Short prompts and answers unless told otherwise: engines here are small."""
    from sim.workload.flags import spec_from_flags

    traffic = {f.name: given[f.name] for f in WORKLOAD if f.name in given}
    traffic.setdefault("dataset_name", given.get("dataset", "random"))
    if traffic["dataset_name"] == "random" and "dataset_path" not in traffic:
        for name, value in (
            ("random_input_len", 96),
            ("random_output_len", 32),
            ("random_range_ratio", "0.5"),
            ("random_prefix_len", 64),
        ):
            traffic.setdefault(name, value)
    traffic.setdefault("num_prompts", 64)
    return spec_from_flags({**traffic, "request_rate": rate})


def parse_loads(text: str) -> list[float]:
    """`"0.3,0.6"`. Raises UsageError."""
    try:
        loads = [float(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"--sweep-load must look like 0.3,0.6,0.8, got {text!r}") from None
    if not all(0 < load <= 2 and math.isfinite(load) for load in loads):
        raise UsageError(f"--sweep-load takes shares of capacity above 0 and up to 2, got {text!r}")
    return loads


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
