"""What became of drafts, counted with vLLM's meanings."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt


@dataclass(slots=True)
class DraftCounts:
    """Of a whole run; `num_drafts` counts verifications of at least one draft token."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_pos: list[int] = field(default_factory=list)
    """Accepted tokens by position in the draft."""
    tried_per_pos: list[int] = field(default_factory=list)
    """Tokens by position whose predecessors in the draft were all accepted."""

    def count(self, num_drafts: npt.NDArray[np.int64], num_accepted: npt.NDArray[np.int64]) -> None:
        """One step: drafts verified and accepted of each sequence, shape (rows,)."""
        verified = num_drafts > 0
        drafts, accepted = num_drafts[verified], num_accepted[verified]
        if not len(drafts):
            return
        self.num_drafts += len(drafts)
        self.num_draft_tokens += int(drafts.sum())
        self.num_accepted_tokens += int(accepted.sum())
        longest = int(drafts.max())
        tried = np.minimum(accepted + 1, drafts)
        for counts, lengths in ((self.tried_per_pos, tried), (self.accepted_per_pos, accepted)):
            counts.extend([0] * (longest - len(counts)))
            # n tokens have one at each position below n.
            by_length = np.bincount(lengths, minlength=longest + 1)[: longest + 1]
            for position, more in enumerate(np.cumsum(by_length[::-1])[::-1][1:].tolist()):
                counts[position] += more

    @property
    def acceptance_rate(self) -> float:
        """Accepted / drafted tokens, 0 to 1; NaN before anything was drafted."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else float("nan")

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per verification: the accepted ones and the target's own."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else float("nan")

    @property
    def acceptance_per_pos(self) -> list[float]:
        """Share of verifications in which the token at each position was accepted, as vLLM counts."""
        return [n / self.num_drafts for n in self.accepted_per_pos]

    @property
    def conditional_per_pos(self) -> list[float]:
        """Acceptance of a position given that it was drafted and all before it stood; 0 where that never happened."""
        return [a / t if t else 0.0 for a, t in zip(self.accepted_per_pos, self.tried_per_pos, strict=True)]


def total(parts: Iterable[DraftCounts | None]) -> DraftCounts | None:
    """The sum of several; None where nobody drafts."""
    found = [part for part in parts if part is not None]
    if not found:
        return None
    out = DraftCounts()
    for part in found:
        out.num_drafts += part.num_drafts
        out.num_draft_tokens += part.num_draft_tokens
        out.num_accepted_tokens += part.num_accepted_tokens
        for mine, theirs in (
            (out.accepted_per_pos, part.accepted_per_pos),
            (out.tried_per_pos, part.tried_per_pos),
        ):
            mine.extend([0] * (len(theirs) - len(mine)))
            mine[: len(theirs)] = [a + b for a, b in zip(mine, theirs, strict=False)]
    return out
