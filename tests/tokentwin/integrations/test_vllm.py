"""Our policies as vLLM's scheduler: with vLLM where there is one, otherwise with a fake of its interface.

Point TOKENTWIN_VLLM_PYTHON to a Python that has vLLM 0.33 (a CPU machine will do) to compare decisions with vLLM itself.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from serving.errors import UsageError
from tests.tokentwin.integrations import fake_vllm
from tests.tokentwin.integrations.fake_vllm import Request, config

HERE = Path(__file__).parent
SKIP_AHEAD = "tests.tokentwin.integrations.skip_ahead:SkipAhead"
PYTHON = sys.executable if find_spec("vllm") else os.environ.get("TOKENTWIN_VLLM_PYTHON")
with_vllm = pytest.mark.skipif(
    PYTHON is None, reason="vLLM 0.33 is not installed; TOKENTWIN_VLLM_PYTHON may name a Python that has it"
)


def on_vllm(*arguments: str) -> dict[str, Any]:
    """The last line of `on_vllm.py`."""
    assert PYTHON is not None
    done = subprocess.run(
        [PYTHON, str(HERE / "on_vllm.py"), *arguments],
        capture_output=True,
        text=True,
        cwd=HERE.parents[2],
        env=os.environ | {"VLLM_TARGET_DEVICE": "cpu", "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


@pytest.mark.slow
@with_vllm
def test_policy_chunked_inside_vllm_decides_what_vllm_decides() -> None:
    found = on_vllm("chunked", "30")
    assert found["difference"] is None
    assert found["steps"] > 3000
    assert found["preempted"] > 50, "the loads must run out of pages"


@pytest.mark.slow
@with_vllm
@pytest.mark.parametrize(
    "arguments",
    [
        ("continuous", "", "{}"),
        ("chunked", "sjf", "{}"),
        ("adaptive", "", '{"prefill_share": 0.1, "max_running_tokens": 300}'),
        (SKIP_AHEAD, "", "{}"),
    ],
)
def test_other_policies_and_orders_decide_inside_vllm_what_they_decide_here(
    arguments: tuple[str, ...],
) -> None:
    policy, *rest = arguments
    found = on_vllm(policy, "12", *rest)
    assert found["difference"] is None
    assert found["preempted"] > 20


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """`tokentwin.integrations.vllm` over the fake."""
    fake_vllm.install(monkeypatch)
    yield importlib.import_module("tokentwin.integrations.vllm")
    sys.modules.pop("tokentwin.integrations.vllm", None)


def run(scheduler: Any, requests: list[Request], limit: int = 500) -> list[Any]:
    """Everybody arrives at once and runs to the end; returns the outputs."""
    for request in requests:
        scheduler.add_request(request)
    outputs = []
    while scheduler.requests:
        output = scheduler.schedule()
        outputs.append(output)
        assert output.total_num_scheduled_tokens == sum(output.num_scheduled_tokens.values())
        assert output.total_num_scheduled_tokens <= scheduler.max_num_scheduled_tokens
        assert len(scheduler.running) <= scheduler.max_num_active_reqs
        new = {row.req_id for row in output.scheduled_new_reqs}
        assert new | set(output.scheduled_cached_reqs.req_ids) == set(output.num_scheduled_tokens)
        scheduler.deliver(output)
        assert len(outputs) < limit, "not done"
    return outputs


def requests(count: int = 9) -> list[Request]:
    return [Request(f"r{i}", 5 + 17 * i % 90, 30 + 11 * i % 40, arrival=float(i)) for i in range(count)]


@pytest.mark.parametrize("policy", ["chunked", "continuous", "adaptive", SKIP_AHEAD])
def test_a_policy_runs_everybody_and_gives_every_page_back(vllm: ModuleType, policy: str) -> None:
    made = vllm.PolicyScheduler(config({"tokentwin": {"policy": policy}}), num_blocks=20, block_size=16)
    outputs = run(made, requests())
    assert any(output.preempted_req_ids for output in outputs), "pages must run out"
    assert len(made.kv_cache_manager.free_ids) == 19


def test_static_batching_reserves_the_pages_of_the_whole_answer(vllm: ModuleType) -> None:
    section = {"policy": "static", "options": {"batch_size": 2, "max_wait_s": 0.0}}
    made = vllm.PolicyScheduler(config({"tokentwin": section}), num_blocks=20, block_size=16)
    outputs = run(made, [Request("a", 10, 40), Request("b", 10, 40), Request("c", 10, 2)])
    first, second = outputs[0].scheduled_new_reqs
    assert [len(row.block_ids[0]) for row in (first, second)] == [4, 4]  # 50 tokens in pages of 16
    assert sum("c" in output.num_scheduled_tokens for output in outputs) == 2
    assert not any(output.preempted_req_ids for output in outputs)


def test_a_request_that_the_policy_can_never_run_is_answered_with_its_reason(vllm: ModuleType) -> None:
    made = vllm.PolicyScheduler(config({"tokentwin": {"policy": "static"}}), num_blocks=5, block_size=16)
    made.add_request(Request("big", 10, 100))
    assert "reserves 7 pages" in made.grammar_compile_error_reqs["big"].message
    assert made.schedule().total_num_scheduled_tokens == 0


def test_shortest_job_first_and_deadlines_order_the_queue(vllm: ModuleType) -> None:
    def order(name: str, *queued: Request) -> list[str]:
        made = vllm.PolicyScheduler(
            config({"tokentwin": {"scheduling_policy": name}}, max_num_seqs=1), num_blocks=20, block_size=16
        )
        outputs = run(made, list(queued))
        return [row.req_id for output in outputs for row in output.scheduled_new_reqs]

    a, b, c = (Request(i, 4, n, arrival=float(t)) for t, (i, n) in enumerate([("a", 9), ("b", 3), ("c", 6)]))
    assert order("sjf", a, b, c) == ["b", "c", "a"]
    late = Request("late", 4, 2, arrival=0.0)
    due = Request("due", 4, 2, arrival=1.0, ttft_ms=100)
    assert order("edf", late, due) == ["due", "late"]


def test_asynchronous_scheduling_makes_an_asynchronous_scheduler(vllm: ModuleType) -> None:
    plain = vllm.PolicyScheduler(config(), num_blocks=5, block_size=16)
    ahead = vllm.PolicyScheduler(config(async_scheduling=True), num_blocks=5, block_size=16)
    assert not isinstance(plain, fake_vllm.AsyncScheduler)
    assert isinstance(ahead, fake_vllm.AsyncScheduler)
    assert isinstance(ahead, vllm.PolicyScheduler)


def test_a_paused_engine_admits_nobody(vllm: ModuleType) -> None:
    made = vllm.PolicyScheduler(config(), num_blocks=20, block_size=16)
    made.add_request(Request("a", 4, 2))
    made._pause_state = fake_vllm.PauseState.PAUSED_NEW
    assert made.schedule().total_num_scheduled_tokens == 0
    made._pause_state = fake_vllm.PauseState.UNPAUSED
    assert made.schedule().num_scheduled_tokens == {"a": 4}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"speculative_config": SimpleNamespace()}, "speculative decoding"),
        ({"prefill_schedule_interval": 4}, "--prefill-schedule-interval"),
        ({"additional": {"tokentwin": {"polcy": "chunked"}}}, "did you mean 'policy'"),
        ({"additional": {"tokentwin": {"policy": "chunkd"}}}, "did you mean 'chunked'"),
        (
            {"additional": {"tokentwin": {"scheduling_policy": "priority"}}},
            "set --scheduling-policy priority",
        ),
        ({"additional": {"tokentwin": {"scheduling_policy": "sjf"}}, "policy": "priority"}, "has no effect"),
        ({"additional": {"tokentwin": "chunked"}}, "must be a mapping"),
        (
            {"additional": {"tokentwin": {"scheduling_policy": "fair"}}},
            "scheduling_policy 'fair'; known: edf",
        ),
    ],
)
def test_what_a_policy_cannot_decide_about_is_refused_at_the_start(
    vllm: ModuleType, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        vllm.PolicyScheduler(config(changes.pop("additional", None), **changes), num_blocks=9, block_size=16)


class Reaches:
    """Reads what only the scheduler of `serving` has."""

    def schedule(self, step: Any) -> None:
        step.scheduler.pool.take(1)


class Greedy:
    """Wants more tokens in a step than there are."""

    def schedule(self, step: Any) -> None:
        step.set_budget(10_000)
        step.continue_running()
        step.admit_waiting()


def test_a_policy_that_reaches_past_the_verbs_is_told_so(vllm: ModuleType) -> None:
    section = {"tokentwin": {"policy": f"{__name__}:Reaches"}}
    made = vllm.PolicyScheduler(config(section), num_blocks=9, block_size=16)
    with pytest.raises(UsageError, match=r"step\.scheduler\.pool, which it does not have in vLLM"):
        made.schedule()


def test_a_budget_beyond_vllms_buffers_is_cut_with_a_warning(
    vllm: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    section = {"tokentwin": {"policy": f"{__name__}:Greedy"}}
    made = vllm.PolicyScheduler(config(section), num_blocks=20, block_size=16)
    outputs = run(made, [Request("long", 150, 1)])
    assert [output.num_scheduled_tokens["long"] for output in outputs] == [64, 64, 22]
    assert sum("wants 10000 tokens in a step; vLLM holds 64" in line for line in caplog.messages) == 1


def test_another_version_of_vllm_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake_vllm.install(monkeypatch, version="0.40.1")
    module = importlib.import_module("tokentwin.integrations.vllm")
    module.PolicyScheduler(config(), num_blocks=9, block_size=16)
    sys.modules.pop("tokentwin.integrations.vllm", None)
    assert any("this is 0.40.1" in line for line in caplog.messages)


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is there")
def test_without_vllm_the_import_says_what_is_missing() -> None:
    with pytest.raises(ImportError, match=r"runs inside vLLM 0\.33, which cannot be imported here"):
        importlib.import_module("tokentwin.integrations.vllm")
