"""Model shapes: published parameter counts, and what is read from a config.json."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from costmodel.model import load_model, model_from_config, shipped_models
from serving.errors import UsageError

# Billions, as the model cards and papers print them (embeddings included, tied ones once).
PUBLISHED = {
    "llama-2-7b": 6.74,
    "llama-2-13b": 13.02,
    "llama-2-70b": 68.98,
    "llama-3.1-8b": 8.03,
    "llama-3.1-70b": 70.55,
    "llama-3.1-405b": 405.85,
    "llama-3.2-1b": 1.236,
    "llama-3.2-3b": 3.213,
    "qwen2.5-0.5b": 0.494,
    "qwen2.5-7b": 7.616,
    "qwen2.5-72b": 72.71,
    "qwen3-0.6b": 0.596,
    "qwen3-4b": 4.022,
    "qwen3-8b": 8.191,
    "qwen3-32b": 32.76,
    "qwen3-30b-a3b": 30.53,
    "qwen3-235b-a22b": 235.09,
    "mistral-7b": 7.248,
    "mixtral-8x7b": 46.70,
    "mixtral-8x22b": 140.63,
    "smollm2-135m": 0.1345,
}


@pytest.mark.parametrize(("name", "billions"), PUBLISHED.items())
def test_parameter_counts_match_the_published_ones(name: str, billions: float) -> None:
    assert load_model(name).num_params / 1e9 == pytest.approx(billions, rel=1e-3)


def test_active_parameters_of_mixtures_match_their_names() -> None:
    assert load_model("qwen3-30b-a3b").active_params / 1e9 == pytest.approx(3.3, abs=0.1)
    assert load_model("qwen3-235b-a22b").active_params / 1e9 == pytest.approx(22, abs=0.3)
    assert load_model("mixtral-8x7b").active_params / 1e9 == pytest.approx(12.9, abs=0.1)


def test_every_shipped_model_loads() -> None:
    assert all(load_model(name).name == name for name in shipped_models())


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("meta-llama/Meta-Llama-3-8B", "llama-3-8b"),
        ("meta-llama/Llama-2-7b-chat-hf", "llama-2-7b"),
        ("Qwen/Qwen3-8B", "qwen3-8b"),
        ("QWEN/QWEN3-30B-A3B-INSTRUCT-2507", "qwen3-30b-a3b"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b"),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "smollm2-135m"),
    ],
)
def test_hugging_face_ids_resolve_in_any_case(given: str, name: str) -> None:
    assert load_model(given).name == name


def test_unknown_name_proposes_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"llama-3\.1-8b"):
        load_model("lama-3.1-8b")


def test_head_dim_is_read_and_not_derived() -> None:
    """Qwen3-4B: 2560 / 32 = 80, but heads are 128 wide."""
    shape = load_model("qwen3-4b")
    assert shape.head_dim == 128
    assert shape.attention_gemms()[0].n == (32 + 2 * 8) * 128
    assert shape.attention_gemms()[1].k == 32 * 128


def test_a_config_file_and_its_folder_are_accepted(tmp_path: Path) -> None:
    config = {
        "model_type": "llama",
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "vocab_size": 1000,
    }
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    shape = load_model(folder)
    assert shape == load_model(folder / "config.json")
    assert (shape.name, shape.num_kv_heads, shape.head_dim, shape.tie_word_embeddings) == (
        "mine",
        8,
        64,
        False,
    )


def test_missing_and_wrong_fields_are_named(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama", "hidden_size": 512, "num_attention_heads": 8}))
    with pytest.raises(UsageError, match=r"config\.json.*'intermediate_size' is missing"):
        load_model(path)
    path.write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(UsageError, match="'gpt2' is not supported"):
        load_model(path)
    path.write_text("{")
    with pytest.raises(UsageError, match="cannot be read as JSON"):
        load_model(path)


def test_qwen2_has_bias_and_mistral_a_window() -> None:
    base = {
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "vocab_size": 1000,
        "sliding_window": 4096,
    }
    qwen = model_from_config({**base, "model_type": "qwen2"}, name="q")
    assert qwen.attention_bias
    assert qwen.sliding_window is None  # use_sliding_window is off unless stated
    mistral = model_from_config({**base, "model_type": "mistral"}, name="m")
    assert not mistral.attention_bias
    assert mistral.sliding_window == 4096


def test_kv_heads_are_replicated_beyond_their_number() -> None:
    """8 KV heads on 16 ranks: each rank holds one, so the group holds twice the cache."""
    shape = load_model("llama-3.1-70b")
    assert shape.kv_bytes_per_token(8) * 8 == shape.kv_bytes_per_token(1)
    assert shape.kv_bytes_per_token(16) == shape.kv_bytes_per_token(8)


def test_tensor_parallel_shards_add_up() -> None:
    shape = load_model("llama-3.1-70b")
    whole = sum(g.weights for g in (*shape.attention_gemms(), *shape.mlp_gemms()))
    assert sum(g.weights for g in (*shape.attention_gemms(8), *shape.mlp_gemms(8))) * 8 == whole


def test_a_model_that_does_not_divide_is_refused_with_sizes_that_do() -> None:
    with pytest.raises(UsageError, match=r"--tensor-parallel-size 3 .* try one of \[1, 2, 4, 8, 16\]"):
        load_model("llama-3.1-8b").check_tensor_parallel(3)
