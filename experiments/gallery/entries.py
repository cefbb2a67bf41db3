"""The entries in the order of the page."""

from __future__ import annotations

from experiments.gallery.batching import chunk_size, fairness, policies, size_classes
from experiments.gallery.beams import beam_search
from experiments.gallery.drafts import speculation, speculation_load
from experiments.gallery.entry import Maker
from experiments.gallery.fleet import admission, cold_start, jitter, response_cache, routing
from experiments.gallery.memory import cliff, eviction, host_tier, paging, preemption
from experiments.gallery.network import bandwidth, head_of_line
from experiments.gallery.parallel import pipeline_parallel
from experiments.gallery.rest import quantisation, streaming, tensor_parallel

ENTRIES: tuple[Maker, ...] = (
    speculation,
    speculation_load,
    beam_search,
    quantisation,
    policies,
    chunk_size,
    size_classes,
    paging,
    eviction,
    host_tier,
    cliff,
    preemption,
    response_cache,
    streaming,
    head_of_line,
    bandwidth,
    tensor_parallel,
    pipeline_parallel,
    fairness,
    admission,
    routing,
    cold_start,
    jitter,
)
