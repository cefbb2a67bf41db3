"""What the engine measured of its drafts is what the twin repeats."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from realengine.generation import Sampling
from serving.config import SchedulerConfig
from serving.errors import UsageError
from serving.speculative_config import parse_speculative_config
from sim.speculation import Speculation
from sim.world import run_world
from tests.realengine.engines import running, tiny_model
from tests.realengine.test_drafts import speculation, tiny_draft, tiny_prompts
from tests.sim.worlds import LinearPricer, make_workload
from tests.tokentwin.shell import Command
from tokentwin.commands.measure_acceptance import measure, read_prompts


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_a_replay_of_what_was_measured_gives_the_same_counts(method: str, tmp_path: Path) -> None:
    prompts, tokens = tiny_prompts(), 30
    draft = tiny_draft() if method == "draft_model" else None
    with running(tiny_model(), speculative=speculation(method), draft=draft, start=False) as engine:
        found = measure(
            engine,
            prompts,
            [Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True) for _ in prompts],
        )
    counts = found.pop("counts")
    accepted = [a for answer in found["outcomes"] for _, a in answer]
    assert sum(accepted) == counts.num_accepted_tokens > 0
    assert found["rates"] == counts.conditional_per_pos
    path = tmp_path / "measured.json"
    path.write_text(json.dumps(found))
    config = parse_speculative_config({**speculation(method), "acceptance": {"replay": str(path)}})
    workload = make_workload([0.0] * len(prompts), [len(ids) for ids in prompts], [tokens] * len(prompts))
    limits = config.limits(SchedulerConfig(num_pages=256, max_num_seqs=8, max_model_len=256))
    record = run_world(workload, limits, LinearPricer(), speculation=Speculation(config, 1, None))
    assert record.drafts is not None
    # The last verification of an answer may have drafted past its end, which the twin cuts short like the engine.
    assert record.drafts.num_accepted_tokens == counts.num_accepted_tokens
    assert record.drafts.num_drafts == counts.num_drafts
    assert (record.requests.output_tokens == np.full(len(prompts), tokens)).all()


def test_prompts_are_lines_or_objects(tmp_path: Path) -> None:
    plain = tmp_path / "prompts.txt"
    plain.write_text("one\n\ntwo\n")
    assert read_prompts(plain) == ["one", "two"]
    objects = tmp_path / "prompts.jsonl"
    objects.write_text('{"prompt": "one"}\n{"text": "two"}\n')
    with pytest.raises(UsageError, match="line 2"):
        read_prompts(objects)
    with pytest.raises(UsageError, match="nowhere"):
        read_prompts(tmp_path / "nowhere")


def test_what_is_missing_is_said(tokentwin: Command) -> None:
    answer = tokentwin("measure-acceptance", "--model", "x")
    assert answer.code == 2
    assert "--speculative-config is missing" in answer.error
    drafts = '{"method": "ngram", "num_speculative_tokens": 2, "acceptance": 0.5}'
    answer = tokentwin("measure-acceptance", "--model", "llama-3.2-1b", "--load-format", "dummy",
                       "--speculative-config", drafts, "--device", "cpu")  # fmt: skip
    assert answer.code == 2
    assert "leave it out" in answer.error
