"""Two processes with half of the heads each give the tokens of one process with all of them."""

from __future__ import annotations

import socket
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from costmodel.model import ModelShape
from realengine.architecture import Architecture, Rope
from realengine.build import EngineOptions, build_engine, serve_rank
from realengine.checkpoint import DummyCheckpoint
from realengine.complete import complete
from realengine.generation import Sampling
from realengine.load import Source
from realengine.parallel import TensorParallel
from serving.config import SchedulerConfig
from tests.realengine.engines import TINY

PROMPTS = [[5, 9, 13, 40, 22], list(range(3, 40)), [7]]
SAMPLING = Sampling(max_tokens=24, seed=3, ignore_eos=True)
LIMITS = SchedulerConfig(
    num_pages=40, page_tokens=8, max_num_seqs=4, max_num_batched_tokens=16, max_model_len=128
)

QWEN2 = TINY.model_copy(
    update={"name": "biased", "family": "qwen2", "qk_norm": False, "attention_bias": True, "num_kv_heads": 1}
)
"""One KV head for two ranks: both hold it."""


def tokens_of_rank(rank: int, size: int, shape: ModelShape, asynchronous: bool) -> list[list[int]]:
    """Rank 0's answers; the other ranks follow and give nothing. Float64: a sum in two parts rounds differently."""
    source = Source(Architecture(shape, Rope(), 1e-6), DummyCheckpoint(shape), None)
    options = EngineOptions(shape.name, dtype="float64", device="cpu")
    limits = replace(LIMITS, async_scheduling=asynchronous)
    ranks = TensorParallel(rank, size)
    if rank:
        serve_rank(options, limits, ranks=ranks, source=source)
        return []
    engine = build_engine(options, limits, ranks=ranks, source=source)
    engine.start()
    answers = [answer.token_ids for (answer,) in complete(engine, PROMPTS, SAMPLING)]
    engine.stop()
    return answers


def run_rank(rank: int, port: int, shape: ModelShape, asynchronous: bool, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    results.put((rank, tokens_of_rank(rank, 2, shape, asynchronous)))
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("shape", "asynchronous"),
    [
        pytest.param(TINY, False, id="qwen3"),
        pytest.param(QWEN2, True, id="one KV head, biases, asynchronous"),
    ],
)
def test_two_ranks_give_the_tokens_of_one(shape: ModelShape, asynchronous: bool) -> None:
    expected = tokens_of_rank(0, 1, shape, asynchronous)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    processes = [
        context.Process(target=run_rank, args=(rank, port, shape, asynchronous, results)) for rank in (0, 1)
    ]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(60)
            assert process.exitcode == 0
    finally:
        for process in processes:
            process.kill()
    got = dict(results.get() for _ in processes)
    assert got[0] == expected
