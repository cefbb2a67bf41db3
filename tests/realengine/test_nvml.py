"""Samples of the driver, with a driver of our own in the place of NVIDIA's."""

from __future__ import annotations

import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from realengine import nvml


class Driver(SimpleNamespace):
    """What of pynvml is used. Power rises by 10 W a reading; the temperature is not supported."""

    NVMLError = RuntimeError
    NVML_CLOCK_SM, NVML_TEMPERATURE_GPU = 1, 0
    readings = 0
    asked = ""
    down = False

    def nvmlInit(self) -> None:
        """Up."""

    def nvmlShutdown(self) -> None:
        self.down = True

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        self.asked = uuid
        return uuid

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        return SimpleNamespace(gpu=80, memory=30)

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        self.readings += 1
        return 300_000 + 10_000 * self.readings

    def nvmlDeviceGetClockInfo(self, handle: str, kind: int) -> int:
        return 1980

    def nvmlDeviceGetTemperature(self, handle: str, kind: int) -> int:
        raise RuntimeError("not supported")


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1-2-3"))
    return driver


def test_a_device_is_sampled_while_the_context_lasts(driver: Driver) -> None:
    began_s = time.monotonic()
    with nvml.watching(torch.device("cuda"), lambda: time.monotonic() - began_s, period_s=0.005) as samples:
        while driver.readings < 4:
            time.sleep(0.002)
    count = len(samples["time_s"])
    assert count >= 4
    assert {len(values) for values in samples.values()} == {count}
    assert samples["power_w"][:3] == [310.0, 320.0, 330.0]
    assert set(samples["gpu_utilization"]) == {80.0}
    assert samples["temperature_c"][0] != samples["temperature_c"][0]  # NaN: the device does not tell
    assert samples["time_s"] == sorted(samples["time_s"])
    assert (driver.asked, driver.down) == ("GPU-1-2-3", True)


def test_long_runs_are_thinned_and_keep_their_span(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "MAX_SAMPLES", 8)
    ticks = iter(range(10_000))
    with nvml.watching(torch.device("cuda"), lambda: float(next(ticks)), period_s=0.0001) as samples:
        while driver.readings < 30:
            time.sleep(0.001)
    assert len(samples["time_s"]) < 8
    assert samples["time_s"][0] == 0.0
    assert samples["time_s"][-1] >= 16.0


def test_without_a_device_or_a_driver_there_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with nvml.watching(torch.device("cpu"), time.monotonic) as samples:
        assert samples == {}
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with nvml.watching(torch.device("cuda"), time.monotonic) as samples:
        assert samples == {}
