"""Streams are followed the same, to the bit, through every kind of deployment, leaping or not."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from sim.deployment import Deployment, simulate
from sim.latency import latencies, stage_times
from sim.record import RunRecord, Status
from sim.workload import Workload, load_workload
from sim.workload.flags import spec_from_flags
from tests.sim.test_fast_forward import assert_same

NETWORK = {"clients": 2, "rtt_ms": 30, "bandwidth_mbit_s": 2, "reader_tokens_per_s": 60, "window_kib": 2}
PROTOCOLS: dict[str, dict[str, Any]] = {
    "pool": {"protocol": "http/1.1", "connections": 3, "handshake_round_trips": 2},
    "pipeline": {"protocol": "http/1.1-pipelined", "connections": 2},
}
DEPLOYMENTS: dict[str, dict[str, Any]] = {
    "replicas": {"data_parallel_size": 3},
    "disaggregated": {
        "pools": [
            {"gpu": "h200", "replicas": 1, "role": "prefill"},
            {"gpu": "h200", "replicas": 2, "role": "decode"},
        ]
    },
    "autoscaled": {"autoscaler": {"outstanding": 4, "max_replicas": 3}, "cold_start": {"seconds": 2}},
    "admission": {"admission": {"max_waiting": 2}, "max_num_seqs": 4},
    "drafts": {
        "speculative_config": json.dumps({"method": "ngram", "num_speculative_tokens": 4, "acceptance": 0.7})
    },
    "stages": {"pipeline_parallel_size": 2},
    "static": {"policy": "static", "static_batch_size": 4},
    "preempted": {"num_gpu_blocks_override": 80, "max_model_len": 400},
}


@pytest.fixture(scope="module")
def workload() -> Workload:
    flags = {
        "dataset_name": "random",
        "input_len": 200,
        "output_len": 60,
        "num_prompts": 40,
        "request_rate": 30.0,
    }
    return load_workload(spec_from_flags(flags), seed=1)


@pytest.mark.parametrize("protocol", sorted(PROTOCOLS))
@pytest.mark.parametrize("kind", sorted(DEPLOYMENTS))
def test_every_deployment(workload: Workload, kind: str, protocol: str) -> None:
    network = {**NETWORK, **PROTOCOLS[protocol]}
    deployment = Deployment(model="llama-3.1-8b", gpu="h200", network=network, **DEPLOYMENTS[kind])  # type: ignore[arg-type]

    def one(fast_forward: bool) -> RunRecord:
        return simulate(workload, deployment, fast_forward=fast_forward)

    fast, slow = one(True), one(False)
    assert_same(fast, slow)
    assert fast.deliveries is not None
    assert slow.deliveries is not None
    assert fast.deliveries.seen_s.tolist() == slow.deliveries.seen_s.tolist()
    r = fast.requests
    done = r.status == Status.FINISHED
    assert done.all() or kind == "admission"
    tokens = np.bincount(fast.deliveries.owners(), fast.deliveries.tokens, len(r))
    assert tokens[done].tolist() == r.output_tokens[done].tolist()
    total_s = sum(stage_times(fast).values(), start=np.zeros(len(r)))
    np.testing.assert_allclose(total_s[done], latencies(fast).e2el_s[done])
    engine_s = np.concatenate([fast.engine_token_times_s(i) for i in np.flatnonzero(done)])
    seen_s = np.concatenate([fast.token_times_s(i) for i in np.flatnonzero(done)])
    assert (seen_s > engine_s + 0.015 - 1e-9).all()
    if kind == "preempted" and protocol == "pipeline":
        assert r.preemptions.any()
