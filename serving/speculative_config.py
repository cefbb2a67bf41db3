"""What `--speculative-config` says: vLLM's JSON keys where vLLM has them, checked once for the engine and the twin."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from serving.config import SchedulerConfig
from serving.errors import UsageError, nearest

FLAG = "--speculative-config"
METHODS = ("ngram", "draft_model", "self", "lookahead")
DRAFT_SAMPLE_METHODS = ("probabilistic", "greedy")
_PROMPT_LOOKUP = 5
"""vLLM's n-gram length where neither bound is given."""
_NGRAM_SIZE = 3
_OF_METHOD = {
    "prompt_lookup_max": ("ngram",),
    "prompt_lookup_min": ("ngram",),
    "model": ("draft_model",),
    "num_layers": ("self",),
    "ngram_size": ("lookahead",),
    "draft_sample_method": ("draft_model", "self"),
}
"""Keys that only some methods have."""
_HEADS = ("eagle", "medusa", "mtp", "mlp_speculator")
"""What vLLM's methods that draft with a head trained on the target have in their names."""


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """Speculative decoding of one deployment. Raises `UsageError` naming the key when a value cannot work.

    `num_layers`, `ngram_size`, `min_draft_acceptance` and `acceptance` are ours, the other keys are vLLM's.
    """

    method: str
    num_speculative_tokens: int
    model: str | None = None
    """The draft model of method draft_model."""
    prompt_lookup_max: int | None = None
    prompt_lookup_min: int | None = None
    num_layers: int | None = None
    """Method self: the target's first layers that draft."""
    ngram_size: int | None = None
    """Method lookahead: tokens of a remembered n-gram, the one that finds it included."""
    draft_sample_method: str = "probabilistic"
    """How a draft model draws where the request is not greedy: from its own distribution, or its likeliest token."""
    disable_by_batch_size: int = 0
    """Draft nothing while more sequences than this run; 0 is off."""
    num_speculative_tokens_per_batch_size: tuple[tuple[int, int, int], ...] = ()
    """(from, to, k): draft k tokens while so many sequences run."""
    min_draft_acceptance: float = 0.0
    """Draft a token only while the chance that it stands, by what the sequence's drafts met, is at least this."""
    acceptance: Any = None
    """What the twin assumes of drafts (`sim.acceptance`)."""

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise UsageError(f"{FLAG}: method is {self.method!r}; {nearest(str(self.method), METHODS)}")
        for name, methods in _OF_METHOD.items():
            default = DRAFT_SAMPLE_METHODS[0] if name == "draft_sample_method" else None
            if getattr(self, name) != default and self.method not in methods:
                raise UsageError(f"{FLAG}: {name} has an effect only with method {' or '.join(methods)}")
        k = self.num_speculative_tokens
        _whole("num_speculative_tokens", k, 1)
        for name in ("prompt_lookup_max", "prompt_lookup_min", "num_layers"):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name), 1)
        if self.ngram_size is not None:
            _whole("ngram_size", self.ngram_size, 2)
        if self.method == "draft_model" and not self.model:
            raise UsageError(
                f'{FLAG}: method draft_model needs "model": a smaller model of the same vocabulary'
            )
        if self.method == "self" and self.num_layers is None:
            raise UsageError(f'{FLAG}: method self needs "num_layers": how many of the first layers draft')
        if self.draft_sample_method not in DRAFT_SAMPLE_METHODS:
            raise UsageError(
                f"{FLAG}: draft_sample_method is {self.draft_sample_method!r}; "
                f"use {' or '.join(DRAFT_SAMPLE_METHODS)}"
            )
        least, most = self.lookup_range
        if least > most:
            raise UsageError(f"{FLAG}: prompt_lookup_min {least} is above prompt_lookup_max {most}")
        _whole("disable_by_batch_size", self.disable_by_batch_size, 0)
        for entry in self.num_speculative_tokens_per_batch_size:
            if len(entry) != 3 or not 1 <= entry[0] <= entry[1] or not 0 <= entry[2] <= k:
                raise UsageError(
                    f"{FLAG}: num_speculative_tokens_per_batch_size holds {list(entry)}; "
                    f"write [from, to, tokens] with tokens of 0 to {k}"
                )
        if not 0.0 <= self.min_draft_acceptance < 1.0:
            raise UsageError(
                f"{FLAG}: min_draft_acceptance is {self.min_draft_acceptance}; use 0 (off) or more, below 1"
            )

    @property
    def lookup_range(self) -> tuple[int, int]:
        """Shortest and longest n-gram that is looked up; one given bound stands for both, as in vLLM."""
        given = [n for n in (self.prompt_lookup_min, self.prompt_lookup_max) if n is not None] or [
            _PROMPT_LOOKUP
        ]
        return (
            self.prompt_lookup_min if self.prompt_lookup_min is not None else given[-1],
            self.prompt_lookup_max if self.prompt_lookup_max is not None else given[0],
        )

    @property
    def pool_ngram(self) -> int:
        """Tokens of an n-gram of method lookahead."""
        return self.ngram_size or _NGRAM_SIZE

    @property
    def draft_has_kv(self) -> bool:
        """Drafting writes KV past the step's own tokens."""
        return self.method in ("draft_model", "self")

    @property
    def draft_cache(self) -> bool | None:
        """Whether a drafter that is a model has a cache of its own; None where the host drafts."""
        return self.method == "draft_model" if self.draft_has_kv else None

    def limits(self, limits: SchedulerConfig) -> SchedulerConfig:
        """Scheduler limits with drafts."""
        return replace(
            limits,
            num_speculative_tokens=self.num_speculative_tokens,
            draft_has_kv=self.draft_has_kv,
            disable_by_batch_size=self.disable_by_batch_size,
            num_speculative_tokens_per_batch_size=self.num_speculative_tokens_per_batch_size,
            min_draft_acceptance=self.min_draft_acceptance,
        )


def parse_speculative_config(given: str | Mapping[str, Any]) -> SpeculativeConfig:
    """The configuration in a JSON object or a mapping. Raises `UsageError` for anything that cannot be."""
    content: Any = given
    if isinstance(given, str):
        try:
            content = json.loads(given)
        except ValueError as error:
            raise UsageError(
                f'{FLAG}: not JSON ({error}); write \'{{"method": "ngram", "num_speculative_tokens": 4}}\''
            ) from None
    if not isinstance(content, Mapping):
        raise UsageError(
            f'{FLAG}: expected an object such as {{"method": "ngram", ...}}, got {str(content)[:40]}'
        )
    _refuse_unmodelled(str(content.get("method", "")))
    known = {f.name for f in fields(SpeculativeConfig)}
    for key in content:
        if key not in known:
            raise UsageError(f"{FLAG}: unknown key {str(key)!r}; {nearest(str(key), known)}")
    values = {key: value for key, value in content.items() if value is not None}
    if "method" not in values:
        if "model" not in values:
            raise UsageError(f'{FLAG}: "method" is missing; use one of {", ".join(METHODS)}')
        values["method"] = "ngram" if values["model"] in ("ngram", "[ngram]") else "draft_model"
    if values["method"] == "ngram" and values.get("model") in ("ngram", "[ngram]"):
        del values["model"]  # vLLM's older spelling of the method
    if "num_speculative_tokens" not in values:
        raise UsageError(f'{FLAG}: "num_speculative_tokens" is missing; 3 to 5 are usual')
    if (schedule := values.get("num_speculative_tokens_per_batch_size")) is not None:
        values["num_speculative_tokens_per_batch_size"] = _schedule(schedule)
    if not isinstance(values.get("min_draft_acceptance", 0.0), int | float):
        raise UsageError(
            f"{FLAG}: min_draft_acceptance must be a number, got {values['min_draft_acceptance']!r}"
        )
    return SpeculativeConfig(**values)


def _refuse_unmodelled(method: str) -> None:
    """Raise `UsageError` for what vLLM drafts with and we do not: what there is, and what comes nearest."""
    if any(head in method.lower() for head in _HEADS):
        raise UsageError(
            f"{FLAG}: method {method!r}: draft heads (EAGLE, Medusa, MTP) are not modelled; use "
            f"{', '.join(METHODS[:2])}, {' or '.join(METHODS[2:])}. Nearest in the twin: "
            '"method": "draft_model" with a "model" about as large as the head and the head\'s measured "acceptance"'
        )
    if method == "suffix":
        raise UsageError(
            f'{FLAG}: suffix decoding is not modelled; nearest is "method": "ngram", with a measured "acceptance" in '
            "the twin"
        )


def _whole(name: str, value: Any, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UsageError(f"{FLAG}: {name} is {value!r}; use a whole number, {least} or more")


def _schedule(given: Any) -> tuple[tuple[int, int, int], ...]:
    rows = given if isinstance(given, list | tuple) else [given]
    for row in rows:
        if not isinstance(row, list | tuple) or not all(type(n) is int for n in row):
            raise UsageError(
                f"{FLAG}: num_speculative_tokens_per_batch_size holds {row!r}; write [[1, 8, 4], [9, 64, 2]]"
            )
    return tuple(tuple(row) for row in rows)
