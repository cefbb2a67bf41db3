"""Sweeps: nothing lost or repeated after a kill, the same bytes whoever runs them, files that others can read."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import duckdb
import pyarrow.parquet as pq
import pytest
import yaml

from experiments.explore import payload
from experiments.explore_data import load_space
from experiments.sweep import make_tasks, run_sweep
from experiments.sweep_backends import Local
from experiments.sweep_spec import Params, product, read_params, read_sweep
from experiments.sweep_store import ENDS, INTERVALS, Outcome, Store, Task, folder_name
from serving.errors import TokenTwinError, UsageError
from tokentwin import simulate
from tokentwin.cli import main
from tokentwin.commands.sweep import SERVING, kinds, sweep_spec
from tokentwin.sweep_point import point_job, run_point

BASE = """\
base: {model: llama-3.2-1b, dataset_name: random, isl: 64, osl: 4, num_prompts: 40}
"""
GRID = BASE + "grid: {request_rate: [50, 100, 200], max-num-seqs: [2, 64]}\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, and a date that stands still."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    return tmp_path


def write(folder: Path, text: str, name: str = "s.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def files(root: Path) -> dict[str, bytes]:
    """Every file by name, without the one that says how the sweep was called."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and path.name != "sweep.json"
    }


def rows(root: Path, columns: str = "*") -> list[tuple[Any, ...]]:
    return duckdb.sql(f'SELECT {columns} FROM "{root}/points/*.parquet" ORDER BY "index"').fetchall()


def test_a_grid_is_every_combination_and_can_be_queried(folder: Path) -> None:
    assert main(["sweep", str(write(folder, GRID)), "--jobs", "1"]) == 0
    found = rows(folder / "results" / "s", "request_rate, max_num_seqs, status, completed")
    assert found == [(rate, seqs, "done", 40) for rate in (50, 100, 200) for seqs in (2, 64)]
    few, many = rows(folder / "results" / "s", "p95_ttft_ms")[-2:]
    assert few > many  # two seats at 200 requests a second make a queue
    together = duckdb.sql(f"SELECT count(*) FROM '{folder}/results/s/results.parquet'").fetchall()
    assert together == [(6,)]


def test_the_tree_is_the_one_that_vllm_plots(folder: Path) -> None:
    assert main(["sweep", str(write(folder, GRID)), "-e", "mine", "-o", "out", "--num-runs", "2"]) == 0
    root = folder / "out" / "mine"
    one = root / "SERVE--max_num_seqs=2-BENCH--request_rate=50.0"
    first, second = json.loads((one / "summary.json").read_text())
    assert (first["run_number"], second["run_number"]) == (0, 1)
    assert first["p95_ttft_ms"] != second["p95_ttft_ms"]  # run n has the n-th seed
    assert json.loads((one / "run=1.json").read_text()) == second
    # What `vllm bench sweep plot_pareto` looks for in each record:
    assert {"output_throughput", "max_concurrent_requests", "tensor_parallel_size", "request_rate"} <= set(
        first
    )
    assert len(list(root.rglob("summary.json"))) == 6
    with (root / "summary.csv").open() as text:
        table = list(csv.DictReader(text))
    assert len(table) == 12
    assert {row["max_num_seqs"] for row in table} == {"2", "64"}


def test_replications_give_each_point_intervals_in_columns_of_their_own(folder: Path) -> None:
    """Those of `simulate` with the same options; beside a point without, which the schema has too."""
    text = BASE + "grid: {request_rate: [50, 100], replications: [1, 3]}\n"
    assert main(["sweep", str(write(folder, text)), "--jobs", "2"]) == 0
    root = folder / "results" / "s"
    table = pq.read_table(root / "results.parquet").to_pylist()
    assert [row["p95_ttft_ci95_low_ms"] is None for row in table] == [True, False, True, False]
    run = simulate(**yaml.safe_load(BASE)["base"], request_rate=100.0, replications=3)
    for figure, (low, high) in ENDS.items():
        interval = run.certainty.interval(figure.removesuffix("_ms"))
        if figure in ("request_goodput", "slo_attainment"):
            assert interval is None  # nobody asked for limits
            continue
        assert interval is not None
        scale = 1000 if figure.endswith("_ms") else 1
        assert table[3][low] == pytest.approx(interval.low * scale)
        assert table[3][high] == pytest.approx(interval.high * scale)
        assert table[3][low] <= table[3][figure] <= table[3][high]
    space = load_space(root, serving=SERVING)
    assert set(space.knobs) == {"request_rate", "replications"}
    assert [bool(point.intervals) for point in space.points] == [False, True, False, True]
    ends = space.points[3].intervals["p95_ttft_ms"]
    assert ends == (table[3]["p95_ttft_ci95_low_ms"], table[3]["p95_ttft_ci95_high_ms"])
    assert payload(space, root, {})["interval"]["p95_ttft_ms"] == [
        *(None, ANY, None),
        pytest.approx(list(ends), rel=1e-5),
    ]


def test_without_replications_there_are_no_columns_for_them(folder: Path) -> None:
    assert main(["sweep", str(write(folder, BASE + "points: [{osl: 2}]\n")), "--jobs", "1"]) == 0
    names = pq.read_table(folder / "results" / "s" / "results.parquet").column_names
    assert not set(INTERVALS) & set(names)
    sweep = ["sweep", str(folder / "s.yaml"), "--jobs", "1", "--resume", "--replications", "3"]
    assert main(sweep) == 2  # rows of one sweep are alike


def test_rows_of_the_summary_are_in_the_order_of_the_grid(folder: Path) -> None:
    text = BASE + "grid: {max_num_seqs: [2, 16, 4], request_rate: [100, 50]}\n"
    assert main(["sweep", str(write(folder, text)), "--num-runs", "2"]) == 0
    with (folder / "results" / "s" / "summary.csv").open() as summary:
        found = [
            (row["max_num_seqs"], row["request_rate"], row["run_number"]) for row in csv.DictReader(summary)
        ]
    assert found == [
        (seqs, rate, run) for seqs in ("2", "16", "4") for rate in ("100.0", "50.0") for run in ("0", "1")
    ]


def test_the_number_of_workers_changes_no_byte(folder: Path) -> None:
    path = write(folder, GRID)
    for jobs in ("1", "2"):
        assert main(["sweep", str(path), "--jobs", jobs, "-e", jobs]) == 0
    one, two = (files(folder / "results" / jobs) for jobs in ("1", "2"))
    assert one.keys() == two.keys()
    assert [name for name in one if one[name] != two[name]] == []


def test_a_killed_sweep_goes_on_where_it_was(folder: Path) -> None:
    text = BASE.replace("num_prompts: 40", "num_prompts: 400") + (
        "grid: {request_rate: [20, 25, 30, 35, 40, 45, 50, 55], block_size: [16, 32], max_num_seqs: [8, 64]}\n"
    )
    path = write(folder, text)
    command = [sys.executable, "-m", "tokentwin", "sweep", str(path), "--jobs", "2"]
    points = folder / "results" / "s" / "points"
    killed = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while len(list(points.glob("*.parquet"))) < 5 and killed.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    before = {file.name: file.stat().st_mtime_ns for file in points.glob("[0-9]*.parquet")}
    assert 5 <= len(before) < 32, "the sweep was over too soon to be killed; make its points longer"
    for place in (points, points.parent, next(points.parent.glob("SERVE*"))):  # killed while it wrote
        (place / "a.json.part-1").write_bytes(b"")
    assert main(["sweep", str(path), "--jobs", "1", "--resume"]) == 0
    after = {file.name: file.stat().st_mtime_ns for file in points.glob("*.parquet")}
    assert {name: after[name] for name in before} == before  # nothing was run again
    assert len(after) == 32
    assert main(["sweep", str(path), "--jobs", "1", "-e", "whole"]) == 0
    resumed, whole = files(folder / "results" / "s"), files(folder / "results" / "whole")
    assert resumed == whole


def test_a_failing_point_is_recorded_and_the_others_run(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(folder, BASE + "points: [{tp: 1}, {tp: 3}, {isl: 32, osl: 2}]\n")
    assert main(["sweep", str(path), "--jobs", "1"]) == 1
    assert "2 of 3 runs done; 1 failed" in capsys.readouterr().out
    root = folder / "results" / "s"
    assert [row[:2] for row in rows(root, "status, error_type")] == [
        ("done", None),
        ("failed", "UsageError"),
        ("done", None),
    ]
    failure = json.loads((root / "SERVE--tensor_parallel_size=3" / "run=0.failure.json").read_text())
    assert "--tensor-parallel-size 3 does not divide" in failure["error"]
    assert failure["serve_overrides"] == {"tensor_parallel_size": 3}


def test_a_sweep_can_stop_at_the_first_failure(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(folder, BASE + "points: [{tp: 3}, {tp: 1}]\n")
    assert main(["sweep", str(path), "--jobs", "1", "--no-continue-on-error"]) == 1
    assert capsys.readouterr().err.count("\n") == 1
    assert len(rows(folder / "results" / "s")) == 1


def test_a_failure_that_is_not_of_the_input_is_tried_again(tmp_path: Path) -> None:
    store = Store(tmp_path / "s", {"request_rate": "float"}, ())
    store.open({"base": {}}, resume=False)
    store.write(Task(0, 0, {"request_rate": 1.0}, "BENCH--a"), Outcome(None, "no space", "OSError"))
    store.write(Task(1, 0, {"request_rate": 2.0}, "BENCH--b"), Outcome(None, "no such flag", "UsageError"))
    assert list(store.done()) == [1]


def test_another_sweep_of_the_same_name_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(folder, BASE + "points: [{osl: 2}]\n")
    assert main(["sweep", str(path), "--jobs", "1"]) == 0
    assert main(["sweep", str(path), "--jobs", "1"]) == 2
    assert "--resume" in capsys.readouterr().err
    write(folder, BASE + "points: [{osl: 3}]\n")
    assert main(["sweep", str(path), "--jobs", "1", "--resume"]) == 2
    assert "another points" in capsys.readouterr().err


def test_vllm_parameter_files_and_linked_variables(folder: Path) -> None:
    serve = write(folder, '[{"max_num_seqs": 2}, {"max-num-seqs": 4}]', "serve.json")
    bench = write(folder, '{"few": {"max_concurrency": 2}, "more": {"max_concurrency": 4}}', "bench.json")
    arguments = ["--serve-params", str(serve), "--bench-params", str(bench)]
    base = ["--model", "llama-3.2-1b", "--dataset-name", "random", "--num-prompts", "8", "--osl", "2"]
    link = ["--link-vars", "max_num_seqs=max_concurrency"]
    assert main(["sweep", *arguments, *base, *link, "-e", "linked", "--jobs", "1"]) == 0
    assert sorted(path.name for path in (folder / "results" / "linked").glob("SERVE*")) == [
        "SERVE--max_num_seqs=2-BENCH--few",
        "SERVE--max_num_seqs=4-BENCH--more",
    ]


def test_parameters_pair_up_only_where_linked_ones_are_equal(tmp_path: Path) -> None:
    serve: list[Params] = [{"max_num_seqs": 2}, {"max_num_seqs": 4}]
    bench: list[Params] = [{"max_concurrency": 4, "request_rate": 1.0}]
    assert len(product(serve, bench)) == 2
    assert product(serve, bench, "max_num_seqs=max_concurrency") == [{"max_num_seqs": 4, **bench[0]}]
    with pytest.raises(UsageError, match="no pair"):
        product(serve, bench, "max_num_seqs=request_rate")
    with pytest.raises(UsageError, match="two sets have the same name"):
        read_params(write(tmp_path, '[{"_benchmark_name": "a"}, {"_benchmark_name": "a"}]'), "--serve-params")


RANDOM = (
    BASE
    + """\
random:
  points: 12
  seed: 3
  space: {request_rate: {low: 10, high: 1000.0, log: true}, max_num_seqs: {low: 2, high: 5}, policy: [chunked, static]}
"""
)


def test_a_random_sample_is_the_same_for_the_same_seed(tmp_path: Path) -> None:
    path = write(tmp_path, RANDOM)
    one, two = (sweep_spec(path, {}) for _ in range(2))
    assert one == two
    assert len(one.points) == 12
    assert {type(point["max_num_seqs"]) for point in one.points} == {int}
    assert all(10 <= point["request_rate"] <= 1000 for point in one.points)
    assert kinds(one) == {"request_rate": "float", "max_num_seqs": "int", "policy": "str"}


OPTUNA = (
    BASE
    + """\
optuna:
  trials: 9
  batch: 3
  maximize: output_throughput
  subject_to: {p95_ttft_ms: 40}
  space: {request_rate: {low: 10.0, high: 2000.0, log: true}, max_num_seqs: [2, 8, 64]}
"""
)


class Interrupted:
    """A backend that is interrupted after some runs."""

    def __init__(self, after: int) -> None:
        self.left = after

    def run(self, runner: Any, base: Params, tasks: Any) -> Iterator[tuple[Task, Outcome]]:
        for task, outcome in Local(1).run(runner, base, tasks):
            if self.left == 0:
                raise KeyboardInterrupt
            self.left -= 1
            yield task, outcome


def test_an_interrupted_search_asks_for_the_same_points_again(folder: Path) -> None:
    spec = sweep_spec(write(folder, OPTUNA), {})
    stores = [Store(folder / name, kinds(spec), ()) for name in ("whole", "resumed")]
    for store in stores:
        store.open({"base": {}}, resume=False)
    run_sweep(spec, stores[0], run_point, Local(2))
    with pytest.raises(KeyboardInterrupt):
        run_sweep(spec, stores[1], run_point, Interrupted(4))
    assert len(stores[1].done()) == 4
    end = run_sweep(spec, stores[1], run_point, Local(1))
    assert (end.total, end.found, end.failed) == (9, 4, 0)
    whole, resumed = (files(store.root) for store in stores)
    parquet = [name for name in whole if name.endswith(".parquet")]
    assert {name: whole[name] for name in parquet} == {name: resumed[name] for name in parquet}


def test_fields_of_tenants_can_vary(folder: Path) -> None:
    base = {"model": "llama-3.1-8b", "dataset_name": "sample"}
    name = "assistant"
    spec = point_job(base, {}).workload
    name = spec.tenants[0].name  # type: ignore[union-attr]
    job = point_job(base, {f"tenants.{name}.num_prompts": 7, f"tenants.{name}.arrivals.request_rate": 2.0})
    tenant = job.workload.tenants[0]  # type: ignore[union-attr]
    assert (tenant.num_prompts, tenant.arrivals.request_rate) == (7, 2.0)  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match="no such tenant"):
        point_job(base, {"tenants.nobody.num_prompts": 7})


def test_points_share_prices_only_where_replicas_share_as_many_experts() -> None:
    base = {"model": "qwen3-30b-a3b", "gpu": "h200", "dataset_name": "random", "num_prompts": 4}
    prices = {n: point_job(base, {"data_parallel_size": n}).built.pricer for n in (1, 2, 4)}
    assert {n: prices[n].data_parallel_size for n in prices} == {1: 1, 2: 2, 4: 4}


def test_long_or_awkward_names_become_folders() -> None:
    assert folder_name({"dataset_path": "a/../b"}, ()) == "BENCH--dataset_path=a____b"
    long = {f"key{i}": "x" * 20 for i in range(30)}
    assert len(folder_name(long, ())) < 200
    assert folder_name(long, ()) != folder_name({**long, "key29": "y"}, ())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("grid: {request_rat: [1]}", "did you mean 'request_rate'"),
        ("grid: {request_rate: [fast]}", "request_rate: must be a valid number"),
        ("grid: {request_rate: 5}", "needs a list of values"),
        ("grids: {}", "did you mean 'grid'"),
        ("base: {}", "give exactly one of grid, points, random, optuna"),
        ("random: {points: 0, space: {osl: [1]}}", "points must be a whole number from 1"),
        ("random: {points: 1, space: {osl: {low: 9, high: 2}}}", "low must be below high"),
        ("optuna: {trials: 1, space: {osl: [1]}}", "needs minimize or maximize"),
        ("optuna: {trials: 1, minimize: p95_tft_ms, space: {osl: [1]}}", "not a figure of a run"),
        ("points: [{osl: 1, output-len: 2}]", "given twice"),
        ("points: {a: [}", "not YAML (line 1)"),
    ],
)
def test_a_wrong_file_is_one_line(
    folder: Path, text: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep", str(write(folder, text))]) == 2
    error = capsys.readouterr().err
    assert words in error, error
    assert error.count("\n") == 1


def test_a_dry_run_lists_the_points_and_writes_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep", str(write(folder, GRID)), "--dry-run", "--num-runs", "3"]) == 0
    assert capsys.readouterr().out.startswith("6 points, 3 runs each; into results/s:\n")
    assert not (folder / "results").exists()


def test_equal_points_are_run_once(tmp_path: Path) -> None:
    spec = read_sweep(write(tmp_path, "points: [{osl: 1}, {osl: 1}, {osl: 2}]"))
    assert [task.params for task in make_tasks(spec, ())] == [{"osl": 1}, {"osl": 2}]


def test_without_ray_the_backend_says_how_to_get_it(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["sweep", str(write(folder, GRID)), "--backend", "ray"]) == 2
    assert "tokentwin[cluster]" in capsys.readouterr().err
    assert main(["sweep", str(write(folder, GRID)), "--address", "auto"]) == 2
    assert "without --backend ray" in capsys.readouterr().err


@pytest.mark.slow
def test_a_ray_cluster_of_two_nodes_gives_the_same_bytes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray", reason="needs the extra cluster")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(p for p in sys.path if p))
    start = [
        sys.executable,
        "-m",
        "ray.scripts.scripts",
        "start",
        "--block",
        "--num-cpus=1",
        "--disable-usage-stats",
    ]
    temporary = f"--temp-dir={tempfile.gettempdir()}/ray-{os.getpid()}"
    head = [*start, "--head", "--port=26379", "--include-dashboard=false", temporary]
    nodes = [subprocess.Popen(head, stdout=subprocess.DEVNULL)]
    try:
        time.sleep(8)
        nodes.append(subprocess.Popen([*start, "--address=127.0.0.1:26379"], stdout=subprocess.DEVNULL))
        time.sleep(8)
        import ray

        path = write(folder, GRID)
        address = "127.0.0.1:26379"
        assert main(["sweep", str(path), "-e", "ray", "--backend", "ray", "--address", address]) == 0
        assert sum(node["Alive"] for node in ray.nodes()) == 2
        ray.shutdown()
        assert main(["sweep", str(path), "-e", "local", "--jobs", "1"]) == 0
    finally:
        for node in nodes[::-1]:
            node.terminate()
            node.wait(timeout=30)
    assert files(folder / "results" / "ray") == files(folder / "results" / "local")


def test_a_stopped_sweep_says_what_failed(tmp_path: Path) -> None:
    spec = read_sweep(write(tmp_path, "points: [{osl: 1}]"))
    store = Store(tmp_path / "out", {"osl": "int"}, ())
    store.open({"base": {}}, resume=False)
    with pytest.raises(TokenTwinError, match=r"BENCH--osl=1, run 0: .*--model is missing"):
        run_sweep(spec, store, run_point, Local(1), continue_on_error=False)


WRONG_BASES = [
    ("model: lama-3.1-8b", "model", "did you mean 'llama-3.1-8b'"),
    ("gpu: h20", "gpu", "did you mean 'h200'"),
    ("policy: chunkd", "policy", "did you mean 'chunked'"),
    ("max_num_batched_tokens: 0", "max_num_batched_tokens", "greater than or equal to 1"),
    ("slo: [p95_tft:500]", "slo", "did you mean"),
    ("goodput: {tft: 500}", "goodput", "did you mean 'ttft'"),
    ("dataset_path: nowhere.csv", "dataset_path", "has no effect"),
    ("dataset_name: azur", "dataset_name", "did you mean 'azure'"),
    ("burstiness: -1", "burstiness", "must be a positive number"),
    ("think-time: 3", "think-time", "has no effect on sessions of one turn"),
    ("speculative_config: {method: eagle, num_speculative_tokens: 3}", "speculative_config", "not modelled"),
    ("tensor_parallel_size: 3", "tensor_parallel_size", "does not divide"),
]


@pytest.mark.parametrize(("line", "key", "words"), WRONG_BASES)
@pytest.mark.parametrize(
    "way", ["grid: {max_num_seqs: [2, 64]}", "random: {points: 3, space: {seed: [1, 2]}}"]
)
def test_a_wrong_value_of_base_is_found_before_the_first_point(
    folder: Path, capsys: pytest.CaptureFixture[str], line: str, key: str, words: str, way: str
) -> None:
    """And not once per point: one line with file, line and key."""
    base = {"model": "llama-3.2-1b", "dataset_name": "random", "request_rate": 9, "num_prompts": 4}
    base.pop(key, None)
    rest = "".join(f"  {name}: {value}\n" for name, value in base.items())
    path = write(folder, f"base:\n{rest}  {line}\n{way}\n")
    assert main(["sweep", str(path), "--jobs", "1"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {path}: line {len(base) + 2}: base.{key}: ")
    assert words in said
    assert said.count("\n") == 1
    assert not (folder / "results").exists()


def test_a_missing_trace_of_base_is_found_too(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "base: {model: llama-3.2-1b, dataset_path: nowhere.csv}\ngrid: {rate_scale: [1, 2]}\n"
    assert main(["sweep", str(write(folder, text)), "--dry-run"]) == 2
    assert "line 1: base.dataset_path: nowhere.csv: no such file" in capsys.readouterr().err


def test_a_value_of_the_command_line_is_not_blamed_on_the_file(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep", str(write(folder, GRID)), "--gpu", "h20"]) == 2
    assert capsys.readouterr().err.startswith("error: --gpu 'h20' is not a shipped profile")


def test_what_is_wrong_with_single_points_is_kept_as_their_result(folder: Path) -> None:
    text = BASE + "points: [{tensor_parallel_size: 3}, {tensor_parallel_size: 1}]\n"
    assert main(["sweep", str(write(folder, text)), "--jobs", "1"]) == 1
    assert rows(folder / "results" / "s", "status") == [("failed",), ("done",)]
    # Every point replaces the wrong value: nothing is wrong with the sweep.
    text = BASE.replace("osl: 4", "osl: 4, gpu: h20") + "points: [{gpu: h100}, {gpu: h200}]\n"
    assert main(["sweep", str(write(folder, text, "t.yaml")), "--jobs", "1"]) == 0
