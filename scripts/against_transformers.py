"""64 requests at once through the engine, and through transformers' own continuous batching on a model of that shape.

Exit status 3 where transformers is not installed or cannot batch continuously.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from realengine.build import EngineOptions, build_engine
from realengine.complete import complete
from realengine.export import hugging_face_config
from realengine.generation import Sampling
from realengine.load import find_model
from serving.config import SchedulerConfig


def ours(options: argparse.Namespace, prompts: list[list[int]]) -> float:
    """Seconds of the engine, warmed up."""
    longest = options.prompt_tokens + options.new_tokens + 1
    limits = SchedulerConfig(
        num_pages=1,
        max_num_seqs=len(prompts),
        max_num_batched_tokens=2048,
        max_model_len=longest,
        enable_prefix_caching=False,
        async_scheduling=True,
    )
    engine = build_engine(EngineOptions(options.model, load_format="dummy", device=options.device), limits)
    engine.start()
    sampling = Sampling(max_tokens=options.new_tokens, temperature=0.0, ignore_eos=True)
    complete(engine, prompts[:2], sampling)
    begun_s = time.perf_counter()
    complete(engine, prompts, sampling)
    took_s = time.perf_counter() - begun_s
    engine.stop()
    del engine
    if options.device.startswith("cuda"):
        torch.cuda.empty_cache()
    return took_s


def theirs(options: argparse.Namespace, prompts: list[list[int]], transformers: Any) -> float | None:
    """Seconds of `generate_batch` after a warm-up (on the CPU, of `generate`); None where there is none."""
    shape = find_model(options.model, "dummy").architecture
    config = transformers.AutoConfig.for_model(**hugging_face_config(shape))
    # On a GPU its fastest attention that needs no other package.
    with torch.device(options.device):
        model = transformers.AutoModelForCausalLM.from_config(
            config,
            dtype=torch.bfloat16,
            attn_implementation="sdpa_paged" if options.device != "cpu" else "sdpa",
        ).eval()
    generation = transformers.GenerationConfig(
        max_new_tokens=options.new_tokens,
        min_new_tokens=options.new_tokens,
        do_sample=False,
        eos_token_id=-1,
        pad_token_id=0,
        use_cuda_graph=False,
    )
    if options.device == "cpu":
        ids = torch.tensor(prompts)
        begun_s = time.perf_counter()
        model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=generation)
        return time.perf_counter() - begun_s
    if not hasattr(model, "generate_batch"):
        return None
    model.generate_batch(inputs=prompts[:2], generation_config=generation, progress_bar=False)
    begun_s = time.perf_counter()
    found = model.generate_batch(inputs=prompts, generation_config=generation, progress_bar=False)
    took_s = time.perf_counter() - begun_s
    made = sum(len(answer.generated_tokens) for answer in found.values())
    if made != len(prompts) * options.new_tokens:
        raise RuntimeError(f"transformers made {made} tokens instead of {len(prompts) * options.new_tokens}")
    return took_s


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--model", required=True, help="a folder with a config.json, or a known shape; weights are random"
    )
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    try:
        import transformers
    except ModuleNotFoundError:
        sys.stdout.write("transformers is not installed\n")
        return 3
    rng = np.random.default_rng(0)
    prompts = rng.integers(3, 1000, (options.requests, options.prompt_tokens)).tolist()
    ours_s = ours(options, prompts)
    theirs_s = theirs(options, prompts, transformers)
    if theirs_s is None:
        sys.stdout.write("this transformers has no generate_batch\n")
        return 3
    tokens = options.requests * options.new_tokens
    figures = {
        "requests": options.requests,
        "tokens_per_s": tokens / ours_s,
        "transformers_tokens_per_s": tokens / theirs_s,
        "ratio": theirs_s / ours_s,
        "transformers": transformers.__version__,
    }
    sys.stdout.write(
        f"{options.requests} requests at once: {figures['tokens_per_s']:,.0f} tokens/s, transformers "
        f"{transformers.__version__} {figures['transformers_tokens_per_s']:,.0f}: {figures['ratio']:.2f} times\n"
    )
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
