"""`tokentwin explore`: the page's numbers are the sweep's, and its front is what no other point beats."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from explored import PRICES, keeps, make_plan, rows, undominated, usd_per_million

from experiments.explore import explore_html, front_numbers, payload
from experiments.explore_data import load_space
from experiments.explore_space import Space
from serving.errors import UsageError
from tokentwin.cli import main
from tokentwin.commands.sweep import SERVING


@pytest.fixture(scope="module")
def space(sweep: Path) -> Space:
    return load_space(sweep, serving=SERVING)


def test_the_page_holds_the_figures_of_the_sweep(sweep: Path, space: Space) -> None:
    data = payload(space, sweep, PRICES)
    for i, row in enumerate(rows(sweep)):
        assert data["number"][i] == row["index"]
        for name in ("p95_ttft_ms", "output_throughput", "sim_kv_occupancy_mean"):
            assert data["figure"][name][i] == pytest.approx(row[name], rel=1e-5)
        for knob in data["knobs"]:
            assert knob["values"][data["knob"][knob["key"]][i]] == row[knob["key"]]
    assert data["limits"] == {
        "ttft": {"statistic": "p95", "ms": 60.0},
        "tpot": {"statistic": "p95", "ms": 6.0},
    }
    assert data["load"] == "request_rate"
    assert [pair["name"] for pair in data["pairs"]] == ["Chunk × load", "Batch limit × load"]


def test_the_front_is_what_no_other_point_beats(sweep: Path, space: Space) -> None:
    kept = {r["index"]: (r["p95_ttft_ms"], usd_per_million(r)) for r in rows(sweep) if keeps(r, 60, 6)}
    assert 1 < len(kept) < 24
    assert set(front_numbers(space, PRICES)) == undominated(kept)


def test_several_runs_of_a_point_are_averaged(tmp_path: Path) -> None:
    (tmp_path / "two.yaml").write_text(
        "base: {model: qwen3-0.6b, dataset_name: random, isl: 50, osl: 5, num_prompts: 20, num_runs: 2}\n".replace(
            ", num_runs: 2", ""
        )
        + "num_runs: 2\ngrid: {request_rate: [20, 80]}\n"
    )
    main(["sweep", str(tmp_path / "two.yaml"), "-o", str(tmp_path), "--jobs", "1"])
    table = rows(tmp_path / "two")
    found = load_space(tmp_path / "two", serving=SERVING)
    assert [p.runs for p in found.points] == [2, 2]
    for p, pair in zip(found.points, (table[:2], table[2:]), strict=True):
        assert p.figures["p95_ttft_ms"] == pytest.approx(sum(r["p95_ttft_ms"] for r in pair) / 2)
        assert pair[0]["p95_ttft_ms"] != pair[1]["p95_ttft_ms"]


def test_fields_of_an_object_are_knobs_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "drafts.yaml").write_text(
        "base: {model: qwen3-0.6b, dataset_name: random, isl: 50, osl: 9, num_prompts: 20, request_rate: 50}\n"
        "grid:\n  speculative_config:\n"
        "    - {method: ngram, num_speculative_tokens: 2, acceptance: 0.3}\n"
        "    - {method: ngram, num_speculative_tokens: 4, acceptance: 0.8}\n"
        "    - null\n"
    )
    main(["sweep", str(tmp_path / "drafts.yaml"), "-o", str(tmp_path), "--jobs", "1"])
    found = load_space(tmp_path / "drafts", serving=SERVING)
    names = [f"speculative_config.{name}" for name in ("method", "num_speculative_tokens", "acceptance")]
    assert sorted(found.knobs) == sorted(names)
    assert [p.params.get(names[2]) for p in found.points] == [0.3, 0.8, None]
    (pair,) = payload(found, tmp_path, {})["pairs"]
    assert pair == {"name": "Acceptance × draft cost", "keys": [names[2], names[1]]}
    command = shlex.split(found.points[1].command)
    assert main([*command[1:-1], str(tmp_path / "again"), "--replications", "1"]) == 0
    again = json.loads((tmp_path / "again" / "result.json").read_text())
    assert again["p95_tpot_ms"] == found.points[1].figures["p95_tpot_ms"]
    assert main(["explore", str(tmp_path / "drafts"), "--price", "h200=4", "--reports", "front"]) == 0
    made = [p.number for p in found.points if p.report is not None and p.report.is_file()]
    assert made == sorted(front_numbers(found, PRICES))


def test_the_same_results_make_the_same_page_and_it_loads_nothing(sweep: Path, space: Space) -> None:
    page = explore_html(space, sweep, PRICES)
    assert page == explore_html(space, sweep, PRICES)
    assert len(page.encode()) < 6e6
    assert "default-src 'none'" in page
    own = page[page.index("<main>") :]
    assert "http" not in own.split('id="data"')[0]


def test_text_from_the_sweep_cannot_leave_the_data(sweep: Path, tmp_path: Path) -> None:
    shutil.copytree(sweep, tmp_path / "evil")
    table = rows(sweep)
    table[0] |= {"status": "failed", "error": "</script><b>x</b>", "gpu": "</script>"}
    pq.write_table(pa.Table.from_pylist(table), tmp_path / "evil" / "results.parquet")
    page = explore_html(load_space(tmp_path / "evil", serving=SERVING), tmp_path, PRICES)
    assert "</script><b>" not in page
    assert "&lt;/script&gt;" in page  # in the table of failed points


def test_a_sweep_that_is_not_over_opens_and_says_so(sweep: Path, tmp_path: Path) -> None:
    shutil.copytree(sweep, tmp_path / "part")
    (tmp_path / "part" / "results.parquet").unlink()
    for left in sorted((tmp_path / "part" / "points").iterdir())[10:]:
        left.unlink()
    found = load_space(tmp_path / "part", serving=SERVING)
    assert len(found.points) == 10
    assert found.notes[0].startswith("14 of 24 runs are not done yet")


def test_where_results_are_looked_for(sweep: Path, tmp_path: Path) -> None:
    above, file = (
        load_space(sweep.parent, serving=SERVING),
        load_space(sweep / "results.parquet", serving=SERVING),
    )
    assert above.points == file.points
    alone = tmp_path / "alone.parquet"
    shutil.copy(sweep / "results.parquet", alone)
    bare = load_space(alone)
    assert bare.knobs == above.knobs
    assert all(p.command == "" and p.folder is None for p in bare.points)
    shutil.copytree(sweep, tmp_path / "a")
    shutil.copytree(sweep, tmp_path / "b")
    with pytest.raises(UsageError, match="holds 2 sweeps and plans; name one"):
        load_space(tmp_path)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["nowhere"], "neither a sweep's folder"),
        (["."], "no sweep.json and no plan.json"),
        (["SWEEP", "--reports", "99"], "numbered 0 to 23"),
        (["SWEEP", "-o", "folder"], "a page is one file"),
        (["SWEEP", "--price", "h200"], "is not GPU=DOLLARS_PER_HOUR"),
        (["SWEEP", "--price", "h200=3", "b200=5"], "--price b200: no point of"),
    ],
)
def test_what_cannot_be_is_one_line(
    flags: list[str], words: str, sweep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert main(["explore", *(str(sweep) if flag == "SWEEP" else flag for flag in flags)]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_a_report_of_a_point_has_the_figures_of_the_sweep(sweep: Path, tmp_path: Path) -> None:
    copy = tmp_path / "grid"
    shutil.copytree(sweep, copy)
    row = rows(sweep)[5]
    assert main(["explore", str(copy), "--reports", "5"]) == 0
    point = load_space(copy, serving=SERVING).points[5]
    assert point.report is not None
    assert point.report.is_file()
    made = json.loads((point.report.parent / "result.json").read_text())
    for name in ("p95_ttft_ms", "output_throughput", "sim_num_steps"):
        assert made[name] == row[name]
    command = json.loads((point.report.parent / "run.json").read_text())["argv"]
    assert (
        main([*command[1:-1], str(tmp_path / "again"), "--replications", "1"]) == 0
    )  # the command that the page shows
    again = json.loads((tmp_path / "again" / "result.json").read_text())
    assert again["p95_ttft_ms"] == row["p95_ttft_ms"]


def test_a_plan_of_another_version_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text('{"schema": "tokentwin-plan/0"}')
    with pytest.raises(UsageError, match="not a plan of this version"):
        load_space(tmp_path)


def test_what_a_plan_extrapolates_is_on_its_page(tmp_path: Path) -> None:
    path = make_plan(tmp_path) / "plan.json"
    assert not [note for note in load_space(path).notes if note.startswith("Not measured")]
    plan = json.loads(path.read_text())
    plan["fleets"][0]["not_measured"] = [
        "decode: batch 1 to 300 outside the measured 1 to 256 (in 2% of steps)"
    ]
    plan["fleets"][1]["not_measured"] = [
        "decode: batch 1 to 400 outside the measured 1 to 256 (in 5% of steps)",
        "lm_head (gemm: n 151936 outside the measured 128 to 65536)",
    ]
    path.write_text(json.dumps(plan))
    assert [note for note in load_space(path).notes if note.startswith("Not measured")] == [
        "Not measured at all 2 fleets: decode: batch 1 to 300 outside the measured 1 to 256 (#1; alike at the others).",
        "Not measured at #2: lm_head (gemm: n 151936 outside the measured 128 to 65536).",
    ]


@pytest.mark.parametrize("lacking", [(), (2,), (1, 2)])
def test_a_limit_on_what_a_point_does_not_have_is_told(tmp_path: Path, lacking: tuple[int, ...]) -> None:
    """Such a point does not keep it; where no point has it, the page starts without the limit."""
    path = make_plan(tmp_path) / "plan.json"
    plan = json.loads(path.read_text())
    for number in lacking:
        plan["fleets"][number - 1]["p95_tpot_ms"] = None
    path.write_text(json.dumps(plan))
    space = load_space(path)
    told = [note for note in space.notes if note.startswith("Not judged")]
    what = "P95 TPOT ≤ 4 ms; there is no such figure"
    assert (
        told
        == {
            (): [],
            (2,): [f"Not judged at #2: {what}, and they do not count as keeping it."],
            (1, 2): [f"Not judged at all 2 fleets: {what}."],
        }[lacking]
    )
    assert ("tpot" in payload(space, tmp_path, PRICES)["limits"]) == (len(lacking) < 2)


def test_what_a_plan_is_not_certain_of_is_on_its_page(tmp_path: Path) -> None:
    found = load_space(make_plan(tmp_path))
    assert found.notes == (
        "Not certain: fleet 1, 2 x l40s: the interval of P95 TTFT reaches beyond the limit.",
    )
    data = payload(found, tmp_path, PRICES)
    assert data["interval"] == {"p95_ttft_ms": [[9.0, 12.0], [5.4, 7.2]]}
    assert found.notes[0] in explore_html(found, tmp_path, PRICES)


def test_points_of_a_sweep_have_no_intervals(sweep: Path, space: Space) -> None:
    assert payload(space, sweep, PRICES)["interval"] == {}


def test_what_a_sweep_is_not_certain_of_is_on_its_page_and_in_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Point by point what the saved results say: intervals around limits, what was not measured, few samples."""
    where = "model: qwen2.5-14b, gpu: l40s, dataset_name: random, isl: 512, osl: 8, num_prompts: 20, replications: 2"
    (tmp_path / "s.yaml").write_text(
        f"base: {{{where}, slo: [p95_ttft:220, p99_e2el:100000]}}\ngrid: {{request_rate: [0.1, 3, 40]}}\n"
    )
    assert main(["sweep", str(tmp_path / "s.yaml"), "-o", str(tmp_path), "--jobs", "1"]) == 0
    table = rows(tmp_path / "s")
    doubtful = [r["p95_ttft_ci95_low_ms"] <= 220 < r["p95_ttft_ci95_high_ms"] for r in table]
    assert 0 < sum(doubtful) < 3
    capsys.readouterr()
    assert main(["explore", str(tmp_path / "s")]) == 0
    said = capsys.readouterr().out.splitlines()
    numbers = ", ".join(
        f"#{row['index']}" for row, is_doubtful in zip(table, doubtful, strict=True) if is_doubtful
    )
    assert said[0] == (
        f"Note: Not certain at {numbers}: the 95% interval of P95 TTFT contains the sweep's limit of 220 ms."
    )
    saved = json.loads(next((tmp_path / "s").glob("*/run=0.json")).read_text())
    assert saved["sim_extrapolations"][0].startswith("lm_head")
    assert f"Note: Not measured at all 3 points: {saved['sim_extrapolations'][0]}." in said
    assert any(line.startswith("Note: At all 3 points, P99 E2EL of 20 samples is nearly") for line in said)
    assert not any("P90" in line for line in said)
    page = (tmp_path / "s" / "explore.html").read_text(encoding="utf-8")
    assert all(line.removeprefix("Note: ").replace("'", "&#x27;") in page for line in said[:-1])
