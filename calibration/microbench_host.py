"""What the host does per step, per sequence and per token, and what whole pages cost to move.

Host time is what the engine's own loop takes beside the device: planning, tensor building, reading tokens back,
detokenising, committing. Decodes at several batch sizes give step and sequence; prompts give tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from calibration.live_engine import Arrival, CpuTimeEngine, CpuTimeRunner, IdleRunner
from costmodel.profile import HostTerms
from realengine.batch import LayerCache
from realengine.kernels import operators
from realengine.runner import Runner
from realengine.swap_store import SwapStore
from realengine.tokenizer import Tokenizer
from serving.config import SchedulerConfig
from serving.swap import Move


def measure_host(
    limits: SchedulerConfig,
    tokenizer: Tokenizer | None,
    vocab_size: int,
    runner: Runner | None = None,
    *,
    steps: int = 16,
) -> list[tuple[int, int, float]]:
    """(sequences, tokens, seconds) of steps, medians over equal ones.

    `runner` is the device where host and device share caches (the CPU): the host then finds them as cold as in service.
    """
    found: dict[tuple[int, int], list[float]] = {}
    most = limits.max_num_seqs
    for batch in sorted({1, max(1, most // 4), most}):
        device = IdleRunner() if runner is None else CpuTimeRunner(runner)
        engine = CpuTimeEngine(limits, device, tokenizer=tokenizer, vocab_size=vocab_size)
        room = limits.max_model_len
        prompt = max(1, min(room - steps - 1, limits.max_num_batched_tokens))
        rng = np.random.default_rng(batch)
        count = max(2, min(steps, room - prompt - 1))
        engine.serve(
            [Arrival(0.0, rng.integers(3, vocab_size, prompt).tolist(), count) for _ in range(batch)]
        )
        for row in engine.recorder.steps:
            found.setdefault((row.num_prefills + row.num_decodes, row.num_tokens), []).append(row.host_s)
    return [(seqs, tokens, float(np.median(values))) for (seqs, tokens), values in sorted(found.items())]


def host_work(limits: SchedulerConfig, tokenizer: Tokenizer | None, vocab_size: int) -> Callable[[], None]:
    """What the host does around a step, as a call: a few requests through the loop over an idle device."""
    count = min(4, limits.max_num_seqs)
    prompt = np.random.default_rng(0).integers(3, vocab_size, 8).tolist()

    def work() -> None:
        engine = CpuTimeEngine(limits, IdleRunner(), tokenizer=tokenizer, vocab_size=vocab_size)
        engine.serve([Arrival(0.0, prompt, 2) for _ in range(count)])

    return work


def fit_host(rows: list[tuple[int, int, float]], launch_s: float, source: str) -> HostTerms:
    """Non-negative terms with the least relative squared error."""
    from scipy.optimize import nnls

    seconds = np.array([row[2] for row in rows])
    design = np.array([(1.0, seqs, tokens) for seqs, tokens, _ in rows])
    weight = 1.0 / np.maximum(seconds, 1e-7)
    scale = design.max(axis=0)
    terms = nnls(design / scale * weight[:, None], seconds * weight)[0] / scale
    step_s, per_seq_s, per_token_s = (float(f"{t:.4g}") for t in terms)
    return HostTerms(
        step_s=step_s, per_seq_s=per_seq_s, per_token_s=per_token_s, launch_s=launch_s, source=source
    )


def measure_moves(caches: list[LayerCache], device: torch.device) -> dict[str, float]:
    """Bytes a second of page copies on the device, and to and from host pages."""
    pages = min(32, (caches[0].k.shape[0] - 1) // 2)
    if pages < 1:
        return {}
    moved = len(caches) * pages * sum(tensor[0].nbytes for tensor in caches[0].tensors)
    order = np.random.default_rng(0).permutation(caches[0].k.shape[0] - 1)[: 2 * pages] + 1
    here, there = order[:pages].astype(np.int32), order[pages:].astype(np.int32)
    store, kernels = SwapStore(caches, pages), operators(device)
    hosts = np.arange(pages, dtype=np.int32)
    sources, targets = torch.from_numpy(here).long().to(device), torch.from_numpy(there).long().to(device)

    def copy() -> None:
        for cache in caches:
            kernels.copy_pages(cache.tensors, sources, targets)

    runs: Mapping[str, Callable[[], Any]] = {
        "page_copy_bytes_per_s": copy,
        "swap_out_bytes_per_s": lambda: store.take(caches, Move(here, hosts)),
        "swap_in_bytes_per_s": lambda: store.give(caches, Move(hosts, there)),
    }
    return {name: moved / _seconds(run, device) for name, run in runs.items()}


def _seconds(run: Callable[[], Any], device: torch.device, repeats: int = 5) -> float:
    """Median seconds of a call: CPU time on the CPU, wall time around a synchronised stream elsewhere."""
    cuda = device.type == "cuda"
    clock = time.perf_counter if cuda else time.thread_time
    times = []
    run()
    for _ in range(repeats):
        if cuda:
            torch.cuda.synchronize(device)
        begun_s = clock()
        run()
        if cuda:
            torch.cuda.synchronize(device)
        times.append(clock() - begun_s)
    return max(float(np.median(times)), 1e-9)
