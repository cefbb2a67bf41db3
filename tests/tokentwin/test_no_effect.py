"""Options that would have no effect are refused, in one line that says what to do instead."""

from __future__ import annotations

import pytest

import tokentwin as tt
from serving.errors import UsageError


def test_a_priority_that_all_requests_share_is_refused() -> None:
    with pytest.raises(UsageError, match=r"--priority has no effect.*workload file"):
        tt.simulate(model="llama-3.1-8b", gpu="h200", dataset_name="random", num_prompts=2, priority=1)


def test_earliest_deadline_first_needs_deadlines() -> None:
    with pytest.raises(UsageError, match=r"edf needs deadlines.*--goodput ttft"):
        tt.simulate(
            model="llama-3.1-8b", gpu="h200", dataset_name="random", num_prompts=2, scheduling_policy="edf"
        )
