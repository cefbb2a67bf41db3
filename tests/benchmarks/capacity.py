"""What is 70 % of capacity on the benchmark's trace? Run `python -m tests.benchmarks.capacity` (about a minute).

Capacity is the throughput when the whole trace comes 100 times as fast, so that the queue never runs dry. The trace's
own rate is not steady, so the highest rate-scale that the drift test does not call saturated is somewhat above the one
at which the mean arrival rate equals that throughput; it is printed too.
"""

from __future__ import annotations

from sim.deployment import simulate
from sim.metrics import summarise
from sim.saturation import Load, saturation
from tests.benchmarks.azure import RATE_SCALE, conversations, deployment


def main() -> None:
    built = deployment()
    trace = conversations(1.0)
    own_rate = (len(trace) - 1) / float(trace.sent_s[-1] - trace.sent_s[0])
    most = summarise(simulate(conversations(100.0), built)).request_throughput
    print(f"trace at its own speed      {own_rate:7.2f} requests/s")
    print(f"capacity                    {most:7.2f} requests/s, which is rate-scale {most / own_rate:.2f}")
    low, high = 1.0, 2 * most / own_rate
    while high - low > 0.1:
        middle = (low + high) / 2
        if saturation(simulate(conversations(middle), built)).load is Load.SATURATED:
            high = middle
        else:
            low = middle
    print(f"drift test: not saturated up to rate-scale {low:.2f}")
    print(
        f"benchmark at rate-scale {RATE_SCALE}: {RATE_SCALE * own_rate / most:.0%} of capacity, "
        f"{RATE_SCALE / low:.0%} of the highest unsaturated rate-scale"
    )


if __name__ == "__main__":
    main()
