"""The engine on CPU cores, as shares of what the machine can do, measured side by side.

SmolLM2-135M. A step cannot be faster than its weights can be read, a prompt not faster than its products: both limits are
measured here, in the same process and moments apart, with as many threads. One thread is measured in CPU time; two in
wall time, which neighbours stretch, so that they need a quiet machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from realengine.batch import Batch
from realengine.complete import complete
from realengine.engine import Engine
from realengine.generation import Sampling
from realengine.models import Model
from realengine.ops_torch import packed_linear
from realengine.runner import Drawn, allocate_caches
from serving.config import SchedulerConfig
from tests.benchmarks.conftest import Note
from tests.realengine.engines import CPU, running, smollm2, smollm2_folder

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
NEW_TOKENS = 64


@pytest.fixture(autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Threads of PyTorch: one, or those that a test asks for."""
    before = torch.get_num_threads()
    count: int = getattr(request, "param", 1)
    torch.set_num_threads(count)
    yield count
    torch.set_num_threads(before)


def cpu_s(work: Callable[[], object], rounds: int = 12) -> float:
    """Lower quartile of this thread's CPU time; of wall time where several threads work."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    work()
    times = []
    for _ in range(rounds):
        begun = clock()
        work()
        times.append(clock() - begun)
    return sorted(times)[rounds // 4]


def copy_bytes_per_s() -> float:
    """Bytes read and written by a large copy."""
    source = torch.zeros(64 * 2**20)
    target = torch.empty_like(source)
    return 2 * source.numel() * 4 / cpu_s(lambda: target.copy_(source))


def matmul_flops_per_s(dtype: torch.dtype) -> float:
    """Rate of a square product, by PyTorch's own operator or with packed weights, whichever is faster."""
    a, b = torch.randn(2, 1024, 1024).to(dtype)
    packed = packed_linear(b)
    return 2 * 1024**3 / min(cpu_s(lambda: a @ b), cpu_s(lambda: packed(a)))


def weight_bytes(model: Model, dtype: torch.dtype) -> int:
    """Every weight once: the embedding is tied and is read by the LM head."""
    return model.architecture.shape.num_params * dtype.itemsize


def decodes(rows: int, context: int, page_tokens: int = 16) -> Batch:
    """A step in which `rows` sequences of `context` tokens decode."""
    pages = -(-context // page_tokens)
    table = torch.arange(rows * pages, dtype=torch.int32).view(rows, pages) + 1
    slots = table[:, -1].long() * page_tokens + (context - 1) % page_tokens
    lengths = torch.full((rows,), context, dtype=torch.int32)
    ids, positions = torch.arange(100, 100 + rows), torch.full((rows,), context - 1)
    starts = torch.zeros(1, dtype=torch.int32)
    return Batch(ids, positions, slots, table, lengths, starts, rows, 1, context, None)


def prompt(tokens: int, page_tokens: int = 16) -> Batch:
    """A step that computes one prompt."""
    pages = -(-tokens // page_tokens)
    table = torch.arange(pages, dtype=torch.int32).view(1, pages) + 1
    positions = torch.arange(tokens)
    length = torch.tensor([tokens], dtype=torch.int32)
    starts = torch.tensor([0, tokens], dtype=torch.int32)
    return Batch(
        torch.arange(100, 100 + tokens),
        positions,
        positions + page_tokens,
        table,
        length,
        starts,
        0,
        tokens,
        tokens,
        torch.tensor([tokens - 1]),
    )


@pytest.mark.parametrize("threads", [1, 2], indirect=True)
@pytest.mark.parametrize("name", DTYPES)
def test_decode_against_memory_bandwidth(name: str, threads: int, note: Note) -> None:
    dtype = DTYPES[name]
    _, model = smollm2(dtype)
    caches = allocate_caches(model, 400, 16, device=CPU, dtype=dtype)
    limit = copy_bytes_per_s()
    for rows in (1, 4, 16):
        batch = decodes(rows, 128)
        step_s = cpu_s(lambda batch=batch: model.forward(batch, caches))  # type: ignore[misc]
        share = weight_bytes(model, dtype) / step_s / limit
        note(
            f"decode, batch {rows}, {name}, {threads} threads",
            f"{share:.0%} of copy bandwidth",
            f"{step_s * 1e3:.1f} ms",
        )


@pytest.mark.parametrize("threads", [1, 2], indirect=True)
@pytest.mark.parametrize("name", DTYPES)
def test_prefill_against_the_rate_of_products(name: str, threads: int, note: Note) -> None:
    dtype = DTYPES[name]
    _, model = smollm2(dtype)
    shape = model.architecture.shape
    caches = allocate_caches(model, 40, 16, device=CPU, dtype=dtype)
    batch = prompt(256)
    step_s = cpu_s(lambda: model.forward(batch, caches))
    flops = 2 * 256 * shape.num_layers * shape.linear_params_per_layer()
    share = flops / step_s / matmul_flops_per_s(dtype)
    note(
        f"prefill, 256 tokens, {name}, {threads} threads",
        f"{share:.0%} of matmul rate",
        f"{step_s * 1e3:.0f} ms",
    )


@pytest.mark.parametrize("name", DTYPES)
def test_batch_of_16_against_transformers(name: str, note: Note) -> None:
    import transformers

    dtype = DTYPES[name]
    _, model = smollm2(dtype)
    rng = np.random.default_rng(0)
    prompts = rng.integers(100, 40_000, (16, 32)).tolist()

    def spent(work: Callable[[], Any]) -> float:
        begun = time.process_time()
        work()
        return time.process_time() - begun

    sampling = Sampling(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    with running(model, dtype=dtype, max_num_seqs=16, num_pages=128, enable_prefix_caching=False) as engine:
        complete(engine, prompts, sampling)
        ours_s = spent(lambda: complete(engine, prompts, sampling))
    oracle = transformers.AutoModelForCausalLM.from_pretrained(smollm2_folder(), dtype=dtype).eval()
    ids = torch.tensor(prompts)
    options = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False}
    options |= {"attention_mask": torch.ones_like(ids), "pad_token_id": 2}
    theirs_s = spent(lambda: oracle.generate(ids, **options))
    rate = 16 * NEW_TOKENS / ours_s
    note(f"16 answers at once, {name}", f"{theirs_s / ours_s:.2f} times transformers", f"{rate:.0f} tokens/s")


@pytest.mark.parametrize("rows", [1, 16])
def test_host_share_of_a_step(rows: int, note: Note) -> None:
    source, model = smollm2(torch.bfloat16)
    caches = allocate_caches(model, 400, 16, device=CPU, dtype=torch.bfloat16)
    batch = decodes(rows, 128)
    step_s = cpu_s(lambda: model.forward(batch, caches))

    class Nothing:
        """A device that takes no time."""

        def launch(self, inputs: Any, draws: Any) -> Callable[[], Drawn]:
            drawn = Drawn(np.full(len(inputs.sample_rows), 504), 0.0)
            return lambda: drawn

        def close(self) -> None: ...

    limits = SchedulerConfig(num_pages=4000, max_num_seqs=rows, max_model_len=2048)
    engine = Engine(limits, Nothing(), tokenizer=source.tokenizer, vocab_size=49152)
    engine.start()
    begun = time.process_time()
    complete(engine, [[7] * 32] * rows, Sampling(max_tokens=1000, temperature=0.0))
    host_s = (time.process_time() - begun) / len(engine.recorder.steps)
    engine.stop()
    note(f"host, batch {rows}", f"{host_s / (host_s + step_s):.1%} of a step", f"{host_s * 1e6:.0f} µs")
