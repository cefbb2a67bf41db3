"""`/metrics` of a run while it goes on: vLLM's names for a simulation or a replay, and the run's own clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from serving.errors import UsageError
from sim.record import Floats, Status
from tokentwin.live import Read, Reading
from tokentwin.server.meters import COUNTERS, GAUGES, HISTOGRAMS, LABELS, SUCCESS

HOST = "127.0.0.1"
Work = Callable[[Mapping[str, Floats]], tuple[float, float]]
"""(FLOPs, bytes) that one device has done in steps, from their columns."""


class RunMeters(Collector):
    """Works everything out anew whenever somebody asks, so that a run pays for being looked at and for nothing else."""

    def __init__(self, read: Read, model: str, work: Work | None = None) -> None:
        self._read = read
        self._labels = (model, "0")
        self._work = work

    def collect(self) -> Iterator[Metric]:
        r = self._read()
        yield self._gauge(
            "tokentwin:run_time_seconds", "The run's clock; simulated seconds of the twin.", r.now_s
        )
        values: dict[str, float] = {
            "num_requests_running": r.running,
            "num_requests_waiting": r.waiting,
            "kv_cache_usage_perc": r.kv_usage,
        }
        for name, words in GAUGES.items():
            yield self._gauge(f"vllm:{name}", words, values[name])
        first = ~np.isnan(r.times_s["prefill_done_s"])
        decodes = float(r.steps["num_decodes"].sum())
        values = {
            "prefix_cache_queries": r.prefix_queries_tokens,
            "prefix_cache_hits": r.prefix_hits_tokens,
            "num_preemptions": r.preemptions,
            "prompt_tokens": int(r.prompt_tokens[first].sum()),
            # Decodes as they come; what answers had in all where steps gave more than one (accepted drafts).
            "generation_tokens": max(int(first.sum()) + decodes, int(r.output_tokens.sum())),
        }
        for name, words in COUNTERS.items():
            yield self._counter(f"vllm:{name}", words, values[name])
        yield self._ended(r)
        if self._work is not None:
            flops, moved = self._work(r.steps)
            yield self._counter(
                "vllm:estimated_flops_per_gpu", "FLOPs of the model's shape, per device.", flops
            )
            yield self._counter(
                "tokentwin:estimated_bytes_per_gpu", "Bytes read and written, per device.", moved
            )
        for name, (values_s, weights) in samples(r).items():
            full, words, buckets = HISTOGRAMS[name]
            family = HistogramMetricFamily(f"vllm:{full}", words, labels=LABELS)
            family.add_metric(self._labels, *bucketed(values_s, weights, buckets))
            yield family

    def _gauge(self, name: str, words: str, value: float) -> Metric:
        gauge = GaugeMetricFamily(name, words, labels=LABELS)
        gauge.add_metric(self._labels, value)
        return gauge

    def _counter(self, name: str, words: str, value: float) -> Metric:
        counter = CounterMetricFamily(name, words, labels=LABELS)
        counter.add_metric(self._labels, value)
        return counter

    def _ended(self, r: Reading) -> Metric:
        counter = CounterMetricFamily(f"vllm:{SUCCESS[0]}", SUCCESS[1], labels=(*LABELS, "finished_reason"))
        done = np.flatnonzero(r.status == Status.FINISHED)
        reasons = [r.reason[row] for row in done.tolist()]
        for reason in sorted(set(reasons)):
            counter.add_metric((*self._labels, reason), reasons.count(reason))
        return counter


def samples(r: Reading) -> dict[str, tuple[Floats, Floats]]:
    """(values, weights) of each histogram so far. A gap between tokens is that of the steps, once per decode."""
    t = r.times_s
    done = (r.status == Status.FINISHED) & ~np.isnan(t["engine_done_s"])
    several = done & (r.output_tokens > 1)
    decode_s = t["engine_done_s"] - t["prefill_done_s"]
    found = {
        "ttft": t["prefill_done_s"] - t["queued_s"],
        "e2e": (t["engine_done_s"] - t["queued_s"])[done],
        "queue": (t["scheduled_s"] - t["queued_s"])[done],
        "prefill": (t["prefill_done_s"] - t["scheduled_s"])[done],
        "decode": decode_s[done],
        "tpot": decode_s[several] / np.maximum(r.output_tokens[several] - 1, 1),
    }
    out = {}
    for name, values in found.items():
        known = values[~np.isnan(values)]
        out[name] = (known, np.ones(len(known)))
    s = r.steps
    out["itl"] = (s["end_s"] - s["start_s"], s["num_decodes"])
    out["iteration"] = (s["num_tokens"], np.ones(len(s["num_tokens"])))
    return out


def bucketed(
    values: Floats, weights: Floats, bounds: tuple[float, ...]
) -> tuple[list[tuple[str, float]], float]:
    """Cumulative buckets as Prometheus has them, the last one +Inf, and the sum of all values."""
    place = np.searchsorted(bounds, values, side="left")
    upto = np.cumsum(np.bincount(place, weights, minlength=len(bounds) + 1))
    names = [*(str(float(bound)) for bound in bounds), "+Inf"]
    return list(zip(names, upto.tolist(), strict=True)), float(np.dot(values, weights))


class _Collected(Collector):
    """The meters of a run once it has begun."""

    def __init__(self, meters: Callable[[], RunMeters | None]) -> None:
        self._meters = meters

    def collect(self) -> Iterator[Metric]:
        meters = self._meters()
        if meters is not None:
            yield from meters.collect()


@contextmanager
def serving(meters: Callable[[], RunMeters | None], port: int) -> Iterator[str]:
    """Serve `/metrics` on this machine for as long as the context lasts; gives the address. Raises UsageError."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collected(meters))
    try:
        server, thread = start_http_server(port, HOST, registry)
    except (OSError, OverflowError) as error:
        words = getattr(error, "strerror", None) or str(error)
        raise UsageError(
            f"--metrics-port {port}: {words}; choose another, or 0 for any that is free"
        ) from None
    try:
        yield f"http://{HOST}:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
