"""Record decisions of vLLM's own scheduler, in the format that `tokentwin conformance` replays.

Needs vLLM 0.33 in the environment that runs it (a CPU machine will do: no model is loaded, the scheduler alone is
driven). Random loads, limits and pools, small enough that pages run out:

    python scripts/record_vllm_schedules.py --traces 200 --seed 1000 -o schedules
    tokentwin conformance schedules

Tokens are functions of the request: with h(id, n, x) the CRC-32 of "id:n:x" and n the output tokens so far, a step that
completes a request's known tokens emits its accepted drafts and then h(id, n, 7) % 50; draft i is accepted while
h(id, n, 100 + i) % 10 < 6.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 64,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float16",
    "bos_token_id": 61,
    "eos_token_id": 62,
}
MOST_STEPS = 400


def token_hash(request_id: str, position: int, salt: int) -> int:
    """CRC-32 of "id:position:salt"."""
    return zlib.crc32(f"{request_id}:{position}:{salt}".encode())


def random_case(seed: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Limits and requests of one trace; half of the prompts share one of three beginnings."""
    rng = random.Random(seed)
    size = rng.choice([4, 8, 16])
    asynchronous = rng.random() < 0.6
    config: dict[str, Any] = {
        "max_num_seqs": rng.choice([2, 4, 8, 16]),
        "max_num_batched_tokens": rng.choice([16, 32, 64, 128]),
        "block_size": size,
        "prefix": rng.random() < 0.75,
        "k": rng.choice([0, 0, 2, 4]),
        "method": "draft_model" if asynchronous else rng.choice(["ngram", "draft_model"]),
        "policy": rng.choice(["fcfs", "fcfs", "priority"]),
        "long_prefill_token_threshold": rng.choice([0, 0, 8, 24]),
        "scheduler_reserve_full_isl": rng.random() < 0.7,
        "watermark": rng.choice([0.0, 0.0, 0.05]),
        "num_blocks": rng.choice({4: [34, 45, 66, 80], 8: [20, 34, 40, 80], 16: [10, 14, 20, 40]}[size]),
        "async_": asynchronous,
    }
    config["max_model_len"] = min(rng.choice([256, 256, 120]), (config["num_blocks"] - 2) * size)
    beginnings = [[rng.randrange(50) for _ in range(200)] for _ in range(3)]
    requests: list[dict[str, Any]] = []
    step = 0
    for number in range(rng.randint(10, 40)):
        step += rng.choice([0, 0, 0, 1, 2, 5])
        length = rng.choice([1, 2, size - 1, size, size + 1, 2 * size, 3 * size, rng.randint(1, 100)])
        length = max(1, min(length, config["max_model_len"] - 3))
        prompt = [rng.randrange(50) for _ in range(length)]
        if rng.random() < 0.5:
            shared = rng.randrange(length + 1)
            prompt[:shared] = rng.choice(beginnings)[:shared]
        requests.append(
            {
                "id": f"r{rng.randrange(1000):03d}{number:02d}",
                "arrive": step,
                "prompt": prompt,
                "max_tokens": rng.randint(1, 50),
                "priority": rng.randrange(3) if config["policy"] == "priority" else 0,
            }
        )
    return config, requests


def make_scheduler(config: dict[str, Any], model: str) -> Any:
    """vLLM's scheduler with these limits, without a model."""
    import torch
    from vllm.config import (
        CacheConfig,
        DeviceConfig,
        ModelConfig,
        ParallelConfig,
        SchedulerConfig,
        SpeculativeConfig,
        VllmConfig,
    )
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    size = config["block_size"]
    shape = ModelConfig(
        model=model, skip_tokenizer_init=True, dtype="float16", max_model_len=config["max_model_len"], seed=0
    )
    cache = CacheConfig(block_size=size, cache_dtype="auto", enable_prefix_caching=config["prefix"])
    cache.num_gpu_blocks = config["num_blocks"]
    speculation: dict[str, Any] = {}
    if config["k"]:
        lookup = {"prompt_lookup_max": 3, "prompt_lookup_min": 2}
        speculation["speculative_config"] = SpeculativeConfig(
            method=config["method"],
            num_speculative_tokens=config["k"],
            target_model_config=shape,
            target_parallel_config=ParallelConfig(),
            **(lookup if config["method"] == "ngram" else {"model": model}),
        )
    everything = VllmConfig(
        scheduler_config=SchedulerConfig(
            max_num_seqs=config["max_num_seqs"],
            max_num_batched_tokens=config["max_num_batched_tokens"],
            max_model_len=config["max_model_len"],
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            policy=config["policy"],
            long_prefill_token_threshold=config["long_prefill_token_threshold"],
            async_scheduling=config["async_"],
            scheduler_reserve_full_isl=config["scheduler_reserve_full_isl"],
            watermark=config["watermark"],
        ),
        model_config=shape,
        cache_config=cache,
        device_config=DeviceConfig("cpu"),
        **speculation,
    )
    layer = FullAttentionSpec(block_size=size, num_kv_heads=1, head_size=32, dtype=torch.float16)
    pages = KVCacheConfig(
        num_blocks=config["num_blocks"],
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["layer"], layer)],
    )
    return (AsyncScheduler if config["async_"] else Scheduler)(
        vllm_config=everything,
        kv_cache_config=pages,
        log_stats=True,
        structured_output_manager=StructuredOutputManager(everything),
        block_size=size,
    )


class Recorder:
    """Drives a scheduler through arrivals and writes down each step."""

    def __init__(self, config: dict[str, Any], arrivals: list[dict[str, Any]], model: str) -> None:
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

        init_none_hash(sha256)
        self.config, self.arrivals = config, arrivals
        self.scheduler = make_scheduler(config, model)
        self.hasher = get_request_block_hasher(config["block_size"], sha256)
        self.requests: dict[str, Any] = {}
        self.samples: dict[tuple[int, str], bool] = {}
        self.steps: list[dict[str, Any]] = []

    def run(self) -> dict[str, Any]:
        """The trace."""
        queue: list[Any] = []
        waiting = list(self.arrivals)
        for number in range(MOST_STEPS):
            while waiting and waiting[0]["arrive"] <= number:
                self._add(waiting.pop(0))
            plan, decided = self._schedule(number)
            if not self.config["async_"]:
                decided["out"], decided["finished"] = self._execute(plan)
            else:
                scheduled = bool(plan.total_num_scheduled_tokens)
                if scheduled:
                    queue.append(plan)
                if len(queue) >= 2 or (queue and not scheduled):
                    _, decided["finished"] = self._execute(queue.pop(0))
            self.steps.append(decided)
            if not waiting and not queue and not self.scheduler.requests:
                break
        return {
            "config": self.config,
            "requests": self.arrivals,
            "result": "ok",
            "steps": self.steps,
        }

    def _add(self, arrival: dict[str, Any]) -> None:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        request = Request(
            arrival["id"],
            arrival["prompt"],
            SamplingParams(max_tokens=arrival["max_tokens"], ignore_eos=True),
            None,
            arrival_time=float(arrival["arrive"]),
            priority=arrival["priority"],
            block_hasher=self.hasher,
        )
        self.requests[arrival["id"]] = request
        self.scheduler.add_request(request)

    def _schedule(self, number: int) -> tuple[Any, dict[str, Any]]:
        scheduler, requests = self.scheduler, self.requests
        preemptions = {i: r.num_preemptions for i, r in requests.items()}
        status = {i: r.status.name for i, r in requests.items()}
        plan = scheduler.schedule()
        for i in plan.num_scheduled_tokens:
            self.samples[(id(plan), i)] = not requests[i].is_prefill_chunk
        return plan, {
            "n": number,
            "sched": dict(plan.num_scheduled_tokens),
            "resumed": sorted(i for i in plan.num_scheduled_tokens if status[i] == "PREEMPTED"),
            "preempted": sorted(i for i, r in requests.items() if r.num_preemptions > preemptions[i]),
            "spec": {i: len(drafts) for i, drafts in plan.scheduled_spec_decode_tokens.items()},
            "running": [r.request_id for r in scheduler.running],
            "free": scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
            "bt": {
                r.request_id: list(scheduler.kv_cache_manager.get_block_ids(r.request_id)[0])
                for r in scheduler.running
            },
        }

    def _execute(self, plan: Any) -> tuple[dict[str, list[int]], list[str]]:
        from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

        scheduler = self.scheduler
        order = list(plan.num_scheduled_tokens)
        tokens: list[list[int]] = []
        out: dict[str, list[int]] = {}
        for i in order:
            samples = self.samples.pop((id(plan), i))
            produced: list[int] = []
            if i in scheduler.requests:
                position = self.requests[i].num_output_tokens
                drafts = plan.scheduled_spec_decode_tokens.get(i, [])
                if samples:
                    accepted = 0
                    while accepted < len(drafts) and token_hash(i, position, 100 + accepted) % 10 < 6:
                        accepted += 1
                    produced = [int(t) for t in drafts[:accepted]] + [token_hash(i, position, 7) % 50]
                out[i] = list(produced)
            tokens.append(produced)
        alive = set(scheduler.requests)
        scheduler.update_from_output(
            plan,
            ModelRunnerOutput(
                req_ids=order,
                req_id_to_index={i: row for row, i in enumerate(order)},
                sampled_token_ids=tokens,
                logprobs=None,
                prompt_logprobs_dict={},
                pooler_output=[],
            ),
        )
        if self.config["k"] and not self.config["async_"]:
            ids = [i for i in order if i in scheduler.requests]
            drafts = [
                [
                    token_hash(i, self.requests[i].num_output_tokens, 200 + z) % 50
                    for z in range(self.config["k"])
                ]
                for i in ids
            ]
            scheduler.update_draft_token_ids(DraftTokenIds(ids, drafts))
        return out, sorted(alive - set(scheduler.requests))


def main() -> int:
    """Record traces into a folder."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--traces", type=int, default=50, help="how many to record")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first; the others follow")
    parser.add_argument("-o", "--output-dir", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as model:
        (Path(model) / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
        for seed in range(arguments.seed, arguments.seed + arguments.traces):
            trace = Recorder(*random_case(seed), model).run()
            path = arguments.output_dir / f"vllm{seed:06d}.json.gz"
            path.write_bytes(gzip.compress(json.dumps(trace).encode(), mtime=0))
    sys.stdout.write(f"{arguments.traces} traces in {arguments.output_dir}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
