"""Sums over several devices, timed as tensor parallelism calls them: one process a device, `torch.distributed`.

NCCL on GPUs, Gloo on the CPU. Every rank starts a round together; a round is as long as its slowest rank.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from serving.errors import UsageError

SIZES = tuple(2**power for power in range(12, 27))
"""Message bytes: 4 KiB to 64 MiB."""


def measure_all_reduce(
    num_ranks: int, device: str, *, sizes: Sequence[int] = SIZES, repeats: int = 20, timeout_s: float = 120.0
) -> list[tuple[int, int, float]]:
    """(ranks, message bytes, seconds) of a 16-bit all-reduce, medians of `repeats`.

    `device` is "cuda" or "cpu". Raises `UsageError` where there are not so many GPUs, and when a rank fails or the time
    is up.
    """
    if num_ranks < 2:
        raise UsageError(f"an all-reduce needs at least 2 ranks, got {num_ranks}")
    if device == "cuda" and torch.cuda.device_count() < num_ranks:
        raise UsageError(f"{num_ranks} ranks need as many GPUs; {torch.cuda.device_count()} here")
    import torch.multiprocessing as mp

    context = mp.get_context("spawn")
    results: Any = context.SimpleQueue()
    arguments = (num_ranks, _free_port(), device, tuple(sizes), repeats, results)
    ranks = [context.Process(target=_rank, args=(rank, *arguments), daemon=True) for rank in range(num_ranks)]
    for process in ranks:
        process.start()
    deadline_s = time.monotonic() + timeout_s
    try:
        for process in ranks:
            process.join(max(0.0, deadline_s - time.monotonic()))
        if any(process.exitcode != 0 for process in ranks):
            codes = ", ".join(str(process.exitcode) for process in ranks)
            raise UsageError(
                f"timing an all-reduce over {num_ranks} ranks failed or took over {timeout_s:.0f} s (exit codes {codes})"
            )
        times = np.array([results.get() for _ in range(num_ranks)])
    finally:
        for process in ranks:
            if process.is_alive():
                process.kill()
    slowest = np.median(times.max(axis=0), axis=-1)
    return [(num_ranks, size, float(seconds)) for size, seconds in zip(sizes, slowest, strict=True)]


def _rank(
    rank: int, num_ranks: int, port: int, device: str, sizes: Sequence[int], repeats: int, results: Any
) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    cuda = device == "cuda"
    where = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(where)
    dist.init_process_group(
        "nccl" if cuda else "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=num_ranks
    )
    times = []
    for size in sizes:
        message = torch.zeros(size // 2, dtype=torch.bfloat16, device=where)
        times.append([_once(message, cuda) for _ in range(repeats + 3)][3:])
    results.put(times)
    dist.destroy_process_group()


def _once(message: torch.Tensor, cuda: bool) -> float:
    import torch.distributed as dist

    dist.barrier()
    if cuda:
        torch.cuda.synchronize()
    begun_s = time.perf_counter()
    dist.all_reduce(message)
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - begun_s


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
