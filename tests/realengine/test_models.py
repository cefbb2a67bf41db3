"""Every family's logits are those of `transformers`, however a prompt is cut and however a step is composed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from realengine.batch import Batch, LayerCache
from realengine.kernels import operators
from realengine.load import find_model, load
from realengine.models import Model
from realengine.ops import KernelOps, rotary_tables

PAGE = 4
TOKENS = 22

SMALL = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "eos_token_id": 2,
    "bos_token_id": 1,
}
LLAMA31_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
FAMILIES: dict[str, Any] = {
    "llama-2": transformers.LlamaConfig(**SMALL | {"num_key_value_heads": 6}),
    "llama-3.1": transformers.LlamaConfig(**SMALL, rope_parameters=LLAMA31_ROPE),
    "llama-linear": transformers.LlamaConfig(
        **SMALL, rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
    ),
    "qwen2": transformers.Qwen2Config(**SMALL, tie_word_embeddings=True),
    "qwen3": transformers.Qwen3Config(**SMALL, head_dim=16),
}


class Case:
    """A random model of one family, its tokens and the logits that `transformers` gives for each of them."""

    def __init__(self, config: Any, folder: Path) -> None:
        torch.manual_seed(7)
        oracle = transformers.AutoModelForCausalLM.from_config(config).eval()
        with torch.no_grad():
            for name, parameter in oracle.named_parameters():
                # Not the initial ones and zeros: a forgotten bias or norm weight must show.
                if "norm" in name or name.endswith("bias"):
                    parameter.add_(torch.randn_like(parameter) * 0.3)
                else:
                    parameter.mul_(4)
        oracle.save_pretrained(folder)
        self.ids = torch.randint(0, SMALL["vocab_size"], (TOKENS,))
        with torch.no_grad():
            self.expected = oracle(self.ids.unsqueeze(0)).logits[0]
        self.model = load(
            find_model(folder), device=torch.device("cpu"), dtype=torch.float32, max_positions=64
        )

    def logits(self, *chunks: int, kernels: bool = False) -> torch.Tensor:
        """Logits of every token, computed in chunks of these sizes, in a cache that starts out as NaN."""
        model = with_reference_kernels(self.model) if kernels else self.model
        shape = model.architecture.shape
        size = (9, PAGE, shape.num_kv_heads, shape.head_dim)
        caches = [
            LayerCache(torch.full(size, torch.nan), torch.full(size, torch.nan))
            for _ in range(shape.num_layers)
        ]
        pages = torch.tensor([[7, 2, 5, 1, 8, 3]], dtype=torch.int32)
        logits, done = [], 0
        for count in chunks:
            logits.append(model.forward(one_sequence(self.ids, pages, done, count), caches))
            done += count
        assert done == TOKENS
        return torch.cat(logits)


def one_sequence(ids: torch.Tensor, pages: torch.Tensor, done: int, count: int) -> Batch:
    positions = torch.arange(done, done + count)
    slots = pages[0][positions // PAGE].long() * PAGE + positions % PAGE
    return Batch(
        ids=ids[done : done + count],
        positions=positions,
        slots=slots,
        page_table=pages,
        context_len=torch.tensor([done + count], dtype=torch.int32),
        query_start=torch.tensor([0, count] if count > 1 else [0], dtype=torch.int32),
        num_decodes=0 if count > 1 else 1,
        max_query=count,
        longest=done + count,
        sample_rows=None,
    )


def with_reference_kernels(model: Model) -> Model:
    shape, rope = model.architecture.shape, model.architecture.rope
    cos, sin = rotary_tables(rope, shape.head_dim, 64, torch.device("cpu"))
    ops = KernelOps(cos, sin, operators("cpu"))
    return Model(model.architecture, model.weights, ops)


@pytest.fixture(scope="module", params=list(FAMILIES))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(FAMILIES[request.param], tmp_path_factory.mktemp(request.param))


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference as a share of the largest logit."""
    return float((got - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize(
    "chunks",
    [
        pytest.param((TOKENS,), id="in one piece"),
        pytest.param((8, 14), id="cut at a page boundary"),
        pytest.param((7, 15), id="cut before a page boundary"),
        pytest.param((9, 13), id="cut after a page boundary"),
        pytest.param((5, 2, 6, 9), id="in four chunks"),
        pytest.param((9, *[1] * 13), id="then decoded one by one"),
        pytest.param((1,) * TOKENS, id="decoded from the first token"),
    ],
)
@pytest.mark.parametrize("kernels", [False, True], ids=["torch", "kernel references"])
def test_logits_equal_transformers(case: Case, chunks: tuple[int, ...], kernels: bool) -> None:
    assert relative_error(case.logits(*chunks, kernels=kernels), case.expected) < 1e-4
