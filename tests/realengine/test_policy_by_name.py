"""A policy of one's own that passes `tokentwin policy-test` runs in the real engine, and the twin, by the same name."""

from __future__ import annotations

import pytest

from experiments.policy_test import check_policy
from serving.policies import load_policy
from tests.realengine.engines import tiny_model
from tests.realengine.test_parity import TINY_CACHE, Load, assert_same_plans, record_and_replay

NAME = "tests.tokentwin.integrations.skip_ahead:SkipAhead"


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_a_policy_that_passes_runs_in_the_real_engine_by_the_same_name(asynchronous: bool) -> None:
    assert check_policy({"policy": NAME}, cases=5).passed
    engine, decided, twin = record_and_replay(
        tiny_model(),
        Load(),
        lambda: load_policy(NAME),
        0.004,
        **TINY_CACHE,
        async_scheduling=asynchronous,
    )
    assert type(engine.scheduler.policy).__name__ == "SkipAhead"
    assert sum(len(d["rows"]) for d in decided) > 100
    assert_same_plans(decided, twin.decisions)
