"""Acceptance of drafts as others measured it: the share of verifications in which the token at each position stood.

Where a source gives mean acceptance lengths for several k instead, a position's share is their difference; where it
starts at k = 2, the first two positions are taken to stand equally often, given those before.
"""

from __future__ import annotations

from dataclasses import dataclass

from serving.errors import UsageError, nearest


@dataclass(frozen=True, slots=True)
class Preset:
    """`shares[j]`: verifications in which draft token j was accepted. `draft_rate`: lookups that found a draft."""

    shares: tuple[float, ...]
    source: str
    draft_rate: float = 1.0

    @property
    def rates(self) -> tuple[float, ...]:
        """Acceptance of each position given that all before it stood."""
        return tuple(share / before for share, before in zip(self.shares, (1.0, *self.shares), strict=False))


_VLLM = "https://github.com/vllm-project/vllm/"
_GOLDEN = "https://github.com/SemiAnalysisAI/InferenceX golden_al_distribution/"

PRESETS: dict[str, Preset] = {
    "ngram-code-edit": Preset(
        (0.81, 0.74, 0.70, 0.68, 0.66),
        f"{_VLLM}pull/24344: prompt lookup 2 to 5 on Llama-3.1-8B, edits of 5,000 characters of code",
        993 / (993 + 821),
    ),
    "ngram-mixed": Preset(
        (0.543, 0.357, 0.264),
        f"{_VLLM}issues/19254: prompt lookup on Qwen3-32B-FP8, a user's own traffic",
    ),
    "eagle-llama-3.1-8b": Preset(
        (0.663, 0.437, 0.19, 0.10, 0.04, 0.02, 0.02),
        f"{_VLLM}issues/20780: EAGLE on Llama-3.1-8B, MT-Bench, greedy, lengths 2.10 to 2.47 at k = 2 to 7",
    ),
    "eagle3-llama-3.1-8b": Preset(
        (0.769, 0.591, 0.43, 0.29, 0.24, 0.14, 0.08),
        f"{_VLLM}issues/20780: EAGLE-3 on Llama-3.1-8B, MT-Bench, greedy, lengths 2.36 to 3.54 at k = 2 to 7",
    ),
    "eagle3-kimi-k2.5": Preset(
        (0.80, 0.53, 0.42, 0.31, 0.19, 0.18, 0.03, 0.05),
        f"{_GOLDEN}kimik2.5_eagle3.yaml: SPEED-Bench coding at temperature 1",
    ),
    "mtp-qwen3.5": Preset(
        (0.92, 0.78, 0.63, 0.50, 0.37, 0.28, 0.25),
        f"{_GOLDEN}qwen3.5_mtp.yaml: SPEED-Bench coding at temperature 0.6",
    ),
    "mtp-glm-5.2": Preset(
        (0.84, 0.66, 0.49, 0.34, 0.28, 0.17, 0.13, 0.15),
        f"{_GOLDEN}glm5.2_mtp.yaml: SPEED-Bench coding at temperature 1",
    ),
}


def preset(name: str) -> Preset:
    """The preset of that name. Raises `UsageError` with the nearest."""
    if name not in PRESETS:
        raise UsageError(f"--speculative-config: no acceptance preset {name!r}; {nearest(name, PRESETS)}")
    return PRESETS[name]
