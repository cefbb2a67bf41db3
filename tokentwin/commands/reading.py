"""`tokentwin reading RUN`: how the answers of a saved run read, under several ways of sending them."""

from __future__ import annotations

import sys
from json import dumps
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from cyclopts import Parameter

from experiments.saved import load_record
from serving.errors import UsageError
from sim.streaming import READING_TOKENS_PER_S, reading
from tokentwin.config_file import configurable
from tokentwin.flags import as_path

EVENT_BYTES = 250


@configurable
def read(
    run: Annotated[Path, Parameter(help="Folder of a saved run (-o of simulate or run).", converter=as_path)],
    /,
    *,
    stream_interval: Annotated[
        str,
        Parameter(
            help="Tokens sent together, as --stream-interval of serve: one way or several, such as 1,8,32."
        ),
    ] = "1",
    stream_slice: Annotated[
        float, Parameter(help="Milliseconds in which tokens gather before they are sent; 0: none.")
    ] = 0.0,
    bandwidth: Annotated[
        float | None, Parameter(help="Bytes a second of a client's line; unlimited by default.")
    ] = None,
    event_bytes: Annotated[
        int, Parameter(help="Bytes of one event with its JSON and headers (about 250 in the OpenAI API).")
    ] = EVENT_BYTES,
    reading_speed: Annotated[
        float, Parameter(help="Tokens a second that the reader takes in; 5.3 are 240 words a minute.")
    ] = READING_TOKENS_PER_S,
    json: Annotated[bool, Parameter(help="Print JSON.", negative=())] = False,
) -> int:
    """Say how a run's answers read: the first word, the longest pause, and how long the reader waits for text.

    Example: tokentwin reading runs/a --stream-interval 1,8,32
    """
    try:
        intervals = [int(part) for part in stream_interval.split(",")]
    except ValueError:
        raise UsageError(
            f"--stream-interval takes whole numbers such as 1,8,32, got {stream_interval!r}"
        ) from None
    checks: tuple[tuple[str, float, bool, str], ...] = (
        *(("--stream-interval", float(n), n >= 1, "at least 1") for n in intervals),
        ("--stream-slice", stream_slice, 0 <= stream_slice < np.inf, "a number of ms, 0 or more"),
        ("--bandwidth", bandwidth or 0.0, bandwidth is None or bandwidth > 0, "positive"),
        ("--event-bytes", float(event_bytes), event_bytes > 0, "positive"),
        ("--reading-speed", reading_speed, 0 < reading_speed < np.inf, "a positive number"),
    )
    for option, value, fine, what in checks:
        if not fine:
            raise UsageError(f"{option} must be {what}, got {value:g}")
    if len(set(intervals)) < len(intervals):
        raise UsageError(f"--stream-interval {stream_interval} names one twice; keep it once")
    if event_bytes != EVENT_BYTES and bandwidth is None:
        raise UsageError(
            "--event-bytes has no effect without --bandwidth; give the bytes a second of the line"
        )
    record = load_record(run)
    asked = intervals != [1] or stream_slice or bandwidth is not None
    if record.deliveries is not None and asked:
        raise UsageError(
            f"{run}: its streams were followed over a network, and read here as they came; give --stream-interval, "
            "--stream-slice-ms and --network to simulate instead"
        )
    if intervals != [1] or stream_slice:
        pauses = reading(record).longest_pause_s
        if np.isfinite(pauses).any() and not np.nanmax(pauses) > 0:
            raise UsageError(
                f"{run}: no answer came token by token (beam searches, best_of, answers of one token), so "
                "--stream-interval and --stream-slice have no effect; leave them out"
            )
    ways: list[dict[str, Any]] = []
    for interval in intervals:
        found = reading(
            record,
            interval=interval,
            slice_s=stream_slice / 1e3,
            event_bytes=float(event_bytes) if bandwidth is not None else 0.0,
            bytes_per_s=bandwidth if bandwidth is not None else float("inf"),
            reading_tokens_per_s=reading_speed,
        )
        if not np.isfinite(found.first_word_s).any():
            raise UsageError(f"{run}: no request finished with an answer, so there is nothing to read")
        ways.append({"stream_interval": interval, **_figures(found)})
    if json:
        sys.stdout.write(dumps(ways, indent=1) + "\n")
        return 0
    lines = [
        f"{'tokens sent':<14}{'first word (ms)':>22}{'longest pause (ms)':>22}{'waiting for text':>22}",
        f"{'together':<14}{'median':>13}{'P95':>9}{'median':>13}{'P95':>9}{'mean':>13}{'P95':>9}",
    ]
    for way in ways:
        word, pause, stalled = way["first_word_ms"], way["longest_pause_ms"], way["stalled_share"]
        lines.append(
            f"{way['stream_interval']:<14}{word['median']:>13,.0f}{word['p95']:>9,.0f}{pause['median']:>13,.0f}"
            f"{pause['p95']:>9,.0f}{stalled['mean']:>13.1%}{stalled['p95']:>9.1%}"
        )
    lines.append(f"A reader takes in {reading_speed:g} tokens a second from the first word on.")
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def _figures(found: Any) -> dict[str, dict[str, float]]:
    out = {}
    for name, values, scale in (
        ("first_word_ms", found.first_word_s, 1e3),
        ("longest_pause_ms", found.longest_pause_s, 1e3),
        ("stalled_share", found.stalled_share, 1.0),
    ):
        kept = values[np.isfinite(values)] * scale
        out[name] = {
            "mean": float(kept.mean()),
            "median": float(np.median(kept)),
            "p95": float(np.percentile(kept, 95)),
        }
    return out
