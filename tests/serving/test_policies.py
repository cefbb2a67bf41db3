"""Batch policies: how they are found, what the built-in ones do, and that the documented example works."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from serving.errors import UsageError
from serving.policies import BatchPolicy, Chunked, Continuous, Static, load_policy, policy_names
from serving.step import Step
from tests.serving.driver import Engine

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "policies.md"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, for modules that only this test sees."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


# ---- finding a policy ------------------------------------------------------------------------------------------------


def test_built_in_policies_are_found_by_name() -> None:
    assert policy_names() == ("chunked", "adaptive", "continuous", "static")
    assert isinstance(load_policy("chunked"), Chunked)
    assert isinstance(load_policy("continuous"), Continuous)
    assert isinstance(load_policy("static", batch_size=4), Static)


def test_an_unknown_name_is_answered_with_the_nearest_one() -> None:
    with pytest.raises(UsageError, match="unknown policy 'chunkd'; did you mean 'chunked'"):
        load_policy("chunkd")
    with pytest.raises(UsageError, match=re.escape("known: adaptive, chunked, continuous, static")):
        load_policy("zzz")


def test_a_policy_of_ones_own_is_loaded_from_the_current_folder(here: Path) -> None:
    (here / "my_module_a.py").write_text(
        "from serving.policies import Chunked\nclass MyPolicy(Chunked):\n    name = 'mine'\n"
    )
    policy = load_policy("my_module_a:MyPolicy")
    assert isinstance(policy, BatchPolicy)
    assert policy.name == "mine"


def test_a_plain_class_with_a_schedule_method_is_enough(here: Path) -> None:
    (here / "my_module_b.py").write_text(
        "class Plain:\n    def schedule(self, step):\n        step.continue_running()\n        step.admit_waiting()\n"
    )
    engine = Engine(load_policy("my_module_b:Plain"))
    engine.add("a", 5, max_tokens=3)
    engine.run()
    assert engine.idle


@pytest.mark.parametrize(
    ("source", "name", "message"),
    [
        ("", "missing_module:P", "cannot import 'missing_module'"),
        ("x = 1\n", "my_module_c:Nothing", "has no class 'Nothing' with a schedule"),
        ("class P: pass\n", "my_module_c:P", "has no class 'P' with a schedule"),
        ("P = 3\n", "my_module_c:P", "has no class 'P' with a schedule"),
        ("def broken(:\n", "my_module_c:P", "cannot import 'my_module_c'"),
        ("raise RuntimeError('no luck')\n", "my_module_c:P", "cannot import 'my_module_c': no luck"),
        ("class P:\n    def schedule(self): pass\n", "my_module_c:", "has no class ''"),
    ],
)
def test_what_cannot_be_loaded_is_one_clear_error(here: Path, source: str, name: str, message: str) -> None:
    (here / "my_module_c.py").write_text(source)
    with pytest.raises(UsageError, match=re.escape(message)):
        load_policy(name)


def test_options_that_a_policy_does_not_take_are_an_error() -> None:
    with pytest.raises(UsageError, match="'chunked' does not take these options"):
        load_policy("chunked", batch_size=3)
    with pytest.raises(UsageError, match="batch_size is 0"):
        load_policy("static", batch_size=0)
    with pytest.raises(UsageError, match="max_wait_s is -1"):
        load_policy("static", max_wait_s=-1)
    with pytest.raises(UsageError, match="max_wait_s is nan"):
        load_policy("static", max_wait_s=float("nan"))


def test_a_policy_without_schedule_says_so() -> None:
    class Forgetful(BatchPolicy):
        pass

    engine = Engine(Forgetful())
    with pytest.raises(NotImplementedError, match=r"Forgetful must define schedule\(step\)"):
        engine.step()


# ---- the verbs -------------------------------------------------------------------------------------------------------


class Verbs(BatchPolicy):
    """Runs what the test put into `do`."""

    def schedule(self, step: Step) -> None:
        self.do(step)

    @staticmethod
    def do(step: Step) -> None:
        step.admit_waiting()


def test_extend_schedules_as_much_as_asked_wanted_and_left() -> None:
    policy = Verbs()
    engine = Engine(policy, max_num_batched_tokens=10)
    request = engine.add("a", 30)
    engine.step()
    seen = []

    def do(step: Step) -> None:
        assert step.wanted(request) == 20
        seen.append(step.extend(request, 4))
        seen.append(step.extend(request))  # already in this step
        assert step.scheduled(request)
        assert step.token_budget == 6
        assert step.num_tokens == 4

    policy.do = do  # type: ignore[method-assign]
    assert engine.step().sched == {"a": 4}
    assert seen == [True, False]


def test_admit_takes_a_request_from_anywhere_in_the_queue_and_a_refused_one_keeps_its_place() -> None:
    policy = Verbs()
    engine = Engine(policy, num_pages=4, page_tokens=4)
    engine.add("first", 8)
    big, small = engine.add("big", 16), engine.add("small", 2)
    engine.add("last", 2)
    engine.step()  # first runs; two pages are free

    def do(step: Step) -> None:
        assert not step.admit(big)
        assert [r.id for r in step.scheduler.waiting] == ["big", "small", "last"]
        assert step.admit(small)

    policy.do = do  # type: ignore[method-assign]
    decided = engine.step()
    assert decided.sched == {"small": 2}
    assert decided.waiting == ["big", "last"]


def test_a_refused_request_that_is_not_the_head_does_not_block_the_head() -> None:
    policy = Verbs()
    engine = Engine(policy, num_pages=4, page_tokens=4)
    engine.add("first", 8)
    engine.step()
    engine.add("head", 2)
    big = engine.add("big", 16)

    def do(step: Step) -> None:
        assert not step.admit(big)
        step.admit_waiting()

    policy.do = do  # type: ignore[method-assign]
    assert engine.step().sched == {"head": 2}


def test_preempt_gives_back_the_tokens_that_the_step_had_planned() -> None:
    policy = Verbs()
    engine = Engine(policy, max_num_batched_tokens=20)
    a, b = engine.add("a", 5), engine.add("b", 5)
    engine.step()

    def do(step: Step) -> None:
        step.continue_running()
        assert step.num_tokens == 2
        step.preempt(a)
        assert step.num_tokens == 1
        assert step.token_budget == 19
        assert step.scheduled(b)
        assert not step.scheduled(a)

    policy.do = do  # type: ignore[method-assign]
    decided = engine.step()
    assert decided.sched == {"b": 1}
    assert decided.waiting == ["a"]


# ---- built-in policies -----------------------------------------------------------------------------------------------


def test_continuous_prefills_whole_prompts_before_anybody_decodes() -> None:
    engine = Engine(Continuous(), max_num_batched_tokens=20)
    engine.add("a", 8, max_tokens=5)
    assert engine.step().sched == {"a": 8}
    engine.add("b", 12)
    engine.add("c", 8)
    engine.add("d", 9)
    # b and c fill the budget of 20 exactly; a's decode stalls, as do d's and everybody else's.
    assert engine.step().sched == {"b": 12, "c": 8}
    assert engine.step().sched == {"d": 9}
    assert engine.step().sched == {"a": 1, "b": 1, "c": 1, "d": 1}


def test_continuous_gives_a_prompt_beyond_the_budget_a_step_to_itself() -> None:
    engine = Engine(Continuous(), max_num_batched_tokens=20)
    engine.add("a", 50)
    engine.add("b", 5)
    assert engine.step().sched == {"a": 50}
    assert engine.step().sched == {"b": 5}


def test_a_static_batch_starts_when_it_is_full_and_runs_until_its_last_member_is_done() -> None:
    engine = Engine(Static(batch_size=2, max_wait_s=1e9))
    engine.add("a", 4, max_tokens=2)
    assert engine.step().sched == {}
    engine.add("b", 4, max_tokens=4)
    engine.add("c", 4)
    assert engine.step().sched == {"a": 4, "b": 4}
    assert engine.step().finished == ["a"]
    # a's seat stays empty until b is done.
    for _ in range(2):
        assert engine.step().sched == {"b": 1}
    assert engine.scheduler.num_running == 0
    assert engine.step().sched == {}


def test_a_static_batch_starts_when_its_oldest_member_has_waited_long_enough() -> None:
    engine = Engine(Static(batch_size=4, max_wait_s=3.0))
    engine.add("a", 4, arrival_s=0.0)  # the driver's clock: the number of the step
    for _ in range(3):
        assert engine.step().sched == {}
        assert engine.scheduler.wake_s == 3.0
    assert engine.step().sched == {"a": 4}


def test_a_static_batch_reserves_its_longest_answers_so_nobody_is_preempted() -> None:
    # 4 + 9 tokens need 4 pages of 4 each, so only two of three fit a pool of 11.
    engine = Engine(Static(max_wait_s=0.0), num_pages=11, page_tokens=4, enable_prefix_caching=False)
    for name in "abc":
        engine.add(name, 4, max_tokens=9)
    decided = engine.step()
    assert decided.sched == {"a": 4, "b": 4}
    assert decided.free == 11 - 2 * 4
    assert not any(d.preempted for d in engine.run())


def test_finished_members_of_a_static_batch_are_computed_as_padding() -> None:
    engine = Engine(Static(batch_size=3, max_wait_s=0.0))
    for i, max_tokens in enumerate((2, 2, 5)):
        engine.add(i, 4, max_tokens=max_tokens)
    padding = []
    while engine.scheduler.num_unfinished:
        engine.plan()
        padding.append(engine.in_flight[-1][0].num_padding)
        engine.commit()
    assert padding == [0, 0, 2, 2, 2]


# ---- the documented example ------------------------------------------------------------------------------------------


def example() -> str:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    assert len(blocks) == 1
    return str(blocks[0])


def test_the_documented_policy_is_short_and_loads(here: Path) -> None:
    (here / "skip_ahead.py").write_text(example())
    assert len([line for line in example().splitlines() if line.strip()]) <= 30
    assert load_policy("skip_ahead:SkipAhead", patience=2).name == "skip_ahead"


def test_the_documented_policy_lets_small_requests_pass_but_does_not_starve_the_head(here: Path) -> None:
    (here / "skip_ahead.py").write_text(example())
    engine = Engine(load_policy("skip_ahead:SkipAhead", patience=3), num_pages=8, page_tokens=4)
    engine.add("first", 16, max_tokens=30)
    engine.add("big", 28, max_tokens=2)
    for i in range(12):
        engine.add(i, 2, max_tokens=2)
    decided = engine.step()
    # big needs 7 pages of 4: three small ones may pass, and no more before it runs.
    assert decided.sched == {"first": 16, 0: 2, 1: 2, 2: 2}
    assert decided.waiting[0] == "big"
    history = engine.run(limit=200)
    admitted = [request_id for d in history for request_id in d.hits]
    assert admitted[0] == "big"
    assert engine.idle


def test_the_documented_policy_serves_what_the_built_in_one_serves(here: Path) -> None:
    (here / "skip_ahead.py").write_text(example())
    answers = []
    for policy in (load_policy("skip_ahead:SkipAhead"), Chunked()):
        engine = Engine(policy, num_pages=14, page_tokens=4, max_num_batched_tokens=16)
        for i in range(20):
            engine.add(i, 1 + 7 * i % 30, max_tokens=1 + 5 * i % 12)
        engine.run()
        assert engine.idle
        answers.append(engine.answers)
    assert answers[0] == answers[1]


def test_the_page_names_every_verb_and_no_other() -> None:
    page = PAGE.read_text()
    verbs = {
        name
        for name in vars(Step)
        if not name.startswith("_") and name not in ("finish", "num_tokens", "num_running")
    }
    named = set(re.findall(r"`step\.(\w+)", page))
    assert verbs <= named
    step = Step(Engine().scheduler, 0.0)
    assert all(hasattr(step, name) for name in named)
