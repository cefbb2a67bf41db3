"""What the runner knows of each running sequence, one row per scheduler slot: its tokens and how to draw the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from realengine.generation import Sampling

Floats = npt.NDArray[np.float32]


@dataclass(slots=True)
class Draws:
    """How to draw one token for each of S sequences, as arrays [S] for the sampling kernel."""

    temperature: Floats
    top_k: npt.NDArray[np.int32]
    top_p: Floats
    min_p: Floats
    seed: npt.NDArray[np.int64]
    greedy: bool
    """All rows are greedy: the largest logit is all that is asked."""
    logprobs: int
    """Likeliest tokens to report beside the drawn one; -1 when no row asks for log-probabilities."""


class Seats:
    """Arrays by slot. `tokens[slot, :n]` are the ids of a sequence of n known tokens."""

    def __init__(self, num_slots: int, longest: int) -> None:
        # Pages of this array that no sequence reaches are never touched, hence never in memory.
        self.tokens: npt.NDArray[np.int32] = np.zeros((num_slots, longest), np.int32)
        self.num_drafts: npt.NDArray[np.int64] = np.zeros(num_slots, np.int64)
        """Drafts of each sequence: they stand in `tokens` behind its known ones."""
        self.turns: npt.NDArray[np.int64] = np.zeros(num_slots, np.int64)
        """How often somebody has sat down."""
        self._temperature: Floats = np.zeros(num_slots, np.float32)
        self._top_k: npt.NDArray[np.int32] = np.zeros(num_slots, np.int32)
        self._top_p: Floats = np.ones(num_slots, np.float32)
        self._min_p: Floats = np.zeros(num_slots, np.float32)
        self._seed: npt.NDArray[np.int64] = np.zeros(num_slots, np.int64)
        self._logprobs: npt.NDArray[np.int32] = np.full(num_slots, -1, np.int32)

    def take(self, slot: int, ids: Sequence[int], sampling: Sampling, seed: int) -> None:
        """A sequence of these known tokens sits down in `slot`."""
        self.tokens[slot, : len(ids)] = ids
        self.num_drafts[slot] = 0
        self.turns[slot] += 1
        self._temperature[slot] = sampling.temperature
        self._top_k[slot] = sampling.top_k
        self._top_p[slot] = sampling.top_p
        self._min_p[slot] = sampling.min_p
        self._seed[slot] = seed
        self._logprobs[slot] = -1 if sampling.logprobs is None else sampling.logprobs

    def draws(self, slots: npt.NDArray[np.int64]) -> Draws:
        """How to draw for the sequences in `slots`."""
        temperature = self._temperature[slots]
        return Draws(
            temperature,
            self._top_k[slots],
            self._top_p[slots],
            self._min_p[slots],
            self._seed[slots],
            not temperature.any(),
            int(self._logprobs[slots].max(initial=-1)),
        )
