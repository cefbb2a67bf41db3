"""Load on a server and what the client saw of it, beside what `simulate` says of the very same arrivals."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np

from sim.deployment import Deployment, simulate
from sim.latency import latencies
from sim.record import Floats
from tests.sim.worlds import make_workload


@dataclass(frozen=True)
class Seen:
    """What a client measured, in the order of sending; real seconds."""

    sent_s: Floats
    prompt_tokens: list[int]
    output_tokens: list[int]
    ttft_s: Floats
    tpot_s: Floats


def send(url: str, sent_s: Sequence[float], lengths: Sequence[tuple[int, int]]) -> Seen:
    """Stream completions of (prompt, answer) tokens at their times, as `vllm bench serve` does."""

    async def one(client: httpx.AsyncClient, place: int, begun_s: float) -> tuple[float, float, float]:
        prompt, answer = lengths[place]
        await asyncio.sleep(begun_s + sent_s[place] - time.perf_counter())
        body = {"prompt": [place, *range(2000, 1999 + prompt)], "max_tokens": answer, "ignore_eos": True}
        started_s, times_s = time.perf_counter(), []
        async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                now_s = time.perf_counter()
                if line.startswith("data: {") and json.loads(line[6:])["choices"]:
                    times_s.append(now_s)
        return started_s - begun_s, times_s[0] - started_s, (times_s[-1] - times_s[0]) / (answer - 1)

    async def main() -> list[tuple[float, float, float]]:
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            await client.get("/health")
            begun_s = time.perf_counter() + 0.1
            return await asyncio.gather(*(one(client, place, begun_s) for place in range(len(lengths))))

    rows = np.array(asyncio.run(main()))
    return Seen(rows[:, 0], [p for p, _ in lengths], [a for _, a in lengths], rows[:, 1], rows[:, 2])


def read_detailed(result: dict[str, Any]) -> Seen:
    """From the JSON of `vllm bench serve --save-detailed`."""
    order = np.argsort(result["start_times"])
    sent_s = np.array(result["start_times"])[order]
    ttft_s = np.array(result["ttfts"])[order]
    tokens = np.array(result["output_lens"])[order]
    e2el_s = ttft_s + np.array([sum(gaps) for gaps in result["itls"]])[order]
    return Seen(
        sent_s - sent_s[0],
        np.array(result["input_lens"])[order].tolist(),
        tokens.tolist(),
        ttft_s,
        (e2el_s - ttft_s) / (tokens - 1),
    )


def errors(seen: Seen, deployment: Deployment, time_scale: float) -> dict[str, float]:
    """By how much mean and median of what was seen differ from those that `simulate` gives for the same arrivals."""
    sent_s = (seen.sent_s * time_scale).tolist()
    said = latencies(simulate(make_workload(sent_s, seen.prompt_tokens, seen.output_tokens), deployment))
    out = {}
    for name, seen_s, simulated in (("ttft", seen.ttft_s, said.ttft_s), ("tpot", seen.tpot_s, said.tpot_s)):
        measured = seen_s * time_scale
        for word, statistic in (("mean", np.mean), ("median", np.median)):
            out[f"{word}_{name}"] = float(statistic(measured) / statistic(simulated) - 1)
    return out
