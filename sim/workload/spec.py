"""What a workload is made of: the config tree of traffic, as frozen models that refuse unknown keys.

Field names are those of the flags (`--request-rate` is `request_rate`). Nothing here reads a file or draws a
number.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    field_validator,
    model_validator,
)

from serving.beams import MAX_BEAM_WIDTH
from sim.workload.arrival_spec import ArrivalSpec

Order = Literal["file", "shuffle", "sample"]
"""Which rows of a file are used: in order (and again from the top when more requests are asked for than it
has rows), shuffled once and then the same, or drawn with replacement."""

MAX_SPAN_S = 366 * 86400.0
"""A year: no workload is longer, and times far beyond lose their milliseconds."""

PositiveTokens = Annotated[int, Field(ge=1, le=10_000_000)]
Tokens = Annotated[int, Field(ge=0, le=10_000_000)]
MAX_BEST_OF = 128


class Spec(BaseModel):
    """Base of every model of the tree."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class AzureSpec(Spec):
    """Azure LLM inference traces 2023 and 2024: CSV with TIMESTAMP, ContextTokens, GeneratedTokens."""

    name: Literal["azure"] = "azure"
    path: Path
    order: Order = "file"


class BurstGptSpec(Spec):
    """BurstGPT: CSV with Timestamp (s), Model, Request tokens, Response tokens."""

    name: Literal["burstgpt"] = "burstgpt"
    path: Path
    order: Order = "file"
    model: str | None = None
    """Keep only the rows of this model; vLLM keeps "GPT-4". None keeps all."""


class MooncakeSpec(Spec):
    """Mooncake: JSONL with timestamp (ms), input_length, output_length, hash_ids (one per block of the
    prompt)."""

    name: Literal["mooncake"] = "mooncake"
    path: Path
    order: Order = "file"
    block_tokens: PositiveTokens = 512
    """Tokens per hash id."""


class TimedTraceSpec(Spec):
    """vLLM's `timed_trace`: JSONL whose keys and time unit are configurable."""

    name: Literal["timed_trace"] = "timed_trace"
    path: Path
    order: Order = "file"
    chunk_hash_size: PositiveTokens = 16
    """Tokens per hash id."""
    sec_multiplier: float = 1.0
    """Timestamp times this is seconds: 0.001 for milliseconds."""
    label_timestamp: str = "timestamp"
    label_input_length: str = "input_length"
    label_output_length: str = "output_length"
    label_hash_ids: str = "hash_ids"

    @field_validator("sec_multiplier")
    @classmethod
    def _positive(cls, value: float) -> float:
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"must be a positive number, got {value:g}; 0.001 reads milliseconds")
        return value


class ShareGptSpec(Spec):
    """ShareGPT: a JSON list of conversations; those with fewer than two turns are dropped."""

    name: Literal["sharegpt"] = "sharegpt"
    path: Path
    order: Order = "file"
    tokenizer: Path | None = None
    """A `tokenizer.json` (or its folder) that counts tokens exactly; without it they are estimated from
    words."""
    multi_turn: bool = False
    """Each conversation is a session of its own turns; otherwise only its first question and answer, as in
    vLLM."""
    output_len: PositiveTokens | None = None
    """Overrides the length of every answer."""
    min_tokens: Tokens = 4
    """vLLM's filter: shorter questions or answers are dropped (single-turn only, like the next two)."""
    max_prompt_tokens: PositiveTokens = 1024
    max_total_tokens: PositiveTokens = 2048


class LengthsSpec(Spec):
    """CSV pairs num_prefill_tokens,num_decode_tokens, without times."""

    name: Literal["lengths"] = "lengths"
    path: Path
    order: Order = "file"


class CustomSpec(Spec):
    """JSONL with `prompt` (text) or `prompt_tokens`, `output_tokens`, and optionally `arrival_s`,
    `prefix_group` and `prefix_tokens` (the first `prefix_tokens` tokens are those of every prompt of that
    group), and `beam_width` (0: no beam search)."""

    name: Literal["custom"] = "custom"
    path: Path
    order: Order = "file"
    tokenizer: Path | None = None
    output_len: PositiveTokens | None = None
    """Length of every answer; needed where a line has no `output_tokens`."""


class RangeRatio(Spec):
    """Separate ratios for prompt and output lengths, as vLLM's `{"input": 0.3, "output": 0.5}`."""

    input: float = 0.0
    output: float = 0.0

    @field_validator("input", "output")
    @classmethod
    def _in_range(cls, value: float) -> float:
        if not 0 <= value < 1:
            raise ValueError(f"range ratio must be in [0, 1), got {value:g}")
        return value


class RandomSpec(Spec):
    """vLLM's `random`: lengths are uniform integers in [floor(len·(1−r)), ceil(len·(1+r))], after a common
    prefix."""

    name: Literal["random"] = "random"
    input_len: Tokens = 1024
    output_len: PositiveTokens = 128
    range_ratio: RangeRatio = RangeRatio()
    prefix_len: Tokens = 0
    """Tokens common to all prompts, in front of `input_len`."""

    @field_validator("range_ratio", mode="before")
    @classmethod
    def _one_ratio_for_both(cls, value: object) -> object:
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except ValueError:
                raise ValueError('must be a number or {"input": 0.3, "output": 0.5}') from None
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return {"input": value, "output": value}
        return value

    @model_validator(mode="after")
    def _not_empty(self) -> RandomSpec:
        if self.prefix_len + math.floor(self.input_len * (1 - self.range_ratio.input)) < 1:
            raise ValueError(
                f"prompts of 0 tokens are possible with `input_len` {self.input_len} and `range_ratio` "
                f"{self.range_ratio.input:g}; raise `input_len` or `prefix_len`"
            )
        return self


class PrefixRepetitionSpec(Spec):
    """vLLM's `prefix_repetition`: N // num_prefixes prompts for each prefix, each with its own suffix,
    shuffled."""

    name: Literal["prefix_repetition"] = "prefix_repetition"
    num_prefixes: Annotated[int, Field(ge=1)] = 10
    prefix_len: Tokens = 256
    suffix_len: Tokens = 256
    output_len: PositiveTokens = 128

    @model_validator(mode="after")
    def _not_empty(self) -> PrefixRepetitionSpec:
        if self.prefix_len + self.suffix_len < 1:
            raise ValueError("prompts of 0 tokens: raise `prefix_len` or `suffix_len`")
        return self


DatasetSpec = Annotated[
    AzureSpec
    | BurstGptSpec
    | CustomSpec
    | LengthsSpec
    | MooncakeSpec
    | PrefixRepetitionSpec
    | RandomSpec
    | ShareGptSpec
    | TimedTraceSpec,
    Field(discriminator="name"),
]

DATASETS: tuple[str, ...] = (
    "azure",
    "burstgpt",
    "custom",
    "lengths",
    "mooncake",
    "prefix_repetition",
    "random",
    "sharegpt",
    "timed_trace",
)
TRACES: tuple[str, ...] = ("azure", "burstgpt", "mooncake", "timed_trace")
"""Datasets that have times of their own (a custom file may have them)."""


class SessionSpec(Spec):
    """Multi-turn sessions: each turn's prompt is the whole history, answers included, and the next new
    tokens.

    The dataset gives new tokens and answer of each turn; arrivals place the sessions' first turns.
    """

    turns_min: Annotated[int, Field(ge=1, le=10_000)] = 1
    """Turns of a session: a uniform integer in [turns_min, turns_max] (unused where the dataset has
    conversations)."""
    turns_max: Annotated[int, Field(ge=1, le=10_000)] = 1
    think_s: Annotated[float, Field(ge=0, le=MAX_SPAN_S)] = 0.0
    """Mean pause between an answer's last token and the next question."""
    think_distribution: Literal["exponential", "constant"] = "exponential"

    @field_validator("think_s")
    @classmethod
    def _finite(cls, value: float) -> float:
        if not math.isfinite(value):
            raise ValueError(f"think time must be finite, got {value:g}")
        return value

    @model_validator(mode="after")
    def _ordered(self) -> SessionSpec:
        if self.turns_min > self.turns_max:
            raise ValueError(f"`turns_min` {self.turns_min} exceeds `turns_max` {self.turns_max}")
        return self


class SharedPrefixSpec(Spec):
    """Tokens in front of every prompt (a system prompt); tenants that name the same group share them."""

    group: Annotated[str, Field(min_length=1)]
    tokens: PositiveTokens


class GoodputSpec(Spec):
    """Limits of a good request in milliseconds, as `--goodput ttft:500 tpot:50 e2el:5000`."""

    ttft: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    tpot: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    e2el: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None


class TenantSpec(Spec):
    """One class of requests: what it sends, when, and what it was promised."""

    name: Annotated[str, Field(min_length=1)] = "default"
    """Also names its random streams: a tenant draws the same numbers whoever else is in the workload."""
    dataset: DatasetSpec
    arrivals: ArrivalSpec = ArrivalSpec()
    num_prompts: Annotated[int, Field(ge=1, le=100_000_000)] | None = None
    """Requests (all turns counted); None is the whole file, or 1,000 of a generated dataset."""
    sessions: SessionSpec | None = None
    shared_prefix: SharedPrefixSpec | None = None
    slo_class: str = ""
    goodput: GoodputSpec = GoodputSpec()
    rtt_ms: Annotated[float, Field(ge=0, le=3.6e6, allow_inf_nan=False)] = 0.0
    """Network round trip between this tenant's clients and the server."""
    priority: int = 0
    """vLLM's meaning: lower is served first."""
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """Share of the engine that it is owed relative to others under `--scheduling-policy fair`."""
    beam_width: Annotated[int, Field(ge=1, le=MAX_BEAM_WIDTH)] | None = None
    """Each request is a beam search of so many hypotheses, whose best is the answer; None is no search."""
    best_of: Annotated[int, Field(ge=1, le=MAX_BEST_OF)] = 1
    """So many answers are sampled to each request, and the likeliest is shown when all have ended."""

    @property
    def turns(self) -> SessionSpec | None:
        """`sessions`, or their defaults for a dataset of conversations; None sends single requests."""
        if self.sessions is None and isinstance(self.dataset, ShareGptSpec) and self.dataset.multi_turn:
            return SessionSpec()
        return self.sessions

    @model_validator(mode="after")
    def _every_option_has_an_effect(self) -> TenantSpec:
        dataset = self.dataset
        if self.sessions is not None:
            if isinstance(dataset, (MooncakeSpec, TimedTraceSpec)):
                raise ValueError(
                    f"`sessions`: {dataset.name} already says in hash_ids what is shared; remove `sessions`"
                )
            of_file = isinstance(dataset, ShareGptSpec) and dataset.multi_turn
            if of_file and self.sessions.turns_max > 1:
                raise ValueError(
                    "`sessions.turns_max` has no effect with `dataset.multi_turn`, whose turns are the file's; remove one"
                )
            if self.sessions.think_s and self.sessions.turns_max == 1 and not of_file:
                raise ValueError(
                    "`sessions.think_s` has no effect on sessions of one turn; raise `sessions.turns_max`"
                )
            if self.sessions.think_distribution != "exponential" and not self.sessions.think_s:
                raise ValueError(
                    "`sessions.think_distribution` has no effect without `sessions.think_s`; set it"
                )
            if self.arrivals.from_trace and isinstance(dataset, (AzureSpec, BurstGptSpec)):
                raise ValueError(
                    "sessions need arrivals of their own; set `arrivals.request_rate` (a trace places single requests)"
                )
        return self


class WorkloadSpec(Spec):
    """Everything about the traffic of a run."""

    name: str = "workload"
    tenants: Annotated[tuple[TenantSpec, ...], Field(min_length=1)]
    max_concurrency: Annotated[int, Field(ge=1)] | None = None
    """At most this many requests in flight over all tenants; the next is sent when one ends."""
    _flags: tuple[str, ...] | None = PrivateAttr(None)
    """The flags that described it, so that errors name them; None where a file or code did."""
    _file: str = PrivateAttr("")
    """The file that did."""

    @model_validator(mode="after")
    def _names_differ(self) -> WorkloadSpec:
        names = [tenant.name for tenant in self.tenants]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two tenants are called {name!r}; give each a name of its own")
        return self
