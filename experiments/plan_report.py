"""A plan as lines for the terminal and as JSON: the table, what would flip the choice, and the command to serve it."""

from __future__ import annotations

import json
import math
import shlex
import textwrap
from collections import Counter
from typing import Any

from experiments.capacity import unit
from experiments.capacity_trial import in_ms
from experiments.plan import Fleet, Plan, front_point, label
from sim.hull import after_run

WIDTH = 80
SCHEMA = "tokentwin-plan/1"
WHY_WORDS = {
    "invalid": "cannot be configured",
    "memory": "do not fit into memory",
    "format": "need arithmetic that the GPU lacks",
    "roofline": "miss a promise even at datasheet peaks",
    "cost": "cannot be cheap enough even at datasheet peaks",
    "alone": "miss a promise with one request at a time",
    "replicas": "need too many replicas (simulated)",
    "gpus": "need more GPUs than are allowed",
}
SINGULAR = {"do": "does", "need": "needs", "miss": "misses"}
HUGGING_FACE = {
    "llama-2": "meta-llama/Llama-2-{}-hf",
    "llama-3": "meta-llama/Meta-Llama-3-{}-Instruct",
    "llama-3.1": "meta-llama/Llama-3.1-{}-Instruct",
    "llama-3.2": "meta-llama/Llama-3.2-{}-Instruct",
    "llama-3.3": "meta-llama/Llama-3.3-{}-Instruct",
    "qwen2.5": "Qwen/Qwen2.5-{}-Instruct",
    "qwen3": "Qwen/Qwen3-{}",
    "mistral": "mistralai/Mistral-{}-Instruct-v0.3",
    "mixtral": "mistralai/Mixtral-{}-Instruct-v0.1",
    "smollm2": "HuggingFaceTB/SmolLM2-{}",
}
"""Repositories of the shipped shapes, by family."""
VLLM_QUANTIZATION = {"fp8": "fp8"}
"""Formats that vLLM makes of 16-bit weights when it loads them; others need a checkpoint that is quantised."""


def plan_lines(plan: Plan) -> list[str]:
    """The answer first, then the table, the reasons and the command."""
    lines = [" Plan ".center(WIDTH, "=")]
    winner = plan.winner
    what = f"{plan.load:.4g} {unit(plan.variable)}"
    if winner is None:
        lines += _wrap(f"No candidate sustains {what} with these promises.")
        lines += _pruned_lines(plan, all_reasons=True)
        return [*lines, "=" * WIDTH]
    lines += _wrap(
        f"For {what}: {_name(winner)}, "
        f"{winner.gpus} GPU{'s' if winner.gpus > 1 else ''}, "
        f"${winner.usd_per_hour:,.2f} an hour, ${winner.usd_per_month:,.0f} a month."
    )
    lines += [
        f"Note: {part}" if i == 0 else part for note in plan.notes for i, part in enumerate(_wrap(note, 74))
    ]
    lines += [" Fleets, cheapest first; * on the Pareto front ".center(WIDTH, "="), *_table(plan)]
    for fleet, name in zip(plan.fleets[:2], ("Winner", "Runner-up"), strict=False):
        lines += _wrap(f"{name}: bound by {fleet.bound.words}; {fleet.bound.evidence}.")
        lines += _wrap(_interval_words(fleet)) if fleet.intervals else []
        doubtful = fleet.doubtful(plan.promises)
        if doubtful:
            lines += _wrap(
                f"  Not certain: the interval of {' and '.join(doubtful)} reaches beyond the limit."
            )
    lines += [" What would flip the choice ".center(WIDTH, "=")]
    for sentence in flips(plan):
        lines += _wrap(sentence)
    lines += [" Left out ".center(WIDTH, "="), *_pruned_lines(plan)]
    command, remarks = vllm_command(winner)
    if command:
        lines += [" Serve it ".center(WIDTH, "="), *_wrap_command(command)]
    for remark in remarks:
        lines += _wrap(remark)
    lines += _wrap(
        "Energy is TDP times busy share: an estimate of the GPUs alone, on the high side while busy."
    )
    return [*lines, "=" * WIDTH]


def flips(plan: Plan) -> list[str]:
    """Prices and loads at which another fleet would be the cheapest."""
    winner = plan.fleets[0]
    out = [] if len(plan.fleets) > 1 else ["No price: no other candidate sustains the load."]
    second = plan.fleets[1] if len(plan.fleets) > 1 else None
    if second is not None and second.usd_per_hour <= winner.usd_per_hour * (1 + 1e-9):
        out.append(f"The runner-up, {_name(second)}, costs the same and has less room.")
    other = next((f for f in plan.fleets if _gpu(f) != _gpu(winner)), None)
    if other is not None:
        below, above = winner.usd_per_hour / other.gpus, other.usd_per_hour / winner.gpus
        out.append(
            f"Price: {_name(other)} is cheaper once {_gpu(other)} costs less than ${below:.2f} an hour (now "
            f"${other.candidate.usd_per_gpu_hour:.2f}), or {_gpu(winner)} more than ${above:.2f} (now "
            f"${winner.candidate.usd_per_gpu_hour:.2f})."
        )
    elif second is not None:
        out.append("Price: every fleet of the table is of the same GPU, so that its price does not matter.")
    room = winner.headroom(plan.load)
    if room is not None and winner.capacity is not None and winner.capacity.load is not None:
        out.append(
            f"Load: the winner holds up to {winner.capacity.load:.4g} {unit(plan.variable)} ({room:+.0%}); "
            f"then {winner.capacity.gives_first}."
        )
        out.append(_load_flip(plan))
    return out


def _gpu(fleet: Fleet) -> str:
    return fleet.candidate.deployment.gpu


def _name(fleet: Fleet) -> str:
    return f"{fleet.replicas} x {label(fleet.candidate.deployment)}"


def _load_flip(plan: Plan) -> str:
    """The nearest loads at which, with replicas in proportion, another fleet of the table is cheaper."""
    known = [f for f in plan.fleets if f.capacity is not None and f.capacity.load]
    winner = plan.fleets[0]

    def cost(fleet: Fleet, load: float) -> float:
        assert fleet.capacity is not None
        assert fleet.capacity.load is not None
        each = fleet.capacity.load / fleet.replicas
        return math.ceil(load / each * (1 - 1e-9)) * fleet.candidate.usd_per_hour

    found = []
    for direction in (1, -1):
        for step in range(1, 200):
            load = plan.load * (1 + 0.02 * step) ** direction
            best = min(known, key=lambda fleet: (cost(fleet, load), fleet is not winner))
            if best is not winner and cost(best, load) < cost(winner, load) * (1 - 1e-9):
                found.append(
                    f"{'above' if direction > 0 else 'below'} about {load:.3g} {unit(plan.variable)}, "
                    f"{label(best.candidate.deployment)} at ${cost(best, load):,.2f} an hour"
                )
                break
    if not found:
        return "Between a fifth and five times this load no other fleet of the table is cheaper."
    return "With replicas in proportion to the load, another one is cheapest " + "; ".join(found) + "."


VLLM_DRAFTING = (
    "method",
    "model",
    "num_speculative_tokens",
    "prompt_lookup_max",
    "prompt_lookup_min",
    "draft_sample_method",
    "disable_by_batch_size",
    "num_speculative_tokens_per_batch_size",
)
"""Keys of --speculative-config that are vLLM's own."""


def vllm_command(fleet: Fleet) -> tuple[str, list[str]]:
    """`vllm serve …` of one replica with flags that vLLM has, and what else is to be known; "" where there is none."""
    d = fleet.built.deployment
    remarks = []
    foreign = [
        *([f"--policy {d.policy}"] if d.policy != "chunked" else []),
        *(
            [f"--scheduling-policy {d.scheduling_policy}"]
            if d.scheduling_policy in ("sjf", "edf", "fair")
            else []
        ),
        *([f"--kv-cache-dtype {d.kv_cache_dtype}"] if d.kv_cache_dtype not in ("auto", "fp8") else []),
        *([f"--kv-eviction {d.kv_eviction}"] if d.kv_eviction != "lru" else []),
        *([f"--preemption-mode {d.preemption_mode}"] if d.preemption_mode != "recompute" else []),
    ]
    if foreign:
        return "", [f"vLLM has no {', '.join(foreign)}; there is no command to serve this fleet with."]
    limits = fleet.built.limits
    parts = ["vllm", "serve", repository(d.model)]
    if d.tensor_parallel_size > 1:
        parts += ["--tensor-parallel-size", str(d.tensor_parallel_size)]
    if d.pipeline_parallel_size > 1:
        parts += ["--pipeline-parallel-size", str(d.pipeline_parallel_size)]
        remarks.append(
            "Pipeline parallelism is not validated against measurements; measure this fleet first."
        )
    if d.enable_expert_parallel:
        parts.append("--enable-expert-parallel")
    if d.dtype not in ("bfloat16", "auto"):
        parts += ["--dtype", d.dtype]
    if d.quantization in VLLM_QUANTIZATION:
        parts += ["--quantization", VLLM_QUANTIZATION[d.quantization]]
    elif d.quantization is not None:
        remarks.append(f"Name a checkpoint whose weights are {d.quantization}; vLLM recognises it by itself.")
    if d.kv_cache_dtype != "auto":
        parts += ["--kv-cache-dtype", d.kv_cache_dtype]
    parts += ["--max-num-seqs", str(limits.max_num_seqs)]
    parts += ["--max-num-batched-tokens", str(limits.max_num_batched_tokens)]
    parts += ["--max-model-len", str(limits.max_model_len)]
    parts += ["--gpu-memory-utilization", f"{d.gpu_memory_utilization:g}"]
    if d.block_size != 16:
        parts += ["--block-size", str(d.block_size)]
    if d.scheduling_policy != "fcfs":
        parts += ["--scheduling-policy", d.scheduling_policy]
    parts += ["--enable-prefix-caching"] if d.enable_prefix_caching else ["--no-enable-prefix-caching"]
    if not d.enable_chunked_prefill:
        parts += ["--no-enable-chunked-prefill"]
    if d.enforce_eager:
        parts += ["--enforce-eager"]
    if d.kv_offloading_size is not None:
        parts += ["--kv-offloading-size", f"{d.kv_offloading_size:g}"]
    if d.speculative_config is not None:
        config = json.loads(str(d.speculative_config))
        parts += ["--speculative-config", json.dumps({k: v for k, v in config.items() if k in VLLM_DRAFTING})]
        if left := sorted(set(config) - {*VLLM_DRAFTING, "acceptance"}):
            remarks.append(f"vLLM's drafting knows no {', '.join(left)}; it is left out.")
    if fleet.replicas > 1:
        remarks.insert(0, f"Start {fleet.replicas} of them behind a {d.router.replace('_', ' ')} router.")
    return shlex.join(parts), remarks


def repository(model: str) -> str:
    """The Hugging Face repository of a shipped shape; any other name as it is."""
    for family in sorted(HUGGING_FACE, key=len, reverse=True):
        if model.startswith(family + "-"):
            size = model.removeprefix(family + "-")
            name = size if family == "llama-2" else size.upper().replace("X", "x")
            return HUGGING_FACE[family].format(name)
    return model


def plan_json(plan: Plan, provenance: dict[str, Any] | None = None) -> dict[str, Any]:
    """Strict JSON values."""
    winner = plan.winner
    command, remarks = vllm_command(winner) if winner is not None else ("", [])
    return {
        "schema": SCHEMA,
        "load": plan.load,
        "unit": unit(plan.variable),
        "request_rate": _finite(plan.requests_per_s),
        "promises": {
            "slos_ms": {slo.name: slo.limit_s * 1000 for slo in plan.promises.slos},
            "goodput_ms": {k: v * 1000 for k, v in plan.promises.goodput.limits_s().items()},
            "slo_attainment": plan.promises.attainment,
        },
        "fleets": [_fleet_json(plan, fleet) for fleet in plan.fleets],
        "flips": flips(plan) if winner is not None else [],
        "vllm_serve": command or None,
        "remarks": remarks,
        "pruned": [
            {
                "candidate": label(p.candidate.deployment),
                "deployment": p.candidate.deployment.model_dump(mode="json"),
                "why": p.why,
                "reason": p.reason,
                "simulated": p.simulated,
            }
            for p in plan.pruned
        ],
        "notes": list(plan.notes),
        **(provenance or {}),
    }


def _fleet_json(plan: Plan, fleet: Fleet) -> dict[str, Any]:
    s = fleet.summary
    p95 = {f"p95_{m}_ms": _finite(_p95_ms(fleet, m)) for m in ("ttft", "tpot", "e2el")}
    ends = {f"{name}_ms_ci95": [low * 1000, high * 1000] for name, (low, high) in fleet.intervals.items()}
    return {
        "label": label(fleet.candidate.deployment),
        "deployment": fleet.built.deployment.model_dump(mode="json"),
        "replicas": fleet.replicas,
        "gpus": fleet.gpus,
        "usd_per_gpu_hour": fleet.candidate.usd_per_gpu_hour,
        "usd_per_hour": fleet.usd_per_hour,
        "usd_per_month": fleet.usd_per_month,
        "usd_per_million_output_tokens": _finite(fleet.usd_per_million_tokens),
        "joules_per_output_token_estimate": _finite(fleet.joules_per_token),
        **p95,
        **ends,
        "request_throughput": s.request_throughput,
        "output_throughput": s.output_throughput,
        "gpu_busy_share": s.gpu_busy_share,
        "slo_attainment": s.slo_attainment,
        "capacity": fleet.capacity.load if fleet.capacity is not None else None,
        "headroom": fleet.headroom(plan.load),
        "gives_first": fleet.capacity.gives_first if fleet.capacity is not None else None,
        "bound": fleet.bound.kind,
        "num_requests": fleet.trial.num_requests,
        "on_pareto_front": fleet.on_front,
        "doubtful": list(fleet.doubtful(plan.promises)),
        "not_measured": [line.words for line in after_run(fleet.built, fleet.record)],
    }


def _table(plan: Plan) -> list[str]:
    head = f"{'':2}{'GPUs':>5} {'fleet':<28}{'$/month':>9}{'$/Mtok':>7}{'TTFT':>7}{'TPOT':>6}{'J/tok':>7}{'room':>6}"
    units = f"{'':2}{'':>5} {'':<28}{'':>9}{'output':>7}{'P95 ms':>7}{'P95':>6}{'est.':>7}{'':>6}"
    lines = [head, units]
    for fleet in plan.fleets:
        first, *more = textwrap.wrap(_name(fleet), 28, break_on_hyphens=False) or [""]
        room = fleet.headroom(plan.load)
        _, ttft_s, tpot_s, _ = front_point(fleet)
        tpot = f"{tpot_s * 1000:.1f}" if fleet.summary.streams else "-"
        lines.append(
            f"{'*' if fleet.on_front else ' ':2}{fleet.gpus:>5} {first:<28}{fleet.usd_per_month:>9,.0f}"
            f"{fleet.usd_per_million_tokens:>7.2f}{ttft_s * 1000:>7.0f}{tpot:>6}"
            f"{fleet.joules_per_token:>7.2f}{'-' if room is None else f'{room:+.0%}':>6}"
        )
        lines += [f"{'':8}{part}" for part in more]
    return lines


def _interval_words(fleet: Fleet) -> str:
    names = {"p95_ttft": "P95 TTFT", "p95_tpot": "P95 TPOT", "p95_e2el": "P95 E2EL"}
    parts = []
    for name, (low, high) in fleet.intervals.items():
        own = _p95_ms(fleet, name[4:]) / 1000
        # Beside saturation an interval has no end worth a number.
        ends = (
            f"{'<' if low < own / 10 else ''}{in_ms(max(low, own / 10)).removesuffix(' ms')} to "
            f"{'>' if high > own * 10 else ''}{in_ms(min(high, own * 10)).removesuffix(' ms')}"
        )
        parts.append(f"{names[name]} {in_ms(own)} [{ends}]")
    return "  95% intervals: " + "; ".join(parts) + "."


def _pruned_lines(plan: Plan, *, all_reasons: bool = False) -> list[str]:
    lines = []
    for why, count in Counter(p.why for p in plan.pruned).most_common():
        some = [p for p in plan.pruned if p.why == why]
        words = WHY_WORDS[why]
        if count == 1:
            verb, rest = words.split(" ", 1)
            words = f"{SINGULAR.get(verb, verb)} {rest}"
        lines.append(f"{count:>4} {words}")
        for p in some if all_reasons and len(some) < 9 else some[:1]:
            lines += textwrap.wrap(
                f"{label(p.candidate.deployment)}: {p.reason}",
                WIDTH,
                initial_indent="     e.g. " if not all_reasons else "     ",
                subsequent_indent="          ",
            )
    return lines or ["   0"]


def _p95_ms(fleet: Fleet, metric: str) -> float:
    return dict(getattr(fleet.summary, metric).percentiles_s)[95.0] * 1000.0  # type: ignore[no-any-return]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _wrap(text: str, width: int = WIDTH) -> list[str]:
    return textwrap.wrap(text, width, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False)


def _wrap_command(command: str) -> list[str]:
    """A command over several lines that a shell takes as it is."""
    lines = textwrap.wrap(
        command, WIDTH - 4, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False
    )
    return [line + " \\" for line in lines[:-1]] + lines[-1:]
