"""Changes that a finding asks for, each a few fields of the deployment. Whether one helps, the simulation says."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from experiments.diagnose_rules import Finding
from sim.deployment import Built, Deployment
from sim.record import RunRecord

Kind = Literal["setting", "precision", "hardware"]
ACCURACY = "other rounding: measure the accuracy of answers, which is not modelled"
DRAFTS = '{"method": "ngram", "num_speculative_tokens": 3, "acceptance": "ngram-mixed"}'
ORACLE = "the twin knows how long answers get; in service max_tokens stands for it"


@dataclass(frozen=True, slots=True)
class Change:
    """One change of a deployment and what it costs beside what the simulation shows."""

    fields: Mapping[str, Any]
    rule: str
    """The finding that asked for it."""
    kind: Kind = "setting"
    cost: str = ""
    words: str = field(default="", compare=False)

    @property
    def flags(self) -> str:
        """As flags of `tokentwin simulate` and of vLLM."""
        given = {name: value for name, value in self.fields.items() if value is not None}
        return " ".join(_flag(name, value) for name, value in (given or self.fields).items())

    def applied(self, deployment: Deployment) -> Deployment:
        """The deployment after the change. Raises pydantic's ValidationError for values that cannot be."""
        return Deployment.model_validate({**deployment.model_dump(), **self.fields})


def _flag(name: str, value: Any) -> str:
    option = name.replace("_", "-")
    if value is None:
        return f"without --{option}"
    if isinstance(value, bool):
        return f"--{option}" if value else f"--no-{option}"
    return f"--{option} {shlex.quote(str(value))}"


@dataclass(frozen=True, slots=True)
class Patient:
    """What cures are chosen by."""

    built: Built
    record: RunRecord
    """Of the twin under the run's own traffic."""

    @property
    def deployment(self) -> Deployment:
        return self.built.deployment


Cure = Callable[[Patient], Iterator[tuple[Mapping[str, Any], str, Kind, str]]]
Tried = Iterator[tuple[Mapping[str, Any], str, Kind, str]]


def changes_for(findings: tuple[Finding, ...], patient: Patient) -> tuple[Change, ...]:
    """Changes that the findings ask for, in their order, each once."""
    out: dict[tuple[tuple[str, Any], ...], Change] = {}
    for finding in findings:
        for cure in CURES.get((finding.rule, finding.cause), CURES.get((finding.rule, ""), ())):
            for fields, words, kind, cost in cure(patient):
                key = tuple(fields.items())
                out.setdefault(key, Change(fields, finding.rule, kind, cost, words))
    return tuple(out.values())


def _more_seats(p: Patient) -> Tried:
    seats = p.built.limits.max_num_seqs
    for times in (2, 4):
        yield {"max_num_seqs": seats * times}, f"{seats * times} seats instead of {seats}", "setting", ""


def _fewer_seats(p: Patient) -> Tried:
    s, seats = p.record.steps, p.built.limits.max_num_seqs
    if not len(s):
        return
    usual = float(np.average(s.num_running, weights=s.end_s - s.start_s))
    for share in (0.75, 0.5):
        fewer = max(int(usual * share), 1)
        if fewer < seats:
            yield {"max_num_seqs": fewer}, f"{fewer} seats instead of {seats}", "setting", ""


def _more_budget(p: Patient) -> Tried:
    tokens = p.built.limits.max_num_batched_tokens
    yield (
        {"max_num_batched_tokens": tokens * 2},
        f"{tokens * 2} tokens a step instead of {tokens}",
        "setting",
        "",
    )


def _smaller_chunks(p: Patient) -> Tried:
    tokens = p.built.limits.max_num_batched_tokens
    if p.deployment.policy != "chunked" or not p.deployment.enable_chunked_prefill:
        return
    for fewer in (2048, 1024, 512, 256):
        if fewer < tokens:
            yield (
                {"max_num_batched_tokens": fewer},
                f"chunks of {fewer} tokens instead of {tokens}",
                "setting",
                "",
            )
    fields = {"policy": "adaptive", "prefill_share": 0.25}
    yield fields, "a quarter of a step for prompts while others decode", "setting", ""


def _chunked(p: Patient) -> Tried:
    if p.deployment.policy != "chunked":
        fields: dict[str, Any] = {"policy": "chunked"}
        if p.deployment.policy == "static":
            fields |= {"static_batch_size": None, "static_max_wait": None}
        yield fields, f"policy chunked instead of {p.deployment.policy}", "setting", ""
        for tokens in (2048, 512):
            if tokens < p.built.limits.max_num_batched_tokens:
                words = f"policy chunked with {tokens} tokens a step"
                yield {**fields, "max_num_batched_tokens": tokens}, words, "setting", ""
    elif not p.deployment.enable_chunked_prefill:
        yield {"enable_chunked_prefill": True}, "chunked prefill on", "setting", ""
        yield (
            {"enable_chunked_prefill": True, "max_num_batched_tokens": 2048},
            "chunked prefill of 2048 tokens a step",
            "setting",
            "",
        )


def _shortest_first(p: Patient) -> Tried:
    if p.deployment.scheduling_policy == "fcfs":
        yield {"scheduling_policy": "sjf"}, "shortest answers first instead of first come", "setting", ORACLE


def _prefix_cache(p: Patient) -> Tried:
    if not p.deployment.enable_prefix_caching:
        yield {"enable_prefix_caching": True}, "prefix caching on", "setting", ""


def _more_pages(p: Patient) -> Tried:
    d = p.deployment
    if d.num_gpu_blocks_override is not None:
        possible = p.built.memory.num_blocks
        if possible > d.num_gpu_blocks_override:
            words = f"the {possible:,} KV pages that memory has room for"
            yield {"num_gpu_blocks_override": None}, words, "setting", ""
    elif d.gpu_memory_utilization < 0.95:
        yield (
            {"gpu_memory_utilization": 0.95},
            "95% of the memory for the engine",
            "setting",
            "less room for others",
        )


def _small_kv(p: Patient) -> Tried:
    if p.deployment.kv_cache_dtype == "auto":
        yield {"kv_cache_dtype": "fp8"}, "KV cache in 8 bit", "precision", ACCURACY


def _small_weights(p: Patient) -> Tried:
    if p.deployment.quantization is None:
        for name in ("fp8", "int4_wo"):
            yield {"quantization": name}, f"weights in {name}", "precision", ACCURACY


def _swap(p: Patient) -> Tried:
    if p.deployment.preemption_mode == "recompute" and p.deployment.policy != "static":
        words = "preempted sequences move to the host where that is cheaper than computing them again"
        yield {"preemption_mode": "auto"}, words, "setting", "4 GiB of host memory"


def _eviction(p: Patient) -> Tried:
    if p.deployment.kv_eviction == "lru" and p.deployment.enable_prefix_caching:
        yield {"kv_eviction": "cost"}, "evict the pages that are cheapest to compute again", "setting", ""


def _drafts(p: Patient) -> Tried:
    if p.deployment.speculative_config is None:
        cost = "as many drafts accepted as in one user's traffic: measure it on yours"
        yield {"speculative_config": DRAFTS}, "three drafts a step looked up in the prompt", "setting", cost


def _split(p: Patient) -> Tried:
    d = p.deployment
    if d.pools:
        return
    tp = d.tensor_parallel_size * 2
    more = d.gpus_per_replica * d.data_parallel_size
    yield {"tensor_parallel_size": tp}, f"tensor parallel over {tp} devices", "hardware", _gpus(more)


def _replica(p: Patient) -> Tried:
    d = p.deployment
    if d.pools or d.autoscaler is not None:
        return
    fields: dict[str, Any] = {"data_parallel_size": d.data_parallel_size + 1}
    if d.router == "round_robin":
        fields["router"] = "least_outstanding"
    yield fields, f"{d.data_parallel_size + 1} replicas", "hardware", _gpus(d.gpus_per_replica)


def _gpus(count: int) -> str:
    return f"{count} GPU{'s' if count > 1 else ''} more"


def _router(p: Patient) -> Tried:
    if p.deployment.data_parallel_size > 1 and p.deployment.router == "round_robin":
        yield {"router": "least_outstanding"}, "requests to the least busy replica", "setting", ""


def _prefix_router(p: Patient) -> Tried:
    if p.deployment.data_parallel_size > 1 and p.deployment.router != "prefix_hash":
        yield {"router": "prefix_hash"}, "prompts that begin alike to the same replica", "setting", ""


def _overlap(p: Patient) -> Tried:
    if not p.built.limits.async_scheduling and p.deployment.policy != "static":
        yield {"async_scheduling": True}, "plan the next step while the current one runs", "setting", ""


def _graphs(p: Patient) -> Tried:
    if p.deployment.enforce_eager:
        yield {"enforce_eager": False}, "CUDA graphs", "setting", "memory for the graphs"


HARDWARE: tuple[Cure, ...] = (_split, _replica)
CURES: dict[tuple[str, str], tuple[Cure, ...]] = {
    ("queue", ""): (
        _more_seats,
        _more_budget,
        _chunked,
        _shortest_first,
        _small_kv,
        _small_weights,
        *HARDWARE,
    ),
    ("queue", "max_num_seqs"): (_more_seats, _shortest_first, _small_weights, *HARDWARE),
    ("queue", "token_budget"): (
        _more_budget,
        _prefix_cache,
        _chunked,
        _shortest_first,
        _small_weights,
        *HARDWARE,
    ),
    ("queue", "kv_pages"): (
        _more_pages,
        _swap,
        _small_kv,
        _small_weights,
        _fewer_seats,
        _shortest_first,
        *HARDWARE,
    ),
    ("queue", "policy"): (_chunked, _more_seats, *HARDWARE),
    ("backlog", ""): (_more_seats, _more_budget, _chunked, _small_weights, *HARDWARE),
    ("prefill", ""): (_prefix_cache, _more_budget, _chunked, _small_weights, _split, _replica),
    ("prefill growth", ""): (_prefix_cache, _more_budget, _more_pages, _split),
    ("prefix cache", "off"): (_prefix_cache,),
    ("prefix cache", "evicted"): (_prefix_router, _eviction, _more_pages, _small_kv, _replica),
    ("floor", ""): (_small_weights, _small_kv, _drafts, _split),
    ("bandwidth", ""): (_small_weights, _small_kv, _fewer_seats, *HARDWARE),
    ("stalls", ""): (_chunked, _smaller_chunks, _prefix_cache, _small_weights, *HARDWARE),
    ("tail", "eviction"): (_swap, _more_pages, _small_kv, _fewer_seats, *HARDWARE),
    ("tail", ""): (_chunked, _smaller_chunks, *HARDWARE),
    ("preemption", ""): (_swap, _more_pages, _small_kv, _small_weights, _fewer_seats, *HARDWARE),
    ("host", ""): (_overlap, _graphs, _replica),
    ("imbalance", ""): (_router, _replica),
}
"""By rule and cause; a rule's "" serves every cause that is not listed. Nothing on the server cures the network."""
