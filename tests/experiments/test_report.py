"""The page: one file, no network, every picture drawn, nothing in the browser's console."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from experiments.report import report_html, write_report
from experiments.report_figures import Roofline, p95_over_time, window_s
from serving.errors import UsageError
from sim.metrics import summarise
from sim.record import RunRecord, Tenant
from sim.slo import Goodput, parse_slo
from sim.verdict import verdict
from tests.sim.toy_runs import toy_run

CHROMIUM = next((path for name in ("chromium", "chromium-browser") if (path := shutil.which(name))), None)
HOOK = """<script>
  addEventListener("error", e => document.documentElement.dataset.error = e.message);
addEventListener("securitypolicyviolation", e =>
    document.documentElement.dataset.error = e.blockedURI);</script>"""


@pytest.fixture(scope="module")
def run() -> RunRecord:
    rng = np.random.default_rng(0)
    n = 400
    sent = np.cumsum(rng.exponential(0.3, n))
    tenants = (Tenant("chat <script>alert(1)</script>"), Tenant("batch"))
    run = toy_run(
        sent,
        rng.integers(1, 3000, n),
        rng.integers(1, 200, n),
        rejected=(7,),
        tenant=rng.integers(0, 2, n),
        tenants=tenants,
        meta={"model_id": "toy</title>", "gpu": "none", "argv": ["simulate", "<&>"]},
    )
    return replace(run, requests=replace(run.requests, cached_tokens=np.where(np.arange(n) % 3, 0, 16)))


def page(run: RunRecord) -> str:
    summary = summarise(run, goodput=Goodput(ttft_s=0.5), slos=parse_slo(["p95_ttft:500", "p95_tpot:12"]))
    work = Roofline(run.steps.num_tokens * 1e10, np.full(len(run.steps), 1e10), 1e15, 4e12, "H200")
    return report_html(run, summary, verdict(run, summary), roofline=work)


def test_the_page_is_one_small_file_that_loads_nothing(run: RunRecord) -> None:
    text = page(run)
    assert len(text.encode()) < 8e6
    own = re.sub(r"<script>/\*\*.*?</script>", "", text, flags=re.S)
    assert not re.findall(r"""(?:src|href)=["']""", own.split("<main>")[1])
    assert "default-src 'none'" in text
    assert 'name="viewport"' in text


def test_text_of_the_user_is_escaped(run: RunRecord) -> None:
    text = page(run)
    assert "toy&lt;/title&gt;" in text
    assert "<script>alert" not in text
    assert "&lt;&amp;&gt;" in text


def test_the_same_run_gives_the_same_page(run: RunRecord) -> None:
    assert page(run) == page(run)


def test_runs_without_results_have_a_page(tmp_path: Path) -> None:
    nothing = np.array([], np.int64)
    for empty in (toy_run([], nothing, nothing), toy_run([0.0], [10], [2], rejected=(0,))):
        summary = summarise(empty)
        path = write_report(empty, summary, verdict(empty, summary), tmp_path / "new" / "report.html")
        assert "Verdict" in path.read_text()


def test_a_partial_run_says_so(run: RunRecord) -> None:
    assert "these results are partial" in page(replace(run, interrupted=True))


def test_an_unwritable_path_is_one_line(run: RunRecord, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    summary = summarise(run)
    with pytest.raises(UsageError, match="cannot write"):
        write_report(run, summary, verdict(run, summary), tmp_path / "file" / "report.html")


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed (apt-get install chromium)")
@pytest.mark.parametrize("window", ["1280,900", "400,800"])
def test_a_browser_draws_every_picture_without_an_error(run: RunRecord, tmp_path: Path, window: str) -> None:
    text = page(run)
    path = tmp_path / "report.html"
    path.write_text(text.replace("</title>", "</title>" + HOOK, 1), encoding="utf-8")
    flags = [
        *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
        *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
        *("--enable-logging=stderr", "--v=0", "--virtual-time-budget=20000", "--dump-dom"),
        *(f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={window}"),
    ]
    out = subprocess.run([str(CHROMIUM), *flags, path.as_uri()], capture_output=True, text=True, timeout=120)
    pictures = text.count('class="plotly-graph-div"')
    assert pictures == 12
    drawn = re.findall(
        r'<div id="plot-\d+" class="plotly-graph-div js-plotly-plot".*?class="main-svg"', out.stdout, re.S
    )
    assert len(drawn) == pictures
    assert "CONSOLE" not in out.stderr, [line for line in out.stderr.splitlines() if "CONSOLE" in line]
    assert "data-error" not in out.stdout.split("<head>")[0]


@pytest.mark.parametrize("count", [3, 12, 60, 400])
def test_a_few_requests_have_a_p95_over_time_too(count: int) -> None:
    few = toy_run(np.arange(count) * 1.0, [100] * count, [20] * count)
    assert window_s(few, 10) >= window_s(few)
    drawn = [trace for trace in p95_over_time(few, summarise(few)).data if trace.name == "P95 TTFT"]
    assert sum(len(trace.x) for trace in drawn) >= min(count // 10, 1)
