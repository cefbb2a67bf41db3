"""Beam searches and best-of on the real engine: the clients' side, and one row for each request in the record."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from realengine.answer import Output
from realengine.engine import Engine
from realengine.generation import Sampling, one_token
from serving.beams import BeamCounts, Beams, CandidateCounts, Likeliest, mean_logprob
from serving.request import Request
from sim.record import RequestTable, Status, TokenRanges
from sim.workload import Workload

Later = Callable[[Callable[[], None]], None]
"""Runs something in the clients' thread."""


class Search:
    """One request's search: `sent()` is told of every request made for it, `done(tokens)` of its best answer.

    `how` are the arguments of `Engine.add`. Everything but listening happens in the clients' thread, by `later`.
    """

    def __init__(
        self,
        engine: Engine,
        prompt: list[int],
        width: int,
        max_tokens: int,
        counts: BeamCounts,
        how: Mapping[str, Any],
        later: Later,
        sent: Callable[[], None],
        done: Callable[[list[int]], None],
    ) -> None:
        self._engine, self._prompt, self._counts, self._how = engine, prompt, counts, how
        self._later, self._sent, self._done = later, sent, done
        scheduler, whole = engine.scheduler, Request("whole", len(prompt), max_tokens)
        # What can never run is refused by the engine, when it gets the prompt.
        room = scheduler.finish_at(whole) - len(prompt) if not scheduler.refusal(whole) else 1
        self.beams = Beams(width, room)
        self._tops: list[Likeliest] = []
        self._missing = 0
        self._send()

    def _send(self) -> None:
        live = self.beams.live
        self._tops, self._missing = [()] * len(live), len(live)
        for place, hypothesis in enumerate(live):
            self._sent()
            self._counts.requests += 1
            self._engine.add(
                [*self._prompt, *hypothesis.token_ids],
                one_token(self.beams.width),
                partial(self._heard, place),
                **self._how,
            )

    def _heard(self, place: int, output: Output) -> None:
        self._later(partial(self._took, place, output))

    def _took(self, place: int, output: Output) -> None:
        if output.finish_reason != "length":
            self._done([])  # refused, or the engine was stopped
            return
        length = len(self._prompt) + self.beams.num_steps
        self._counts.cached_tokens += output.cached_tokens
        self._counts.computed_tokens += length - output.cached_tokens
        self._tops[place] = output.logprobs[0].top
        self._missing -= 1
        if self._missing:
            return
        self.beams.grow(self._tops)
        if not self.beams.over:
            self._send()
            return
        best = list(self.beams.best()[0].token_ids)
        self._counts.searches += 1
        self._counts.shown_tokens += len(best)
        self._done(best)


class BestOf:
    """The listener of one request's candidates. `done(tokens)` is told of the likeliest one's, by `later`."""

    def __init__(
        self, candidates: int, counts: CandidateCounts, later: Later, done: Callable[[list[int]], None]
    ) -> None:
        self._tokens: list[list[int]] = [[] for _ in range(candidates)]
        self._logprobs: list[list[float]] = [[] for _ in range(candidates)]
        self._left, self._counts, self._later, self._done = candidates, counts, later, done
        self._whole = True

    @staticmethod
    def sampling(candidates: int, max_tokens: int, seed: int) -> Sampling:
        """What is asked of the engine: as many tokens as the workload says, drawn as they are likely."""
        return Sampling(max_tokens, 1.0, seed=seed, n=candidates, logprobs=0, ignore_eos=True)

    def __call__(self, output: Output) -> None:
        """In the engine's thread."""
        self._tokens[output.index].extend(output.token_ids)
        self._logprobs[output.index].extend(entry.logprob for entry in output.logprobs)
        if output.finish_reason is None:
            return
        self._whole &= output.finish_reason == "length"
        self._left -= 1
        if not self._left:
            self._later(self._end)

    def _end(self) -> None:
        if not self._whole:
            self._done([])  # refused, or the engine was stopped
            return
        means = [mean_logprob(logprobs) for logprobs in self._logprobs]
        best = self._tokens[means.index(max(means))]
        self._counts.requests += 1
        self._counts.answers += len(self._tokens)
        self._counts.generated_tokens += sum(map(len, self._tokens))
        self._counts.shown_tokens += len(best)
        self._done(best)


def fold(
    table: RequestTable, tokens: TokenRanges, workload: Workload, shown: Mapping[int, int]
) -> tuple[RequestTable, TokenRanges]:
    """One row for each request, where a search or best-of has made many; `shown` counts tokens of those that are over."""
    several = workload.come_whole()
    order = np.argsort(table.request_id, kind="stable")
    ids, starts = np.unique(table.request_id[order], return_index=True)
    groups = np.split(order, starts[1:])
    groups.sort(key=lambda group: int(group[0]))
    heads = np.array([group[0] for group in groups], np.int64)
    columns = {name: column[heads].copy() for name, column in table.columns().items()}
    ranges: list[list[tuple[int, int, int]]] = []
    every = np.ones(len(tokens.count), np.int64) if tokens.per_step is None else tokens.per_step
    for at, group in enumerate(groups):
        row = int(columns["request_id"][at])
        if not several[row] or table.status[group[0]] == Status.REJECTED:
            mine = range(int(tokens.offsets[group[0]]), int(tokens.offsets[group[0] + 1]))
            ranges.append([(int(tokens.first_step[r]), int(tokens.count[r]), int(every[r])) for r in mine])
            continue
        columns["max_output_tokens"][at] = workload.output_tokens[row]
        columns["preemptions"][at] = table.preemptions[group].sum()
        if row not in shown:
            ranges.append([])
            columns["status"][at], columns["reason"][at], columns["output_tokens"][at] = 0, "", 0
            for name in ("engine_done_s", "first_token_s", "last_token_s"):
                columns[name][at] = np.nan
            continue
        last = group[np.argmax(table.engine_done_s[group])]
        for name in ("engine_done_s", "first_token_s", "last_token_s"):
            columns[name][at] = table.engine_done_s[last]
        columns["output_tokens"][at] = shown[row]
        final = int(tokens.offsets[last + 1]) - 1
        step = int(tokens.first_step[final] + tokens.count[final]) - 1
        ranges.append([(step, 1, shown[row])])
    flat = np.array([entry for mine in ranges for entry in mine], np.int64).reshape(-1, 3)
    offsets = np.cumsum([0, *(len(mine) for mine in ranges)]).astype(np.int64)
    assert len(ids) == len(groups)
    return replace(table, **columns), TokenRanges(offsets, flat[:, 0], flat[:, 1], flat[:, 2])
