"""The timeline of `--plot-timeline`: pieces of a request's bar, and the page."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from experiments.timeline import segments, timeline, write_timeline
from serving.errors import UsageError
from sim.record import RunRecord
from tests.sim.toy_runs import toy_run


@pytest.fixture(scope="module")
def record() -> RunRecord:
    """Steps of 10 ms; the second request's prompt of 500 tokens holds the first one up for 60 ms once."""
    return toy_run([0.0, 0.1, 0.2], [100, 500, 100], [30, 3, 4], rejected=(2,))


def test_neighbouring_gaps_of_one_class_are_one_piece(record: RunRecord) -> None:
    start_s, end_s, kind = segments(record, 0, (25.0, 50.0))
    assert kind.tolist() == [0, 1, 3, 1]  # wait, 10 ms gaps, the 60 ms gap, 10 ms gaps
    assert end_s[2] - start_s[2] == pytest.approx(0.060)
    assert np.array_equal(start_s[1:], end_s[:-1])
    assert (start_s[0], end_s[-1]) == (record.requests.sent_s[0], record.token_times_s(0)[-1])


def test_classes_are_cut_at_the_thresholds(record: RunRecord) -> None:
    assert segments(record, 0, (25.0, 61.0))[2].tolist() == [0, 1, 2, 1]
    assert segments(record, 0, (61.0, 99.0))[2].tolist() == [0, 1]


def test_a_request_without_tokens_has_no_bar(record: RunRecord) -> None:
    assert len(segments(record, 2, (25.0, 50.0))[0]) == 0


def test_the_page_stands_alone(record: RunRecord, tmp_path: Path) -> None:
    text = write_timeline(record, tmp_path / "deep" / "t.html").read_text(encoding="utf-8")
    assert "default-src 'none'" in text
    assert "Every request" in text
    assert len(timeline(record).data) == 4
    with pytest.raises(UsageError, match="cannot write"):
        write_timeline(record, "/dev/null/t.html")
