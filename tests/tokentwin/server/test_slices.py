"""Tokens that gather before they are sent: the server's groups are those of `simulate`, and no token is lost for it."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realengine.answer import Output
from realengine.generation import Sampling
from serving.config import SchedulerConfig
from sim.clock import LATE
from sim.deployment import simulate
from sim.wire import Stream
from tests.sim.worlds import make_workload
from tests.tokentwin.server.harness import idle, twin
from tests.tokentwin.server.test_twin_backend import Told, at, before_time, requests
from tokentwin.server.backend import Delta, Failed, Generation, GenerationRequest
from tokentwin.server.engine import EngineBackend
from tokentwin.server.mailbox import Mailbox, Slices
from tokentwin.server.plain_codec import PlainCodec

Groups = list[tuple[float, int]]
"""When tokens were sent together, and how many."""


@dataclass
class Timers:
    """A clock that somebody turns, and what is to be done at its times."""

    heap: list[tuple[float, int]] = field(default_factory=list)
    actions: dict[int, Callable[[], None]] = field(default_factory=dict)
    made: int = 0

    def call_at(self, time_s: float, action: Callable[[], None]) -> Callable[[], None]:
        number = self.made = self.made + 1
        heappush(self.heap, (time_s, number))
        self.actions[number] = action
        return lambda: self.actions.pop(number) and None

    def next_s(self) -> float:
        while self.heap and self.heap[0][1] not in self.actions:
            heappop(self.heap)
        return self.heap[0][0] if self.heap else float("inf")

    def fire(self) -> float:
        time_s = self.next_s()
        self.actions.pop(heappop(self.heap)[1])()
        return time_s


def take(box: Mailbox) -> list[Delta]:
    """What a reader gets who is there now."""
    if not box._ready.is_set():
        return []
    try:
        box.get().send(None)
    except StopIteration as done:
        got: list[Delta] = done.value
        return got
    raise AssertionError("something is due and the reader waits")


Answer = list[tuple[float, int]]
"""Times at which an engine gives tokens, and how many."""
gaps = st.sampled_from([0.0, 0.01, 0.02, 0.03, 0.1, 0.1 / 3, 0.25])
answers = st.lists(st.tuples(gaps, st.integers(1, 4)), min_size=1, max_size=30).map(
    lambda steps: list(zip(accumulate(gap for gap, _ in steps), (n for _, n in steps), strict=True))
)
ways = st.one_of(
    st.builds(lambda n: {"interval": n}, st.integers(1, 7)),
    st.builds(lambda s: {"slice_s": s}, st.sampled_from([0.001, 0.02, 0.05, 0.1, 0.7])),
)


def of_the_twin(answer: Answer, way: dict[str, Any]) -> Groups:
    stream = Stream(0, **way)
    for time_s, tokens in answer:
        stream.give(time_s, tokens)
    stream.end(answer[-1][0])
    return list(zip(stream.left_s, stream.tokens, strict=True))


@given(st.lists(answers, min_size=1, max_size=3), ways)
@settings(max_examples=150, deadline=None)
def test_groups_are_those_of_the_twins_streams(several: list[Answer], way: dict[str, Any]) -> None:
    """Every answer of a request by itself, for a reader who is always there."""
    timers = Timers()
    slices = Slices(way["slice_s"], timers.call_at) if "slice_s" in way else None
    box = Mailbox(way.get("interval", 1), slices=slices)
    sent: list[Groups] = [[] for _ in several]
    given_s = sorted({time_s for answer in several for time_s, _ in answer})

    def read(now_s: float) -> None:
        for delta in take(box):
            sent[delta.index].append((now_s, len(delta.token_ids)))

    for now_s in given_s:
        while timers.next_s() < now_s:
            read(timers.fire())
        for index, answer in enumerate(several):
            for place, (time_s, tokens) in enumerate(answer):
                if time_s == now_s:
                    reason = "length" if place == len(answer) - 1 else None
                    assert box.put(Delta(index, [0] * tokens, finish_reason=reason), now_s)
                    read(now_s)
        while timers.next_s() == now_s:
            read(timers.fire())
    assert not timers.actions
    assert sent == [of_the_twin(answer, way) for answer in several]


@given(st.data(), ways, st.integers(1, 3))
@settings(max_examples=150, deadline=None)
def test_no_token_is_lost_doubled_or_out_of_order_whenever_whoever_comes(
    data: st.DataObject, way: dict[str, Any], count: int
) -> None:
    """Steps, slices that end (late, too) and a reader who comes and goes, in any order; he is woken for what is due."""
    timers = Timers()
    box = Mailbox(
        way.get("interval", 1), slices=Slices(way["slice_s"], timers.call_at) if "slice_s" in way else None
    )
    put, got = [0] * count, [0] * count
    ended: set[int] = set()
    now_s = 0.0

    def read() -> None:
        for delta in take(box):
            assert delta.token_ids == list(range(got[delta.index], got[delta.index] + len(delta.token_ids)))
            got[delta.index] += len(delta.token_ids)

    for _ in range(data.draw(st.integers(1, 60))):
        what = data.draw(st.sampled_from(["step", "step", "slice", "read", "end"]))
        open_ones = [index for index in range(count) if index not in ended]
        if what == "read":
            read()
        elif what == "slice" and timers.next_s() < float("inf"):
            now_s = max(now_s, timers.fire())
        elif what in ("step", "end") and open_ones:
            now_s += data.draw(gaps)
            index, tokens = data.draw(st.sampled_from(open_ones)), data.draw(st.integers(1, 3))
            ids = list(range(put[index], put[index] + tokens))
            put[index] += tokens
            if what == "end":
                ended.add(index)
            assert box.put(Delta(index, ids, finish_reason="length" if what == "end" else None), now_s)
        assert box._waiting_tokens == sum(put) - sum(got)
        assert box._ready.is_set() == bool(box._due)
        if way.get("interval", 1) == 1:
            # What neither is due nor was taken waits for the end of a slice.
            assert set(box._gathering) == set(box._ends)
            assert len(timers.actions) == len(box._ends)
    while timers.next_s() < float("inf"):
        timers.fire()
    read()
    kept = [len(box._gathering[i].token_ids) if i in box._gathering else 0 for i in range(count)]
    assert [a - b for a, b in zip(put, kept, strict=True)] == got
    assert all(n < way.get("interval", 1) for n in kept)
    assert not any(kept[index] for index in ended)


def test_a_closed_box_has_no_slice_under_way() -> None:
    for close in (
        Mailbox.close,
        lambda box: box.fail(Failed("broken")),
        lambda box: box.put(Delta(0, [0] * 9), 0.03),
    ):
        timers = Timers()
        box = Mailbox(limit=8, slices=Slices(0.1, timers.call_at))
        for index in range(3):
            box.put(Delta(index, [1]), 0.01)
            box.put(Delta(index, [2]), 0.02)
        assert len(timers.actions) == 3
        close(box)
        assert not timers.actions
        assert not box._due
        assert not box.put(Delta(0, [3]), 0.05)


def test_without_slices_nobody_looks_at_a_clock() -> None:
    box = Mailbox(interval=4)
    for token in range(9):
        assert box.put(Delta(0, [token]))
    assert not box._ends


# ---- the twin's server ---------------------------------------------------------------------------------------


async def follow(backend: Any, generation: Generation) -> dict[int, Groups]:
    """By answer when each of its events was sent, on the backend's clock, and its tokens."""
    sent: dict[int, Groups] = {}
    async for delta in generation:
        sent.setdefault(delta.index, []).append((backend._clock.now, len(delta.token_ids)))
    return sent


def served(backend: Any, asked: Sequence[GenerationRequest], gap_s: float) -> list[dict[int, Groups]]:
    async def main() -> list[dict[int, Groups]]:
        await backend.start(Told())
        tasks = []
        with before_time(backend):
            for place, request in enumerate(asked):
                with at(backend, 0.1 + place * gap_s):
                    tasks.append(asyncio.ensure_future(follow(backend, backend.submit(request))))
        sent = await asyncio.gather(*tasks)
        assert idle(backend)
        await backend.stop()
        assert backend._clock.peek() == float("inf")
        return sent

    return asyncio.run(asyncio.wait_for(main(), 30))


@pytest.mark.parametrize(
    "way", [{"stream_slice_ms": 40.0}, {"stream_slice_ms": 0.5}, {"stream_interval": 7}], ids=str
)
def test_a_server_sends_what_simulate_says_at_the_same_times(way: dict[str, Any]) -> None:
    """The same arrivals: every event has as many tokens, and leaves at the same time of the deployment's clock."""
    gap_s = 0.02
    lengths = [(300 + 977 * i % 1800, 2 + 31 * i % 60) for i in range(12)]
    backend = twin(
        options={
            "stream_interval": way.get("stream_interval", 1),
            "stream_slice_s": way.get("stream_slice_ms", 0.0) / 1e3,
        },
        time_scale=500,
        enable_prefix_caching=False,
        max_model_len=4096,
        tokenize_us_per_token=0,
        detokenize_us_per_token=0,
        **way,
    )
    sent = served(backend, requests(lengths), gap_s)
    workload = make_workload([0.1 + i * gap_s for i in range(12)], *map(list, zip(*lengths, strict=True)))
    events = simulate(workload, backend.built.deployment).deliveries
    assert events is not None
    for row, one in enumerate(sent):
        mine = slice(events.offsets[row], events.offsets[row + 1])
        assert [tokens for _, tokens in one[0]] == events.tokens[mine].tolist()
        np.testing.assert_allclose([time_s for time_s, _ in one[0]], events.seen_s[mine], rtol=1e-9)


def test_answers_to_one_prompt_have_slices_of_their_own() -> None:
    backend = twin(options={"stream_slice_s": 0.05})
    (sent,) = served(backend, requests([(100, 40)], n=3), 0.0)
    assert set(sent) == {0, 1, 2}
    for groups in sent.values():
        assert sum(tokens for _, tokens in groups) == 40
        assert groups[0][1] == 1
        since = [(time_s - groups[0][0]) / 0.05 for time_s, _ in groups[:-1]]
        np.testing.assert_allclose(since, np.round(since), atol=1e-9)


@pytest.mark.parametrize("way", [{"stream_slice_s": 0.2}, {"stream_interval": 30}], ids=str)
def test_a_stop_string_ends_an_answer_at_once(way: dict[str, float]) -> None:
    """As in the engine, which looks for it in every step: not when the slice is over."""
    whole, last_s = read_out({})
    stop = whole[60:66]
    plain, plain_s = read_out({}, stop=(stop,))
    gathered, gathered_s = read_out(way, stop=(stop,))
    assert gathered == plain == whole[: whole.index(stop)]
    assert gathered_s == plain_s < last_s


def read_out(options: dict[str, float], **sampling: Any) -> tuple[str, float]:
    """The text of an answer, and when its end was sent."""
    backend = twin(options=options)

    async def main() -> tuple[str, float]:
        await backend.start(Told())
        with before_time(backend), at(backend, 0.1):
            generation = backend.submit(requests([(100, 64)], **sampling)[0])
        text = ""
        async for delta in generation:
            text += delta.text
        await backend.stop()
        return text, backend._clock.now

    return asyncio.run(asyncio.wait_for(main(), 30))


def test_a_client_that_leaves_takes_its_slices_with_it() -> None:
    backend = twin(options={"stream_slice_s": 3600.0})

    async def main() -> None:
        await backend.start(Told())
        generation = backend.submit(requests([(100, 5000)], n=2)[0])
        first = [await anext(generation), await anext(generation)]
        assert {delta.index for delta in first} == {0, 1}
        while not any(entry[1] == LATE for entry in backend._clock._queue):
            await asyncio.sleep(0)
        generation.abort()
        assert not any(entry[1] == LATE for entry in backend._clock._queue)
        assert idle(backend)
        await backend.stop()

    asyncio.run(asyncio.wait_for(main(), 30))


# ---- the engine's server -------------------------------------------------------------------------------------


class Waits(selectors.DefaultSelector):
    """Nothing ever comes from outside: waiting only lets time pass."""

    now_s = 1000.0

    def select(self, timeout: float | None = None) -> list[Any]:
        assert timeout is not None, "nobody is woken any more"
        self.now_s += timeout
        return super().select(0)


def in_no_time(main: Callable[[asyncio.AbstractEventLoop], Coroutine[Any, Any, None]]) -> None:
    """Run on a loop whose clock goes only where the loop waits."""
    waits = Waits()
    loop = asyncio.SelectorEventLoop(waits)
    loop.time = lambda: waits.now_s  # type: ignore[method-assign]
    try:
        loop.run_until_complete(main(loop))
    finally:
        loop.close()


def an_engine(
    loop: asyncio.AbstractEventLoop, begun_s: float
) -> tuple[EngineBackend, Callable[[Output], None]]:
    """A backend over what looks like an engine whose clock began at `begun_s` of the loop, and how it gives."""
    listeners: list[Callable[[Output], None]] = []

    def add(prompt: Any, sampling: Sampling, listener: Any, **_: Any) -> list[Any]:
        listeners.append(listener)
        return list(range(sampling.n))

    engine = SimpleNamespace(
        config=SchedulerConfig(8),
        scheduler=SimpleNamespace(refusal=lambda request: None),
        fault=None,
        add=add,
        abort=lambda request: None,
        now_s=lambda: loop.time() - begun_s,
    )
    backend = EngineBackend(engine, PlainCodec(), model="", root="", stream_slice_s=0.1)  # type: ignore[arg-type]
    nobody: Any = SimpleNamespace(
        first_token=lambda ttft_s: None, tokens=lambda n, gap_s: None, ended=lambda *_: None
    )
    backend._loop, backend._meters = loop, nobody
    backend._boundaries = SimpleNamespace(now_s=0.0, scheduled_s={})  # type: ignore[assignment]
    return backend, lambda output: listeners[0](output)


@given(answers)
@settings(max_examples=60, deadline=None)
def test_the_engines_slices_end_on_its_own_clock(answer: Answer) -> None:
    sent: Groups = []

    async def main(loop: asyncio.AbstractEventLoop) -> None:
        backend, give = an_engine(loop, begun_s := loop.time() + 5.0)
        generation = backend.submit(GenerationRequest("a", [1], Sampling(max_tokens=500)))

        async def read() -> None:
            async for delta in generation:
                sent.append((backend.engine.now_s(), len(delta.token_ids)))

        reading = asyncio.ensure_future(read())
        for place, (time_s, tokens) in enumerate(answer):
            if (wait_s := begun_s + time_s - loop.time()) > 0:
                await asyncio.sleep(wait_s)
            backend._boundaries.now_s = time_s
            reason = "length" if place == len(answer) - 1 else None
            give(Output(0, (7,) * tokens, finish_reason=reason))
            for _ in range(4):
                await asyncio.sleep(0)  # the reader is there
        await reading
        assert not [handle for handle in loop._scheduled if not handle.cancelled()]  # type: ignore[attr-defined]

    in_no_time(main)
    expected = of_the_twin(answer, {"slice_s": 0.1})
    assert sum(tokens for _, tokens in sent) == sum(tokens for _, tokens in expected)
    # The loop's times are sums: a step at the very end of a slice may come an instant after it.
    seen = np.repeat([time_s for time_s, _ in sent], [tokens for _, tokens in sent])
    wanted = np.repeat([time_s for time_s, _ in expected], [tokens for _, tokens in expected])
    np.testing.assert_allclose(seen, wanted, atol=1e-6)


def test_an_engines_client_that_leaves_takes_his_timers_with_him() -> None:
    async def main(loop: asyncio.AbstractEventLoop) -> None:
        backend, give = an_engine(loop, loop.time())
        generation = backend.submit(GenerationRequest("a", [1], Sampling(max_tokens=500)))
        for time_s in (0.01, 0.02):
            backend._boundaries.now_s = time_s
            give(Output(0, (7,)))
            await asyncio.sleep(0)
        assert len(loop._scheduled) == 1  # type: ignore[attr-defined]
        generation.abort()
        assert all(handle.cancelled() for handle in loop._scheduled)  # type: ignore[attr-defined]

    in_no_time(main)
