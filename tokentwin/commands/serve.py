"""`tokentwin serve`: the OpenAI API in front of the twin of a deployment, or of the engine."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from serving.errors import UsageError
from sim.fleet.build import FLEET_FIELDS
from sim.network import check_network
from tokentwin.config_file import print_config, with_config
from tokentwin.flag_tables import CONFIG_FLAGS, DEPLOYMENT, OBSERVE
from tokentwin.flags import Flag, takes
from tokentwin.job import make_deployment
from tokentwin.observe import Observers

if TYPE_CHECKING:
    from tokentwin.server.backend import Backend
    from tokentwin.server.tracing import Tracing

LogLevel = Literal["critical", "error", "warning", "info", "debug", "trace"]
KEY_VARIABLE = "TOKENTWIN_API_KEY"

SERVER: tuple[Flag, ...] = tuple(
    Flag(name, kind, text, "Server", (), default)
    for name, kind, text, default in (
        ("engine", Literal["real", "twin"], "What generates: the engine, or its twin, which needs no GPU.", "real"),
        ("tokenizer", Path, "Folder with a tokenizer.json; the model's own by default, and for a twin bytes and short "
         "groups of letters.", None),
        ("served_model_name", list[str], "Names that clients may use for the model.", None),
        ("host", str, "Address to listen on; 0.0.0.0 is every one.", "127.0.0.1"),
        ("port", int, "Port to listen on; 0 is any that is free.", "8000"),
        ("api_key", list[str], f"Keys of which clients must send one; also read from {KEY_VARIABLE}.", None),
        ("uvicorn_log_level", LogLevel, "How much uvicorn logs.", "info"),
        ("disable_uvicorn_access_log", bool, "No line for each request.", None),
        ("max_waiting", int, "Requests that may queue beyond those with a seat; more get status 429.", "10000"),
        ("send_timeout", float, "Seconds after which a client that does not read is cut.", "30"),
        ("drain_timeout", float, "Seconds that SIGTERM gives to requests that have begun.", "60"),
        ("max_body_mib", int, "Longest body of a request, in MiB.", "8"),
        ("load_format", Literal["auto", "dummy"], "Engine: the model's weights, or random ones of its shape.", "auto"),
        ("device", str, "Engine: cuda, cuda:1 or cpu; CUDA where there is one, by default.", None),
        ("time_scale", float, "Twin: simulated seconds per real second; 10 is ten times as fast.", "1"),
        ("response_cache_entries", int, "Answers that --response-cache memory keeps.", "10000"),
        ("response_cache_ttl", int, "Seconds that --response-cache redis:// keeps an answer.", "86400"),
        ("answer_len", int, "Twin: tokens of an answer to a request that sets no max_tokens.", "256"),
    )
)  # fmt: skip
SPANS = tuple(flag for flag in OBSERVE if flag.name.startswith("otlp_"))
SERVE = {flag.name: flag for flag in (*DEPLOYMENT, *SERVER, *SPANS, *CONFIG_FLAGS)}
"""Every flag of `serve` by name."""

TWIN_ONLY = (
    "time_scale",
    "answer_len",
    "gpu",
    "collective_overlap",
    "enable_expert_parallel",
    "expert_load_imbalance",
    "engine_version",
    "disable_custom_all_reduce",
    "data_parallel_size",
    "router",
    "semantics",
    "frontend_overhead_ms",
    "step_jitter",
    "stall_rate",
    "stall_ms",
)
"""Flags that the engine does not know."""
REAL_ONLY = ("load_format", "device")
MEASURED_HERE = ("tokenize_us_per_token", "detokenize_us_per_token", "network")
"""What the twin assumes of a front end and of the way to clients is real here."""
ANSWER_DEPENDS_ON = (
    "engine",
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "kv_cache_recent_tokens",
    "answer_len",
)
"""Flags besides the model that decide what is answered, so that servers that differ in them share no cached answer."""
NOT_OVER_HTTP = {"edf": "deadlines", "fair": "tenants"}
"""Orders of the queue, and what they need that requests over HTTP do not say."""
LEAST = {"stream_interval": 1, "max_waiting": 1, "max_body_mib": 1, "answer_len": 1, "port": 0,
         "response_cache_entries": 1, "response_cache_ttl": 1}  # fmt: skip


@takes(DEPLOYMENT, SERVER, SPANS, CONFIG_FLAGS)
def serve(**flags: Any) -> int:
    """Serve the OpenAI API: completions, chat, streaming, Prometheus metrics.

    Example: tokentwin serve --model llama-3.1-8b --gpu h200 --engine twin --port 8000
    """
    given = with_config(flags, SERVE)
    _check(given)
    if given.get("print_config"):
        from sim.deployment import build

        deployment = make_deployment(given)
        known = {name: flag for name, flag in SERVE.items() if name not in MEASURED_HERE}
        return print_config(given, build(deployment) if given.get("engine") == "twin" else None, known)
    _need_extra()
    from tokentwin.server.run import bind, make_server
    from tokentwin.server.service import Limits, Service

    twin = given.get("engine", "real") == "twin"
    backend = with_cache(make_twin(given) if twin else make_engine(given), given)
    keys = [*given.get("api_key", ()), *filter(None, [os.environ.get(KEY_VARIABLE)])]
    limits = Limits(
        names=tuple(given.get("served_model_name", ())),
        api_keys=tuple(keys),
        send_timeout_s=given.get("send_timeout", 30.0),
        max_body_bytes=given.get("max_body_mib", 8) << 20,
    )
    service = Service(backend, limits, make_tracing(given, backend.model))
    listener = bind(given.get("host", "127.0.0.1"), given.get("port", 8000))
    server = make_server(
        service,
        log_level=given.get("uvicorn_log_level", "info"),
        access_log=not given.get("disable_uvicorn_access_log"),
        drain_timeout_s=given.get("drain_timeout", 60.0),
    )
    host, port = listener.getsockname()[:2]
    address = f"[{host}]" if ":" in host else host
    what = "the twin of " if twin else ""
    sys.stdout.write(f"Serving {what}{', '.join(service.names)} at http://{address}:{port}\n")
    sys.stdout.flush()
    server.run(sockets=[listener])
    return 1 if server.cut or backend.failure is not None else 0


def with_cache(backend: Backend, given: Mapping[str, Any]) -> Backend:
    """`backend`, behind the cache of answers that the flags ask for."""
    where = given.get("response_cache")
    for name, wanted in (("response_cache_entries", "memory"), ("response_cache_ttl", "redis://")):
        if name in given and not (where or "").startswith(wanted):
            raise UsageError(f"{SERVE[name].option} has an effect only with --response-cache {wanted}")
    if where is None:
        return backend
    from tokentwin.server.response_cache import CachingBackend, open_store, weights_version

    entries, ttl_s = given.get("response_cache_entries", 10_000), given.get("response_cache_ttl", 86_400)
    store = open_store(where, entries, ttl_s)
    computed = [backend.max_model_len, *(given.get(name) for name in ANSWER_DEPENDS_ON)]
    version = weights_version(given["model"], given.get("load_format", "auto"), computed)
    return CachingBackend(backend, store, version)


def make_tracing(given: Mapping[str, Any], model: str) -> Tracing | None:
    """Where the spans of answers go; None where nobody asked for any."""
    observers = Observers.of(given)
    if observers.otlp_file is None and observers.otlp_traces_endpoint is None:
        return None
    from tokentwin.server.tracing import Tracing

    return Tracing(
        model,
        file=observers.otlp_file,
        endpoint=observers.otlp_traces_endpoint,
        sample_ratio=observers.sample_ratio,
        time_scale=given.get("time_scale", 1.0),
    )


def make_twin(given: Mapping[str, Any]) -> Backend:
    """The twin of the deployment that the flags describe."""
    from sim.deployment import build
    from sim.deployment_limits import policy_options
    from tokentwin.server.twin import TwinBackend

    built = build(make_deployment(given))
    folder = tokenizer_folder(given)
    names = {"time_scale": "time_scale", "answer_len": "answer_tokens", "max_waiting": "max_waiting"}
    names["stream_interval"] = "stream_interval"
    twin = TwinBackend(
        built,
        twin_codec(folder),
        root=str(folder) if folder is not None else None,
        policy_options=policy_options(built.deployment),
        stream_slice_s=built.deployment.stream_slice_ms / 1e3,
        **{ours: given[flag] for flag, ours in names.items() if flag in given},
    )
    for warning in built.warnings:
        sys.stderr.write(f"warning: {warning}\n")
    return twin


def make_engine(given: Mapping[str, Any]) -> Backend:
    """The engine, with the model that --model names, loaded. Raises `UsageError` without the extra `engine`."""
    from importlib import import_module

    from serving.config import SchedulerConfig
    from serving.policies import CHUNKING, load_policy
    from sim.deployment_limits import fitting_seqs, policy_options
    from tokentwin.engine_limits import drafting, memory_limits
    from tokentwin.server.engine import EngineBackend
    from tokentwin.server.plain_codec import PlainCodec

    d = make_deployment(given)
    try:
        build = import_module("realengine.build")
    except ModuleNotFoundError as error:
        raise UsageError(
            f"--engine real needs {error.name}, which is not installed: pip install 'tokentwin[engine]' "
            "(--engine twin needs neither torch nor a GPU)"
        ) from None
    source = build.find_model(d.model, given.get("load_format", "auto"))
    tokens = d.max_num_batched_tokens or 2048
    limits = SchedulerConfig(
        num_pages=d.num_gpu_blocks_override or 1,
        page_tokens=d.block_size,
        max_num_seqs=fitting_seqs(d, d.max_num_seqs or 64, tokens),
        max_num_batched_tokens=tokens,
        max_model_len=d.max_model_len or 1 << 17,
        enable_prefix_caching=d.enable_prefix_caching,
        enable_chunked_prefill=d.enable_chunked_prefill,
        long_prefill_token_threshold=d.long_prefill_token_threshold,
        queue_order=d.scheduling_policy,
        **memory_limits(d, source.architecture.shape),
        async_scheduling=d.policy in CHUNKING and d.speculative_config is None
        if d.async_scheduling is None
        else d.async_scheduling,
    )
    options = build.EngineOptions(
        d.model,
        load_format=given.get("load_format", "auto"),
        dtype=d.dtype,
        device=given.get("device", "auto"),
        gpu_memory_utilization=d.gpu_memory_utilization,
        enforce_eager=d.enforce_eager,
        quantization=d.quantization,
        kv_cache_dtype=d.kv_cache_dtype,
        kv_cache_recent_tokens=d.kv_cache_recent_tokens,
        speculative=drafting(d),
    )
    engine = build.build_engine(
        options,
        limits,
        source=source,
        policy=load_policy(d.policy, **policy_options(d)),
        num_pages=d.num_gpu_blocks_override,
    )
    folder = tokenizer_folder(given)
    if folder is not None and "tokenizer" in given:
        engine.tokenizer = load_codec(folder)
    elif engine.tokenizer is None:
        engine.tokenizer = PlainCodec(source.architecture.shape.vocab_size)
    return EngineBackend(
        engine,
        engine.tokenizer,
        model=Path(d.model).name,
        root=str(folder or Path(d.model).expanduser().resolve()),
        stream_slice_s=d.stream_slice_ms / 1e3,
        **{name: given[name] for name in ("max_waiting", "stream_interval") if name in given},
    )


def tokenizer_folder(given: Mapping[str, Any]) -> Path | None:
    """Where the tokenizer is: --tokenizer, or the folder of the model."""
    if "tokenizer" in given:
        folder = Path(given["tokenizer"]).expanduser().resolve()
        return folder.parent if folder.name == "tokenizer.json" else folder
    model = Path(str(given.get("model", ""))).expanduser()
    folder = model if model.is_dir() else model.parent
    if model.exists() and (folder / "tokenizer.json").is_file():
        return folder.resolve()
    return None


def twin_codec(folder: Path | None) -> Any:
    """The tokenizer of a folder, or the built-in one; either can write a chat as text."""
    from tokentwin.server.plain_codec import TEMPLATE, PlainCodec

    if folder is None:
        return PlainCodec()
    codec = load_codec(folder)
    if codec.template is None:
        codec.template = TEMPLATE
    return codec


def load_codec(folder: Path) -> Any:
    """The tokenizer of a folder. Raises `UsageError` when it cannot be read."""
    from realengine.tokenizer import Tokenizer

    if not (folder / "tokenizer.json").is_file():
        raise UsageError(f"--tokenizer {folder}: there is no tokenizer.json; name a folder that has one")
    try:
        return Tokenizer.from_folder(folder)
    except (ValueError, OSError) as error:
        raise UsageError(f"--tokenizer {folder}: cannot be read ({error})") from None


def _check(given: Mapping[str, Any]) -> None:
    twin = given.get("engine", "real") == "twin"
    for name in TWIN_ONLY:
        if name in given and not twin:
            raise UsageError(f"{SERVE[name].option} has an effect only with --engine twin")
    for name in REAL_ONLY:
        if name in given and twin:
            raise UsageError(f"{SERVE[name].option} has an effect only with --engine real")
    if not twin and given.get("tensor_parallel_size", 1) > 1:
        raise UsageError("--tensor-parallel-size: the engine serves from one device; use 1, or --engine twin")
    if given.get("pipeline_parallel_size", 1) > 1:
        raise UsageError(
            "--pipeline-parallel-size: a server has no pipeline, of either engine; try it with simulate"
        )
    for name in MEASURED_HERE:
        if name in given:
            raise UsageError(f"{SERVE[name].option} has no effect on a server, which does that work itself")
    for name in FLEET_FIELDS:
        if name in given:
            raise UsageError(
                f"{SERVE[name].option}: a server has fixed replicas, all alike; try it with simulate"
            )
    if given.get("router") == "session":
        raise UsageError("--router session: requests over HTTP name no session; use prefix_hash or another")
    if (order := given.get("scheduling_policy")) in NOT_OVER_HTTP:
        raise UsageError(
            f"--scheduling-policy {order} needs {NOT_OVER_HTTP[order]}, and requests over HTTP have none; use fcfs"
        )
    for name, least in LEAST.items():
        if given.get(name, least) < least:
            raise UsageError(f"{SERVE[name].option} must be at least {least}, got {given[name]}")
    for name in ("send_timeout", "drain_timeout"):
        if not given.get(name, 1.0) >= 0:
            raise UsageError(f"{SERVE[name].option} must be 0 or more seconds, got {given[name]:g}")
    if not given.get("time_scale", 1.0) > 0:
        raise UsageError(f"--time-scale must be a positive number, got {given['time_scale']:g}")
    if "model" in given:
        check_network(make_deployment(given))


def _need_extra() -> None:
    try:
        import fastapi  # noqa: F401
        import httptools  # noqa: F401
        import jinja2  # noqa: F401
        import prometheus_client  # noqa: F401
        import tokenizers  # noqa: F401
        import uvicorn  # noqa: F401
    except ModuleNotFoundError as error:
        raise UsageError(
            f"tokentwin serve needs {error.name}, which is not installed: pip install 'tokentwin[serve]'"
        ) from None
