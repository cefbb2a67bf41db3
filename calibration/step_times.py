"""Single steps of a real run, read off the times of its requests: `python -m calibration.step_times [--write PAGE]`.

A request that was never preempted gets a token in every step between its first and its last, and which requests share a
step follows from the schedule. So the schedule is replayed with the cost model's prices, and wherever a request's first
or last token was recorded, the clock is set to it. What lies between two recorded times is compared with the prices of
the steps between them, and a robust regression says by how much each size of step is over or under its price.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from calibration.doc_tables import markdown, page_command
from calibration.observed import Case, number, read_rows
from calibration.runs_vllm import read_runs
from calibration.validate import memory_of
from costmodel.prices import Prices
from serving.errors import UsageError
from serving.plan import StepPlan
from serving.policies import Chunked
from serving.request import Request
from serving.scheduler import Scheduler
from sim.deployment import build
from sim.record import Floats

RUNS = {"RTX 4090": "lss_rtx4090_llama31-8b_tp1", "RTX PRO 6000": "lss_rtxpro6000_llama31-8b_tp1"}
PROMPT_TOKENS = (384, 512, 640, 768, 896, 1024, 1152, 1280, 1408, 1536, 1792, 2047, 2048)
DECODES = (8, 32, 64, 127, 256)
"""Upper ends of the classes of steps: with prompt chunks by tokens, of decodes alone by sequences."""
_SECTION = "steps"
_APART_S = 2e-3
"""Recorded times of one step farther apart than this mean that the replay has lost a step."""
_LATE_S = 0.02
_WARM_UP = 16
"""First steps left out: kernels are compiled and loaded in them."""


@dataclass(frozen=True, slots=True)
class Times:
    """Recorded seconds of every request, in order of reaching the queue."""

    scheduled_s: Floats
    first_token_s: Floats
    last_token_s: Floats


@dataclass(slots=True)
class Step:
    """A step of the replay: what it holds, its price, and its recorded end (NaN where nobody's was recorded)."""

    tokens: int
    decodes: int
    prompts: bool
    priced_s: float
    ended_s: float = float("nan")
    consistent: bool = True
    rows: list[int] = field(default_factory=list)

    @property
    def group(self) -> int:
        """Index into `classes()`."""
        if self.prompts:
            return min(int(np.searchsorted(PROMPT_TOKENS, self.tokens)), len(PROMPT_TOKENS) - 1)
        return len(PROMPT_TOKENS) + min(int(np.searchsorted(DECODES, self.decodes)), len(DECODES) - 1)


def classes() -> list[str]:
    """What `Step.group` counts, in words."""
    names = []
    for edges, what in ((PROMPT_TOKENS, "tokens, with prompts"), (DECODES, "decodes")):
        lows = (1, *(edge + 1 for edge in edges[:-1]))
        names += [
            f"{a:,} {what}" if a == b else f"{a:,} to {b:,} {what}" for a, b in zip(lows, edges, strict=True)
        ]
    return names


def read_times(folder: Path, run: str) -> Times:
    """Times of a run in `*_requests.csv`. Raises `UsageError` without the columns."""
    path = next(iter(sorted(folder.glob("*_requests.csv"))), folder / "requests.csv")
    wanted = ("queued_s", "scheduled_s", "first_token_s", "last_token_s")
    rows = [r for r in read_rows(path, ("run", "req", *wanted)) if r["run"] == run]
    if not rows:
        raise UsageError(f"{path}: no requests of run {run!r}")
    rows.sort(key=lambda r: int(number(r, "req", path)))
    queued, *others = (np.array([number(r, column, path) for r in rows]) for column in wanted)
    order = np.argsort(queued, kind="stable")
    return Times(*(values[order] for values in others))


def replay(case: Case, times: Times, num_pages: int, excess_s: Callable[[Step], float]) -> list[Step]:
    """The case's steps, the clock set to every recorded time; between them a step lasts its price plus `excess_s`.

    A request joins the queue in time for the plan nearest to its `scheduled_s`.
    """
    work = case.workload
    built = build(case.deployment.model_copy(update={"num_gpu_blocks_override": num_pages}))
    scheduler = Scheduler(built.limits, Chunked())
    has_keys = np.diff(work.segment_offsets) > 0
    page = built.limits.page_tokens
    requests = [
        Request(i, int(p), int(o), keys=work.page_keys(i, page) if has_keys[i] else ())
        for i, (p, o) in enumerate(zip(work.prompt_tokens, work.output_tokens, strict=True))
    ]
    got, arrived, done = np.zeros(len(work), int), 0, 0
    now = ends = float(times.scheduled_s[0])
    steps: list[Step] = []
    current: tuple[StepPlan, Step] | None = None
    while done < len(work):
        while arrived < len(work) and times.scheduled_s[arrived] <= (now + ends) / 2 + _APART_S / 4:
            scheduler.add(requests[arrived])
            arrived += 1
        plan = scheduler.plan(now)
        ahead = None
        if plan is not None and len(plan):
            ahead = (plan, _step(plan, scheduler, built.pricer))
            steps.append(ahead[1])
            for admission in plan.admitted:
                late = times.scheduled_s[_row(admission.request)] - now
                ahead[1].consistent &= admission.resumed or abs(late) <= _LATE_S
        if current is None:
            if ahead is None:
                now = ends = max(now, float(times.scheduled_s[arrived]))
                continue
            current, ends = ahead, now + ahead[1].priced_s + excess_s(ahead[1])
            continue
        running, step = current
        recorded = []
        for row in step.rows:
            got[row] += 1
            if got[row] == 1:
                recorded.append(times.first_token_s[row])
            if got[row] == work.output_tokens[row]:
                recorded.append(times.last_token_s[row])
                done += 1
        if recorded:
            step.ended_s = ends = float(np.median(recorded))
            step.consistent &= bool(np.ptp(recorded) <= _APART_S)
        now = ends
        scheduler.commit(running)
        current = ahead
        ends = now + (ahead[1].priced_s + excess_s(ahead[1]) if ahead is not None else 0.0)
    return steps


def _row(request: Request) -> int:
    assert isinstance(request.id, int)
    return request.id


def _step(plan: StepPlan, scheduler: Scheduler, pricer: Prices) -> Step:
    chunks = [(chunk.num_tokens, chunk.context) for chunk in plan.chunks]
    priced_s = pricer.step_s(
        plan.num_tokens,
        plan.num_sampled,
        chunks,
        plan.num_decodes,
        plan.decode_context_sum,
        plan.decode_context_max,
    )
    sampling = plan.slots if plan.samples is None else plan.slots[plan.samples]
    members = (scheduler.seqs.requests[slot] for slot in sampling.tolist())
    rows = [_row(request) for request in members if request is not None]
    return Step(plan.num_tokens, plan.num_decodes, bool(chunks), priced_s, rows=rows)


def excesses(steps: Sequence[Step]) -> tuple[Floats, Floats, npt.NDArray[np.int64]]:
    """(seconds over the price, standard error, steps seen) of each class of steps; NaN where none was seen.

    From the steps before the replay first contradicts itself; weighted least squares, outliers left out.
    """
    odd = [i for i, step in enumerate(steps) if not step.consistent and i > _WARM_UP]
    counts, over, prices = [], [], []
    since: list[Step] | None = None
    start_s = 0.0
    for step in steps[_WARM_UP : odd[0] if odd else len(steps)]:
        if since is not None:
            since.append(step)
        if np.isnan(step.ended_s):
            continue
        if since:
            counts.append(np.bincount([s.group for s in since], minlength=len(classes())))
            prices.append(sum(s.priced_s for s in since))
            over.append(step.ended_s - start_s - prices[-1])
        since, start_s = [], step.ended_s
    if not counts:
        raise UsageError("no two steps with recorded ends; nothing can be read off this run")
    matrix, target = np.array(counts, np.float64), np.array(over)
    weight = 1.0 / np.sqrt(matrix.sum(axis=1))
    seen = matrix.any(axis=0)
    keep: npt.NDArray[np.bool_] = np.ones(len(target), bool)
    for _ in range(8):
        design = (matrix[:, seen] * weight[:, None])[keep]
        # A class that is seen once or twice is pulled to 0 rather than left to explain an outlier.
        ridge = 1e-2 * np.eye(int(seen.sum()))
        found = np.linalg.solve(design.T @ design + ridge, design.T @ (target * weight)[keep])
        rest = (target - matrix[:, seen] @ found) * weight
        keep = np.asarray(np.abs(rest) <= max(4.0 * 1.4826 * float(np.median(np.abs(rest[keep]))), 2e-4))
    variance = float(np.mean(rest[keep] ** 2)) * np.diag(np.linalg.inv(design.T @ design + ridge))
    mean, error = np.full(len(classes()), np.nan), np.full(len(classes()), np.nan)
    mean[seen], error[seen] = found, np.sqrt(variance)
    return mean, error, np.asarray(matrix[keep].sum(axis=0), np.int64)


def read_off(
    case: Case, times: Times, num_pages: int, rounds: int = 3
) -> tuple[list[Step], Floats, Floats, Floats]:
    """(steps, and per class: seconds over the price, standard error, steps seen) of a run.

    What one round finds keeps the next in step with the run for longer.
    """
    found = np.zeros(len(classes()))
    for _ in range(rounds):
        known = np.nan_to_num(found)
        steps = replay(case, times, num_pages, lambda step, by=known: float(by[step.group]))  # type: ignore[misc]
        found, error, seen = excesses(steps)
    return steps, found, error, seen.astype(np.float64)


def table(folder: Path) -> str:
    """Milliseconds over the price by class of steps, a column per run."""
    columns = []
    for run in RUNS.values():
        case = read_runs(folder, run, None, None)
        pages = case.observed.num_pages or memory_of(case).num_blocks
        _, over, error, seen = read_off(case, read_times(folder, case.name), pages)
        columns.append(
            [
                f"{v * 1e3:+.1f} ± {e * 1e3:.1f} ({n:,.0f})" if n >= 3 else "—"
                for v, e, n in zip(over, error, seen, strict=True)
            ]
        )
    rows = [[name, *cells] for name, *cells in zip(classes(), *columns, strict=True)]
    return markdown(["ms over the sum of the kernels (steps)", *RUNS], rows)


def main(arguments: list[str] | None = None) -> int:
    """Print the table, and write it into a page if asked to."""
    return page_command(
        "python -m calibration.step_times", __doc__, _SECTION, table, "../shared/data/yardstick", arguments
    )


if __name__ == "__main__":
    raise SystemExit(main())
