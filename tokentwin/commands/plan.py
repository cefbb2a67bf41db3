"""`tokentwin plan`: the cheapest fleet that keeps its promises under a traffic."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from costmodel.profile import list_profiles, load_profile
from experiments.capacity_lengths import FULL
from experiments.capacity_traffic import Replay, Traffic, make_traffic
from experiments.capacity_trial import Promises
from experiments.plan import Fleet, Plan, make_candidates, make_plan
from experiments.plan_report import plan_json, plan_lines
from experiments.prices import load_prices
from serving.errors import UsageError
from sim.deployment import Deployment
from sim.fleet.build import FLEET_FIELDS, num_replicas
from sim.slo import Slo, parse_slo
from sim.workload import WorkloadSpec
from sim.workload.arrival_spec import ArrivalSpec
from sim.workload.arrivals import RateCurve
from tokentwin.config_file import print_config, with_config
from tokentwin.flag_tables import DEPLOYMENT, JSON, OUTPUT, PROMISES, RUN, TRAFFIC
from tokentwin.flags import Flag, at_least, takes
from tokentwin.job import make_deployment, make_goodput, make_spec
from tokentwin.job import words as items
from tokentwin.outputs import check_folder
from tokentwin.provenance import ARGV, VERSION, git_commit
from tokentwin.value_checks import check_value

if TYPE_CHECKING:
    from tokentwin.run import Run

NO_FLEET = 3
NOT_HERE = (
    *("data_parallel_size", "gpu", "tensor_parallel_size"),
    *(name for name in FLEET_FIELDS if name != "admission"),
)
"""Fields of a deployment that the plan chooses, and those of fleets that it does not have: its replicas are alike."""
AXES = {
    "models": "model",
    "tensor_parallel_sizes": "tensor_parallel_size",
    "pipeline_parallel_sizes": "pipeline_parallel_size",
    "quantizations": "quantization",
    "kv_cache_dtypes": "kv_cache_dtype",
    "policies": "policy",
    "chunks": "max_num_batched_tokens",
    "batches": "max_num_seqs",
    "speculative_configs": "speculative_config",
}
CANDIDATES = tuple(
    Flag(name, kind, text, "Candidates", *rest)
    for name, kind, text, *rest in (
        ("price", list[str], "Dollars per GPU and hour: h200=3.5 h100=2.9. Only these GPUs are candidates.", ()),
        ("prices", Path, "YAML file of prices.", (), "examples, which are no quotes"),
        ("gpus", list[str], "Only these of the GPUs that have a price.", ()),
        ("models", list[str], "Models, instead of one --model.", ()),
        ("tensor_parallel_sizes", list[str], "Devices per replica.", ("--tp-sizes",), "1 2 4 8"),
        ("pipeline_parallel_sizes", list[str], "Stages per replica.", ("--pp-sizes",),
         "that of --pipeline-parallel-size"),
        ("quantizations", list[str], "Weight formats; none is 16 bit.", (), "that of --quantization"),
        ("kv_cache_dtypes", list[str], "KV cache formats.", (), "that of --kv-cache-dtype"),
        ("policies", list[str], "Batch policies.", (), "that of --policy"),
        ("chunks", list[str], "Values of --max-num-batched-tokens.", (), "the device's default"),
        ("batches", list[str], "Values of --max-num-seqs.", (), "the device's default"),
        ("speculative_configs", list[str], "Ways to draft as --speculative-config takes them; none drafts nothing.", (),
         "that of --speculative-config"),
        ("total_gpus", int, "At most this many GPUs in the fleet."),
        ("max_replicas", int, "At most this many replicas.", (), "64"),
        ("top", int, "Fleets to list; a candidate that cannot be among them is left out early.", (), "5"),
    )
)  # fmt: skip
SIZING = (
    Flag("ttft", float, "Limit of P95 TTFT in ms: short for --slo p95_ttft:MS.", "Promises"),
    Flag("tpot", float, "Limit of P95 TPOT in ms: short for --slo p95_tpot:MS.", "Promises"),
    Flag("slo_attainment", float, "Share of requests that must keep their --goodput limits.", "Promises", (), "0.95"),
    Flag("target_request_rate", float, "The same as --request-rate.", "Traffic"),
    Flag("target_concurrency", float, "Plan for this many users at once instead of a rate.", "Traffic"),
)  # fmt: skip
_HELP = {
    "num_prompts": f"Requests of the longest run of a fleet ({FULL} by default); of a trace, its first requests.",
    "output_dir": "Folder for plan.json and, for each fleet of the table, everything about its run.",
    "replications": "Runs for 95% intervals of the first two fleets; 1 leaves them out.",
    "fail_on_slo": "Exit with code 3 when no fleet keeps the promises.",
}


def _of(table: tuple[Flag, ...], *names: str) -> tuple[Flag, ...]:
    return tuple(
        replace(f, help=_HELP.get(f.name, f.help), default="6" if f.name == "replications" else f.default)
        for f in table
        if not names or f.name in names
    )


TABLES = (
    CANDIDATES,
    tuple(flag for flag in DEPLOYMENT if flag.name not in NOT_HERE),
    tuple(flag for flag in _of(TRAFFIC) if flag.name != "max_concurrency"),
    _of(PROMISES),
    SIZING,
    _of(RUN, "seed", "replications", "config", "print_config", "disable_tqdm"),
    (Flag("jobs", int, "Processes that share the runs of the intervals.", "Run", (), "all cores"),),
    _of(OUTPUT, "output_dir"),
    (JSON,),
)
KNOWN = {flag.name: flag for table in TABLES for flag in table}


@dataclass(frozen=True)
class PlanAnswer:
    """A plan and where it comes from."""

    plan: Plan
    seed: int

    def json(self) -> dict[str, Any]:
        """The plan as strict JSON values."""
        known = {"argv": list(ARGV.get()), "version": VERSION, "git_commit": git_commit()}
        return plan_json(self.plan, {"seed": self.seed, **known})


@takes(*TABLES)
def plan(**flags: Any) -> int:
    """Find the cheapest fleet (GPU kind, tensor parallelism, replicas, formats, limits) for a traffic and its promises.

    Example: tokentwin plan --model llama-3.1-8b --dataset-name random --request-rate 60 --slo chat
    --price h200=3.5 h100=2.9 l40s=1.0 --quantizations none fp8
    """
    given = with_config(flags, KNOWN)
    if given.get("print_config"):
        check_plan(given)
        return print_config(given, known=KNOWN)
    folder = given.get("output_dir")
    if folder is not None:
        check_folder(folder)
    with _status(silent=bool(given.get("disable_tqdm")) or bool(given.get("json"))) as told:
        answer = answer_plan(given, told=told, progress=told)
    text = json.dumps(answer.json(), indent=1, allow_nan=False) if given.get("json") else None
    sys.stdout.write((text or "\n".join(plan_lines(answer.plan))) + "\n")
    if folder is not None:
        paths = _write(answer, folder)
        if text is None:
            sys.stdout.write(f"Wrote to {folder}: {', '.join(str(p.relative_to(folder)) for p in paths)}\n")
            sys.stdout.write(f"Look at it: tokentwin explore {folder}\n")
    return NO_FLEET if given.get("fail_on_slo") and answer.plan.winner is None else 0


def answer_plan(
    flags: Mapping[str, Any],
    *,
    told: Callable[[str], None] | None = None,
    progress: Callable[[str], None] | None = None,
) -> PlanAnswer:
    """The plan that flags by name ask for. Raises UsageError for what cannot be."""
    given = {name: value for name, value in flags.items() if value is not None}
    promises = Promises(
        (*parse_slo(items(given.get("slo"))), *_short_slos(given)),
        make_goodput(given.get("goodput")),
        float(given.get("slo_attainment", 0.95)),
    )
    prices = _prices(given)
    base = _base(given)
    axes = {AXES[name]: values for name, values in _axes(given).items()}
    seed = at_least(given, "seed", 0, default=0)
    traffic, load, notes = _traffic(given, seed)
    if "slo_attainment" in given and not promises.limited(traffic.workload(load, 16).tenants):
        raise UsageError("--slo-attainment has no effect without --goodput; add limits such as ttft:500")
    candidates = make_candidates(base, {gpu: price for gpu, (price, _) in prices.items()}, axes)
    if any(example for _, example in prices.values()):
        notes = (*notes, "prices are examples and no quotes; give yours with --price or --prices.")
    made = make_plan(
        candidates,
        traffic,
        load,
        promises,
        top=at_least(given, "top", default=5),
        max_replicas=at_least(given, "max_replicas", default=64),
        total_gpus=at_least(given, "total_gpus"),
        full=at_least(given, "num_prompts"),
        replications=at_least(given, "replications", default=6),
        seed=seed,
        jobs=at_least(given, "jobs"),
        told=told,
        progress=progress,
    )
    if made.pruned and not made.fleets and all(left.why == "invalid" for left in made.pruned):
        raise UsageError(f"no candidate can be configured: {made.pruned[0].reason}")
    return PlanAnswer(replace(made, notes=notes), seed)


def check_plan(given: Mapping[str, Any]) -> None:
    """Raises UsageError for what can be told to be wrong before anything is simulated."""
    _short_slos(given)
    _prices(given)
    _base(given)
    _axes(given)
    _traffic(given, int(given.get("seed", 0)))


def _short_slos(given: Mapping[str, Any]) -> tuple[Slo, ...]:
    for name in ("ttft", "tpot"):
        if name in given and not 0 < given[name] < np.inf:
            raise UsageError(f"--{name} must be a positive, finite number of ms, got {given[name]:g}")
    slos = [f"p95_{name}:{given[name]}" for name in ("ttft", "tpot") if name in given]
    both = [slo for slo in items(given.get("slo")) if any(slo.startswith(s.split(":")[0]) for s in slos)]
    if both:
        raise UsageError(f"--slo {both[0]} is given by --ttft or --tpot too; keep one")
    return parse_slo(slos)


def _prices(given: Mapping[str, Any]) -> dict[str, tuple[float, bool]]:
    table = load_prices(given.get("prices"), items(given.get("price")))
    chosen = items(given.get("gpus"))
    if not chosen and "price" not in given and "prices" not in given:
        chosen = [gpu for gpu in table if gpu in list_profiles()]
    out: dict[str, tuple[float, bool]] = {}
    option = "--gpus" if chosen else f"--prices {given['prices']}:" if "prices" in given else "--price"
    own = [item.partition("=")[0].strip() for item in items(given.get("price"))]
    for gpu in [*own, *(chosen or table)]:
        _check_name(load_profile, gpu, "--gpu", "--price" if gpu in own else option)
    for gpu in chosen or list(table):
        if gpu not in table:
            raise UsageError(f"--gpus {gpu}: no price; add --price {gpu}=DOLLARS_PER_HOUR")
        out[gpu] = (table[gpu].usd_per_hour, table[gpu].example)
    return out


def _check_name(load: Callable[[Any], object], name: object, single: str, option: str) -> None:
    """A wrong name fails here, with the nearest, and is blamed on the option that it is from."""
    try:
        load(name)
    except (UsageError, ValueError) as error:
        text = str(error)
        raise UsageError(text.replace(single, option, 1) if single in text else f"{option}: {text}") from None


def _base(given: Mapping[str, Any]) -> Deployment:
    models = items(given.get("models"))
    if models and "model" in given:
        raise UsageError("--model and --models are both given; keep one")
    own = {name: given[name] for name in given if name not in NOT_HERE}
    return make_deployment({**own, "model": models[0]} if models else own)


def _axes(given: Mapping[str, Any]) -> dict[str, Sequence[object]]:
    """Values by flag. Raises UsageError where a value is not one, or its single flag is given too."""
    axes: dict[str, Sequence[object]] = {}
    for name, field in AXES.items():
        whole = given.get(name) if name == "speculative_configs" else None  # JSON has blanks in it
        values = ([whole] if isinstance(whole, str) else list(whole)) if whole else items(given.get(name))
        if not values:
            continue
        if twice := next((value for value in values if values.count(value) > 1), None):
            raise UsageError(f"--{name.replace('_', '-')}: {twice} is given twice; keep one")
        if name != "models" and field in given:
            raise UsageError(
                f"--{field.replace('_', '-')} and --{name.replace('_', '-')} are both given; keep one"
            )
        if name in ("tensor_parallel_sizes", "pipeline_parallel_sizes", "chunks", "batches"):
            axes[name] = [_whole(value, name) for value in values]
        else:
            may_be_none = name in ("quantizations", "speculative_configs")
            axes[name] = [None if value == "none" and may_be_none else value for value in values]
            for value in axes[name]:
                if value is not None:
                    options = (f"--{each.replace('_', '-')}" for each in (field, name))
                    _check_name(partial(check_value, field), value, *options)
    axes.setdefault("tensor_parallel_sizes", (1, 2, 4, 8))
    return axes


def _whole(text: str, name: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise UsageError(f"--{name.replace('_', '-')}: {text!r} is not a whole number from 1")
    return int(text)


def _traffic(given: Mapping[str, Any], seed: int) -> tuple[Traffic, float, tuple[str, ...]]:
    """The traffic, the load that is planned for, and what to say about it."""
    flags = dict(given)
    if "target_request_rate" in flags:
        if "request_rate" in flags:
            raise UsageError("--request-rate and --target-request-rate are both given; keep one")
        flags["request_rate"] = flags["target_request_rate"]
    users = flags.get("target_concurrency")
    if users is not None and "request_rate" in flags:
        option = "--target-request-rate" if "target_request_rate" in flags else "--request-rate"
        raise UsageError(f"{option} and --target-concurrency are both given; keep one")
    spec, notes = _at_peak(make_spec({**flags, "num_prompts": None}))
    if users is not None:
        if not 1 <= users < np.inf:
            raise UsageError(f"--target-concurrency must be a whole number of users, got {users:g}")
        return make_traffic(spec, seed=seed, variable="max_concurrency"), float(round(users)), notes
    rates = [tenant.arrivals.request_rate for tenant in spec.tenants]
    traffic = make_traffic(spec, seed=seed)
    if isinstance(traffic, Replay):
        if "num_prompts" in given:
            traffic = make_traffic(make_spec(flags), seed=seed)
        return traffic, 1.0, notes
    total = sum(rate for rate in rates if rate is not None)
    if not (total > 0 and np.isfinite(total)):
        raise UsageError("no rate to plan for: set --request-rate (or --target-concurrency)")
    return traffic, total, notes


def _at_peak(spec: WorkloadSpec) -> tuple[WorkloadSpec, tuple[str, ...]]:
    """Rate curves replaced by their peak: a fleet that is always on must hold that."""
    tenants, notes = [], []
    for tenant in spec.tenants:
        arrivals = tenant.arrivals
        if arrivals.rate_points is None and arrivals.daily_curve is None:
            tenants.append(tenant)
            continue
        curve = RateCurve.of(arrivals)
        peak, mean = float(curve.rates.max()), curve.per_period / curve.period_s
        notes.append(f"planned for the peak of the curve, {peak:.4g} requests/s; its mean is {mean:.4g}.")
        steady = ArrivalSpec(request_rate=peak, burstiness=arrivals.burstiness)
        tenants.append(tenant.model_copy(update={"arrivals": steady}))
    return spec.model_copy(update={"tenants": tuple(tenants)}), tuple(notes)


def _write(answer: PlanAnswer, folder: Path) -> list[Path]:
    from experiments.results import writable
    from tokentwin.run import REPORT

    path = folder / "plan.json"
    with writable(path):
        path.write_text(json.dumps(answer.json(), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    paths = [path]
    for rank, fleet in enumerate(answer.plan.fleets, 1):
        d = fleet.candidate.deployment
        model = d.model.rstrip("/").rsplit("/", 1)[-1]
        inside = folder / f"{rank}-{fleet.replicas}x{d.gpus_per_replica}-{d.gpu}-{model}"
        fleet_run(fleet, answer).save(inside)
        paths.append(inside / REPORT)
    return paths


def fleet_run(fleet: Fleet, answer: PlanAnswer) -> Run:
    """The run that a fleet was judged by."""
    from sim.certainty import Certainty
    from sim.hull import after_run
    from sim.verdict import verdict
    from tokentwin.run import Run

    d = fleet.built.deployment
    meta = {
        "argv": list(ARGV.get()),
        "version": VERSION,
        "git_commit": git_commit(),
        "seed": answer.seed,
        "model_id": fleet.built.model.name,
        "gpu": fleet.built.profile.name,
        "tensor_parallel_size": d.tensor_parallel_size,
        "pipeline_parallel_size": d.pipeline_parallel_size,
        "data_parallel_size": num_replicas(d),
    }
    record = replace(fleet.record, meta={**fleet.record.meta, **meta})
    certainty = Certainty(extrapolations=after_run(fleet.built, record))
    return Run(
        record, fleet.summary, verdict(record, fleet.summary), fleet.built, len(record.requests), certainty
    )


@contextmanager
def _status(*, silent: bool) -> Iterator[Callable[[str], None] | None]:
    """A line on standard error that says what is simulated, or None where nobody would see it."""
    from rich.console import Console

    console = Console(stderr=True)
    if silent or not console.is_terminal:
        yield None
        return
    with console.status("Working out bounds") as status:
        yield lambda words: status.update(f"Simulating {words}")
