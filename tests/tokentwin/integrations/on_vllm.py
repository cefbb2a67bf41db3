"""Drives vLLM's own scheduler and ours inside it over the same random loads; run by a Python that has vLLM.

    python tests/tokentwin/integrations/on_vllm.py chunked 40     # must decide what vLLM decides, block ids included
    python tests/tokentwin/integrations/on_vllm.py continuous 20  # must decide what the policy decides in `serving`
    python tests/tokentwin/integrations/on_vllm.py adaptive 20 "" '{"prefill_share": 0.3}'  # queue order, options

Prints one line of JSON: how many loads and steps were compared, how often pages ran out, and the first difference.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))


def recorder_module() -> Any:
    spec = importlib.util.spec_from_file_location("record", ROOT / "scripts" / "record_vllm_schedules.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def ours(record: Any, policy: str, order: str | None, options: dict[str, Any]) -> Any:
    """`make_scheduler` of the recorder with our class in vLLM's place, chosen as vLLM would be told to."""

    def make(config: dict[str, Any], model: str) -> Any:
        theirs = original(config, model)
        everything = theirs.vllm_config
        section = {"policy": policy, "options": options} | ({"scheduling_policy": order} if order else {})
        everything.additional_config = {"tokentwin": section}
        everything.scheduler_config.async_scheduling = config["async_"]  # which vLLM turns off for a CPU
        everything.scheduler_config.scheduler_cls = "tokentwin.integrations.vllm.PolicyScheduler"
        cls = everything.scheduler_config.get_scheduler_cls()
        return cls(
            vllm_config=everything,
            kv_cache_config=theirs.kv_cache_config,
            log_stats=True,
            structured_output_manager=theirs.structured_output_manager,
            block_size=config["block_size"],
        )

    original = record.make_scheduler
    return make


def loads(record: Any, count: int, first: int) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Random loads without drafts, which a policy cannot decide about."""
    found = []
    for seed in range(first, first + count):
        config, arrivals = record.random_case(seed)
        found.append((config | {"k": 0}, arrivals))
    return found


def against_vllm(count: int) -> dict[str, Any]:
    """Policy chunked in vLLM against vLLM."""
    record = recorder_module()
    steps = preempted = cut = 0
    with tempfile.TemporaryDirectory() as model:
        (Path(model) / "config.json").write_text(json.dumps(record.MODEL), encoding="utf-8")
        for number, (config, arrivals) in enumerate(loads(record, count, 7000)):
            theirs = record.Recorder(config, arrivals, model).run()["steps"]
            made, record.make_scheduler = record.make_scheduler, ours(record, "chunked", None, {})
            try:
                mine = record.Recorder(config, arrivals, model).run()["steps"]
            finally:
                record.make_scheduler = made
            steps += len(theirs)
            preempted += sum(len(step["preempted"]) for step in theirs)
            cut += len(arrivals)
            for a, b in zip(theirs, mine, strict=False):
                if a != b:
                    return {"loads": number, "steps": steps, "difference": {"vllm": a, "ours": b}}
            if len(theirs) != len(mine):
                return {"loads": number, "steps": steps, "difference": [len(theirs), len(mine)]}
    return {"loads": count, "steps": steps, "preempted": preempted, "requests": cut, "difference": None}


def against_serving(policy: str, order: str | None, options: dict[str, Any], count: int) -> dict[str, Any]:
    """Another policy in vLLM against the same policy on the scheduler of `serving`: who runs, for how many tokens.

    Tokens of a request are a function of its id, so that both see the same prefixes.
    """
    record = recorder_module()
    from tests.tokentwin.integrations.serving_trace import serve

    steps = preempted = 0
    with tempfile.TemporaryDirectory() as model:
        (Path(model) / "config.json").write_text(json.dumps(record.MODEL), encoding="utf-8")
        for number, (config, arrivals) in enumerate(loads(record, count, 9000)):
            config |= {"policy": "fcfs", "async_": False, "watermark": 0.0, "max_num_batched_tokens": 256}
            made, record.make_scheduler = record.make_scheduler, ours(record, policy, order, options)
            try:
                mine = record.Recorder(config, arrivals, model).run()["steps"]
            finally:
                record.make_scheduler = made
            theirs = serve(config, arrivals, policy, order, options, record.token_hash)
            steps += len(theirs)
            preempted += sum(len(step["preempted"]) for step in theirs)
            for a, b in zip(theirs, mine, strict=False):
                seen = {name: b[name] for name in a}
                if a != seen:
                    return {"loads": number, "steps": steps, "difference": {"serving": a, "vllm": seen}}
            if len(theirs) != len(mine):
                return {"loads": number, "steps": steps, "difference": [len(theirs), len(mine)]}
    return {"loads": count, "steps": steps, "preempted": preempted, "difference": None}


def main() -> int:
    """The comparison named on the command line."""
    policy, count = sys.argv[1], int(sys.argv[2])
    order, options = (sys.argv[3] or None, sys.argv[4]) if len(sys.argv) > 4 else (None, "{}")
    if policy == "chunked" and order is None:
        found = against_vllm(count)
    else:
        found = against_serving(policy, order, json.loads(options), count)
    sys.stdout.write("\n" + json.dumps(found) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
