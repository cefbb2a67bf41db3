"""Multi-turn sessions: from new tokens per turn to prompts that carry the whole history, answers included."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sim.record import Floats, Ints
from sim.workload.rows import Rows, Segments
from sim.workload.spec import SessionSpec


@dataclass(frozen=True, slots=True)
class Turns:
    """Requests of one tenant, session by session."""

    prompt_tokens: Ints
    output_tokens: Ints
    sent_s: Floats
    segments: Segments
    after: Ints
    think_s: Floats
    beam_width: Ints | None = None
    """As of the rows that they were made of."""


def draw_turns(
    spec: SessionSpec, num_sessions: int | None, num_requests: int | None, rng: np.random.Generator
) -> Ints:
    """Turns of each session; enough sessions for `num_requests`, the last one cut short, when that limits
    them."""
    if num_sessions is None:
        assert num_requests is not None
        num_sessions = -(-num_requests // spec.turns_min)
    turns = rng.integers(spec.turns_min, spec.turns_max + 1, size=num_sessions)
    return turns if num_requests is None else cut(turns, num_requests)


def cut(turns: Ints, num_requests: int) -> Ints:
    """The first sessions that make `num_requests` requests together; the last of them may lose turns."""
    before = np.cumsum(turns) - turns
    turns = turns[before < num_requests]
    if len(turns):
        turns[-1] = min(int(turns[-1]), num_requests - int(before[len(turns) - 1]))
    return turns


def compose(rows: Rows, turns: Ints, start_s: Floats, spec: SessionSpec, rng: np.random.Generator) -> Turns:
    """Prompts, times and segments of sessions whose turns are neighbours in `rows` and start at `start_s`.

    A prefix that the dataset itself shares stays in front of the session and is counted once.
    """
    count = len(rows)
    session: Ints = np.repeat(np.arange(len(turns)), turns)
    first = np.repeat(np.cumsum(turns) - turns, turns)
    later = np.arange(count) > first
    own = rows.segments if rows.segments is not None else Segments.none(count)
    prefix = np.zeros(count, dtype=np.int64)
    has = np.diff(own.offsets) > 0
    prefix[has] = own.ends[own.offsets[1:][has] - 1]
    new: Ints = np.where(later, np.maximum(rows.prompt_tokens - prefix, 1), rows.prompt_tokens)
    added = new + rows.output_tokens
    before = np.cumsum(added) - added
    prompt: Ints = before - before[first] + new
    ends = prompt + rows.output_tokens
    segments = own.take(first).append(ends, session + own.num_streams)
    # The draws of a session do not depend on how many turns other sessions have: one number for each request.
    think_s = np.where(later, _pauses(spec, count, rng), 0.0)
    waited = np.cumsum(think_s)
    sent_s = np.repeat(start_s, turns) + (waited - waited[first])
    after = np.where(later, np.arange(count) - 1, -1)
    return Turns(prompt, rows.output_tokens, sent_s, segments, after, think_s, rows.beam_width)


def _pauses(spec: SessionSpec, count: int, rng: np.random.Generator) -> Floats:
    if spec.think_distribution == "constant":
        return np.full(count, spec.think_s)
    pauses: Floats = rng.standard_exponential(count) * spec.think_s
    return pauses
