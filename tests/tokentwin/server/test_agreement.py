"""What a client measures against the twin at 4 requests a second is what `simulate` says, within 10 %."""

from __future__ import annotations

import numpy as np

from sim.deployment import Deployment
from tests.tokentwin.server.harness import serving, twin
from tests.tokentwin.server.load import errors, send

DEPLOYMENT = {"model": "llama-3.1-8b", "gpu": "l40s", "max_model_len": 16384}
RATE = 4.0
PROMPTS = (400, 1200)
"""Half busy: a queue near saturation would blow every delay up."""
SCALES = (0.4, 0.2, 0.1)
"""Slower than real, so that delays of this machine weigh less than the twin's own times. Where it is too busy even so,
the measurement is repeated at half the pace; the limit stays."""


def test_a_client_sees_the_latencies_that_simulate_gives() -> None:
    rng = np.random.default_rng(0)
    lengths = [(int(prompt), 20) for prompt in rng.integers(*PROMPTS, 14)]
    gaps_s = rng.exponential(1.0, len(lengths))
    # As in vLLM's benchmark, the last of N requests is sent at N / rate.
    sent_s = np.cumsum(gaps_s / gaps_s.mean() / RATE)
    for scale in SCALES:
        with serving(twin(time_scale=scale, **DEPLOYMENT)) as server:
            seen = send(server.url, (sent_s / scale).tolist(), lengths)
        off = errors(seen, Deployment(**DEPLOYMENT), scale)
        if max(map(abs, off.values())) < 0.1:
            return
    raise AssertionError(f"even at time scale {scale}: {off}")
