"""`/metrics`: vLLM's names, in Prometheus text. Times are seconds of the backend's clock."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from serving.draft_counts import DraftCounts
from tokentwin.server.backend import Backend, Timing

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SHORT = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
)
_GAPS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_LONG = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
LABELS = ("model_name", "engine")
GAUGES = {
    "num_requests_running": "Requests in the running batch.",
    "num_requests_waiting": "Requests waiting to be scheduled.",
    "kv_cache_usage_perc": "Share of KV pages in use, 0 to 1.",
}
COUNTERS = {
    "prefix_cache_queries": "Tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Tokens found in the prefix cache.",
    "num_preemptions": "Preemptions.",
    "prompt_tokens": "Prompt tokens of requests that began to answer.",
    "generation_tokens": "Tokens generated.",
}
SUCCESS = ("request_success", "Requests that ended, by reason.")
HISTOGRAMS: dict[str, tuple[str, str, tuple[float, ...]]] = {
    "ttft": ("time_to_first_token_seconds", "Arrival to first token.", _SHORT),
    "itl": ("inter_token_latency_seconds", "Gap between tokens.", _GAPS),
    "tpot": ("request_time_per_output_token_seconds", "Mean gap between the tokens of a request.", _GAPS),
    "e2e": ("e2e_request_latency_seconds", "Arrival to last token.", _LONG),
    "queue": ("request_queue_time_seconds", "Arrival to first scheduled.", _LONG),
    "prefill": ("request_prefill_time_seconds", "First scheduled to first token.", _LONG),
    "decode": ("request_decode_time_seconds", "First token to last.", _LONG),
    "iteration": ("iteration_tokens_total", "Tokens computed by a step.", _TOKENS),
}
"""vLLM's metrics without `vllm:`, what each says, and the bounds of a histogram's buckets."""
DRAFTS = {
    "num_drafts": "Verifications of drafts.",
    "num_draft_tokens": "Draft tokens verified.",
    "num_accepted_tokens": "Draft tokens accepted.",
}
DRAFTS_PER_POSITION = ("num_accepted_tokens_per_pos", "Draft tokens accepted, by position in the draft.")
"""Only where drafts are made; vLLM's names without `vllm:spec_decode_`."""
_NOW = ("prefix_cache_queries", "prefix_cache_hits", "num_preemptions")
"""Counters that a backend keeps itself."""


class _Now(Collector):
    """What the backend knows itself, read when somebody asks."""

    def __init__(self, backend: Backend, labels: tuple[str, str]) -> None:
        self._backend = backend
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        stats = self._backend.stats()
        gauges = (stats.running, stats.waiting, stats.kv_usage)
        counters = (stats.prefix_queries_tokens, stats.prefix_hits_tokens, stats.preemptions)
        for (name, words), value in zip(GAUGES.items(), gauges, strict=True):
            gauge = GaugeMetricFamily(f"vllm:{name}", words, labels=LABELS)
            gauge.add_metric(self._labels, value)
            yield gauge
        for name, count in zip(_NOW, counters, strict=True):
            counter = CounterMetricFamily(f"vllm:{name}", COUNTERS[name], labels=LABELS)
            counter.add_metric(self._labels, count)
            yield counter
        if stats.drafts is not None:
            yield from self._drafts(stats.drafts)
        lag = GaugeMetricFamily(
            "tokentwin:lag_seconds", "Real seconds by which a twin is behind.", labels=LABELS
        )
        lag.add_metric(self._labels, stats.lag_s)
        yield lag

    def _drafts(self, drafts: DraftCounts) -> Iterator[Metric]:
        for name, words in DRAFTS.items():
            counter = CounterMetricFamily(f"vllm:spec_decode_{name}", words, labels=LABELS)
            counter.add_metric(self._labels, getattr(drafts, name))
            yield counter
        name, words = DRAFTS_PER_POSITION
        by_position = CounterMetricFamily(f"vllm:spec_decode_{name}", words, labels=(*LABELS, "position"))
        for position, count in enumerate(drafts.accepted_per_pos):
            by_position.add_metric((*self._labels, str(position)), count)
        yield by_position


class PrometheusMeters:
    """Counters and histograms of one server, in a registry of its own."""

    def __init__(self, backend: Backend, model: str) -> None:
        self.registry = CollectorRegistry()
        self._labels = (model, "0")
        self.registry.register(_Now(backend, self._labels))
        self._prompt_tokens = self._counter("prompt_tokens")
        self._generation_tokens = self._counter("generation_tokens")
        name, words = SUCCESS
        labels = (*LABELS, "finished_reason")
        self._success = Counter(f"vllm:{name}", words, labels, registry=self.registry)
        self._ttft, self._itl, self._tpot = (self._histogram(name) for name in ("ttft", "itl", "tpot"))
        self._e2e, self._queue = self._histogram("e2e"), self._histogram("queue")
        self._prefill, self._decode = self._histogram("prefill"), self._histogram("decode")
        self._iteration = self._histogram("iteration")

    def step(self, num_tokens: int) -> None:
        """A step ended."""
        self._iteration.observe(num_tokens)

    def first_token(self, ttft_s: float) -> None:
        """An answer began."""
        self._ttft.observe(ttft_s)
        self._generation_tokens.inc()

    def tokens(self, count: int, gap_s: float) -> None:
        """An answer grew by `count` tokens, `gap_s` after the one before."""
        for _ in range(count):
            self._itl.observe(gap_s / count)
        self._generation_tokens.inc(count)

    def shown_whole(self, count: int, ttft_s: float) -> None:
        """An answer of `count` tokens was shown at once, `ttft_s` after it was asked for."""
        self._ttft.observe(ttft_s)
        self._generation_tokens.inc(count)

    def ended(self, timing: Timing, reason: str) -> None:
        """An answer ended."""
        self._success.labels(*self._labels, reason).inc()
        if not timing.output_tokens:
            return
        self._prompt_tokens.inc(timing.prompt_tokens)
        self._e2e.observe(timing.ttft_s + timing.decode_s)
        self._queue.observe(timing.queue_s)
        self._prefill.observe(timing.ttft_s - timing.queue_s)
        self._decode.observe(timing.decode_s)
        if timing.output_tokens > 1:
            self._tpot.observe(timing.mean_itl_s)

    def text(self) -> bytes:
        """Everything, as Prometheus reads it."""
        return generate_latest(self.registry)

    def _counter(self, name: str) -> Counter:
        counter = Counter(f"vllm:{name}", COUNTERS[name], LABELS, registry=self.registry)
        return counter.labels(*self._labels)

    def _histogram(self, name: str) -> Histogram:
        full, words, buckets = HISTOGRAMS[name]
        histogram = Histogram(f"vllm:{full}", words, LABELS, registry=self.registry, buckets=buckets)
        return histogram.labels(*self._labels)
