"""What the driver says of a CUDA device while the engine runs: how busy it is, its power, clock and temperature.

By NVIDIA's own binding of NVML (nvidia-ml-py). Without it, or without a CUDA device, there is nothing to say.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch

PERIOD_S = 1.0
"""The driver itself averages over up to a second."""
MAX_SAMPLES = 2048
"""Of longer runs every other sample is dropped, again and again, so that a run's file stays small."""
COLUMNS = ("time_s", "gpu_utilization", "memory_utilization", "power_w", "sm_clock_mhz", "temperature_c")
"""Utilisations in percent of time in which a kernel ran, or memory was read or written."""

Samples = dict[str, list[float]]


@contextmanager
def watching(
    device: torch.device, now_s: Callable[[], float], *, period_s: float = PERIOD_S
) -> Iterator[Samples]:
    """Samples of `device` by the clock `now_s` while the context lasts, by names in `COLUMNS`; empty where unknown."""
    samples: Samples = {}
    handle, nvml = _handle(device)
    if nvml is None:
        yield samples
        return
    samples.update({name: [] for name in COLUMNS})
    over = threading.Event()

    def sample() -> None:
        wait_s = period_s
        while True:
            for name, value in zip(COLUMNS, (now_s(), *_read(nvml, handle)), strict=True):
                samples[name].append(value)
            if len(samples["time_s"]) >= MAX_SAMPLES:
                for values in samples.values():
                    del values[1::2]
                wait_s *= 2
            if over.wait(wait_s):
                return

    thread = threading.Thread(target=sample, name="nvml", daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        over.set()
        thread.join()
        nvml.nvmlShutdown()


def _handle(device: torch.device) -> tuple[Any, Any]:
    """(NVML's handle of a torch device, the binding), or twice None. By UUID: numbers differ where some are hidden."""
    if device.type != "cuda":
        return None, None
    try:
        nvml: Any = import_module("pynvml")
        nvml.nvmlInit()
    except Exception:  # not installed, or no driver: either way there is nothing to say
        return None, None
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    name = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
    return nvml.nvmlDeviceGetHandleByUUID(name), nvml


def _read(nvml: Any, handle: Any) -> tuple[float, ...]:
    """The columns but for time; NaN for what the device does not tell."""

    def ask(what: Callable[[], float]) -> float:
        try:
            return float(what())
        except nvml.NVMLError:
            return float("nan")

    return (
        ask(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu),
        ask(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).memory),
        ask(lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000),
        ask(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
        ask(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
    )
