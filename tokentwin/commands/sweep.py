"""`tokentwin sweep`: many runs over chosen flags, in parallel, kept as they come."""

from __future__ import annotations

import sys
import textwrap
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from cyclopts import Parameter

from experiments.results import result_date
from experiments.sweep import SweepEnd, check_search, make_tasks, run_sweep
from experiments.sweep_backends import make_backend
from experiments.sweep_spec import NAME, Params, Space, SweepSpec, product, read_params, read_sweep
from experiments.sweep_store import RESULTS, SUMMARY_CSV, Store
from serving.errors import UsageError
from sim.workload.yaml_lines import line_of
from tokentwin.cli import INTERRUPTED
from tokentwin.config_file import print_config, typed, with_config
from tokentwin.flag_tables import DEPLOYMENT, PROMISES, RUN, TRAFFIC
from tokentwin.flags import Flag, as_path, find, takes
from tokentwin.provenance import ARGV, VERSION, git_commit
from tokentwin.sweep_checks import PARAMETERS, check_sweep_values, placed
from tokentwin.sweep_point import TENANTS, run_point

FAILED = 1
SCHEMA = "tokentwin-sweep/1"
SWEEP = tuple(
    Flag(name, kind, text, "Sweep", *rest)
    for name, kind, text, *rest in (
        ("serve_params", Path, "Parameter sets of the deployment, as for vllm bench sweep: a JSON list of objects, or an "
         "object of them by name. With --bench-params, every pair of both."),
        ("bench_params", Path, "Parameter sets of the traffic, in the same form."),
        ("link_vars", str, "Only pairs in which these are equal: max_num_seqs=max_concurrency,…"),
        ("num_runs", int, "Runs of each point; run n has the n-th seed from --seed on.", (), "1"),
        ("output_dir", Path, "Folder of all sweeps.", ("-o",), "results"),
        ("experiment_name", str, "This sweep's folder in it: the file's name, or the time, by default.", ("-e",)),
        ("resume", bool, "Continue the sweep of that name: runs that are done are kept.", (), None, False),
        ("dry_run", bool, "Only say what would be run.", (), None, False),
        ("continue_on_error", bool, "Record a failing run and go on; off: stop at the first.", (), "true"),
        ("jobs", int, "Processes on this machine.", (), "all cores"),
        ("backend", Literal["joblib", "ray"], "Who runs it: this machine's cores, or a Ray cluster.", (), "joblib"),
        ("address", str, "Of the Ray cluster: auto, HOST:6379 or ray://HOST:10001; none starts one here."),
    )
)  # fmt: skip
REPLICATIONS = Flag(
    "replications", int, "For 95% intervals of each point's figures, in columns of their own: so many more runs of it, "
    "and some that tell what calibration does; 1 leaves them out.", "Run", (), "1",
)  # fmt: skip
BASE = (*DEPLOYMENT, *TRAFFIC, *(f for f in PROMISES if f.name != "fail_on_slo"), *(
    REPLICATIONS if f.name == "replications" else f
    for f in RUN
    if f.name not in ("config", "print_config", "disable_tqdm")
))  # fmt: skip
BASE_FLAGS = {flag.name: flag for flag in BASE}
OTHERS = tuple(flag for flag in RUN if flag.name in ("config", "print_config", "disable_tqdm"))
KNOWN = {flag.name: flag for flag in (*BASE, *SWEEP, *OTHERS)}
SERVING = tuple(flag.name for flag in DEPLOYMENT)


@takes(SWEEP, BASE, OTHERS)
def sweep(
    spec: Annotated[
        Path | None,
        Parameter(
            help="YAML file with base (flags) and one of grid, points, random, optuna.",
            group="Sweep",
            converter=as_path,
        ),
    ] = None,
    /,
    **flags: Any,
) -> int:
    """Run many points: a grid, a list, a random sample or an Optuna search over any flags of tokentwin simulate.

    Example: tokentwin sweep chunk.yaml --jobs 2, where chunk.yaml says
    {base: {model: llama-3.1-8b, dataset_name: random}, grid: {request_rate: [5, 10], max_num_seqs: [64, 256]}}
    """
    given = with_config(flags, KNOWN)
    asked = sweep_spec(spec, given)
    if given.get("print_config"):
        return print_config(given, known=KNOWN)
    name = given.get("experiment_name") or asked.name or datetime.now().strftime("%Y%m%d_%H%M%S")
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise UsageError(f"--experiment-name {name} must lie in --output-dir; give a name such as chunk")
    root = Path(given.get("output_dir", "results")) / name
    if given.get("dry_run"):
        sys.stdout.write("\n".join(_plan_lines(asked, root)) + "\n")
        return 0
    try:
        with _bar(silent=bool(given.get("disable_tqdm"))) as told:
            end, _ = run_asked(asked, root, given, told=told)
    except KeyboardInterrupt:
        more = "" if given.get("resume") else " with --resume"
        sys.stderr.write(
            f"error: interrupted; what is done is in {root}; the same command{more} goes on from there\n"
        )
        return INTERRUPTED
    sys.stdout.write("\n".join(_end_lines(end, root)) + "\n")
    return FAILED if end.failed else 0


def run_asked(
    asked: SweepSpec,
    root: Path,
    given: Mapping[str, Any],
    *,
    told: Callable[[int, int, int], None] | None = None,
) -> tuple[SweepEnd, Store]:
    """Run a checked sweep into the folder `root`, or continue there; how it ended, and where its rows are."""
    intervals = asked.base.get("replications", 1) != 1 or "replications" in asked.varied()
    store = Store(root, kinds(asked), SERVING, intervals=intervals)
    backend = make_backend(
        given.get("backend", "joblib"), jobs=given.get("jobs"), address=given.get("address")
    )
    kept = store.open(_asked_json(asked), resume=bool(given.get("resume")))
    asked = replace(asked, base={**asked.base, "date": kept["date"]})
    continue_on_error = given.get("continue_on_error") is not False
    end = run_sweep(asked, store, run_point, backend, continue_on_error=continue_on_error, told=told)
    return end, store


def sweep_spec(path: Path | None, given: Mapping[str, Any]) -> SweepSpec:
    """The sweep of a file and of the flags, every value with its flag's type. Raises UsageError."""
    files = [name for name in ("serve_params", "bench_params") if name in given]
    if (path is None) == (not files):
        raise UsageError(
            "name a sweep file, such as tokentwin sweep chunk.yaml, or give --serve-params or --bench-params"
            + ("; not both" if files else "")
        )
    if path is not None:
        if "link_vars" in given:
            raise UsageError("--link-vars has no effect without --serve-params and --bench-params")
        asked, where = read_sweep(path), str(path)
        _check_keys(path)
    else:
        serve, bench = _file(given, "serve_params"), _file(given, "bench_params")
        _belongs(serve, bench)
        asked, where = (
            SweepSpec(points=tuple(product(serve, bench, given.get("link_vars", "")))),
            PARAMETERS,
        )
    return check_sweep(asked, given, where)


def _check_keys(path: Path) -> None:
    """Raises UsageError, with the line, for a flag of a sweep file that there is not."""
    text = path.read_text(encoding="utf-8-sig")
    content = yaml.safe_load(text)
    places: list[tuple[int | str, ...]] = [("base",), ("grid",), ("random", "space"), ("optuna", "space")]
    places += [("points", number) for number in range(len(content.get("points") or ()))]
    for place in places:
        inner: Any = content
        for part in place:
            inner = (inner.get(part) if isinstance(inner, dict) else inner[part]) or {}
        for key in inner:
            if key != NAME and not str(key).startswith(TENANTS):
                where = ".".join(map(str, place))
                find(str(key), BASE_FLAGS, f"{path}: line {line_of(text, (*place, key))}: {where}")


def check_sweep(asked: SweepSpec, given: Mapping[str, Any], where: str) -> SweepSpec:
    """The sweep with the flags given over its base, every value with its flag's type. Errors begin with `where`."""
    runs = given.get("num_runs", asked.num_runs)
    if runs < 1:
        raise UsageError(f"--num-runs must be at least 1, got {runs}")
    base = {flag.name: value for flag, value in _checked(asked.base, where) if value is not None}
    base |= {name: given[name] for name in given if name in BASE_FLAGS}
    points = tuple(_point(point, where, index) for index, point in enumerate(asked.points))
    search = asked.search
    if search is not None:
        check_search(search)
        search = replace(search, space=_space(search.space, where))
    drawn_from = _space(asked.drawn_from, where)
    checked_sweep = replace(
        asked, base=base, points=points, search=search, num_runs=runs, drawn_from=drawn_from
    )
    check_sweep_values(checked_sweep, given, where, BASE_FLAGS)
    return checked_sweep


def _file(given: Mapping[str, Any], name: str) -> list[Params]:
    return read_params(given[name], "--" + name.replace("_", "-")) if name in given else [{}]


def _belongs(serve: list[Params], bench: list[Params]) -> None:
    """vLLM's two files are for two programs; a key in the wrong one would be an error there too."""
    for flag, sets, mine in (("--serve-params", serve, True), ("--bench-params", bench, False)):
        for params in sets:
            for key in params:
                if key in BASE_FLAGS and (key in SERVING) is not mine:
                    other = "--bench-params" if mine else "--serve-params"
                    raise UsageError(f"{flag}: {key} belongs to {other}")


def _checked(params: Mapping[str, Any], where: str, point: int | None = None) -> Iterator[tuple[Flag, Any]]:
    """Flags with typed values, of the base or of a point."""
    for key, value in params.items():
        flag = find(key, BASE_FLAGS, where if point is not None else f"{where}: base")
        try:
            yield flag, None if value is None else typed(flag, value, where)
        except UsageError as error:
            problem = str(error).removeprefix(f"{where}: ")
            raise UsageError(placed(where, flag.name, BASE_FLAGS, problem, point)) from None


def _space(space: Space, where: str) -> Space:
    """A space by full names of flags, with their types."""
    out: Space = {}
    for key, axis in space.items():
        ends = axis if isinstance(axis, list) else axis.ends()
        checked = [next(iter(_point({key: value}, where).items())) for value in ends]
        name = checked[0][0]
        out[name] = [value for _, value in checked] if isinstance(axis, list) else axis
    return out


def _point(params: Params, where: str, number: int = 0) -> Params:
    """A point by full names of flags, with their types. None takes the default of the simulation, not of the base."""
    out: Params = {}
    for key, value in params.items():
        if key == NAME or key.startswith(TENANTS):
            out[key] = value
            continue
        flag, value = next(_checked({key: value}, where, number))
        if flag.name in out:
            raise UsageError(f"{where}: {flag.name} is given twice; keep one")
        out[flag.name] = str(value) if isinstance(value, Path) else value
    return out


def kinds(asked: SweepSpec) -> dict[str, str]:
    """Column type of each parameter that varies: that of its flag, or of its values for a tenant's field."""
    out = {}
    for key in asked.varied():
        if not key.startswith(TENANTS):
            out[key] = _kind_of(_leaves(BASE_FLAGS[key].kind))
            continue
        axis = asked.search.space[key] if asked.search is not None else []
        values = axis if isinstance(axis, list) else [1 if axis.whole else 1.0]
        values = [*values, *(point[key] for point in asked.points if key in point)]
        out[key] = _kind_of({type(value) for value in values if value is not None})
    return out


def _leaves(kind: Any) -> set[Any]:
    if get_origin(kind) in (Union, types.UnionType):
        return {leaf for part in get_args(kind) for leaf in _leaves(part)} - {type(None)}
    return {kind}


def _kind_of(leaves: set[Any]) -> str:
    for name, types_of in (("bool", {bool}), ("int", {int}), ("float", {int, float})):
        if leaves and leaves <= types_of:
            return name
    return "str"


def _asked_json(asked: SweepSpec) -> dict[str, Any]:
    search = asked.search
    return {
        "schema": SCHEMA,
        "date": result_date(),
        "version": VERSION,
        "git_commit": git_commit(),
        "argv": list(ARGV.get()),
        "num_runs": asked.num_runs,
        "base": {k: str(v) if isinstance(v, Path) else v for k, v in asked.base.items()},
        "points": list(asked.points),
        "search": None
        if search is None
        else {
            "trials": search.trials,
            "batch": search.batch,
            "seed": search.seed,
            "goals": [list(goal) for goal in search.goals],
            "limits": [list(limit) for limit in search.limits],
            "space": {
                key: axis
                if isinstance(axis, list)
                else {name: getattr(axis, name) for name in axis.__slots__}
                for key, axis in search.space.items()
            },
        },
    }


def _plan_lines(asked: SweepSpec, root: Path) -> list[str]:
    if asked.search is not None:
        s = asked.search
        goals = ", ".join(f"{direction} {column}" for column, direction in s.goals)
        return [f"{s.trials} trials in batches of {s.batch}, to {goals}; into {root}"]
    tasks = make_tasks(asked, SERVING)
    folders = list(dict.fromkeys(task.folder for task in tasks))
    shown = [f"  {folder}" for folder in folders[:20]]
    more = [f"  … and {len(folders) - 20} more"] if len(folders) > 20 else []
    runs = f", {asked.num_runs} runs each" if asked.num_runs > 1 else ""
    return [f"{len(folders)} points{runs}; into {root}:", *shown, *more]


def _end_lines(end: SweepEnd, root: Path) -> list[str]:
    before = f", {end.found} of them before" if end.found else ""
    lines = [f"{end.total - end.failed} of {end.total} runs done{before}; {end.failed} failed."]
    if end.failed:
        lines += textwrap.wrap(f"First error: {end.first_error}", 80, subsequent_indent="  ")
    lines += [
        f"Wrote {root}: {RESULTS}, {SUMMARY_CSV}, points/, one folder per point.",
        f"Look at it: tokentwin explore {root}",
        f"Query: python -c \"import duckdb; duckdb.sql('''FROM '{root}/points/*.parquet' LIMIT 5''').show()\"",
    ]
    return lines


@contextmanager
def _bar(*, silent: bool) -> Iterator[Callable[[int, int, int], None] | None]:
    """A progress bar with the time that is left, or None where nobody would see it."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if silent or not console.is_terminal:
        yield None
        return
    bar = Progress(
        TextColumn("Sweeping"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[failed]}"),
        console=console,
        transient=True,
    )
    with bar:
        task = bar.add_task("sweep", total=None, failed="")

        def told(done: int, total: int, failed: int) -> None:
            bar.update(task, completed=done, total=total, failed=f"{failed} failed" if failed else "")

        yield told
