"""What watches a run from outside: spans for a collector, and metrics for Prometheus while the run goes on."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.source_date import source_date_s
from serving.errors import UsageError
from sim.record import RunRecord
from tokentwin.provenance import VERSION

if TYPE_CHECKING:
    from experiments.spans import Value
    from tokentwin.live import Read
    from tokentwin.server.run_meters import Work

Watch = Callable[[Any], None]
"""Told of what is about to run: a world of the twin, or an engine."""


@dataclass(frozen=True, slots=True)
class Observers:
    """The observability flags but for alerts, checked."""

    otlp_file: Path | None = None
    otlp_traces_endpoint: str | None = None
    sample_ratio: float = 1.0
    metrics_port: int | None = None

    @classmethod
    def of(cls, flags: Mapping[str, Any]) -> Observers:
        """From flags by name. Raises UsageError for what cannot be, before anything runs."""
        file, endpoint = flags.get("otlp_file"), flags.get("otlp_traces_endpoint")
        ratio, port = flags.get("otlp_traces_sample_ratio"), flags.get("metrics_port")
        if ratio is not None and file is None and endpoint is None:
            raise UsageError(
                "--otlp-traces-sample-ratio has no effect without --otlp-file or --otlp-traces-endpoint; add one"
            )
        if ratio is not None and not 0 < ratio <= 1:
            raise UsageError(f"--otlp-traces-sample-ratio must lie above 0 and up to 1, got {ratio:g}")
        if file is not None or endpoint is not None:
            source_date_s()  # spans begin there
        if file is not None:
            from experiments.otlp import check_otlp_file

            check_otlp_file(file)
        if endpoint is not None:
            from experiments.otlp import check_endpoint

            check_endpoint(endpoint)
        if port is not None and not 0 <= port < 65536:
            raise UsageError(
                f"--metrics-port {port}: ports go up to 65535; choose another, or 0 for any that is free"
            )
        if port is not None and find_spec("prometheus_client") is None:
            raise UsageError(
                "--metrics-port needs prometheus_client, which is not installed: pip install 'tokentwin[serve]'"
            )
        return cls(file, endpoint, 1.0 if ratio is None else ratio, port)

    @contextmanager
    def watching(
        self, model: str, reader: Callable[[Any], Read], work: Work | None = None
    ) -> Iterator[Watch | None]:
        """While it lasts, what the given callback is told of is served at `/metrics`; None where nobody asked for it."""
        if self.metrics_port is None:
            yield None
            return
        from tokentwin.server.run_meters import RunMeters, serving

        read: list[Read] = []
        with serving(lambda: RunMeters(read[0], model, work) if read else None, self.metrics_port) as address:
            sys.stderr.write(f"Metrics at {address} while this runs\n")
            sys.stderr.flush()
            yield lambda running: read.append(reader(running))

    def write(self, record: RunRecord) -> list[Path]:
        """Write and send the spans; says on stderr how many of how many requests were traced where it is a sample.

        Raises UsageError when the file cannot be written, TokenTwinError when the endpoint does not take them.
        """
        if self.otlp_file is None and self.otlp_traces_endpoint is None:
            return []
        from experiments.otlp import origin_ns, resource_attributes, send, write_otlp_file
        from experiments.spans import run_spans

        clock = "real" if record.meta.get("real") else "simulated"
        facts: dict[str, Value] = {
            "tokentwin.clock": clock,
            "tokentwin.seed": int(record.meta.get("seed") or 0),
        }
        resource, start_ns = resource_attributes(VERSION, **facts), origin_ns(record.end_s)
        count, paths = 0, []
        if self.otlp_file is not None:
            traces = run_spans(record, start_ns, sample_ratio=self.sample_ratio)
            count = write_otlp_file(traces, self.otlp_file, resource, VERSION)
            paths.append(self.otlp_file)
        if self.otlp_traces_endpoint is not None:
            traces = run_spans(record, start_ns, sample_ratio=self.sample_ratio)
            count = send(traces, self.otlp_traces_endpoint, resource, VERSION)
        if self.sample_ratio < 1:
            sys.stderr.write(f"note: {count:,} of {len(record.requests):,} requests were traced\n")
        return paths
