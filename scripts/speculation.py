"""The engine with speculative decoding on and off: tokens per second and what is accepted, for each way to draft.

A model with random weights (--load-format dummy) repeats itself when it is greedy, which flatters n-grams, and its first
layers agree with it in nothing: then read what a step costs, not what is accepted.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from realengine.build import EngineOptions, make_runner
from realengine.complete import complete
from realengine.engine import Engine
from realengine.generation import Sampling
from realengine.load import Source, find_model, load
from realengine.models import Model
from serving.config import SchedulerConfig
from serving.draft_counts import DraftCounts
from serving.errors import TokenTwinError
from serving.speculative_config import parse_speculative_config

PAGE_TOKENS = 16


@dataclass(frozen=True)
class Row:
    """One way to draft."""

    method: str
    batch: int
    tokens_per_s: float
    step_ms: float
    tokens_per_step: float
    acceptance_rate: float | None
    acceptance_length: float


def measure(
    source: Source,
    model: Model,
    device: torch.device,
    dtype: torch.dtype,
    config: dict[str, Any] | None,
    *,
    batch: int,
    prompt_tokens: int,
    output_tokens: int,
) -> Row:
    """`batch` greedy answers at once, after a warm-up."""
    longest = prompt_tokens + output_tokens + 16
    limits = SchedulerConfig(
        num_pages=batch * -(-longest // PAGE_TOKENS),
        page_tokens=PAGE_TOKENS,
        max_num_seqs=batch,
        max_model_len=longest,
        enable_prefix_caching=False,
    )
    drafting = None if config is None else parse_speculative_config(config)
    if drafting is not None:
        limits = drafting.limits(limits)
    runner = make_runner(model, limits, dtype, device, graphs=True, speculative=drafting)
    vocabulary = source.architecture.shape.vocab_size
    engine = Engine(limits, runner, vocab_size=vocabulary, speculative=drafting)
    engine.start()
    rng = np.random.default_rng(0)
    if source.tokenizer is not None:
        from realengine.quant_quality import bundled_text

        ids = source.tokenizer.encode(bundled_text())
        starts = np.linspace(0, max(0, len(ids) - prompt_tokens), batch).astype(int)
        prompts = [ids[at : at + prompt_tokens] for at in starts.tolist()]
    else:
        prompts = rng.integers(0, vocabulary, (batch, prompt_tokens)).tolist()
    try:
        complete(engine, prompts[:1], Sampling(max_tokens=8, temperature=0.0, ignore_eos=True))
        before, begun_s = len(engine.recorder.steps), time.perf_counter()
        engine.recorder.drafts = DraftCounts()
        answers = complete(
            engine, prompts, Sampling(max_tokens=output_tokens, temperature=0.0, ignore_eos=True)
        )
        passed_s = time.perf_counter() - begun_s
    finally:
        engine.stop()
    steps = len(engine.recorder.steps) - before
    tokens = sum(len(answer.token_ids) for (answer,) in answers)
    drafts = engine.recorder.drafts
    return Row(
        "none" if config is None else json.dumps(config),
        batch,
        tokens / passed_s,
        passed_s / steps * 1e3,
        tokens / steps / batch,
        drafts.acceptance_rate if drafts.num_drafts else None,
        drafts.mean_acceptance_length if drafts.num_drafts else 1.0,
    )


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--load-format", default="dummy", choices=("auto", "dummy"))
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--num-speculative-tokens", type=int, default=4)
    parser.add_argument("--num-layers", type=int, help="layers that draft; a quarter by default")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    options = EngineOptions(given.model, given.load_format, given.dtype, given.device)
    try:
        device, dtype = options.torch_device(), options.torch_dtype()
        source = find_model(given.model, given.load_format)
        longest = given.prompt_tokens + given.output_tokens + 16
        model = load(source, device=device, dtype=dtype, max_positions=longest)
        k = given.num_speculative_tokens
        layers = given.num_layers or max(1, source.architecture.shape.num_layers // 4)
        ways: list[dict[str, Any] | None] = [
            None,
            {"method": "ngram", "num_speculative_tokens": k, "prompt_lookup_min": 2, "prompt_lookup_max": 4},
            {"method": "lookahead", "num_speculative_tokens": k},
            {"method": "self", "num_speculative_tokens": k, "num_layers": layers},
        ]
        rows = [
            measure(
                source,
                model,
                device,
                dtype,
                way,
                batch=batch,
                prompt_tokens=given.prompt_tokens,
                output_tokens=given.output_tokens,
            )
            for batch in given.batch
            for way in ways
        ]
    except TokenTwinError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    plain = {row.batch: row.tokens_per_s for row in rows if row.method == "none"}
    sys.stdout.write(
        f"{'drafts':<12}{'batch':>6}{'tokens/s':>10}{'speed-up':>10}{'step ms':>10}{'accepted':>10}{'length':>8}\n"
    )
    for row in rows:
        name = "none" if row.method == "none" else json.loads(row.method)["method"]
        accepted = "-" if row.acceptance_rate is None else f"{row.acceptance_rate:.0%}"
        sys.stdout.write(
            f"{name:<12}{row.batch:>6}{row.tokens_per_s:>10.1f}{row.tokens_per_s / plain[row.batch]:>10.2f}"
            f"{row.step_ms:>10.2f}{accepted:>10}{row.acceptance_length:>8.2f}\n"
        )
    if given.json is not None:
        given.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
