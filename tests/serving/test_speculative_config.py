"""What `--speculative-config` says of methods that vLLM has and this program does not."""

from __future__ import annotations

import json

import pytest

from serving.errors import UsageError
from serving.speculative_config import parse_speculative_config


@pytest.mark.parametrize(
    ("method", "kind"),
    [
        ("eagle", "draft heads"),
        ("eagle3", "draft heads"),
        ("EAGLE", "draft heads"),
        ("medusa", "draft heads"),
        ("mtp", "draft heads"),
        ("deepseek_mtp", "draft heads"),
        ("mlp_speculator", "draft heads"),
    ],
)
def test_heads_are_not_modelled_and_the_message_says_what_is_and_comes_nearest(
    method: str, kind: str
) -> None:
    """Whatever other keys the configuration has: they belong to the method."""
    given = {"method": method, "model": "some/head", "num_speculative_tokens": 3}
    for content in (given, {**given, "draft_tensor_parallel_size": 1}):
        with pytest.raises(UsageError) as error:
            parse_speculative_config(json.dumps(content))
        said = str(error.value)
        assert f"method {method!r}: {kind} (EAGLE, Medusa, MTP) are not modelled" in said
        assert "use ngram, draft_model, self or lookahead" in said
        assert '"method": "draft_model"' in said
        assert '"acceptance"' in said


def test_suffix_decoding_is_nearest_to_ngram() -> None:
    with pytest.raises(UsageError, match=r'suffix decoding is not modelled.*"method": "ngram"'):
        parse_speculative_config({"method": "suffix", "num_speculative_tokens": 8})


def test_a_typing_error_still_gets_the_nearest_name() -> None:
    with pytest.raises(UsageError, match="method is 'draft_modl'; did you mean 'draft_model'"):
        parse_speculative_config({"method": "draft_modl", "num_speculative_tokens": 3})


def test_the_nearest_approximation_that_is_named_can_be_run() -> None:
    from sim.deployment import Deployment, build

    nearest = {"method": "draft_model", "model": "llama-3.2-1b", "num_speculative_tokens": 3}
    built = build(Deployment(model="llama-3.1-8b", speculative_config=nearest | {"acceptance": 0.7}))  # type: ignore[arg-type]
    assert built.speculation is not None
