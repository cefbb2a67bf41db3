"""What it costs to move KV pages between the device and host memory, and when computing them again is cheaper."""

from __future__ import annotations

from costmodel.datasheet import FACTS
from costmodel.pricer import StepPricer
from costmodel.profile import DeviceFacts
from serving.errors import UsageError

LINK_SHARE = 0.8
"""Share of a datasheet's rate that copies of many pages through pinned memory reach: an estimate, not measured."""


def host_link_bytes_per_s(facts: DeviceFacts) -> float:
    """Rate of page copies between device and host in one direction. Raises `UsageError` where no rate is stated."""
    rate = facts.host_link_bytes_per_s
    if rate is None and facts.name in FACTS:
        rate = FACTS[facts.name].host_link_bytes_per_s
    if rate is None:
        raise UsageError(
            f"the profile of {facts.product} does not state host_link_bytes_per_s, the rate of its link to host "
            "memory, so that swapping cannot be priced; add it to the profile's facts, or use --preemption-mode recompute"
        )
    measured = "measured" in facts.sources.get("host_link", "")
    return rate if measured else LINK_SHARE * rate


def recompute_coefficients(pricer: StepPricer, chunk_tokens: int) -> tuple[float, float]:
    """Seconds per token and per token squared of computing a sequence again, alone, in chunks of `chunk_tokens`.

    Two lengths determine the two coefficients; what a step costs before its first token is left out, because the
    sequence joins a step that runs anyway.
    """

    def total_s(num_tokens: int) -> float:
        total, context = 0.0, 0
        while context < num_tokens:
            chunk = min(chunk_tokens, num_tokens - context)
            total += pricer.step_s(chunk, 0, [(chunk, context)], 0, 0, 0)
            context += chunk
        return total

    base, short, long = chunk_tokens, 4 * chunk_tokens, 8 * chunk_tokens
    # t(n) - t(base) = a (n - base) + b (n^2 - base^2)
    first, second = total_s(short) - total_s(base), total_s(long) - total_s(base)
    widths = short - base, long - base
    squares = short**2 - base**2, long**2 - base**2
    determinant = widths[0] * squares[1] - widths[1] * squares[0]
    per_token = (first * squares[1] - second * squares[0]) / determinant
    per_square = (widths[0] * second - widths[1] * first) / determinant
    return max(per_token, 0.0), max(per_square, 0.0)
