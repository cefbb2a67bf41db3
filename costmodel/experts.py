"""How tokens spread over the experts of a mixture, and what of them the busiest rank computes.

A token chooses k of E experts, expert e with probability q_e, and the q_e sum to k. `imbalance` X is the busiest expert's
tokens over the mean, q_1 = X k / E; the others fall off as a Zipf law, q_e = q_1 / e^s, with the s that makes the sum k.
X = 1 is uniform routing. The law is an assumption: no measurement of expert loads stands behind it.

With expert parallelism each rank has whole experts, dealt out in order of popularity, and a layer lasts as long as the
rank with the most work. The loads of n ranks are taken as normal variables, of which the expected largest is wanted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from serving.errors import UsageError

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Routing:
    """`num_experts` of which each token takes `experts_per_token`, on `num_ranks` ranks of whole experts (1: on all)."""

    num_experts: int
    experts_per_token: int
    imbalance: float = 1.0
    num_ranks: int = 1

    def __post_init__(self) -> None:
        most = self.num_experts / self.experts_per_token
        if not 1.0 <= self.imbalance <= most:
            raise UsageError(
                f"--expert-load-imbalance {self.imbalance:g}: the busiest of {self.num_experts} experts, of which each "
                f"token takes {self.experts_per_token}, can have 1 to {most:g} times the mean"
            )
        if self.num_ranks > self.num_experts:
            raise UsageError(
                f"--enable-expert-parallel: {self.num_experts} experts do not go around {self.num_ranks} ranks; "
                "lower --tensor-parallel-size or --data-parallel-size"
            )

    @cached_property
    def chosen(self) -> Floats:
        """Probability that a token takes each expert, shape (num_experts,), most popular first."""
        total, each = self.num_experts, self.experts_per_token
        if self.imbalance == 1.0:
            return np.full(total, each / total)
        order = np.arange(1, total + 1, dtype=np.float64)
        low, high = 0.0, 64.0
        for _ in range(64):
            middle = (low + high) / 2
            low, high = (middle, high) if np.mean(order**-middle) * self.imbalance > 1 else (low, middle)
        shares = order**-high
        return np.asarray(each * shares / shares.sum())

    def touched(self, tokens: Floats) -> Floats:
        """Expected number of distinct experts that `tokens` tokens take."""
        if self.imbalance == 1.0:
            total, each = float(self.num_experts), float(self.experts_per_token)
            return np.asarray(total * (1.0 - (1.0 - each / total) ** tokens))
        return np.asarray(self._touched(self.chosen, tokens).sum(axis=-1))

    def on_busiest_rank(self, tokens: Floats) -> tuple[Floats, Floats]:
        """(rows, distinct experts) expected on the rank that has the most of each, of `tokens` tokens."""
        tokens = np.asarray(tokens, np.float64)
        if self.num_ranks == 1:
            return tokens * self.experts_per_token, self.touched(tokens)
        # What one rank has more than its share, another lacks.
        apart = 1.0 - 1.0 / self.num_ranks
        spread = expected_largest(self.num_ranks) * math.sqrt(apart)
        mine = self.chosen[:: self.num_ranks]
        rows = tokens * mine.sum() + spread * np.sqrt(tokens * np.sum(mine * (1.0 - mine)))
        found = self._touched(mine, tokens)
        distinct = found.sum(axis=-1) + spread * np.sqrt(np.sum(found * (1.0 - found), axis=-1))
        most = np.minimum(len(mine), tokens * self.experts_per_token)
        rows = np.minimum(rows, tokens * min(len(mine), self.experts_per_token))
        return np.asarray(rows), np.asarray(np.minimum(distinct, most))

    @staticmethod
    def _touched(chosen: Floats, tokens: Floats) -> Floats:
        return np.asarray(1.0 - (1.0 - chosen) ** np.asarray(tokens, np.float64)[..., None])


@lru_cache(maxsize=64)
def expected_largest(count: int) -> float:
    """Expected largest of `count` standard normal variables: the integral of x d(Phi(x)^count)."""
    x = np.linspace(0.0, 9.0, 1801)
    below = np.array([0.5 * math.erfc(-each / math.sqrt(2)) for each in x.tolist()])
    above = 1.0 - below**count - (1.0 - below) ** count
    return float(np.sum((above[1:] + above[:-1]) / 2) * (x[1] - x[0]))
