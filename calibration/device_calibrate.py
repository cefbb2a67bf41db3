"""From a model and a device to a profile: load, measure under a budget, fit, keep the raw samples beside it.

Files beside `here.json`: `here.steps.jsonl` (every step measured; a later run goes on from it) and `here.parquet` (one
row a sample, in the layout of docs/calibration.md, which `tokentwin calibrate fit` reads as well).
"""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from calibration import bench_table
from calibration.device_facts import measured_facts, raised
from calibration.device_memory import PagePlan, measure_context_bytes, predict_pages, weight_bytes
from calibration.microbench_collectives import measure_all_reduce
from calibration.microbench_fit import fastest, fit_steps, rows_of, table_rows
from calibration.microbench_graphs import Launches, measure_launches
from calibration.microbench_host import fit_host, host_work, measure_host, measure_moves
from calibration.microbench_points import Bounds, reference
from calibration.microbench_run import Drift, Progress, Store, drift, measure_round, open_store
from calibration.microbench_steps import StepBench
from costmodel.formats import kv_format
from costmodel.model import ModelShape
from costmodel.profile import DeviceFacts, DeviceProfile, HostTerms, Provenance
from realengine.build import EngineOptions, make_runner, pages_that_fit
from realengine.checkpoint import DummyCheckpoint
from realengine.load import Source, find_model, load, weight_format
from realengine.models import Model
from realengine.runner import Runner, StepRunner
from serving.config import SchedulerConfig
from serving.errors import UsageError

KV_NAMES = {torch.bfloat16: "bfloat16", torch.float16: "bfloat16"}


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure."""

    options: EngineOptions
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 512
    max_model_len: int = 1024
    budget_s: float = 480.0
    rounds: int = 2
    repeats: int = 3


@dataclass(slots=True)
class Bench:
    """A loaded model, ready to be measured again and again."""

    plan: Plan
    source: Source
    model: Model
    device: torch.device
    limits: SchedulerConfig
    runner: Runner
    steps: StepBench
    bounds: Bounds
    pages: PagePlan
    load_s: float
    """Seconds of finding and loading the weights: a cold start."""

    @property
    def shape(self) -> ModelShape:
        return self.source.architecture.shape

    @property
    def gemm_format(self) -> str:
        """Number format of the layers' matrices, by the name that profiles have."""
        return weight_format(self.source, self.plan.options.quantization)

    @property
    def kv_dtype(self) -> str:
        """Format of the KV cache, by the name that profiles have."""
        return kv_format(self.plan.options.kv_cache_dtype).name

    def header(self) -> dict[str, object]:
        """What a store of its steps is of."""
        plan = self.plan
        return {
            "model": self.shape.name,
            "layers": self.shape.num_layers,
            "hidden": self.shape.hidden_size,
            "device": str(self.device),
            "dtype": str(plan.options.torch_dtype()).removeprefix("torch."),
            "max_num_seqs": plan.max_num_seqs,
            "max_num_batched_tokens": plan.max_num_batched_tokens,
            "max_model_len": self.limits.max_model_len,
            "formats": [self.gemm_format, self.kv_dtype],
        }

    def fastest(self, store: Store) -> tuple[float, float]:
        """(FLOP/s, bytes/s) that any measured part reached."""
        return fastest(store, self.shape, gemm_format=self.gemm_format, kv_dtype=self.kv_dtype)

    @property
    def pages_of_longest(self) -> int:
        """Pages of the longest sequence."""
        return -(-self.limits.max_model_len // self.limits.page_tokens)

    @property
    def key(self) -> str:
        """The reference step's."""
        return reference(self.bounds).key


@dataclass(frozen=True, slots=True)
class Calibrated:
    """A profile and how it came about."""

    profile: DeviceProfile
    store: Store
    drift: Drift | None
    notes: tuple[str, ...]


def prepare(plan: Plan, source: Source | None = None) -> Bench:
    """Load the model and give it caches. Raises `UsageError` for what the twin has no prices of."""
    dtype, device = plan.options.torch_dtype(), plan.options.torch_device()
    if dtype not in KV_NAMES:
        raise UsageError(
            "--dtype float32: profiles price 16-bit arithmetic; calibrate with bfloat16, or leave --dtype out"
        )
    if device.type == "cpu":
        torch.set_num_threads(1)  # its clock is the thread's own
    context = measure_context_bytes(device)
    begun_s = time.perf_counter()
    source = source if source is not None else find_model(plan.options.model, plan.options.load_format)
    shape = source.architecture.shape
    if isinstance(source.checkpoint, DummyCheckpoint):
        # Drawn where they are used: billions of numbers are slow to draw on the CPU.
        source = replace(source, checkpoint=DummyCheckpoint(shape, device=device))
    longest = min(plan.max_model_len, shape.max_position_embeddings)
    model = load(
        source,
        device=device,
        dtype=dtype,
        max_positions=longest,
        quantization=plan.options.quantization,
        kv_cache_dtype=plan.options.kv_cache_dtype,
        kv_recent_tokens=plan.options.kv_cache_recent_tokens,
    )
    load_s = time.perf_counter() - begun_s
    limits = SchedulerConfig(
        num_pages=1,
        max_num_seqs=plan.max_num_seqs,
        max_num_batched_tokens=plan.max_num_batched_tokens,
        max_model_len=longest,
    )
    weights = weight_format(source, plan.options.quantization)
    total = torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else 0
    predicted = predict_pages(
        shape,
        limits,
        device=device.type,
        memory_bytes=total,
        utilization=plan.options.gpu_memory_utilization,
        context_bytes=context,
        quantization=None if weights == "bfloat16" else weights,
        kv_cache_dtype=plan.options.kv_cache_dtype,
    )
    pages = pages_that_fit(model, limits, dtype, device, plan.options.gpu_memory_utilization)
    limits = SchedulerConfig(
        num_pages=pages,
        max_num_seqs=plan.max_num_seqs,
        max_num_batched_tokens=plan.max_num_batched_tokens,
        max_model_len=longest,
    )
    runner = make_runner(model, limits, dtype, device, graphs=not plan.options.enforce_eager)
    step: StepRunner = runner.step  # type: ignore[attr-defined]
    bounds = Bounds(
        plan.max_num_seqs,
        min(plan.max_num_batched_tokens, 8192),
        longest,
        pages * limits.page_tokens,
        odd=device.type == "cpu",
    )
    between = host_work(limits, source.tokenizer, shape.vocab_size)
    steps = StepBench(step, limits.page_tokens, between=between)
    return Bench(plan, source, model, device, limits, runner, steps, bounds, predicted, load_s)


def calibrate(
    plan: Plan,
    output: Path | None = None,
    *,
    source: Source | None = None,
    progress: Progress | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Calibrated:
    """Measure and fit; with `output` the profile and its samples are written there. Raises `UsageError`."""
    begun_s = time.monotonic()
    bench = prepare(plan, source)
    store = Store(bench.header()) if output is None else open_store(_steps_path(output), bench.header())
    if store.runs:
        say(f"going on from {len(store.runs)} steps measured before ({_steps_path(output or Path())})")
    host = host_of(bench, store)
    until_s = begun_s + plan.budget_s
    for round_ in range(plan.rounds):
        if round_ and time.monotonic() > until_s:
            break
        measure_round(
            bench.steps,
            store,
            bench.bounds,
            round_=round_,
            repeats=plan.repeats,
            until_s=until_s,
            progress=progress,
        )
    facts = raised(measured_facts(bench.device), *bench.fastest(store))
    facts = _with_load_rate(_with_host_link(facts, store), bench, store)
    done = finish(bench, store, facts, host)
    if output is not None:
        output.write_text(done.profile.to_json() + "\n", encoding="utf-8")
        rows = rows_of(store, bench.shape, key=bench.key)
        bench_table.write(
            output.with_suffix(".parquet"),
            table_rows(rows, bench.shape, gemm_format=bench.gemm_format, kv_dtype=bench.kv_dtype),
        )
    return done


def _steps_path(output: Path) -> Path:
    return output.with_suffix(".steps.jsonl")


def host_of(bench: Bench, store: Store) -> HostTerms:
    """Host terms, page moves and load time, measured or as the store has them."""
    shape = bench.shape
    if "host" not in store.extras:
        same_caches = bench.runner if bench.device.type == "cpu" else None
        store.note("host", measure_host(bench.limits, bench.source.tokenizer, shape.vocab_size, same_caches))
        step: StepRunner = bench.runner.step  # type: ignore[attr-defined]
        store.note("moves", measure_moves(step.caches, bench.device))
        if bench.device.type == "cuda":  # pragma: no cover - needs a GPU
            width = bench.pages_of_longest
            launches = measure_launches(step, bench.steps, _spread(bench.plan.max_num_seqs), width)
            store.note("launches", [(row.rows, row.eager_s, row.graph_s) for row in launches])
            devices = torch.cuda.device_count()
            ranks = [n for n in (2, 4, 8) if n <= devices]
            store.note("collectives", [row for n in ranks for row in measure_all_reduce(n, "cuda")])
        store.note("load_s", bench.load_s)
    launch_s = 4e-6 if bench.device.type == "cuda" else 0.0
    with_text = "with" if bench.source.tokenizer is not None else "without"
    rows = [(int(seqs), int(tokens), float(s)) for seqs, tokens, s in store.extras["host"]]
    return fit_host(
        rows,
        launch_s,
        f"the engine's own loop beside the device, {with_text} detokenising, CPU seconds",
    )


def _with_host_link(facts: DeviceFacts, store: Store) -> DeviceFacts:
    """`facts` with the measured rate of page copies to and from host memory, where it was measured."""
    moves = store.extras.get("moves") or {}
    rates = [moves[name] for name in ("swap_out_bytes_per_s", "swap_in_bytes_per_s") if name in moves]
    if not rates:
        return facts
    sources = {**facts.sources, "host_link": "measured by copies of pages both ways, the slower of the two"}
    return facts.model_copy(update={"host_link_bytes_per_s": float(f"{min(rates):.4g}"), "sources": sources})


def _with_load_rate(facts: DeviceFacts, bench: Bench, store: Store) -> DeviceFacts:
    """`facts` with the rate at which the weights were loaded; random ones were not."""
    load_s = store.extras.get("load_s")
    if not load_s or isinstance(bench.source.checkpoint, DummyCheckpoint):
        return facts
    rate = weight_bytes(bench.shape, 2) / float(load_s)
    sources = {**facts.sources, "load": "weights found, read and laid out by the engine"}
    return facts.model_copy(update={"load_bytes_per_s": float(f"{rate:.4g}"), "sources": sources})


def _spread(most: int) -> list[int]:
    return sorted({1, max(1, most // 16), max(1, most // 4), most})


def finish(
    bench: Bench, store: Store, facts: DeviceFacts, host: HostTerms, rounds: set[int] | None = None
) -> Calibrated:
    """Fit what was measured (in `rounds`, or all) and say what there is to say about it."""
    wander = drift(store, bench.bounds)
    notes = list(wander.flags) if wander is not None else []
    real = bench.limits.num_pages
    notes.append(
        f"KV pages: {bench.pages.num_pages:,} predicted, {real:,} in the engine "
        f"({bench.pages.error(real):+.1%})"
    )
    moves = store.extras.get("moves") or {}
    notes += [f"{name.replace('_', ' ')}: {value:.3g}" for name, value in moves.items()]
    notes += [str(Launches(*row)) for row in store.extras.get("launches", ())]
    notes.append(f"weights loaded in {store.extras.get('load_s', math.nan):.1f} s")
    if wander is not None:
        notes.append(
            f"reference step {bench.key}: {wander.median_s * 1e3:.2f} ms, 10th to 90th percentile "
            f"{wander.low_s * 1e3:.2f} to {wander.high_s * 1e3:.2f}"
        )
    provenance = Provenance(
        measured=f"the engine's own steps of {bench.shape.name} on {facts.product}",
        engine_versions=[f"torch {torch.__version__}"],
        fitted_on=datetime.datetime.now(datetime.UTC).date().isoformat(),
        fitted_by="tokentwin calibrate",
        notes=notes,
    )
    profile = fit_steps(
        store,
        bench.shape,
        facts,
        host,
        provenance,
        gemm_format=bench.gemm_format,
        kv_dtype=bench.kv_dtype,
        rounds=rounds,
        key=bench.key,
        wander=0.0 if wander is None else min(wander.log_spread, 0.3) / 2,
    )
    return Calibrated(profile, store, wander, tuple(notes))
