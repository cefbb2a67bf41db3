"""Beam search and best-of in front of a twin: the fields of the engine's server, the times of `simulate`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from realengine.generation import Sampling
from sim.deployment import simulate
from sim.latency import latencies
from tests.sim.worlds import make_workload
from tests.tokentwin.server.harness import Running, idle, serving, twin, until
from tests.tokentwin.server.test_clients import raw_request
from tests.tokentwin.server.test_twin_backend import Told, read, run
from tokentwin.server.backend import BeamOptions, GenerationRequest
from tokentwin.server.plain_codec import PlainCodec
from tokentwin.server.twin_beams import Words

LENGTHS = ((300, 40), (17, 25), (1200, 30), (64, 1))


def searches(width: int) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            str(i),
            [i, *range(1000, 999 + prompt)],
            Sampling(max_tokens=answer, n=width, temperature=0.0),
            beams=BeamOptions() if i != 2 else None,
        )
        for i, (prompt, answer) in enumerate(LENGTHS)
    ]


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("width", [1, 4])
def test_times_are_those_of_a_simulation(width: int, asynchronous: bool) -> None:
    """Three searches and a plain request among them, 50 ms apart."""
    backend = twin(async_scheduling=asynchronous)
    asked = searches(width)
    asked[2] = replace(asked[2], sampling=replace(asked[2].sampling, n=1))
    told, answers = run(backend, asked, gap_s=0.05)
    sent = [0.1 + 0.05 * i for i in range(len(LENGTHS))]
    workload = make_workload(sent, *map(list, zip(*LENGTHS, strict=True)))
    workload = replace(workload, beam_width=np.array([width, width, 0, width], np.int64))
    free = {"tokenize_us_per_token": 0.0, "detokenize_us_per_token": 0.0}
    record = simulate(workload, backend.built.deployment.model_copy(update=free))
    lat = latencies(record)
    for row, deltas in enumerate(answers):
        timing = deltas[-1].timing
        assert timing is not None
        overhead_s = record.requests.queued_s[row] - record.requests.sent_s[row]
        assert timing.ttft_s == pytest.approx(lat.ttft_s[row], abs=1e-9)
        assert timing.last_token_s == pytest.approx(record.requests.engine_done_s[row], abs=1e-9)
        assert timing.queue_s == pytest.approx(lat.queue_s[row] + overhead_s, abs=1e-9)
        if row != 2:
            assert [len(delta.token_ids) for delta in deltas] == [LENGTHS[row][1]] * width
            assert len({tuple(delta.token_ids) for delta in deltas}) == width
    assert told.num_tokens == sum(width * n for i, (_, n) in enumerate(LENGTHS) if i != 2) + LENGTHS[2][1]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(twin()) as server:
        yield server


def ask(server: Running, path: str = "/v1/completions", **body: Any) -> Any:
    with server.client() as client:
        answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_hypothesis_is_found_when_it_comes_back() -> None:
    """All full pages of any of them, up to the last token, which nobody computed."""
    prompt, output = list(range(2, 100)), 40

    async def main() -> list[int]:
        backend = twin()
        await backend.start(Told())
        search = Sampling(max_tokens=output, n=4, temperature=0.0)
        found = await read(backend.submit(GenerationRequest("0", prompt, search, beams=BeamOptions())))
        cached = []
        for delta in found:
            ids = [*prompt, *delta.token_ids]
            (one,) = await read(backend.submit(GenerationRequest("1", ids, Sampling(max_tokens=1))))
            assert one.timing is not None
            cached.append(one.timing.cached_tokens)
        assert idle(backend)
        await backend.stop()
        return cached

    assert set(asyncio.run(main())) == {(len(prompt) + output - 1) // 16 * 16}


def test_a_chat_of_open_length_has_the_twins_and_stops_by_itself(server: Running) -> None:
    body = {"messages": [{"role": "user", "content": "hello"}], "use_beam_search": True, "n": 2}
    choices = ask(server, "/v1/chat/completions", **body)["choices"]
    assert [choice["finish_reason"] for choice in choices] == ["stop", "stop"]
    assert all(choice["message"]["content"] for choice in choices)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_times_of_best_of_are_those_of_a_simulation(asynchronous: bool) -> None:
    backend = twin(async_scheduling=asynchronous)
    one = Sampling(max_tokens=30, temperature=1.0)
    asked = [
        GenerationRequest("0", list(range(2, 302)), one, best_of=5),
        GenerationRequest("1", list(range(500, 580)), one, best_of=2),
    ]
    _, answers = run(backend, asked, gap_s=0.05)
    workload = make_workload([0.1, 0.15], [300, 80], [30, 30])
    free = {"tokenize_us_per_token": 0.0, "detokenize_us_per_token": 0.0}
    record = simulate(
        replace(workload, best_of=np.array([5, 2], np.int64)),
        backend.built.deployment.model_copy(update=free),
    )
    for row, (delta,) in enumerate(answers):
        assert delta.timing is not None
        assert delta.timing.last_token_s == pytest.approx(record.requests.engine_done_s[row], abs=1e-9)
        assert delta.timing.ttft_s == pytest.approx(latencies(record).e2el_s[row], abs=1e-9)


def test_best_of_waits_for_all_of_them() -> None:
    backend = twin(time_scale=20.0)
    one = Sampling(max_tokens=30, temperature=1.0)
    asked = [GenerationRequest("0", range(50), one, best_of=5), GenerationRequest("1", range(50), one)]
    told, (best, alone) = run(backend, asked, gap_s=5.0)
    assert len(best) == 1
    assert best[0].index == 0
    assert len(best[0].token_ids) == 30
    assert best[0].timing is not None
    assert alone[-1].timing is not None
    assert best[0].timing.ttft_s > alone[-1].timing.last_token_s - alone[-1].timing.arrival_s
    assert len(told.ends) == 6


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"use_beam_search": True, "stream": True}, "stream"),
        ({"use_beam_search": True, "n": 11}, "n"),
        ({"use_beam_search": True, "logprobs": 1}, "logprobs"),
        ({"best_of": 3, "logprobs": 1}, "logprobs"),
        ({"use_beam_search": True, "max_tokens": 200_000}, "max_tokens"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_a_twin_refuses(server: Running, body: dict[str, Any], param: str) -> None:
    with server.client() as client:
        answer = client.post("/v1/completions", json={"prompt": "a"} | body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert not server.backend.unfinished


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_client_that_leaves_frees_the_hypotheses(replicas: int) -> None:
    with serving(twin(time_scale=1.0, data_parallel_size=replicas)) as server:
        body = {"prompt": "hello", "use_beam_search": True, "n": 4, "max_tokens": 4000}
        client = raw_request(server.port, body)
        until(lambda: server.backend.unfinished == 4)
        client.close()
        until(lambda: not server.backend.unfinished)
        until(lambda: idle(server.backend))


def test_a_twin_that_breaks_says_so() -> None:
    with serving(twin(time_scale=1.0)) as server, server.client() as client:
        server.backend._replicas[0].scheduler.plan = None  # whatever happens, it is a bug
        body = {"prompt": "a", "use_beam_search": True, "n": 3, "max_tokens": 50}
        answer = client.post("/v1/completions", json=body)
        assert answer.status_code == 500


def test_likely_words_differ_and_begin_with_the_script() -> None:
    codec = PlainCodec()
    words = Words(codec, [5, 6, 5, 7])
    for position in range(8):
        found = words.at(position, 20)
        assert found[0] == [5, 6, 5, 7][position % 4]
        assert len(set(found)) == 20
