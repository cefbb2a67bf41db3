"""How many tokens to draft next: all that the deployment allows, fewer under load and where drafts keep failing.

It is the scheduler's decision, so that the engine and its twin shorten drafts at the same steps.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from serving.config import SchedulerConfig
from serving.plan import Counts, Slots

FORGETTING = 0.9
"""What a sequence's earlier verifications weigh, each time that another is counted."""


class DraftLengths:
    """Draft lengths by slot.

    Under `min_draft_acceptance` the acceptance of a sequence is measured as accepted drafts per draft tried (those after
    the first rejected one are not), older ones counting less. Draft j of a chain stands with probability of its j-th
    power. One token is always drafted: a sequence that never drafts would never be seen to improve.
    """

    def __init__(self, config: SchedulerConfig, num_slots: int) -> None:
        self.config = config
        self.measures = config.min_draft_acceptance > 0
        size = num_slots if self.measures else 0
        self._tried: npt.NDArray[np.float64] = np.ones(size)
        self._accepted: npt.NDArray[np.float64] = np.ones(size)

    def enter(self, slot: int) -> None:
        """A sequence takes a slot; nothing is known of its drafts, which gives them the benefit of the doubt."""
        self._tried[slot] = self._accepted[slot] = 1.0

    def verified(self, slot: int, drafts: int, accepted: int) -> None:
        """Count what became of a sequence's drafts."""
        self._tried[slot] = FORGETTING * self._tried[slot] + accepted + (accepted < drafts)
        self._accepted[slot] = FORGETTING * self._accepted[slot] + accepted

    def most(self, num_running: int) -> int:
        """The longest draft while so many sequences run."""
        config = self.config
        if config.disable_by_batch_size and num_running > config.disable_by_batch_size:
            return 0
        for first, last, tokens in config.num_speculative_tokens_per_batch_size:
            if first <= num_running <= last:
                return tokens
        return config.num_speculative_tokens

    def after(self, slots: Slots, num_running: int) -> Counts:
        """Tokens to draft for each of `slots`, shape (rows,)."""
        most = self.most(num_running)
        if not self.measures or most < 2:
            return np.full(len(slots), most, np.int64)
        chance = self._accepted[slots] / self._tried[slots]
        # The longest draft whose last token still has the chance asked for.
        powers = chance[:, None] ** np.arange(2, most + 1)
        return np.asarray(1 + (powers >= self.config.min_draft_acceptance).sum(axis=1), np.int64)
