"""Lines, channels and windows against sums done by hand and rules that any network keeps."""

from __future__ import annotations

from itertools import pairwise
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.streaming import grouped, over_line, sliced
from sim.wire import Channel, Stream, Wire, alone

BYTE_S = 0.001
"""A line of a thousand bytes a second, to count in milliseconds."""
gaps = st.lists(st.sampled_from([0.0, 0.01, 0.03, 0.2]), min_size=1, max_size=25)


def stream(row: int, times_s: list[float], size: float = 100.0, **options: float) -> Stream:
    """An answer of one token an event, whole."""
    made = Stream(row, event_bytes=size, **options)  # type: ignore[arg-type]
    for time_s in times_s:
        made.give(time_s, 1)
    made.end(times_s[-1])
    return made


def carry(*channels: Channel, s_per_byte: float = BYTE_S, until_s: float = inf) -> None:
    wire = Wire(s_per_byte)
    for channel in channels:
        wire.offer(channel)
    wire.advance(until_s)


def channel(*streams: Stream, half_rtt_s: float = 0.0, pace_s: float = 0.0, window: float = inf) -> Channel:
    made = Channel(half_rtt_s, window)
    made.streams.extend(streams)
    for each in streams:
        each.pace_s = pace_s
    return made


def test_an_event_takes_its_bytes_over_the_rate_and_half_a_round_trip() -> None:
    one = stream(0, [1.0, 1.05, 2.0])
    carry(channel(one, half_rtt_s=0.02))
    # 100 bytes take 0.1 s: the second waits for the first, the third finds the line free.
    assert one.seen_s == pytest.approx([1.12, 1.22, 2.12])


def test_two_streams_of_a_client_share_its_line_in_order_of_time() -> None:
    a, b = stream(0, [0.0, 0.3]), stream(1, [0.05, 0.31])
    carry(channel(a), channel(b))
    assert a.seen_s == pytest.approx([0.1, 0.4])
    assert b.seen_s == pytest.approx([0.2, 0.5])
    at_once_s, read_s = alone(b, channel(), BYTE_S)
    assert (at_once_s, read_s) == pytest.approx((0.41, 0.41))  # so that the other stream cost it 0.09 s


def test_a_slow_reader_holds_up_whoever_is_behind_it_in_a_pipeline_and_nobody_beside_it() -> None:
    """Ten tokens at once and a reader of one in 0.1 s: whole after 0.9 s, and free for the next after 1 s."""
    for pipelined, expected in ((True, [1.0, 1.1]), (False, [0.0, 0.1])):
        slow, quick = stream(0, [0.0] * 10), stream(1, [0.0, 0.0])
        if pipelined:
            carry(channel(slow, quick, pace_s=0.1), s_per_byte=0.0)
        else:
            carry(channel(slow, pace_s=0.1), channel(quick, pace_s=0.1), s_per_byte=0.0)
        assert slow.seen_s == pytest.approx(np.arange(10) / 10)
        assert quick.seen_s == pytest.approx(expected)


def test_a_full_window_fills_with_the_reader_and_opens_half_a_round_trip_later() -> None:
    one = stream(0, [0.0] * 6)
    carry(channel(one, pace_s=1.0, window=200.0, half_rtt_s=0.05), s_per_byte=0.0)
    # Two are under way or unread; the third goes when the client has taken the first and has said so.
    assert one.seen_s == pytest.approx([0.05, 1.05, 2.05, 3.05, 4.05, 5.05])
    assert one.passed_s == pytest.approx([0.0, 0.0, 0.1, 1.1, 2.1, 3.1])


def test_a_window_bounds_the_rate_by_itself_over_a_round_trip() -> None:
    one = stream(0, [0.0] * 400)
    carry(channel(one, window=1000.0, half_rtt_s=0.1), s_per_byte=1e-9)
    assert 400 * 100 / (one.seen_s[-1] - 0.1) == pytest.approx(1000 / 0.2, rel=0.03)


@given(gaps, st.integers(1, 6))
def test_gathering_by_count_is_that_of_the_post_pass(steps: list[float], interval: int) -> None:
    times_s = np.cumsum(steps)
    one = stream(0, times_s.tolist(), interval=interval)
    assert np.repeat(one.left_s, one.tokens).tolist() == grouped(times_s, interval).tolist()


@given(gaps, st.sampled_from([0.005, 0.02, 0.07, 1.0]))
def test_gathering_by_time_is_that_of_the_post_pass(steps: list[float], slice_s: float) -> None:
    times_s = np.cumsum(steps)
    one = stream(0, times_s.tolist(), slice_s=slice_s)
    np.testing.assert_allclose(np.repeat(one.left_s, one.tokens), sliced(times_s, slice_s), atol=1e-9)


@given(gaps)
def test_a_stream_alone_is_the_closed_form_of_a_line(steps: list[float]) -> None:
    times_s = np.cumsum(steps)
    one = stream(0, times_s.tolist())
    carry(channel(one))
    np.testing.assert_allclose(one.seen_s, over_line(times_s, 100 * BYTE_S), rtol=1e-12)


@st.composite
def networks(draw: st.DrawFn) -> tuple[list[list[float]], list[int], bool, float, float]:
    count = draw(st.integers(1, 5))
    starts = draw(st.lists(st.sampled_from([0.0, 0.0, 0.05, 0.4]), min_size=count, max_size=count))
    times = [(start + np.cumsum(draw(gaps))).tolist() for start in starts]
    sizes = draw(st.lists(st.sampled_from([10, 100]), min_size=count, max_size=count))
    pace_s = draw(st.sampled_from([0.0, 0.04, 0.3]))
    return times, sizes, draw(st.booleans()), pace_s, draw(st.sampled_from([inf, 100.0, 250.0]))


def made(
    network: tuple[list[list[float]], list[int], bool, float, float],
) -> tuple[list[Stream], list[Channel]]:
    times, sizes, pipelined, pace_s, window = network
    streams = [stream(i, t, s) for i, (t, s) in enumerate(zip(times, sizes, strict=True))]
    groups = [streams] if pipelined else [[each] for each in streams]
    return streams, [channel(*group, half_rtt_s=0.01, pace_s=pace_s, window=window) for group in groups]


@given(networks())
@settings(max_examples=150)
def test_nothing_comes_before_it_was_sent_or_out_of_order_or_is_lost(network) -> None:  # type: ignore[no-untyped-def]
    streams, channels = made(network)
    carry(*channels)
    for one in streams:
        assert one.delivered
        assert all(seen_s >= left_s + 0.01 for seen_s, left_s in zip(one.seen_s, one.left_s, strict=True))
        assert one.seen_s == sorted(one.seen_s)
        # Others never help: alone it would be there as early, or earlier.
        own = channel(half_rtt_s=0.01, window=channels[0].window_bytes)
        at_once_s, read_s = alone(one, own, BYTE_S)
        assert one.left_s[-1] + 0.01 <= at_once_s <= read_s + 1e-9
        assert read_s <= one.seen_s[-1] + 1e-9
    if network[2]:
        ends = [one.seen_s for one in streams]
        assert all(a[-1] <= b[0] for a, b in pairwise(ends))


@given(networks(), st.floats(1.0, 20.0))
@settings(max_examples=100)
def test_more_bandwidth_is_never_later(network, factor: float) -> None:  # type: ignore[no-untyped-def]
    ends = []
    for s_per_byte in (BYTE_S, BYTE_S / factor):
        streams, channels = made((*network[:3], network[3], inf))
        carry(*channels, s_per_byte=s_per_byte)
        ends.append(np.concatenate([one.seen_s for one in streams]))
    assert (ends[1] <= ends[0] + 1e-9).all()


@given(networks(), st.lists(st.floats(0, 3), max_size=6))
@settings(max_examples=100)
def test_looking_at_a_line_does_not_change_it(network, looks: list[float]) -> None:  # type: ignore[no-untyped-def]
    at_once, channels = made(network)
    carry(*channels)
    looked, channels = made(network)
    wire = Wire(BYTE_S)
    for until_s in (*sorted(looks), inf):
        for each in channels:
            wire.offer(each)
        wire.advance(until_s)
    assert [one.seen_s for one in looked] == [one.seen_s for one in at_once]
