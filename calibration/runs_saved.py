"""Runs kept as JSON: a folder that this project wrote, or a result of `vllm bench serve --save-detailed`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from calibration.observed import Case, Observed, plain_workload
from serving.errors import UsageError
from sim.deployment import Deployment
from sim.record import Floats, Ints
from sim.slo import TICK_S
from sim.workload import Workload, WorkloadSpec, load_workload

DETAILED = ("input_lens", "output_lens", "ttfts", "itls", "start_times")


def is_saved_run(path: Path) -> bool:
    """Whether `path` is a folder with `run.json` and `requests.parquet`."""
    return (path / "run.json").is_file() and (path / "requests.parquet").is_file()


def read_saved_run(folder: Path, profile: str | None) -> Case:
    """A run folder of ours. Requests are sent again when they were; prefixes were not kept, so none are shared."""
    pq: Any = import_module("pyarrow.parquet")
    try:
        meta = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        table = pq.read_table(folder / "requests.parquet").to_pydict()
        values = dict(meta["deployment"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{folder}: not a run folder ({error}); its run.json must hold the deployment"
        ) from None
    if profile:
        values["gpu"] = profile
    try:
        deployment = Deployment(**values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UsageError(f"{folder / 'run.json'}: deployment.{where}: {first['msg']}") from None
    done = np.array([status == "finished" for status in table["status"]], bool)
    if not done.any():
        raise UsageError(f"{folder}: no request of this run finished; there is nothing to compare")

    def column(name: str) -> Floats:
        return np.array([np.nan if v is None else v for v in table[name]], np.float64)

    several = done & (column("output_tokens") > 1)
    samples = {
        "ttft": column("ttft_s")[done],
        "tpot": column("tpot_s")[several],
        "e2el": column("e2el_s")[done],
    }
    notes = ["requests are sent at the recorded times"]
    if not (samples["tpot"] > TICK_S).any():
        del samples["tpot"]
        notes.append("every answer came whole, so that there is no TPOT to compare")
    pages = meta.get("capacity", {}).get(
        "num_pages"
    )  # without vLLM's null block, which its own count includes
    observed = Observed(samples=samples, num_pages=None if pages is None else pages + 1)
    workload = plain_workload(
        folder.name,
        column("sent_s"),
        column("prompt_tokens").astype(int).tolist(),
        table["max_output_tokens"],
    )
    if meta.get("beams") or meta.get("candidates"):
        order = np.argsort(column("sent_s"), kind="stable")
        workload = _of_several(workload, folder, meta, np.array(table["request_id"], np.int64)[order])
    if sum(table["cached_tokens"]):
        notes.append("prefixes were not kept in the run folder: the twin shares none, the run did")
    return Case(folder.name, deployment, workload, observed, False, (), tuple(notes))


def _of_several(workload: Workload, folder: Path, meta: Mapping[str, Any], rows: Ints) -> Workload:
    """With widths of beam searches and numbers of answers, which no request table says: those of `rows` of the workload
    that the run was made of. Raises `UsageError` where that is not to be had.
    """
    facts = meta.get("workload") or {}
    try:
        made = load_workload(WorkloadSpec.model_validate(facts["spec"]), seed=int(facts["seed"]))
        same = np.array_equal(made.prompt_tokens[rows], workload.prompt_tokens)
    except (UsageError, ValidationError, KeyError, TypeError, IndexError):
        same = False
    if not same:
        raise UsageError(
            f"{folder}: beam searches and best-of cannot be replayed without their workload (a file moved, or times were "
            "scaled): the request table does not say how wide or how many they were"
        )
    return replace(
        workload,
        beam_width=None if made.beam_width is None else made.beam_width[rows],
        best_of=None if made.best_of is None else made.best_of[rows],
    )


def is_bench_json(path: Path) -> bool:
    """Whether `path` looks like a JSON result file."""
    return path.is_file() and path.suffix.lower() == ".json"


def read_bench(path: Path, deployment: Deployment | None) -> Case:
    """A result of `vllm bench serve --save-result --save-detailed`; the file does not say how it was served.

    Raises `UsageError` without a deployment, or when the file has no lists per request.
    """
    if deployment is None:
        raise UsageError(
            f"{path} does not say what was served how; give --model, --gpu and the engine's flags"
        )
    try:
        lines = path.read_text(encoding="utf-8").strip().splitlines()
        text = "\n".join(lines)
        result = json.loads(text if text.startswith("{\n") or len(lines) == 1 else lines[-1])
    except (OSError, ValueError, IndexError) as error:
        raise UsageError(f"{path}: cannot be read as JSON ({error})") from None
    missing = [key for key in DETAILED if not isinstance(result, dict) or not result.get(key)]
    if missing:
        raise UsageError(f"{path}: no list {missing[0]!r}; save the run with --save-result --save-detailed")
    prompts, outputs = np.array(result["input_lens"]), np.array(result["output_lens"])
    errors = result.get("errors") or [""] * len(prompts)
    done = np.array([not e for e in errors]) & (outputs > 0)
    if not done.any():
        raise UsageError(f"{path}: no request of this run succeeded; there is nothing to compare")
    ttft = np.array(result["ttfts"], np.float64)[done]
    decode = np.array([float(np.sum(gaps)) for gaps in result["itls"]])[done]
    tokens = outputs[done]
    several = tokens > 1
    start = np.array(result["start_times"], np.float64)[done]
    workload = plain_workload(path.stem, start - start.min(), prompts[done].tolist(), tokens.tolist())
    observed = Observed(
        samples={"ttft": ttft, "tpot": decode[several] / (tokens[several] - 1), "e2el": ttft + decode}
    )
    notes = ["requests are sent at the recorded times; prefixes are unknown, so none are shared"]
    if not done.all():
        notes.append(f"{int((~done).sum())} of {len(done)} requests failed and are left out")
    return Case(path.stem, deployment, workload, observed, False, (), tuple(notes))
