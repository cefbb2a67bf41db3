"""What an impossible deployment is told to try must itself be possible."""

from __future__ import annotations

import re

import pytest

from costmodel.memory import plan_memory
from costmodel.model import load_model, model_from_config
from costmodel.profile import load_profile
from costmodel.shipped import CONFIGS
from serving.errors import InfeasibleError, UsageError


@pytest.mark.parametrize(
    ("model", "gpu"), [("llama-3.1-70b", "h100"), ("llama-3.1-70b", "rtx4090"), ("llama-3.1-405b", "h200")]
)
def test_each_suggested_tensor_parallel_size_or_format_fits(model: str, gpu: str) -> None:
    shape, profile = load_model(model), load_profile(gpu)
    with pytest.raises(InfeasibleError) as raised:
        plan_memory(shape, profile)
    tried = str(raised.value).split("; try ")[1].split(", or ")
    for fix in tried:
        size = re.search(r"--tensor-parallel-size (\d+)", fix)
        quantization = re.search(r"--quantization (\w+)", fix)
        if size or quantization:
            plan_memory(
                shape,
                profile,
                tensor_parallel_size=int(size[1]) if size else 1,
                quantization=quantization[1] if quantization else None,
            )
    assert any("--" in fix for fix in tried)


def test_heads_that_do_not_share_kv_heads_evenly_are_an_error() -> None:
    config = {**CONFIGS["llama-3.1-8b"], "num_key_value_heads": 7}
    with pytest.raises(UsageError, match=r"num_attention_heads 32 .* num_key_value_heads 7"):
        model_from_config(config, name="odd")
