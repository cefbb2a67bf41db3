"""Options that would have no effect are refused, in one line that says what to do instead."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import tokentwin as tt
from serving.errors import UsageError
from sim.deployment import Deployment, simulate
from tests.sim.worlds import make_workload


def test_a_priority_that_all_requests_share_is_refused() -> None:
    with pytest.raises(UsageError, match=r"--priority has no effect.*workload file"):
        tt.simulate(model="llama-3.1-8b", gpu="h200", dataset_name="random", num_prompts=2, priority=1)


def test_earliest_deadline_first_needs_deadlines() -> None:
    with pytest.raises(UsageError, match=r"edf needs deadlines.*--goodput ttft"):
        tt.simulate(
            model="llama-3.1-8b", gpu="h200", dataset_name="random", num_prompts=2, scheduling_policy="edf"
        )


def test_fair_shares_of_one_tenant_are_said_to_be_none() -> None:
    """No error, since the same configuration may be swept over workloads; it is the plain queue, to the last bit."""
    crowd = make_workload(np.arange(40) / 100, [3000] * 40, [20] * 40)
    fcfs, fair = (
        simulate(crowd, Deployment(model="llama-3.1-8b", max_num_seqs=2, scheduling_policy=order))
        for order in ("fcfs", "fair")
    )
    assert np.array_equal(fcfs.requests.last_token_s, fair.requests.last_token_s)
    assert fcfs.warnings == ()
    (said,) = fair.warnings
    assert said.startswith("--scheduling-policy fair has no effect: all requests are of one tenant")
    two = replace(
        crowd, tenant=np.arange(40) // 39, tenants=(*crowd.tenants, replace(crowd.tenants[0], name="b"))
    )
    late, early = (
        simulate(two, Deployment(model="llama-3.1-8b", max_num_seqs=2, scheduling_policy=order))
        for order in ("fcfs", "fair")
    )
    assert early.warnings == ()
    assert early.requests.last_token_s[39] < late.requests.last_token_s[39]


def test_answers_that_end_at_the_longest_sequence_are_told() -> None:
    """Prompt and answer fill `max_model_len` together, whatever was asked for."""
    known = {
        "model": "llama-3.2-1b",
        "dataset_name": "random",
        "isl": 32,
        "num_prompts": 3,
        "max_model_len": 64,
    }
    cut = tt.simulate(**known, osl=100)
    assert list(cut.record.requests.output_tokens) == [32] * 3
    assert any(
        "3 of 3 requests ask for more than fits max_model_len 64" in said for said in cut.record.warnings
    )
    fits = tt.simulate(**known, osl=32)
    assert list(fits.record.requests.output_tokens) == [32] * 3
    assert not any("max_model_len" in said for said in fits.record.warnings)
