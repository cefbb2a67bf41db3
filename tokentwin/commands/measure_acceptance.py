"""`tokentwin measure-acceptance`: which drafts a model really accepts, as the twin takes it."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from experiments.drafts import draft_rows
from experiments.results import writable
from serving.errors import UsageError
from serving.policies import load_policy
from tokentwin.config_file import configurable
from tokentwin.engine_limits import drafting
from tokentwin.flag_tables import DEPLOYMENT
from tokentwin.flags import Flag, takes
from tokentwin.job import make_deployment
from tokentwin.outputs import check_file

if TYPE_CHECKING:
    from realengine.engine import Engine
    from realengine.generation import Sampling
    from realengine.load import Source

LIMITS = (
    "model", "dtype", "speculative_config", "max_num_seqs", "max_num_batched_tokens", "max_model_len",
    "gpu_memory_utilization", "block_size",
)  # fmt: skip
OWN = tuple(
    Flag(name, kind, text, "Engine" if name in ("load_format", "device") else "Prompts", aliases, default)
    for name, kind, text, aliases, default in (
        ("load_format", Literal["auto", "dummy"], "The model's weights, or random ones of its shape.", (), "auto"),
        ("device", str, "cuda, cuda:1 or cpu; CUDA where there is one, by default.", (), None),
        ("dataset_path", Path, "Prompts: a text file with one a line, or JSONL with the key prompt; passages of a "
         "bundled text without it.", (), None),
        ("num_prompts", int, "Prompts to answer; all of the file by default.", ("--request-count",), "16"),
        ("output_len", int, "Tokens of each answer.", ("--osl",), "128"),
        ("temperature", float, "Of the answers; 0 is greedy.", (), "0"),
        ("top_p", float, "Of the answers.", (), "1"),
        ("seed", int, "Of the answers' draws.", (), "0"),
        ("output", Path, "JSON file to write, for the twin's acceptance and its replay.", ("-o",), None),
    )
)  # fmt: skip
ENGINE = tuple(flag for flag in DEPLOYMENT if flag.name in LIMITS)
_PASSAGE_WORDS = 40


@configurable
@takes(ENGINE, OWN)
def measure_acceptance(**flags: Any) -> int:
    """Answer prompts on the engine with drafts, and say how many stand: by position, and step by step.

    Example: tokentwin measure-acceptance --model path/to/SmolLM2 --speculative-config
    '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2}' -o acceptance.json
    """
    given = {name: value for name, value in flags.items() if value is not None}
    for name in ("model", "speculative_config"):
        if name not in given:
            raise UsageError(f"--{name.replace('_', '-')} is missing")
    for name, default in (("num_prompts", 16), ("output_len", 128)):
        if given.get(name, default) < 1:
            raise UsageError(f"--{name.replace('_', '-')} must be at least 1, got {given[name]}")
    if "output" in given:
        check_file(given["output"])
    try:
        import_module("realengine.build")
    except ModuleNotFoundError as error:
        raise UsageError(
            f"tokentwin measure-acceptance needs {error.name}, which is not installed: pip install 'tokentwin[engine]'"
        ) from None
    engine, source = _engine(given)
    prompts = _prompts(given, source)
    found = measure(engine, prompts, _sampling(given))
    found = {"model": Path(given["model"]).name, **found}
    drafts = found.pop("counts")
    for name, value, note in draft_rows(drafts):
        sys.stdout.write(f"{name:<40} {value:<10} {note}".rstrip() + "\n")
    rates = ", ".join(f"{rate:.3f}" for rate in found["rates"])
    shown = f'{{"rates": [{rates}], "draft_rate": {found["draft_rate"]:.3f}}}'
    sys.stdout.write(f'\nFor the twin: "acceptance": {shown}\n')
    if (output := given.get("output")) is not None:
        with writable(output):
            Path(output).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        sys.stdout.write(f'Wrote {output}; step by step it is "acceptance": {{"replay": "{output}"}}\n')
    return 0


def measure(engine: Engine, prompts: Sequence[Sequence[int]], sampling: Sequence[Sampling]) -> dict[str, Any]:
    """Answer all prompts on an engine that has not been started, and count.

    `rates[j]` is the acceptance of draft token j given that all before it stood, `draft_rate` the share of decode steps
    with a draft, `outcomes` what was drafted and accepted, step by step, of each answer; `counts` all together.
    """
    from realengine.complete import complete

    engine.start()
    try:
        complete(engine, prompts, sampling)
    finally:
        engine.stop()
    outcomes = [row.verdicts for row in engine.recorder.requests]
    steps = sum(map(len, outcomes))
    drafts = engine.recorder.drafts
    if not drafts.num_drafts:
        raise UsageError("nothing was drafted: lengthen --output-len, or lower prompt_lookup_min")
    return {
        "num_speculative_tokens": engine.config.num_speculative_tokens,
        "rates": drafts.conditional_per_pos,
        "draft_rate": drafts.num_drafts / steps,
        "mean_acceptance_length": drafts.mean_acceptance_length,
        "outcomes": outcomes,
        "counts": drafts,
    }


def _engine(given: Mapping[str, Any]) -> tuple[Engine, Source]:
    from realengine.build import EngineOptions, build_engine
    from realengine.load import find_model
    from serving.config import SchedulerConfig

    d = make_deployment({name: value for name, value in given.items() if name in LIMITS})
    options = EngineOptions(
        d.model,
        load_format=given.get("load_format", "auto"),
        dtype=d.dtype,
        device=given.get("device", "auto"),
        gpu_memory_utilization=d.gpu_memory_utilization,
        seed=given.get("seed", 0),
        speculative=drafting(d),
    )
    options.torch_device(), options.torch_dtype()
    source = find_model(options.model, options.load_format)
    limits = SchedulerConfig(
        num_pages=1,
        page_tokens=d.block_size,
        max_num_seqs=d.max_num_seqs or 16,
        max_num_batched_tokens=d.max_num_batched_tokens or 2048,
        max_model_len=d.max_model_len or source.architecture.shape.max_position_embeddings,
    )
    without_text = replace(source, tokenizer=None)
    return build_engine(options, limits, policy=load_policy("chunked"), source=without_text), source


def _sampling(given: Mapping[str, Any]) -> list[Sampling]:
    from realengine.generation import Sampling

    seed = given.get("seed", 0)
    return [
        Sampling(
            max_tokens=given.get("output_len", 128),
            temperature=given.get("temperature", 0.0),
            top_p=given.get("top_p", 1.0),
            seed=seed + i,
        )
        for i in range(given.get("num_prompts", 1 << 20))
    ]


def _prompts(given: Mapping[str, Any], source: Source) -> list[list[int]]:
    if source.tokenizer is None:
        raise UsageError(
            f"--model {given['model']} has no tokenizer to read prompts with; give a folder or GGUF file that has"
        )
    path = given.get("dataset_path")
    texts = _passages() if path is None else read_prompts(path)
    most = given.get("num_prompts", 16 if path is None else len(texts))
    if most > len(texts):
        raise UsageError(f"--num-prompts {most}: there are {len(texts)} prompts")
    return [source.tokenizer.encode(text) for text in texts[:most]]


def _passages() -> list[str]:
    from realengine.quant_quality import bundled_text

    words = bundled_text().split()
    return [
        " ".join(words[i : i + _PASSAGE_WORDS]) for i in range(0, len(words) - _PASSAGE_WORDS, _PASSAGE_WORDS)
    ]


def read_prompts(path: Path) -> list[str]:
    """The prompts of a text or JSONL file. Raises `UsageError` when there are none or a line has no prompt."""
    try:
        lines = [line for line in path.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
    except OSError as error:
        raise UsageError(f"--dataset-path {path}: {error.strerror}") from None
    if not lines:
        raise UsageError(f"--dataset-path {path}: no prompts; write one a line")
    if path.suffix not in (".jsonl", ".json"):
        return lines
    out = []
    for number, line in enumerate(lines, 1):
        try:
            text = json.loads(line)["prompt"]
        except (ValueError, KeyError, TypeError):
            text = None
        if not isinstance(text, str):
            raise UsageError(
                f"--dataset-path {path}, line {number}: expected an object with the text key prompt"
            )
        out.append(text)
    return out
