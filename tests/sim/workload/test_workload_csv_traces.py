"""CSV readers: valid files come back exactly, dirty ones have one defined outcome each."""

from __future__ import annotations

import gzip
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from serving.errors import UsageError
from sim.workload.csv_traces import read_azure, read_burstgpt, read_lengths

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
tokens = st.integers(1, 10_000_000)
same_file = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None
)


def one_line(error: UsageError) -> None:
    assert "\n" not in str(error)


def azure(tmp_path: Path, text: str | bytes) -> Path:
    path = tmp_path / "trace.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@given(
    st.lists(st.tuples(st.integers(0, 10**14), tokens, tokens), min_size=1, max_size=30),
    st.sampled_from(["", "+00:00", "Z", "-05:30"]),
    st.sampled_from(["\n", "\r\n", "\r"]),
    st.booleans(),
    st.booleans(),
)
@same_file
def test_azure_round_trip_keeps_every_digit(
    tmp_path: Path, rows: list[tuple[int, int, int]], zone: str, newline: str, bom: bool, last_newline: bool
) -> None:
    """`rows` are times in units of 100 ns: the trace's seven digits."""
    rows = sorted(rows, key=lambda row: row[0])
    lines = [HEADER.strip()]
    for ticks, prompt, output in rows:
        whole = datetime(2023, 11, 16) + timedelta(seconds=ticks // 10**7)
        lines.append(f"{whole:%Y-%m-%d %H:%M:%S}.{ticks % 10**7:07d}{zone},{prompt},{output}")
    text = ("\ufeff" if bom else "") + newline.join(lines) + (newline if last_newline else "")
    read = read_azure(azure(tmp_path, text))
    assert read.time_s is not None
    ticks_read = np.rint(read.time_s * 1e7).astype(int)
    assert ticks_read.tolist() == [ticks - rows[0][0] for ticks, _, _ in rows]
    assert read.prompt_tokens.tolist() == [prompt for _, prompt, _ in rows]
    assert read.output_tokens.tolist() == [output for _, _, output in rows]
    assert not any("dropped" in line for line in read.warnings)


@given(st.binary(max_size=300))
@example(b"\x1f\x8b\x08")
@example(b"\xff\xfe\x00")
@example(b'TIMESTAMP,ContextTokens,GeneratedTokens\n"')
@example(b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,9e999,1")
@same_file
def test_fuzzed_bytes_raise_nothing_but_usage_errors(tmp_path: Path, junk: bytes) -> None:
    for prefix, read in (
        (HEADER.encode(), read_azure),
        (b"Timestamp,Model,Request tokens,Response tokens\n", read_burstgpt),
        (b"num_prefill_tokens,num_decode_tokens\n", read_lengths),
        (b"", read_azure),
    ):
        try:
            rows = read(azure(tmp_path, prefix + junk))
        except UsageError as error:
            one_line(error)
        else:
            assert rows.prompt_tokens.min() >= 1
            assert rows.output_tokens.min() >= 1


CELLS = st.sampled_from(
    ["5", " 7 ", "0", "-3", "", "nan", "1e3", "2.5", "x", "9" * 30, "1_0", "inf", "5.0", '"8"']
)
TIMES = st.sampled_from(
    ["2023-11-16 18:15:46.1", "2023-11-16T18:15:46Z", "2023-11-16", "", "now", "1.5", "NaT"]
)


@given(st.lists(st.tuples(TIMES, CELLS, CELLS), min_size=1, max_size=6))
@same_file
def test_dirty_cells_are_dropped_and_counted_or_refused_with_line_and_column(
    tmp_path: Path, cells: list[tuple[str, str, str]]
) -> None:
    text = HEADER + "\n".join(",".join(row) for row in cells)
    bad_time = {"now", "1.5"}
    bad_count = {"2.5", "x", "9" * 30, "1_0", "inf"}
    left_out_time, left_out = {"", "NaT"}, {"0", "-3", "", "nan"}
    must_fail = any(t in bad_time or p in bad_count or g in bad_count for t, p, g in cells)
    kept = [row for row in cells if row[0] not in left_out_time and not ({row[1], row[2]} & left_out)]
    if must_fail:
        with pytest.raises(UsageError, match=r"line \d+, column '"):
            read_azure(azure(tmp_path, text))
    elif not kept:
        with pytest.raises(UsageError, match="no usable rows"):
            read_azure(azure(tmp_path, text))
    else:
        rows = read_azure(azure(tmp_path, text))
        assert len(rows) == len(kept)
        counted = sum(int(line.split()[0]) for line in rows.warnings if "dropped" in line)
        assert counted == len(cells) - len(kept)


def test_zero_answers_are_dropped_with_a_count(tmp_path: Path) -> None:
    text = HEADER + "2023-11-16 18:15:46,5,0\n" * 12 + "2023-11-16 18:15:46,5,4\n" * 1234
    rows = read_azure(azure(tmp_path, text))
    assert rows.warnings == ("12 of 1,246 rows dropped: GeneratedTokens is 0",)
    assert len(rows) == 1234


def test_a_row_with_two_faults_is_counted_once(tmp_path: Path) -> None:
    rows = read_azure(azure(tmp_path, HEADER + "2023-11-16 18:15:46,0,-1\n2023-11-16 18:15:46,5,4"))
    assert rows.warnings == ("1 of 2 rows dropped: ContextTokens is 0",)


def test_unsorted_rows_are_sorted_stably_and_counted(tmp_path: Path) -> None:
    text = (
        HEADER
        + "2023-11-16 18:15:48,1,1\n2023-11-16 18:15:46,2,1\n2023-11-16 18:15:48,3,1\n2023-11-16 18:15:46,4,1"
    )
    rows = read_azure(azure(tmp_path, text))
    assert rows.prompt_tokens.tolist() == [2, 4, 1, 3]
    assert rows.time_s is not None
    assert rows.time_s.tolist() == [0, 0, 2, 2]
    assert rows.warnings == ("2 of 4 rows out of time order; sorted",)


def test_equal_timestamps_are_kept(tmp_path: Path) -> None:
    rows = read_azure(azure(tmp_path, HEADER + "2023-11-16 18:15:46.5,1,1\n" * 3))
    assert len(rows) == 3
    assert rows.warnings == ()


def test_zones_are_applied_and_a_mixture_is_reported(tmp_path: Path) -> None:
    text = HEADER + "2024-05-10 00:00:00+00:00,1,1\n2024-05-10 02:00:00.25+02:00,2,1\n2024-05-10T00:00:01,3,1"
    rows = read_azure(azure(tmp_path, text))
    assert rows.time_s is not None
    assert rows.time_s.tolist() == [0, 0.25, 1]
    assert rows.warnings == ("1 of 3 timestamps have no time zone and were read as UTC",)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("\n\r\n", "is empty"),
        (HEADER, "no usable rows"),
        (
            "TIMESTAMP,ContextTokens\n",
            "line 1: no column 'GeneratedTokens' for dataset azure; found TIMESTAMP",
        ),
        (
            HEADER + "2023-11-16 18:15:46,5,1,\n2023-11-16 18:15:46,1,155,211",
            "line 3: 4 fields under a header of 3",
        ),
        (
            HEADER + "2023-11-16 18:15:46,5,1\n2023-11-16 18:15:46,many,1",
            "line 3, column 'ContextTokens': 'many'",
        ),
        (HEADER + "\n\n2023-11-16 25:15:46,5,1", "line 4, column 'TIMESTAMP': '2023-11-16 25:15:46'"),
        (
            HEADER + "2023-11-16 18:15:46,5,99999999999",
            "line 2, column 'GeneratedTokens': '99999999999' tokens",
        ),
        (HEADER + "2023-02-30 18:15:46,5,9", "line 2, column 'TIMESTAMP'"),
        (b"\x00\x01\x02" * 50, "binary file"),
        (HEADER.encode("utf-16"), "UTF-16"),
        (HEADER.encode() + b"\xe9", "line 2: not UTF-8"),
        (gzip.compress(HEADER.encode(), mtime=0)[:-5], "gzip"),
        (HEADER + '"' + "x" * 200_000, "not CSV"),
    ],
)
def test_broken_files_are_one_line_errors_that_name_the_place(
    tmp_path: Path, text: str | bytes, message: str
) -> None:
    with pytest.raises(UsageError) as caught:
        read_azure(azure(tmp_path, text))
    assert message in str(caught.value)
    assert str(tmp_path / "trace.csv") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_files_and_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        read_azure(tmp_path / "none.csv")
    with pytest.raises(UsageError, match="is a folder"):
        read_azure(tmp_path)


def test_gzip_is_recognised_by_content_whatever_the_name(tmp_path: Path) -> None:
    rows = read_azure(azure(tmp_path, gzip.compress((HEADER + "2023-11-16 18:15:46,5,1").encode())))
    assert rows.prompt_tokens.tolist() == [5]


def test_quoted_cells_short_rows_and_blank_lines(tmp_path: Path) -> None:
    text = HEADER + '"2023-11-16 18:15:46","5","1"\n\n2023-11-16 18:15:47,6\n2023-11-16 18:15:48,7,2,\n'
    rows = read_azure(azure(tmp_path, text))
    assert rows.prompt_tokens.tolist() == [5, 7]
    assert rows.warnings == ("1 of 3 rows dropped: GeneratedTokens is empty or NaN",)


@given(st.lists(st.tuples(st.floats(0, 1e7), tokens, tokens), min_size=1, max_size=20))
@same_file
def test_burstgpt_round_trip(tmp_path: Path, rows: list[tuple[float, int, int]]) -> None:
    rows = sorted(rows, key=lambda row: row[0])
    lines = ["Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"]
    lines += [f"{t!r},ChatGPT,{p},{g},{p + g},API log" for t, p, g in rows]
    read = read_burstgpt(azure(tmp_path, "\n".join(lines)))
    assert read.time_s is not None
    np.testing.assert_array_equal(read.time_s, np.array([t for t, _, _ in rows]) - rows[0][0])
    assert read.prompt_tokens.tolist() == [p for _, p, _ in rows]


def test_burstgpt_keeps_one_model_and_says_so(tmp_path: Path) -> None:
    text = "Timestamp,Model,Request tokens,Response tokens\n"
    text += "5,ChatGPT,1,1\n6.5,GPT-4,2,0\n7.25,GPT-4,3,1\n9,GPT-4,4,1"
    read = read_burstgpt(azure(tmp_path, text), "GPT-4")
    assert read.prompt_tokens.tolist() == [3, 4]
    assert read.time_s is not None
    assert read.time_s.tolist() == [0, 1.75]
    assert read.warnings == (
        "1 of 3 rows dropped: Response tokens is 0",
        "1 row of other models left out (model GPT-4)",
    )
    with pytest.raises(UsageError, match=r"no row of model 'gpt-5'; known: ChatGPT, GPT-4"):
        read_burstgpt(azure(tmp_path, text), "gpt-5")


@given(st.lists(st.tuples(tokens, tokens), min_size=1, max_size=20))
@same_file
def test_lengths_round_trip(tmp_path: Path, pairs: list[tuple[int, int]]) -> None:
    text = "num_prefill_tokens,num_decode_tokens\n" + "".join(f"{p},{g}\n" for p, g in pairs)
    read = read_lengths(azure(tmp_path, text))
    assert list(zip(read.prompt_tokens.tolist(), read.output_tokens.tolist(), strict=True)) == pairs
    assert read.time_s is None


PLAIN = CELLS.filter(lambda cell: '"' not in cell)


@given(st.lists(st.tuples(TIMES, PLAIN, PLAIN), min_size=1, max_size=6))
@same_file
def test_quotes_change_nothing(tmp_path: Path, cells: list[tuple[str, str, str]]) -> None:
    """The fast path for plain rows and the careful one give the same rows, warnings and errors."""
    outcomes = []
    for quote in ("", '"'):
        text = HEADER + "\n".join(",".join(f"{quote}{cell}{quote}" for cell in row) for row in cells)
        try:
            rows = read_azure(azure(tmp_path, text))
        except UsageError as error:
            outcomes.append(str(error))
        else:
            assert rows.time_s is not None
            outcomes.append(repr((rows.time_s, rows.prompt_tokens, rows.output_tokens, rows.warnings)))
    assert outcomes[0] == outcomes[1]


def test_a_row_of_empty_cells_is_counted(tmp_path: Path) -> None:
    rows = read_azure(azure(tmp_path, HEADER + "2023-11-16 18:15:46,5,1\n,,\n  \n"))
    assert rows.warnings == ("1 of 2 rows dropped: TIMESTAMP is empty or NaN",)


def test_a_gap_of_months_is_pointed_out(tmp_path: Path) -> None:
    rows = read_azure(azure(tmp_path, HEADER + "2023-11-16 18:15:46,5,1\n2024-02-24 18:15:46,6,1"))
    assert rows.warnings == ("a gap of 100 days between two requests; check the timestamps",)
