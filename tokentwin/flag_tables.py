"""Every flag of `tokentwin simulate`: those of a deployment come from `Deployment` itself, the rest are listed here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from sim.deployment import Deployment
from sim.fleet.build import FLEET_FIELDS
from sim.slo import PRESETS
from sim.workload.flags import NAMES
from tokentwin.flags import Flag

ALIASES: dict[str, tuple[str, ...]] = {
    "tensor_parallel_size": ("--tp",),
    "pipeline_parallel_size": ("--pp",),
    "data_parallel_size": ("--dp",),
}


def _deployment_flags() -> tuple[Flag, ...]:
    flags = []
    for name, field in Deployment.model_fields.items():
        structured = name in (*FLEET_FIELDS, "speculative_config", "network")
        default: Any = None if structured else field.default
        flags.append(
            Flag(
                name,
                str if structured else field.annotation,
                field.description or "",
                "Deployment",
                ALIASES.get(name, ()),
                None if field.is_required() or default is None else _word(default),
                structured=structured,
            )
        )
    return tuple(flags)


def _word(default: Any) -> str:
    return str(default).lower() if isinstance(default, bool) else str(default)


DEPLOYMENT = _deployment_flags()
"""One flag per field of `Deployment`."""

Order = Literal["file", "shuffle", "sample"]


def _rows(group: str, *rows: tuple[Any, ...]) -> tuple[Flag, ...]:
    return tuple(Flag(name, kind, text, group, *rest) for name, kind, text, *rest in rows)


TRAFFIC = _rows(
    "Traffic",
    ("dataset_name", str, f"What is sent: {', '.join(NAMES)}, or workload for a YAML file of tenants. "
     "Recognised from the file where possible."),
    ("dataset_path", Path, "Trace, dataset or workload file (also .gz)."),
    ("num_prompts", int, "Requests to send: all rows of a file, or 1000 of a generated dataset, by default.",
     ("--request-count",)),
    ("max_concurrency", int, "Closed loop: at most this many requests in flight.", ("--concurrency",)),
    ("input_len", int, "Prompt tokens of dataset random.", ("--isl",)),
    ("output_len", int, "Answer tokens, for datasets that leave them open or to override theirs.", ("--osl",)),
    ("shared_prefix_len", int, "Tokens in front of every prompt that all share, such as a system prompt."),
    ("session_turns_min", int, "Turns of a session at least; each turn's prompt is the whole history.", (), "1"),
    ("session_turns_max", int, "Turns of a session at most.", (), "1"),
    ("think_time", float, "Mean seconds between an answer and the session's next question.", (), "0"),
    ("think_distribution", Literal["exponential", "constant"], "How think times are spread.", (), "exponential"),
    ("rtt_ms", float, "Network round trip between clients and server.", (), "0"),
    ("priority", int, "Priority of the requests; lower is served first (--scheduling-policy priority).", (), "0"),
    ("best_of", int, "Answers sampled to each request; one is shown, when all have ended.", (), "1"),
    ("beam_width", int, "Each request is a beam search of so many hypotheses; nothing of it is shown before its end."),
) + _rows(
    "Arrivals",
    ("request_rate", float, "Requests a second; inf sends all at once. A trace keeps its own times without it."),
    ("burstiness", float, "Shape of the gamma-distributed gaps: 1 is Poisson, below 1 burstier, inf constant.",
     (), "1"),
    ("rate_scale", float, "Speeds a trace's own times up; 2 is twice the load.", (), "1"),
    ("ramp_up_strategy", Literal["linear", "exponential"], "Let the rate rise from start to end."),
    ("ramp_up_start_rps", float, "Rate at the start of the ramp."),
    ("ramp_up_end_rps", float, "Rate at its end."),
    ("rate_points", str, "Rate over time, linear in between: 0:2,600:10 is 2/s at first and 10/s after 600 s."),
    ("daily_curve", str, "Rate follows a day's shape: office or consumer; --request-rate is its mean."),
    ("period", float, "Seconds of the day of --daily-curve; fewer compress it.", (), "86400"),
    ("duration", float, "Send for this many seconds instead of counting prompts."),
) + _rows(
    "Datasets",
    ("dataset_order", Order, "Rows in the file's order, shuffled once, or sampled with replacement.", (), "file"),
    ("dataset_tokenizer", Path, "A tokenizer.json that counts the tokens of text; words are counted without it."),
    ("random_input_len", int, "random: prompt tokens after the prefix.", (), "1024"),
    ("random_output_len", int, "random: answer tokens.", (), "128"),
    ("random_range_ratio", str, "random: lengths vary within len*(1-r) to len*(1+r); a number, or JSON such as "
     '{"input": 0.3, "output": 0.5}.', (), "0"),
    ("random_prefix_len", int, "random: tokens common to all prompts.", (), "0"),
    ("prefix_repetition_num_prefixes", int, "prefix_repetition: how many prefixes.", (), "10"),
    ("prefix_repetition_prefix_len", int, "prefix_repetition: tokens of a prefix.", (), "256"),
    ("prefix_repetition_suffix_len", int, "prefix_repetition: tokens after it.", (), "256"),
    ("prefix_repetition_output_len", int, "prefix_repetition: answer tokens.", (), "128"),
    ("sharegpt_output_len", int, "sharegpt: answer tokens, instead of the file's."),
    ("sharegpt_multi_turn", bool, "sharegpt: send whole conversations, turn by turn."),
    ("custom_output_len", int, "custom: answer tokens, instead of the file's."),
    ("burstgpt_model", str, "burstgpt: only the rows of this model, such as GPT-4."),
    ("mooncake_block_tokens", int, "mooncake: tokens per hash id.", (), "512"),
    ("timed_trace_chunk_hash_size", int, "timed_trace: tokens per hash id.", (), "16"),
    ("timed_trace_sec_multiplier", float, "timed_trace: a timestamp times this is seconds.", (), "1"),
    ("timed_trace_label_timestamp", str, "timed_trace: key of the time.", (), "timestamp"),
    ("timed_trace_label_input_length", str, "timed_trace: key of the prompt's tokens.", (), "input_length"),
    ("timed_trace_label_output_length", str, "timed_trace: key of the answer's tokens.", (), "output_length"),
    ("timed_trace_label_hash_ids", str, "timed_trace: key of the hash ids.", (), "hash_ids"),
)  # fmt: skip
"""What `sim.workload.flags.spec_from_flags` reads, except for `goodput`."""

PROMISES = _rows(
    "Promises",
    ("goodput", list[str], "Limits in ms that a good request keeps: ttft:500 tpot:50 e2el:5000."),
    ("slo", list[str], "Limits in ms on statistics of all requests: p95_ttft:500 mean_tpot:50, or a preset: "
     f"{', '.join(PRESETS)}."),
    ("fail_on_slo", bool, "Exit with code 3 when an SLO is missed or cannot be judged."),
)  # fmt: skip

RUN = _rows(
    "Run",
    ("seed", int, "Seed of everything random; the same seed gives the same bytes.", (), "0"),
    ("until", float, "Stop the simulated clock after this many seconds."),
    ("fast_forward", bool, "Leap over decode steps in which nothing changes; off: the same numbers, slower.",
     (), "true"),
    ("replications", int, "Runs with other calibration errors, step noise and requests, for 95% intervals of every "
     "figure; 1 leaves them out.", (), "8, or 4 for a long run"),
    ("strict", bool, "Refuse to extrapolate: exit with code 2 where something was not measured.", (), "false", False),
    ("config", Path, "YAML file of flags, such as model: llama-3.1-8b; flags given here override it."),
    ("print_config", bool, "Print the resolved configuration as such a file and stop.", (), None, False),
    ("disable_tqdm", bool, "No progress bar.", (), None, False),
)  # fmt: skip

OUTPUT = _rows(
    "Output",
    ("output_dir", Path, "Folder for everything: result.json, run.json, requests.parquet, steps.parquet, "
     "trace.json.gz (open it at ui.perfetto.dev) and report.html.", ("-o",)),
    ("percentile_metrics", str, "Latencies to print and save, comma-separated.", (), "ttft,tpot,itl,e2el"),
    ("metric_percentiles", str, "Percentiles of them, comma-separated.", (), "50,90,95,99"),
    ("save_result", bool, "Save the JSON of vllm bench serve to --result-dir."),
    ("save_detailed", bool, "Put lists per request into the JSON."),
    ("append_result", bool, "Add to --result-filename instead of replacing it."),
    ("result_dir", Path, "Folder of the saved JSON.", (), "."),
    ("result_filename", str, "Its name: label, rate, model and date by default."),
    ("metadata", list[str], "KEY=VALUE pairs to put into the JSON."),
    ("label", str, "Name of this run in results and report."),
    ("plot_timeline", bool, "Draw the requests over time, coloured by gaps between tokens, into an HTML file "
     "beside the JSON."),
    ("date", str, "Date in the JSON: now, or SOURCE_DATE_EPOCH, by default."),
)  # fmt: skip

OBSERVE = _rows(
    "Observability",
    ("alert", list[str], "Alert rules, each quoted: 'ttft:p95:1m > 1s for 3m'; says when they would have fired."),
    ("fail_on_alert", bool, "Exit with code 3 when an alert rule fired."),
    ("otlp_file", Path, "OpenTelemetry spans of every request, as OTLP JSON lines for a collector's otlpjsonfile."),
    ("otlp_traces_endpoint", str, "Send the spans there: an OTLP collector, such as http://localhost:4317."),
    ("otlp_traces_sample_ratio", float, "Trace this share of the requests.", (), "1"),
    ("metrics_port", int, "Serve Prometheus metrics of the run at 127.0.0.1:PORT/metrics while it goes on; 0 is any "
     "free port."),
)  # fmt: skip
"""What watches a run; docs/observability.md has the grammar of rules."""

JSON = Flag("json", bool, "Print JSON instead.", "Output", negative=False)


def _one(table: tuple[Flag, ...], name: str) -> Flag:
    return next(flag for flag in table if flag.name == name)


CONFIG, SEED = _one(RUN, "config"), _one(RUN, "seed")
CONFIG_FLAGS = (CONFIG, _one(RUN, "print_config"))
"""Of every command that has flags to keep in a file."""
BLOCK_SIZE = replace(_one(DEPLOYMENT, "block_size"), group="Run")

SIMULATE: dict[str, Flag] = {
    flag.name: flag for table in (DEPLOYMENT, TRAFFIC, PROMISES, RUN, OUTPUT, OBSERVE) for flag in table
}
"""Every flag of `simulate` by name."""
