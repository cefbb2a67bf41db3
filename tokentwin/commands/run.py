"""`tokentwin run`: a workload on the real engine; the table, the verdict and the files of `simulate`."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module, metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from experiments.console import print_run
from experiments.minutes import DEVICE
from experiments.observed import ALERTS, UTILISATION, any_fired
from experiments.results import BACKEND_REAL
from experiments.utilisation import engine_work, utilisation
from serving.config import SchedulerConfig
from serving.errors import UsageError
from serving.policies import CHUNKING, load_policy
from sim.certainty import Certainty
from sim.deployment import Deployment
from sim.deployment_limits import cut_answers, fitting_seqs, idle_options, policy_options
from sim.fleet.build import FLEET_FIELDS
from sim.metrics import summarise
from sim.samples import thin_percentiles
from sim.slo import Goodput, Slo, parse_slo
from sim.verdict import verdict
from sim.workload import Workload, load_workload
from tokentwin.commands.simulate import ALERT_FIRED, INTERRUPTED, LOST, SLO_MISSED, say_files
from tokentwin.config_file import print_config, with_config
from tokentwin.engine_limits import drafting, memory_limits
from tokentwin.flag_tables import DEPLOYMENT, OBSERVE, OUTPUT, PROMISES, RUN, TRAFFIC
from tokentwin.flags import Flag, takes
from tokentwin.interrupt import between_events
from tokentwin.job import make_alerts, make_deployment, make_goodput, make_spec, parse_percentiles, words
from tokentwin.live import of_engine
from tokentwin.observe import Observers
from tokentwin.outputs import Outputs
from tokentwin.progress import progress_bar
from tokentwin.provenance import ARGV, VERSION, git_commit

if TYPE_CHECKING:
    from costmodel.model import ModelShape
    from realengine.engine import Engine
    from realengine.load import Source
    from tokentwin.replay import RealRun

TWIN_ONLY = (
    "gpu",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "collective_overlap",
    "enable_expert_parallel",
    "expert_load_imbalance",
    "engine_version",
    "disable_custom_all_reduce",
    "data_parallel_size",
    "router",
    "router_prefix_tokens",
    "router_load_factor",
    *FLEET_FIELDS,
    "frontend_overhead_ms",
    "tokenize_us_per_token",
    "detokenize_us_per_token",
    "stream_interval",
    "stream_slice_ms",
    "network",
    "response_cache",
    "step_jitter",
    "stall_rate",
    "stall_ms",
)
"""Fields of a deployment that one engine on one device, without a front end, does not have."""
_RUN = ("seed", "until", "config", "print_config", "disable_tqdm")
_WORDS = {
    "model": "Hugging Face folder or GGUF file, or with --load-format dummy any shape that simulate knows.",
    "dtype": "Format of weights, activations and KV cache: bfloat16, float16, float32 or auto.",
    "quantization": "Weights rounded to nearest at loading: int8_wo, int4_wo, fp8 or fp8_block. AWQ, GPTQ and fp8 "
    "checkpoints need no option.",
    "kv_cache_dtype": "Format of the KV cache: auto (that of --dtype), int8, int4 or fp8.",
    "max_num_seqs": "Sequences that may run at once (64 by default).",
    "max_num_batched_tokens": "Tokens a step may compute (2048 by default).",
    "num_gpu_blocks_override": "KV pages, one of them for padding, instead of what memory has room for.",
    "until": "Stop after this many seconds.",
}
"""Where the engine's meaning or default is another one than the twin's."""

LIMITS = tuple(
    replace(flag, help=_WORDS.get(flag.name, flag.help)) for flag in DEPLOYMENT if flag.name not in TWIN_ONLY
)
HOW = tuple(
    Flag(name, kind, text, "Engine", (), default)
    for name, kind, text, default in (
        ("load_format", Literal["auto", "dummy"], "The model's weights, or random ones of its shape.", "auto"),
        ("device", str, "cuda, cuda:1 or cpu; CUDA where there is one, by default.", None),
        ("warmup", int, "Requests to answer before the run begins; they are not in the results.", "1"),
        ("time_scale", float, "Speeds arrivals and think times up; 2 is twice the load.", "1"),
    )
)  # fmt: skip
RUNS = tuple(replace(flag, help=_WORDS.get(flag.name, flag.help)) for flag in RUN if flag.name in _RUN)
REPLAY = {
    flag.name: flag for table in (LIMITS, HOW, TRAFFIC, PROMISES, RUNS, OUTPUT, OBSERVE) for flag in table
}
"""Every flag of `run` by name."""


@dataclass(frozen=True)
class RunPlan:
    """What `tokentwin run` was asked for, worked out. No model is loaded yet."""

    deployment: Deployment
    workload: Workload
    goodput: Goodput
    slos: tuple[Slo, ...]
    percentiles: tuple[float, ...]
    seed: int
    until_s: float
    warmup: int
    load_format: str
    device: str
    alerts: tuple[str, ...] = ()


@takes(LIMITS, HOW, TRAFFIC, PROMISES, RUNS, OUTPUT, OBSERVE)
def run(**flags: Any) -> int:
    """Run a workload on the real engine, print its latencies and say whether it keeps its promises.

    Prompts are made up in the workload's lengths, shared prefixes included; answers have exactly its lengths.

    Example: tokentwin run --model llama-3.2-1b --load-format dummy --dataset-name random --num-prompts 20
    --random-input-len 64 --random-output-len 16 --request-rate 2 -o runs/real
    """
    given = with_config(flags, REPLAY)
    outputs = Outputs.of(given)
    _need_extra()
    plan = make_plan(given)
    if given.get("print_config"):
        return print_config(given, known=REPLAY)
    observers = Observers.of(given)
    outputs.check()
    with observers.watching(Path(plan.deployment.model).name, of_engine) as watch:
        real = run_plan(plan, label=given.get("label"), silent=bool(given.get("disable_tqdm")), watch=watch)
    print_run(real.record, real.summary, real.verdict, metrics=outputs.metrics, certainty=real.certainty)
    say_files([*outputs.write(real), *observers.write(real.record)])
    if real.record.interrupted:
        return INTERRUPTED
    if real.num_lost and math.isinf(plan.until_s):
        return LOST
    if given.get("fail_on_slo") and not real.verdict.meets_slos:
        return SLO_MISSED
    return ALERT_FIRED if given.get("fail_on_alert") and any_fired(real.record) else 0


def make_plan(given: Mapping[str, Any]) -> RunPlan:
    """A plan from flags by name. Raises `UsageError` for anything that cannot be."""
    from tokentwin.replay import check, scaled

    seed, warmup = int(given.get("seed", 0)), int(given.get("warmup", 1))
    until_s, time_scale = float(given.get("until", math.inf)), float(given.get("time_scale", 1.0))
    if not until_s > 0:
        raise UsageError(f"--until must be a positive number of seconds, got {until_s:g}")
    if warmup < 0:
        raise UsageError(f"--warmup must be 0 or more requests, got {warmup}")
    if not 0 < time_scale < math.inf:
        raise UsageError(f"--time-scale must be a positive number, got {time_scale:g}")
    if given.get("priority") is not None:
        raise UsageError(
            "--priority has no effect where all requests have the same; give each tenant its own in a workload file"
        )
    slos = parse_slo(words(given.get("slo")))
    if given.get("fail_on_slo") and not slos:
        raise UsageError("--fail-on-slo has no effect without --slo; add one such as --slo p95_ttft:500")
    deployment = make_deployment({**given, "tokenize_us_per_token": 0.0, "detokenize_us_per_token": 0.0})
    load_policy(deployment.policy, **policy_options(deployment))  # a wrong name fails before anything loads
    if deployment.async_scheduling and deployment.policy == "static":
        raise UsageError("--async-scheduling has no meaning for --policy static; leave it off")
    workload = scaled(load_workload(make_spec(given), seed=seed), time_scale)
    check(workload)
    if deployment.scheduling_policy == "edf" and all(t.goodput_ttft_s is None for t in workload.tenants):
        raise UsageError(
            "--scheduling-policy edf needs deadlines: set --goodput ttft:MS, or a tenant's goodput in a workload file"
        )
    return RunPlan(
        deployment,
        workload,
        make_goodput(given.get("goodput")),
        slos,
        parse_percentiles(given.get("metric_percentiles")),
        seed,
        until_s,
        warmup,
        given.get("load_format", "auto"),
        given.get("device", "auto"),
        make_alerts(given),
    )


def run_plan(
    plan: RunPlan,
    *,
    label: str | None = None,
    silent: bool = True,
    watch: Callable[[Any], None] | None = None,
) -> RealRun:
    """Load the model, warm up, replay the workload and judge it. After a Ctrl-C the run holds what happened so far.

    `watch` is told of the engine before the workload begins (`tokentwin.observe`).
    """
    from tokentwin.replay import RealRun, replay, warm_up

    engine, source = make_engine(plan)
    vocab_size = source.architecture.shape.vocab_size
    facts = _meta(plan, engine, source, label)
    engine.start()
    try:
        if plan.warmup:
            warm_up(engine, plan.workload, vocab_size, plan.warmup, plan.seed)
        with (
            progress_bar(silent=silent, doing="Running", clock="run") as bar,
            between_events(bar) as told,
            device_samples(plan, engine) as samples,
        ):
            if watch is not None:
                watch(engine)
            record = replay(
                engine,
                plan.workload,
                vocab_size=vocab_size,
                seed=plan.seed,
                until_s=plan.until_s,
                progress=told,
            )
    finally:
        engine.stop()
    longest = engine.config.max_model_len
    warned = (*idle_options(plan.deployment, plan.workload), *cut_answers(plan.workload, longest))
    record = replace(record, meta={**facts, **samples}, warnings=(*warned, *record.warnings))
    if (work := engine_work(record)) is not None:
        record.meta[UTILISATION] = utilisation(record, work).json()
    summary = summarise(record, percentiles=plan.percentiles, goodput=plan.goodput, slos=plan.slos)
    certainty = Certainty(thin=thin_percentiles(summary))
    return RealRun(record, summary, verdict(record, summary, plan.slos), len(plan.workload), certainty)


def make_engine(plan: RunPlan) -> tuple[Engine, Source]:
    """The engine of a plan, loaded, and where its model came from. It makes no text: nobody reads it."""
    from realengine.build import EngineOptions, build_engine
    from realengine.load import find_model

    d = plan.deployment
    options = EngineOptions(
        d.model,
        load_format=plan.load_format,
        dtype=d.dtype,
        device=plan.device,
        gpu_memory_utilization=d.gpu_memory_utilization,
        enforce_eager=d.enforce_eager,
        seed=plan.seed,
        quantization=d.quantization,
        kv_cache_dtype=d.kv_cache_dtype,
        kv_cache_recent_tokens=d.kv_cache_recent_tokens,
        speculative=drafting(d),
    )
    options.torch_device(), options.torch_dtype()  # a wrong name fails before the model is looked for
    source = replace(find_model(options.model, options.load_format), tokenizer=None)
    shape = source.architecture.shape
    if d.max_model_len is not None and d.max_model_len > shape.max_position_embeddings:
        raise UsageError(
            f"--max-model-len {d.max_model_len} is beyond the {shape.max_position_embeddings} positions of {shape.name}"
        )
    pages = None if d.num_gpu_blocks_override is None else d.num_gpu_blocks_override - 1
    engine = build_engine(
        options,
        _limits(d, shape, pages),
        policy=load_policy(d.policy, **policy_options(d)),
        num_pages=pages,
        source=source,
    )
    return engine, source


def _limits(d: Deployment, shape: ModelShape, pages: int | None) -> SchedulerConfig:
    """The scheduler's limits; `pages` may still be unknown."""
    longest = d.max_model_len or shape.max_position_embeddings
    tokens = d.max_num_batched_tokens or 2048
    if not d.enable_chunked_prefill and d.policy in CHUNKING and tokens < longest:
        if d.max_num_batched_tokens is not None:
            raise UsageError(
                f"--max-num-batched-tokens {tokens} is smaller than --max-model-len {longest}, and prompts cannot be "
                "cut with --no-enable-chunked-prefill; raise it, lower --max-model-len, or leave chunked prefill on"
            )
        tokens = longest
    asynchronous = d.policy in CHUNKING if d.async_scheduling is None else d.async_scheduling
    if d.speculative_config is not None and d.async_scheduling is None:
        asynchronous = False  # drafts are verified before the next step is planned
    if d.semantics == "vllm-2025" and d.async_scheduling is None:
        asynchronous = False
    limits = SchedulerConfig(
        num_pages=pages or 1,
        page_tokens=d.block_size,
        max_num_seqs=fitting_seqs(d, d.max_num_seqs or 64, tokens),
        max_num_batched_tokens=tokens,
        max_model_len=longest,
        enable_prefix_caching=d.enable_prefix_caching,
        enable_chunked_prefill=d.enable_chunked_prefill,
        long_prefill_token_threshold=d.long_prefill_token_threshold,
        queue_order=d.scheduling_policy,
        **memory_limits(d, shape),
    )
    if d.semantics == "vllm-2025":
        limits = limits.vllm_2025()
    return replace(limits, async_scheduling=asynchronous)


def _meta(plan: RunPlan, engine: Engine, source: Source, label: str | None) -> dict[str, Any]:
    """What the results file says of a run: the keys of a simulated one, and what ran it."""
    torch = import_module("torch")
    d, workload, limits = plan.deployment, plan.workload, engine.config
    device = import_module("realengine.build").EngineOptions(d.model, device=plan.device).torch_device()
    on_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if on_gpu else platform.processor() or platform.machine()
    rates: dict[str, Any] = {
        key: workload.meta[key] for key in ("request_rate", "burstiness") if key in workload.meta
    }
    model = source.architecture.shape.name if plan.load_format == "dummy" else Path(d.model).name
    deployment = {key: value for key, value in d.model_dump(mode="json").items() if key != "gpu"}
    return {
        "real": True,
        "backend": BACKEND_REAL,
        "engine": {
            "versions": {each: _version(each) for each in ("torch", "triton", "numpy")},
            "python": platform.python_version(),
            "device": str(device),
            "device_name": name,
            "threads": torch.get_num_threads(),
            "dtype": d.dtype,
            "load_format": plan.load_format,
            "warmup": plan.warmup,
            "work": work_facts(plan, source.architecture.shape, name if on_gpu else None),
        },
        "argv": list(ARGV.get()),
        "version": VERSION,
        "git_commit": git_commit(),
        "seed": plan.seed,
        "label": label,
        "model_id": model,
        "tokenizer_id": model,
        "gpu": name,
        "tensor_parallel_size": 1,
        "data_parallel_size": 1,
        "max_concurrency": workload.closed_loop.max_concurrency if workload.closed_loop else None,
        **rates,
        "slos": {slo.name: slo.limit_s for slo in plan.slos},
        "goodput_s": plan.goodput.limits_s(),
        "percentiles": list(plan.percentiles),
        "until_s": plan.until_s if math.isfinite(plan.until_s) else None,
        **({ALERTS: list(plan.alerts)} if plan.alerts else {}),
        "deployment": deployment,
        "limits": {each: getattr(limits, each) for each in limits.__slots__},
        "workload": {"name": workload.name, **workload.meta},
    }


def _drafter(plan: RunPlan, shape: ModelShape) -> dict[str, Any]:
    """The shape of a model that drafts, where one does."""
    speculative = drafting(plan.deployment)
    if speculative is None or (own_cache := speculative.draft_cache) is None:
        return {}
    if own_cache:
        source = import_module("realengine.load").find_model(speculative.model, plan.load_format)
        shape = source.architecture.shape
    else:
        shape = shape.model_copy(update={"num_layers": speculative.num_layers})
    return {"draft": {"shape": shape.model_dump(mode="json"), "own_cache": own_cache}}


def work_facts(plan: RunPlan, shape: ModelShape, gpu: str | None) -> dict[str, Any]:
    """What FLOPs and bytes of the engine's steps are counted from, and the device's peaks where a datasheet has them."""
    build = import_module("realengine.build")
    options = build.EngineOptions(plan.deployment.model, dtype=plan.deployment.dtype, device=plan.device)
    facts = import_module("calibration.device_facts").known_gpu(gpu) if gpu is not None else None
    dtype = options.torch_dtype()
    name = str(dtype).removeprefix("torch.")
    return {
        **_drafter(plan, shape),
        "shape": shape.model_dump(mode="json"),
        "bytes_per_number": float(dtype.itemsize),
        "device": facts.product if facts is not None else gpu or "CPU",
        "peak_flops_per_s": facts.peak_flops.get(name) if facts is not None else None,
        "peak_bytes_per_s": facts.hbm_bytes_per_s if facts is not None else None,
    }


@contextmanager
def device_samples(plan: RunPlan, engine: Engine) -> Iterator[dict[str, Any]]:
    """What the driver says of the device while the context lasts, by the key of `RunRecord.meta`; empty without one."""
    nvml = import_module("realengine.nvml")
    device = import_module("realengine.build").EngineOptions(plan.deployment.model, device=plan.device)
    origin_s, found = engine.now_s(), dict[str, Any]()
    with nvml.watching(device.torch_device(), lambda: engine.now_s() - origin_s) as samples:
        if samples:
            found[DEVICE] = samples
        yield found


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _need_extra() -> None:
    try:
        import_module("realengine.build")
    except ModuleNotFoundError as error:
        raise UsageError(
            f"tokentwin run needs {error.name}, which is not installed: pip install 'tokentwin[engine]' "
            "(tokentwin simulate needs neither torch nor a GPU)"
        ) from None
