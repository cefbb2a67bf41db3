"""Seats against tokens of a step: vLLM lowers a default to the tokens, and refuses a number above them."""

from __future__ import annotations

import pytest

from serving.errors import UsageError
from sim.deployment import Deployment, build


@pytest.mark.parametrize(("tokens", "seats"), [(1, 1), (512, 512), (1024, 1024), (4096, 1024)])
def test_the_default_is_at_most_the_tokens_of_a_step(tokens: int, seats: int) -> None:
    built = build(Deployment(model="llama-3.1-8b", gpu="h200", max_num_batched_tokens=tokens))
    assert built.limits.max_num_seqs == seats
    assert any("max_num_seqs lowered" in warning for warning in built.warnings) is (seats < 1024)


def test_more_seats_than_tokens_are_refused() -> None:
    build(Deployment(model="llama-3.1-8b", max_num_seqs=64, max_num_batched_tokens=64))
    with pytest.raises(UsageError, match="--max-num-batched-tokens 64 is smaller than --max-num-seqs 65"):
        build(Deployment(model="llama-3.1-8b", max_num_seqs=65, max_num_batched_tokens=64))


def test_a_folder_is_not_a_missing_file() -> None:
    for field in ({"model": "/etc"}, {"model": "llama-3.1-8b", "gpu": "/etc"}):
        with pytest.raises(UsageError, match="is a folder"):
            build(Deployment.model_validate(field))
