"""Requests made up from a few parameters: vLLM's `random` and `prefix_repetition`."""

from __future__ import annotations

import math

import numpy as np

from serving.errors import UsageError
from sim.workload.rows import Rows, Segments
from sim.workload.spec import PrefixRepetitionSpec, RandomSpec


def make_random(spec: RandomSpec, count: int, rng: np.random.Generator) -> Rows:
    """`count` requests; inputs first, then outputs, each a uniform integer with both ends included."""
    low = math.floor(spec.input_len * (1 - spec.range_ratio.input))
    high = math.ceil(spec.input_len * (1 + spec.range_ratio.input))
    prompt = rng.integers(low, high + 1, size=count) + spec.prefix_len
    low = max(math.floor(spec.output_len * (1 - spec.range_ratio.output)), 1)
    high = max(math.ceil(spec.output_len * (1 + spec.range_ratio.output)), 1)
    output = rng.integers(low, high + 1, size=count)
    prefix = np.full(count, spec.prefix_len, dtype=np.int64)
    return Rows(prompt, output, segments=Segments.one_each(prefix, np.zeros(count, dtype=np.int64)))


def prefix_repetition_count(spec: PrefixRepetitionSpec, count: int) -> int:
    """How many requests are made when `count` are asked for: the same number for each prefix. UsageError when
    0."""
    each = count // spec.num_prefixes
    if each == 0:
        raise UsageError(
            f"prefix_repetition: {count} prompts are fewer than {spec.num_prefixes} prefixes; raise "
            "`num_prompts` or lower `dataset.num_prefixes`"
        )
    return each * spec.num_prefixes


def make_prefix_repetition(spec: PrefixRepetitionSpec, count: int, rng: np.random.Generator) -> Rows:
    """`count` requests, a multiple of `num_prefixes`: as many for each prefix, in random order."""
    total = prefix_repetition_count(spec, count)
    streams = rng.permutation(np.repeat(np.arange(spec.num_prefixes), total // spec.num_prefixes))
    return Rows(
        np.full(total, spec.prefix_len + spec.suffix_len, dtype=np.int64),
        np.full(total, spec.output_len, dtype=np.int64),
        segments=Segments.one_each(np.full(total, spec.prefix_len, dtype=np.int64), streams.astype(np.int64)),
    )
