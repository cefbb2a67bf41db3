"""Runs small enough to check by hand: a first-come-first-served server, and a single-server queue."""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np

from sim.record import RequestTable, RunRecord, StepTable, Tenant, TokenRanges

IN_S, OUT_S, TOKENIZE_S = 0.010, 0.010, 0.001
STEP_S, PREFILL_TOKEN_S = 0.010, 0.0001


def toy_run(
    sent_s: Any,
    prompt_tokens: Any,
    output_tokens: Any,
    *,
    max_num_seqs: int = 8,
    rejected: tuple[int, ...] = (),
    until_s: float = np.inf,
    tenant: Any = None,
    tenants: tuple[Tenant, ...] = (Tenant(),),
    **changes: Any,
) -> RunRecord:
    """Serve requests first come first served; every step takes 10 ms and 0.1 ms per prompt token.

    A request is computed whole in the step that admits it, which gives its first token; each further step
    gives one more. It takes 10 ms to the server, 1 ms to tokenise, 10 ms back. The run is cut at `until_s`.
    """
    sent, prompt, output = (np.asarray(x) for x in (sent_s, prompt_tokens, output_tokens))
    n = len(sent)
    moments = ("queued", "scheduled", "prefill_done", "engine_done", "first", "last")
    times = {moment: np.full(n, np.nan) for moment in moments}
    first_step, produced = np.zeros(n, np.int64), np.zeros(n, np.int64)
    queue = [i for i in range(n) if i not in rejected]
    ends: list[tuple[int, int]] = []
    rows: list[tuple[float, ...]] = []
    now, waiting = 0.0, 0
    for i in queue:
        times["queued"][i] = sent[i] + IN_S + TOKENIZE_S
    joined = times["queued"][queue] if queue else np.empty(0)
    while (waiting < len(queue) or ends) and now < until_s:
        if not ends:
            now = max(now, float(times["queued"][queue[waiting]]))
        admitted = []
        while waiting < len(queue) and len(ends) < max_num_seqs and times["queued"][queue[waiting]] <= now:
            i = queue[waiting]
            waiting += 1
            admitted.append(i)
            times["scheduled"][i], first_step[i] = now, len(rows)
            heapq.heappush(ends, (len(rows) + int(output[i]) - 1, i))
        new_tokens = sum(int(prompt[i]) for i in admitted)
        decodes = len(ends) - len(admitted)
        end = now + STEP_S + PREFILL_TOKEN_S * new_tokens
        late = int(np.searchsorted(joined, now, side="right")) - waiting
        pages = sum(-(-int(prompt[i] + output[i]) // 16) for _, i in ends) if n < 1000 else 4 * len(ends)
        area = sum(int(prompt[i]) * (int(prompt[i]) + 1) / 2 for i in admitted)
        rows.append(
            (
                now,
                end,
                end - now - 0.001,
                new_tokens + decodes,
                new_tokens,
                len(admitted),
                decodes,
                decodes * 64,
                area,
                new_tokens,
                len(ends),
                max(late, 0),
                pages,
            )
        )
        for i in admitted:
            times["prefill_done"][i], times["first"][i] = end, end + OUT_S
        now = end
        while ends and ends[0][0] == len(rows) - 1:
            _, i = heapq.heappop(ends)
            times["engine_done"][i], times["last"][i] = end, end + OUT_S
            produced[i] = output[i]
    for _, i in ends:
        produced[i] = len(rows) - first_step[i]
    status = np.where(np.isnan(times["last"]), 0, 1)
    status[list(rejected)] = 2
    reason = np.array(["", "length", "prompt is longer than max_model_len"], dtype=object)[status]
    c = [np.array(column) for column in zip(*rows, strict=True)] if rows else [np.empty(0)] * 13
    ints = [x.astype(np.int64) for x in c]
    zeros, steps0 = np.zeros(n, np.int64), np.zeros(len(rows), np.int64)
    known = np.where(status == 2, np.nan, 1.0)
    fields: dict[str, Any] = {
        "requests": RequestTable(
            np.arange(n),
            zeros if tenant is None else np.asarray(tenant),
            np.where(status == 2, -1, 0),
            sent * 1.0,
            times["queued"],
            times["scheduled"],
            times["prefill_done"],
            times["engine_done"],
            times["first"],
            times["last"],
            known * (IN_S + OUT_S),
            known * TOKENIZE_S,
            prompt,
            produced,
            output,
            zeros.copy(),
            zeros,
            status,
            reason,
        ),
        "steps": StepTable(
            steps0,
            c[0],
            c[1],
            c[2],
            np.full(len(rows), 0.001),
            ints[3],
            ints[4],
            ints[5],
            ints[6],
            ints[7],
            c[8],
            ints[9],
            ints[10],
            ints[11],
            ints[12],
            steps0,
        ),
        "tokens": TokenRanges(
            np.concatenate([[0], np.cumsum(produced > 0)]), first_step[produced > 0], produced[produced > 0]
        ),
        "tenants": tenants,
        "num_pages": 1000,
        "page_tokens": 16,
        "num_replicas": 1,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": 8192,
        "end_s": float(np.nanmax([now, *times["last"], *sent, 0.0])),
        "interrupted": bool(np.isfinite(until_s)),
        "meta": {"model_id": "toy", "seed": 0},
    }
    return RunRecord(**fields | changes)


def queue_run(rho: float, num_requests: int, seed: int, **changes: Any) -> RunRecord:
    """A single-server queue with Poisson arrivals and exponential service of mean 1 s, at load `rho`."""
    rng = np.random.default_rng(seed)
    sent = np.cumsum(rng.exponential(1 / rho, num_requests))
    service = rng.exponential(1.0, num_requests)
    # Lindley: a request starts when it has come and the one before it is done; in closed form,
    # done[i] = S[i] + max over j ≤ i of (sent[j] − S[j − 1]), with S the running sum of service times.
    total = np.cumsum(service)
    done = total + np.maximum.accumulate(sent - (total - service))
    blank = toy_run([], np.array([], np.int64), np.array([], np.int64))
    ones, zeros, nothing = (np.full(num_requests, v) for v in (1, 0, 0.0))
    start = done - service
    requests = RequestTable(
        np.arange(num_requests),
        zeros,
        zeros,
        sent,
        sent,
        start,
        done,
        done,
        done,
        done,
        nothing,
        nothing,
        ones,
        ones,
        ones,
        zeros,
        zeros,
        ones,
        np.full(num_requests, "length", dtype=object),
    )
    tokens = TokenRanges(np.zeros(num_requests + 1, np.int64), zeros[:0], zeros[:0])
    fields = {f: getattr(blank, f) for f in RunRecord.__slots__}
    return RunRecord(**fields | {"requests": requests, "tokens": tokens, "end_s": float(done[-1])} | changes)
