"""A tokenizer built from a GGUF file's metadata: byte-level BPE, or SentencePiece BPE with byte fallback."""

from __future__ import annotations

from typing import Any

from realengine.tokenizer import Tokenizer
from serving.errors import UsageError

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_CONTROL, _USER_DEFINED = 3, 4


def tokenizer_from_gguf(fields: dict[str, Any], eos_token_ids: tuple[int, ...]) -> Tokenizer | None:
    """The tokenizer that the metadata describes; None when it describes none.

    Raises `UsageError` for a kind of tokenizer that is not implemented.
    """
    model = fields.get("tokenizer.ggml.model")
    if model is None:
        return None
    if model == "gpt2":
        backend = _byte_level(fields)
    elif model == "llama":
        backend = _sentencepiece(fields)
    else:
        raise UsageError(f"tokenizer {model!r} in GGUF metadata is not implemented; gpt2 and llama are")
    tokens = fields["tokenizer.ggml.tokens"]
    _add_special_tokens(backend, tokens, fields.get("tokenizer.ggml.token_type") or [])
    bos = fields.get("tokenizer.ggml.bos_token_id")
    add_bos = bool(fields.get("tokenizer.ggml.add_bos_token", model == "llama"))
    return Tokenizer(
        backend,
        template=fields.get("tokenizer.chat_template"),
        bos_token=tokens[int(bos)] if bos is not None else "",
        eos_token=tokens[eos_token_ids[0]] if eos_token_ids else "",
        bos_token_id=int(bos) if add_bos and bos is not None else None,
    )


def _byte_level(fields: dict[str, Any]) -> Any:
    from tokenizers import Regex, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    vocabulary = {token: index for index, token in enumerate(fields["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    pre = fields.get("tokenizer.ggml.pre", "default")
    ignore = pre in ("llama-bpe", "llama3", "llama-v3")
    backend = Backend(models.BPE(vocabulary, merges, ignore_merges=ignore))
    if pre == "smollm":
        splits = [pre_tokenizers.Digits(individual_digits=True)]
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
        )
    elif pre in ("llama-bpe", "llama3", "llama-v3", "qwen2"):
        pattern = Regex(_QWEN2 if pre == "qwen2" else _LLAMA3)
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(pattern, "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    elif pre in ("default", "gpt-2"):
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    else:
        raise UsageError(
            f"pre-tokenizer {pre!r} in GGUF metadata is not implemented; smollm, llama-bpe, qwen2 and gpt-2 are"
        )
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(fields: dict[str, Any]) -> Any:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, normalizers

    tokens, scores = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.scores"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    # SentencePiece merges the pair whose union scores best; BPE merges in the order of a list: the same, by score.
    merges = []
    for index, token in enumerate(tokens):
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                merges.append((-scores[index], vocabulary[left], vocabulary[right], left, right))
    merges.sort(key=lambda merge: merge[:3])
    unknown = tokens[int(fields.get("tokenizer.ggml.unknown_token_id", 0))]
    backend = Backend(
        models.BPE(
            vocabulary,
            [(left, right) for *_, left, right in merges],
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = bool(fields.get("tokenizer.ggml.add_space_prefix", True))
    steps = [normalizers.Prepend("▁")] if prefix else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend


def _add_special_tokens(backend: Any, tokens: list[str], types: list[int]) -> None:
    from tokenizers import AddedToken

    special = [token for token, kind in zip(tokens, types, strict=False) if kind == _CONTROL]
    added = [token for token, kind in zip(tokens, types, strict=False) if kind == _USER_DEFINED]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    backend.add_tokens([AddedToken(token, normalized=False) for token in added])
