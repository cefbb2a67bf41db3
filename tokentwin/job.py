"""From flags to a run: the deployment, the workload, the promises; checked together before anything starts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

from experiments.observed import ALERTS, UTILISATION
from experiments.utilisation import twin_work, utilisation
from serving.errors import UsageError
from sim.certainty import assess
from sim.deployment import Built, Deployment, build
from sim.deployment import simulate as simulate_deployment
from sim.fleet.build import most_replicas, num_replicas
from sim.fleet.spec import set_by_all
from sim.hull import before_run, check_strict
from sim.latency import DEFAULT_PERCENTILES
from sim.metrics import summarise
from sim.slo import Goodput, Slo, parse_goodput, parse_slo
from sim.verdict import verdict
from sim.workload import Workload, WorkloadSpec, load_workload, spec_from_flags
from sim.workload.files import Location, explain
from sim.workload.flags import known_flags
from sim.world import Progress
from tokentwin.flag_tables import DEPLOYMENT
from tokentwin.interrupt import between_events
from tokentwin.provenance import ARGV, VERSION, git_commit
from tokentwin.run import Run

DEPLOYMENT_NAMES = tuple(flag.name for flag in DEPLOYMENT)


@dataclass(frozen=True)
class Job:
    """What `tokentwin simulate` was asked for, worked out. Nothing has been simulated yet."""

    built: Built
    workload: WorkloadSpec | Workload
    goodput: Goodput = field(default_factory=Goodput)
    slos: tuple[Slo, ...] = ()
    percentiles: tuple[float, ...] = DEFAULT_PERCENTILES
    seed: int = 0
    fast_forward: bool = True
    until_s: float = math.inf
    replications: int | None = None
    """None takes the default of `sim.certainty`; 1 leaves intervals out."""
    strict: bool = False
    alerts: tuple[str, ...] = ()
    """Rules of `experiments.alerts`, checked."""


def make_job(
    flags: Mapping[str, Any],
    *,
    deployment: Deployment | None = None,
    workload: WorkloadSpec | Workload | None = None,
    builder: Callable[[Deployment], Built] = build,
) -> Job:
    """A job from flags by name (underscores; None is not given); `deployment` and `workload` stand in for theirs.

    `builder` works a deployment out; another one may remember those that it has seen.

    Raises UsageError for anything that cannot be, InfeasibleError where the model does not fit.
    """
    given = {name: value for name, value in flags.items() if value is not None}
    goodput, slos = check_run(given)
    if given.get("fail_on_slo") and not slos:
        raise UsageError("--fail-on-slo has no effect without --slo; add one such as --slo p95_ttft:500")
    percentiles = parse_percentiles(given.get("metric_percentiles"))
    planned = make_deployment(given, deployment)
    built = builder(planned)
    check_routing(planned, given)
    if given.get("strict"):
        check_strict(before_run(built))
    if workload is None:
        workload = make_spec(given)
    else:
        extra = sorted((known_flags() - {"goodput"}) & set(given))
        if extra:
            raise UsageError(f"{extra[0]} has no effect on a workload that is given; set it in the workload")
    return Job(
        built,
        workload,
        goodput,
        slos,
        percentiles,
        int(given.get("seed", 0)),
        bool(given.get("fast_forward", True)),
        float(given.get("until", math.inf)),
        given.get("replications"),
        bool(given.get("strict")),
        make_alerts(given),
    )


def check_routing(deployment: Deployment, given: Mapping[str, Any]) -> None:
    """Raise UsageError for a router in front of one replica."""
    if most_replicas(deployment) == 1 and given.get("router", "round_robin") != "round_robin":
        fix = "give the pool 2 or more replicas" if deployment.pools else "set --data-parallel-size 2 or more"
        raise UsageError(f"--router has no effect on one replica; {fix}")


def check_run(given: Mapping[str, Any]) -> tuple[Goodput, tuple[Slo, ...]]:
    """The promises of the flags, with the numbers of the run itself checked. Raises UsageError."""
    seed, until_s = given.get("seed", 0), given.get("until", math.inf)
    if seed < 0:
        raise UsageError(f"--seed must not be negative, got {seed}")
    if not until_s > 0:
        raise UsageError(f"--until must be a positive number of seconds, got {until_s:g}")
    replications = given.get("replications")
    if replications is not None and replications < 1:
        raise UsageError(f"--replications must be at least 1 (no intervals), got {replications}")
    return make_goodput(given.get("goodput")), parse_slo(words(given.get("slo")))


def make_alerts(given: Mapping[str, Any]) -> tuple[str, ...]:
    """The alert rules of the flags, as they are written out. Raises UsageError that points at the wrong word."""
    rules = given.get("alert") or ()
    if given.get("fail_on_alert") and not rules:
        raise UsageError(
            "--fail-on-alert has no effect without --alert; add one such as 'ttft:p95:1m > 1s for 3m'"
        )
    if not rules:
        return ()
    from experiments.alerts import parse_rules

    return tuple(map(str, parse_rules([rules] if isinstance(rules, str) else rules)))


def make_deployment(flags: Mapping[str, Any], base: Deployment | None = None) -> Deployment:
    """The deployment of the flags, over `base` where there is one. Errors name the flag."""
    given = {name: flags[name] for name in DEPLOYMENT_NAMES if flags.get(name) is not None}
    content = {**(base.model_dump() if base is not None else {}), **given}
    if "model" not in content:
        raise UsageError("--model is missing; name one (tokentwin model list) or give a config.json")
    try:
        made = Deployment.model_validate(content)
    except ValidationError as error:
        raise UsageError(explain(error, _flag_of, keys_at)) from None
    if "pools" in given and not made.pools:
        raise UsageError(
            "--pools: the list is empty; name a pool, such as [{gpu: h200, replicas: 2}], or leave it out"
        )
    for name in sorted(set_by_all(made.pools) & given.keys()):
        raise UsageError(f"{_flag_of((name,))} has no effect: every pool has its own; leave it out")
    return made


def _flag_of(location: Location) -> str:
    if not location:
        return ""
    inner = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location[1:])
    return "--" + str(location[0]).replace("_", "-") + inner


def keys_at(place: Location) -> set[str]:
    """Keys of the mapping at a place in a deployment, such as ("network", "tenants", "chat")."""
    model: type[BaseModel] = Deployment
    parts = iter(place)
    for part in parts:
        kind: Any = model.model_fields[str(part)].annotation
        while not isinstance(kind, type) or not issubclass(kind, BaseModel):
            if get_origin(kind) in (dict, tuple):
                next(parts, None)  # a name or a number, which is no field
            kind = next(each for each in reversed(get_args(kind)) if each not in (type(None), Ellipsis))
        model = kind
    return set(model.model_fields)


def make_spec(flags: Mapping[str, Any]) -> WorkloadSpec:
    """The workload of the traffic flags, `goodput` limits among them. Raises UsageError."""
    if flags.get("priority") is not None:
        raise UsageError(
            "--priority has no effect where all requests have the same; give each tenant its own in a workload file"
        )
    traffic = {name: value for name, value in flags.items() if name in known_flags() and value is not None}
    if "goodput" in traffic:
        limits = make_goodput(traffic["goodput"]).limits_s()
        traffic["goodput"] = {name: limit_s * 1000 for name, limit_s in limits.items()}
    return spec_from_flags(traffic)


def run_job(
    job: Job,
    *,
    label: str | None = None,
    progress: Callable[[Progress], None] | None = None,
    watch: Callable[[Any], None] | None = None,
) -> Run:
    """Simulate a job, judge the result and say how sure it is. After a Ctrl-C the run holds what happened so far.

    `watch` is told of the world before it runs (`tokentwin.observe`).
    """
    workload = job.workload
    if isinstance(workload, WorkloadSpec):
        workload = load_workload(workload, seed=job.seed)
    with between_events(progress) as told:
        record = simulate_deployment(
            workload,
            job.built,
            fast_forward=job.fast_forward,
            progress=told,
            until_s=job.until_s,
            seed=job.seed,
            watch=watch,
        )
    known = {}
    if record.fleet is None:  # pools may have other devices
        known = {UTILISATION: utilisation(record, twin_work(record, job.built)).json()}
    record = replace(record, meta={**_meta(job, workload, label), **known, **record.meta})
    summary = summarise(record, percentiles=job.percentiles, goodput=job.goodput, slos=job.slos)
    certainty = assess(
        record,
        summary,
        job.built,
        job.workload,
        seed=job.seed,
        replications=job.replications,
        goodput=job.goodput,
        slos=job.slos,
        percentiles=job.percentiles,
        fast_forward=job.fast_forward,
        until_s=job.until_s,
        progress=_counted(progress, record.end_s),
    )
    return Run(record, summary, verdict(record, summary, job.slos), job.built, len(workload), certainty)


def _counted(progress: Callable[[Progress], None] | None, end_s: float) -> Callable[[int, int], None] | None:
    """The bar of a run, counting replications."""
    if progress is None:
        return None
    return lambda done, total: progress(Progress(end_s, done, total, 0.0))


def _meta(job: Job, workload: Workload, label: str | None) -> dict[str, Any]:
    """What the results file says of a run, beside what `sim.deployment.simulate` writes."""
    d = job.built.deployment
    rates = ("request_rate", "burstiness")
    known: dict[str, Any] = {name: workload.meta[name] for name in rates if name in workload.meta}
    return {
        "argv": list(ARGV.get()),
        "version": VERSION,
        "git_commit": git_commit(),
        "seed": job.seed,
        "label": label,
        "model_id": job.built.model.name,
        "tokenizer_id": job.built.model.name,
        "gpu": job.built.profile.name,
        "tensor_parallel_size": d.tensor_parallel_size,
        "pipeline_parallel_size": d.pipeline_parallel_size,
        "data_parallel_size": num_replicas(d),
        "max_concurrency": workload.closed_loop.max_concurrency if workload.closed_loop else None,
        **known,
        "slos": {slo.name: slo.limit_s for slo in job.slos},
        "goodput_s": job.goodput.limits_s(),
        "percentiles": list(job.percentiles),
        "fast_forward": job.fast_forward,
        "until_s": job.until_s if math.isfinite(job.until_s) else None,
        **({ALERTS: list(job.alerts)} if job.alerts else {}),
    }


def parse_percentiles(text: str | Sequence[float] | None) -> tuple[float, ...]:
    """`"50,90,95,99"`, as `vllm bench serve` takes them. Raises UsageError."""
    if text is None:
        return DEFAULT_PERCENTILES
    parts = text.split(",") if isinstance(text, str) else list(text)
    try:
        values = tuple(float(part) for part in parts)
    except ValueError:
        raise UsageError(f"--metric-percentiles must look like 50,90,95,99, got {text!r}") from None
    if not values or not all(0 < value <= 100 for value in values):
        raise UsageError(f"--metric-percentiles must lie above 0 and up to 100, got {text!r}")
    return tuple(sorted(set(values)))


def words(value: str | Sequence[str] | None) -> list[str]:
    """A list of words from a list, or from one text with spaces or commas."""
    if value is None:
        return []
    parts = [value] if isinstance(value, str) else list(value)
    return [word for part in parts for word in part.replace(",", " ").split()]


def make_goodput(value: Any) -> Goodput:
    """Limits per request from what `--goodput` or its keyword takes. Raises UsageError."""
    if isinstance(value, Goodput):
        return value
    if isinstance(value, Mapping):
        value = [f"{name}:{limit}" for name, limit in value.items()]
    return parse_goodput(words(value))
