"""`tokentwin report`: saved runs side by side, with the differences that are really between them."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from browser import Browser, needs_browser

from experiments.report_several import curve, run_names, several_html, stages
from experiments.saved import Opened, open_run
from serving.errors import UsageError
from sim.latency import inter_token_gaps
from tokentwin import simulate
from tokentwin.cli import main


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    base = tmp_path_factory.mktemp("several")
    for seats in (4, 32):
        simulate(
            model="qwen3-0.6b",
            gpu="h200",
            dataset_name="random",
            isl=200,
            osl=50,
            request_rate=60,
            num_prompts=150,
            max_num_seqs=seats,
            slo=["p95_ttft:100"],
        ).save(base / f"{seats}")
    return [base / "4", base / "32"]


@pytest.fixture(scope="module")
def opened(folders: list[Path]) -> list[Opened]:
    return [open_run(folder) for folder in folders]


def cells(page: str, row: str) -> list[str]:
    line = re.search(rf'<th scope="row">{re.escape(row)}</th>(.*?)</tr>', page)
    assert line is not None, row
    return [re.sub("<[^>]+>", "", cell) for cell in re.findall("<td>(.*?)</td>", line.group(1))]


def test_the_table_sets_each_number_beside_the_first(opened: list[Opened], tmp_path: Path) -> None:
    page = several_html(opened, tmp_path)
    a, b = (run.summary.ttft.at(95.0) * 1000 for run in opened)
    assert a > b  # four seats wait longer than thirty-two
    assert cells(page, "P95 TTFT (ms)") == [f"{a:,.4g}", f"{b:,.4g} {b / a - 1:+.1%}"]
    assert cells(page, "max_num_seqs") == ["4", "32"]
    assert "P95 TTFT ≤ 100 ms" in page
    differing = re.findall(r'<th scope="row">([a-z_.]+)</th>', page)
    assert differing == ["max_num_seqs"]


def test_the_curve_of_gaps_is_the_distribution_of_all_gaps(opened: list[Opened]) -> None:
    x_ms, share = curve(opened[0], "itl")
    pool = inter_token_gaps(opened[0].record)
    every = np.repeat(pool.values_s, pool.counts) * 1000
    for q in (0.1, 0.5, 0.9):
        at = x_ms[np.searchsorted(share, q)]
        assert (every <= at).mean() >= q
        assert (every < at).mean() <= q + 2 / 1500
    assert share[-1] == 1.0


def test_every_run_has_its_bar_also_where_a_name_is_a_number(opened: list[Opened]) -> None:
    figure = stages(opened, run_names(opened))
    assert figure.layout.yaxis.type == "category"
    assert {tuple(bar.y) for bar in figure.data} == {("4", "32")}
    for run, of_run in zip(opened, np.array([bar.x for bar in figure.data]).T, strict=True):
        assert of_run.sum() == pytest.approx(run.summary.e2el.mean_s)


def test_runs_are_named_by_what_tells_their_folders_apart(opened: list[Opened]) -> None:
    assert run_names(opened) == ["4", "32"]
    same = [opened[0], opened[0]]
    assert len(set(run_names(same))) == 2


def test_the_command_makes_one_page_or_many(
    folders: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (folders[0] / "report.html").read_bytes()
    assert main(["report", str(folders[0]), "--plot-timeline"]) == 0
    assert (folders[0] / "report.html").read_bytes() == before
    assert (folders[0] / "report.timeline.html").exists()
    page = tmp_path / "deep" / "both.html"
    assert main(["report", *map(str, folders), "-o", str(page)]) == 0
    links = re.findall(r'<a href="([^"]+)">', page.read_text())
    assert [(page.parent / link).resolve() for link in links] == [f / "report.html" for f in folders]
    capsys.readouterr()
    many = [tmp_path / f"run{number}" for number in range(9)]
    for link in many:
        link.symlink_to(folders[0])
    for wrong, words in (
        ([str(folders[0]), "-o", str(tmp_path)], "a page is one file"),
        ([*map(str, folders), "--plot-timeline"], "shows one run"),
        ([*map(str, many)], "2 to 7 runs"),
        ([str(tmp_path / "none")], "cannot read"),
    ):
        assert main(["report", *wrong]) == UsageError.exit_code
        error = capsys.readouterr().err
        assert words in error
        assert error.count("\n") == 1


@pytest.mark.browser
@needs_browser
def test_the_page_draws_on_desk_and_phone_light_and_dark(opened: list[Opened], tmp_path: Path) -> None:
    path = tmp_path / "both.html"
    path.write_text(several_html(opened, tmp_path), encoding="utf-8")
    with Browser(tmp_path / "profile") as browser:
        for width, dark in ((1280, False), (390, True)):
            browser.size(width, 844, touch=width < 400)
            browser.media(dark=dark)
            browser.open(path)
            assert browser.js("document.querySelectorAll('.js-plotly-plot .main-svg').length") >= 6
            assert browser.js("document.documentElement.scrollWidth") == width
            paper = browser.js("document.querySelector('.js-plotly-plot')._fullLayout.paper_bgcolor")
            assert (paper != "white") == dark
        assert browser.said == []
