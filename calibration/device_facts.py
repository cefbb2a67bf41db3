"""What a device is, asked of the machine and measured: of a CPU everything, of a GPU what its datasheet leaves out."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from costmodel.datasheet import FACTS
from costmodel.profile import DeviceFacts


def measured_facts(device: torch.device) -> DeviceFacts:
    """Facts of `device`: of a known GPU from its datasheet, of anything else as measured here."""
    if device.type == "cuda":
        return _cuda_facts(device)
    return _cpu_facts()


def known_gpu(product: str) -> DeviceFacts | None:
    """Datasheet facts of the GPU that the driver calls `product`; None for one without."""
    words = set(re.findall(r"[a-z]+\d*[a-z]*|\d+", product.lower()))
    plain = re.sub(r"[^a-z0-9]", "", product.lower())
    hits = [facts for name, facts in FACTS.items() if name in plain or name in words]
    return max(hits, key=lambda facts: len(facts.name)) if hits else None


def _cuda_facts(device: torch.device) -> DeviceFacts:  # pragma: no cover - needs a GPU
    properties: Any = torch.cuda.get_device_properties(device)
    known = known_gpu(properties.name)
    source = "torch.cuda.get_device_properties"
    asked = {
        "product": properties.name,
        "memory_bytes": properties.total_memory,
        "num_sms": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
    }
    if known is not None:
        return known.model_copy(
            update={**asked, "sources": {**known.sources, **dict.fromkeys(asked, source)}}
        )
    copy, product = _rates(device)
    measured = "measured by a large copy / a large bfloat16 product"
    return DeviceFacts(
        name=re.sub(r"[^a-z0-9]+", "", properties.name.lower()),
        peak_flops={"bfloat16": product * 1.1},
        hbm_bytes_per_s=copy * 1.05,
        link_bytes_per_s=25e9,
        tdp_w=300.0,
        sources={
            **dict.fromkeys(asked, source),
            "peak_flops": measured,
            "hbm_bytes_per_s": measured,
            "link_bytes_per_s": "PCIe 4.0 x16 assumed",
            "tdp_w": "not known; a guess",
        },
        **asked,
    )


def _cpu_facts() -> DeviceFacts:
    copy, product = _rates(torch.device("cpu"))
    measured = "measured here, one thread: "
    return DeviceFacts(
        name="cpu",
        product=_cpu_name(),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        # One worker: tiles follow each other, and nothing is split.
        num_sms=1,
        peak_flops={"bfloat16": product},
        hbm_bytes_per_s=copy,
        l2_bytes=_cache_bytes(),
        link_bytes_per_s=copy,
        tdp_w=100.0,
        sources={
            "product": "/proc/cpuinfo",
            "memory_bytes": "physical memory, sysconf",
            "peak_flops": measured + "a large bfloat16 product; raised where a layer was faster",
            "hbm_bytes_per_s": measured + "a large copy, read and write; raised where a kernel read faster",
            "l2_bytes": "last-level cache, sysfs",
            "link_bytes_per_s": "no link: the copy's rate",
            "tdp_w": "not known; a round number",
        },
    )


def raised(facts: DeviceFacts, flops: float, bytes_per_s: float) -> DeviceFacts:
    """Facts whose peaks are at least what kernels were seen to reach: a floor on a price must be one."""
    peak = max(facts.peak_flops["bfloat16"], flops * 1.02)
    return facts.model_copy(
        update={
            "peak_flops": {**facts.peak_flops, "bfloat16": float(f"{peak:.4g}")},
            "hbm_bytes_per_s": float(f"{max(facts.hbm_bytes_per_s, bytes_per_s * 1.1):.4g}"),
        }
    )


def _rates(device: torch.device) -> tuple[float, float]:
    """(bytes/s of a large copy, FLOP/s of a large bfloat16 product), the fastest of a few."""
    small = device.type == "cpu"
    size, side = (48 << 20, 768) if small else (2 << 30, 8192)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    a = torch.randn(side, side, device=device).to(torch.bfloat16)
    copy_s = _least(lambda: target.copy_(source), device)
    product_s = _least(lambda: a @ a, device)
    return 2 * size / copy_s, 2 * side**3 / product_s


def _least(run: Callable[[], object], device: torch.device) -> float:
    cuda = device.type == "cuda"
    clock = time.perf_counter if cuda else time.thread_time
    times = []
    for _ in range(6):
        if cuda:
            torch.cuda.synchronize(device)
        begun_s = clock()
        run()
        if cuda:
            torch.cuda.synchronize(device)
        times.append(clock() - begun_s)
    return float(np.min(times[1:]))


def _cpu_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return "CPU"
    found = re.search(r"model name\s*:\s*(.+)", text)
    return found[1].strip() if found else "CPU"


def _cache_bytes() -> int:
    """The largest cache that sysfs lists, 32 MiB where it lists none."""
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text(encoding="utf-8").strip()
        factor = {"K": 2**10, "M": 2**20}.get(text[-1:], 1)
        sizes.append(int(text.rstrip("KMG")) * factor)
    return max(sizes, default=32 * 2**20)
