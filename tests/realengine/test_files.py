"""Files that models come in: GGUF blocks and metadata, safetensors in shards, and what is wrong with some."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from realengine.architecture import architecture_from_config
from realengine.checkpoint import DummyCheckpoint, tensor_shapes
from realengine.export import hugging_face_config, write_folder
from realengine.gguf_file import _gguf_name, read_gguf
from realengine.load import Source, find_model, load
from serving.errors import UsageError
from tests.realengine.engines import CPU, smollm2_gguf

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 40,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
}


def source(**changes: Any) -> Source:
    architecture = architecture_from_config(CONFIG | changes, name="small")
    return Source(architecture, DummyCheckpoint(architecture.shape), None)


def write_gguf(of: Source, path: Path, kind: Kind, rope_factors: list[float] | None = None) -> dict[str, Any]:
    """Write a model as llama.cpp stores it; returns its weights as they read back, by Hugging Face name."""
    shape, family = of.architecture.shape, of.architecture.shape.family
    writer = gguf.GGUFWriter(path, family)
    writer.add_block_count(shape.num_layers)
    writer.add_context_length(shape.max_position_embeddings)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_feed_forward_length(shape.intermediate_size)
    writer.add_head_count(shape.num_heads)
    writer.add_head_count_kv(shape.num_kv_heads)
    writer.add_layer_norm_rms_eps(of.architecture.norm_eps)
    writer.add_vocab_size(shape.vocab_size)
    writer.add_eos_token_id(2)
    stored = {}
    for name in tensor_shapes(shape):
        weight = of.checkpoint.tensor(name)
        matrix = weight.ndim == 2
        heads = {"q_proj": shape.num_heads, "k_proj": shape.num_kv_heads}.get(name.split(".")[-2])
        if family == "llama" and heads is not None:
            # Halves of a head to interleaved pairs, as llama.cpp's converter does.
            halves = weight.view(heads, 2, -1, shape.hidden_size)
            weight = halves.transpose(1, 2).reshape(weight.shape)
        kept = kind if matrix and weight.shape[1] % 32 == 0 else Kind.F32
        block = gguf.quants.quantize(weight.numpy(), kept)
        back = torch.from_numpy(np.array(gguf.quants.dequantize(block, kept), np.float32))
        if family == "llama" and heads is not None:
            pairs = back.view(heads, -1, 2, shape.hidden_size)
            back = pairs.transpose(1, 2).reshape(back.shape)
        stored[name] = back
        writer.add_tensor(_gguf_name(name), block, raw_dtype=kept)
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", np.array(rope_factors, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_gguf_blocks_read_back_as_the_weights_they_hold(tmp_path: Path, family: str, kind: Kind) -> None:
    of = source(model_type=family, head_dim=16)
    stored = write_gguf(of, tmp_path / "model.gguf", kind)
    file = read_gguf(tmp_path / "model.gguf")
    assert file.architecture.shape.model_copy(update={"name": "small"}) == of.architecture.shape
    for name, weight in stored.items():
        torch.testing.assert_close(file.tensor(name), weight, rtol=0, atol=0, msg=name)


@pytest.mark.parametrize(("kind", "num_bytes"), [(Kind.Q4_K, 144), (Kind.Q6_K, 210)])
def test_k_quants_are_scale_times_level(tmp_path: Path, kind: Kind, num_bytes: int) -> None:
    """A block whose sub-scales are all alike: Q4_K w = d·s·q − dmin·m, Q6_K w = d·s·(q − 32), 256 weights each."""
    block = np.zeros(num_bytes, np.uint8)
    half, two = np.array([0.5], np.float16).view(np.uint8), np.array([2.0], np.float16).view(np.uint8)
    if kind is Kind.Q4_K:
        block[0:2], block[2:4] = half, two
        block[4:12] = 3  # the six-bit scales and minima of the first four and last four sub-blocks
        block[12:16] = 3 | 3 << 4
        block[16:] = 5 | 9 << 4  # levels: 32 fives, then 32 nines, and so on
        expected = np.tile(np.repeat([0.5 * 3 * 5 - 2.0 * 3, 0.5 * 3 * 9 - 2.0 * 3], 32), 4)
    else:
        block[:128], block[128:192] = 7 | 7 << 4, 0b10101010  # level 2 · 16 + 7
        block[192:208], block[208:210] = 3, half
        expected = np.full(256, 0.5 * 3 * (2 * 16 + 7 - 32))
    writer = gguf.GGUFWriter(tmp_path / "k.gguf", "llama")
    writer.add_tensor("w", block.reshape(1, -1), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    from realengine.gguf_file import _dequantised

    (tensor,) = gguf.GGUFReader(tmp_path / "k.gguf").tensors
    assert _dequantised(tensor, tmp_path).ravel().tolist() == expected.tolist()


def test_rotary_factors_in_a_gguf_file_are_used(tmp_path: Path) -> None:
    of = source()
    write_gguf(of, tmp_path / "model.gguf", Kind.F32, [1.0] * 4 + [8.0] * 4)
    rope = read_gguf(tmp_path / "model.gguf").architecture.rope
    plain = of.architecture.rope.frequencies(16)
    assert rope.frequencies(16) == pytest.approx([*plain[:4], *(plain[4:] / 8)])


def test_a_folder_written_is_the_model_it_was_written_from(tmp_path: Path) -> None:
    of = source(
        rope_scaling={
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        eos_token_id=[2, 3],
    )
    write_folder(of, tmp_path / "small", torch.float32)
    found = find_model(tmp_path / "small")
    assert found.architecture == of.architecture
    for name in tensor_shapes(of.architecture.shape):
        assert torch.equal(found.checkpoint.tensor(name), of.checkpoint.tensor(name))
    assert hugging_face_config(found.architecture) == hugging_face_config(of.architecture)


def test_shards_are_found_by_their_index(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    of = source()
    write_folder(of, tmp_path, torch.float32)
    names = sorted(tensor_shapes(of.architecture.shape))
    (tmp_path / "model.safetensors").unlink()
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in files.items():
        save_file({name: of.checkpoint.tensor(name) for name in part}, tmp_path / file)
    index = {"weight_map": {name: file for file, part in files.items() for name in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    found = find_model(tmp_path)
    assert all(torch.equal(found.checkpoint.tensor(n), of.checkpoint.tensor(n)) for n in names)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen2.5-7b", "qwen3-8b", "llama-2-7b"])
def test_known_shapes_can_be_had_with_random_weights(name: str) -> None:
    """Found without a file; made small here, since 8 billion weights are not for a test."""
    found = find_model(name, "dummy")
    small = found.architecture.shape.model_copy(
        update={"num_layers": 1, "hidden_size": 64, "intermediate_size": 32, "vocab_size": 99}
    )
    assert found.checkpoint.tensor("model.norm.weight").shape == (found.architecture.shape.hidden_size,)
    made = load(
        Source(
            found.architecture.__class__(small, found.architecture.rope, 1e-6), DummyCheckpoint(small), None
        ),
        device=CPU,
        dtype=torch.float32,
        max_positions=64,
    )
    assert len(made.weights.layers) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mixtral"}, "does not run mixtral"),
        ({"model_type": "gpt2"}, "'gpt2' is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"sliding_window": 64, "model_type": "mistral"}, "does not run mistral"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn' is not implemented"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "lacks 'low_freq_factor'"),
        ({"attention_bias": True}, "attention_bias"),
    ],
)
def test_models_that_would_come_out_wrong_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        architecture_from_config(CONFIG | change, name="m")


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--model is empty"):
        find_model("")
    with pytest.raises(UsageError, match="neither a Hugging Face folder nor a GGUF file"):
        find_model(tmp_path / "nowhere")
    with pytest.raises(UsageError, match=r"there is no config\.json in it"):
        find_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(UsageError, match=r"no model\.safetensors"):
        find_model(tmp_path)
    assert isinstance(find_model(tmp_path, "dummy").checkpoint, DummyCheckpoint)
    (tmp_path / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(UsageError, match="cannot be read as safetensors"):
        find_model(tmp_path)
    (tmp_path / "model.gguf").write_bytes(b"not gguf at all, but long enough to look")
    with pytest.raises(UsageError, match="cannot be read as GGUF"):
        find_model(tmp_path / "model.gguf")
    with pytest.raises(UsageError, match="--load-format 'pt'"):
        find_model(tmp_path, "pt")


@pytest.mark.slow
def test_smollm2_reads_as_transformers_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """An independent reader of the same file: dequantisation, rotary order and tokenizer."""
    import transformers
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    monkeypatch.setattr(gguf, "GGUFReader", functools.cache(gguf.GGUFReader))  # it would be parsed four times
    path = smollm2_gguf()
    file = read_gguf(path)
    config = transformers.AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    with torch.device("meta"):
        empty = transformers.AutoModelForCausalLM.from_config(config)
    weights = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=empty)["tensors"]
    for name, weight in weights.items():
        if "layers" not in name or ".0." in name or ".29." in name:
            assert torch.equal(file.tensor(name), weight.float()), name
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    ours = file.tokenizer
    assert ours is not None
    code = "  def f(x):\n\treturn x**2\n\n"
    for text in ("Hello, world! 1234 héllo", code, "你好 🙂", "<|im_start|>user\nHi<|im_end|>"):
        assert ours.encode(text) == tokenizer.encode(text, add_special_tokens=False)
    messages = [{"role": "user", "content": "Hi!"}]
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert ours.render(messages) == rendered
