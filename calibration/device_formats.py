"""More number formats for a profile: the engine's steps with quantised weights or caches, measured on the same device.

Fits share the profile's device facts and host terms, so that all formats are priced on one footing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from calibration.device_calibrate import Plan, finish, prepare
from calibration.microbench_run import Store, measure_round
from costmodel.profile import DeviceProfile
from realengine.load import Source, find_model

Say = Callable[[str], None]
Format = tuple[str | None, str]
"""(quantisation of the weights, format of the KV cache), as the options are called."""


def with_formats(
    base: DeviceProfile,
    plan: Plan,
    formats: Sequence[Format],
    source: Source | None = None,
    say: Say = lambda line: None,
) -> DeviceProfile:
    """`base` with the kernels of every format measured under `plan`; its budget is shared equally.

    Of a format, only what `base` lacks is added: its matrices, and attention over its cache. Raises `UsageError` for a
    format that the engine does not have.
    """
    source = source if source is not None else find_model(plan.options.model, plan.options.load_format)
    profile, notes = base, list(base.provenance.notes)
    for weights, kv in formats:
        begun_s = time.monotonic()
        options = replace(plan.options, quantization=weights, kv_cache_dtype=kv)
        bench = prepare(replace(plan, options=options), source)
        store = Store({"device": str(bench.device)})
        until_s = begun_s + plan.budget_s / len(formats)
        for round_ in range(plan.rounds):
            if round_ == 0 or time.monotonic() < until_s:
                measure_round(
                    bench.steps, store, bench.bounds, round_=round_, repeats=plan.repeats, until_s=until_s
                )
        added = finish(bench, store, base.facts, base.host).profile
        words = f"{bench.gemm_format} weights, {bench.kv_dtype} cache: {len(store.runs)} steps"
        say(words)
        notes.append(f"added: {words}")
        profile = profile.model_copy(
            update={
                group: getattr(added, group) | getattr(profile, group)
                for group in ("gemm", "prefill", "decode", "decode_mixed")
            }
        )
        bench.runner.close()
    provenance = base.provenance.model_copy(update={"notes": notes})
    return profile.model_copy(update={"provenance": provenance})
