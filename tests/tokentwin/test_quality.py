"""tokentwin quality: figures that a formula gives, and the table of a small model."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from realengine.architecture import Architecture, Rope  # noqa: E402
from realengine.checkpoint import DummyCheckpoint  # noqa: E402
from realengine.export import write_folder  # noqa: E402
from realengine.load import Source  # noqa: E402
from realengine.quant_quality import bundled_text, divergence, windows_of  # noqa: E402
from serving.errors import UsageError  # noqa: E402
from tests.realengine.engines import TINY  # noqa: E402
from tests.tokentwin.shell import Command  # noqa: E402
from tokentwin.commands.quality import PLAIN, USUAL, pairs_of  # noqa: E402


def test_a_model_agrees_with_itself() -> None:
    """Uniform logits: every token of a vocabulary of V is as likely, so that perplexity is V."""
    windows = windows_of(list(range(50)), 20)
    assert [len(window) for window in windows] == [20, 20, 10]
    uniform = [torch.zeros(len(window), 64) for window in windows]
    torch.manual_seed(0)
    some = [torch.randn(len(window), 64) for window in windows]
    assert divergence(windows, some, uniform).perplexity == pytest.approx(64)
    same = divergence(windows, some, [logits + 3.0 for logits in some])  # a constant is no change
    assert same.logit_error == pytest.approx(0, abs=1e-5)
    assert same.kl_nats == pytest.approx(0, abs=1e-6)
    assert same.same_choice == 1.0
    assert same.num_tokens == 50


def test_unrelated_logits_differ_by_the_root_of_two_and_kl_is_that_of_two_coins() -> None:
    torch.manual_seed(1)
    windows = [torch.zeros(400, dtype=torch.int64)]
    a, b = torch.randn(400, 256), torch.randn(400, 256)
    assert divergence(windows, [a], [b]).logit_error == pytest.approx(math.sqrt(2), rel=0.02)
    p, q = torch.tensor([[0.2, 0.8]]).log(), torch.tensor([[0.25, 0.75]]).log()
    expected = 0.2 * math.log(0.2 / 0.25) + 0.8 * math.log(0.8 / 0.75)
    found = divergence([torch.tensor([0, 0])], [p.expand(2, 2)], [q.expand(2, 2)])
    assert found.kl_nats == pytest.approx(expected, rel=1e-5)
    assert found.perplexity == pytest.approx(4)


def test_formats_are_combined_after_the_plain_one() -> None:
    assert pairs_of(None, None) == list(USUAL)
    assert pairs_of(["int8_wo"], None) == [PLAIN, ("int8_wo", "auto")]
    assert pairs_of(["none", "int4_wo"], ["auto", "int8"]) == [
        PLAIN,
        (None, "int8"),
        ("int4_wo", "auto"),
        ("int4_wo", "int8"),
    ]


def test_the_text_is_some_hundred_words_of_plain_letters() -> None:
    text = bundled_text()
    assert 500 < len(text.split()) < 1000
    assert text.isascii()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model whose tokens are letters."""
    from tokenizers import Regex, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    base = tmp_path_factory.mktemp("letters")
    shape = TINY.model_copy(update={"hidden_size": 64, "vocab_size": 128})
    write_folder(Source(Architecture(shape, Rope(), 1e-6, (2,)), DummyCheckpoint(shape), None), base)
    letters = Backend(models.WordLevel({chr(32 + i): i for i in range(96)} | {"?": 31}, unk_token="?"))
    letters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    letters.save(str(base / "tokenizer.json"))
    return base


def test_the_table_has_answers_speed_and_memory_of_every_format(folder: Path, tokentwin: Command) -> None:
    flags = ("--model", str(folder), "--device", "cpu", "--max-tokens", "80", "--window", "40")
    done = tokentwin("quality", *flags, "--quantization", "int8_wo", "--kv-cache-dtype", "int8", "--json")
    assert done.code == 0
    plain, both = json.loads(done.out)["rows"]
    assert (plain["quantization"], plain["kv_cache_dtype"]) == ("none", "auto")
    assert plain["logit_error"] == plain["kl_nats"] == 0
    # Independent logits of variance 1 know nothing: V exp(1/2), the normaliser's mean being V exp(1/2).
    assert plain["perplexity"] == pytest.approx(128 * math.exp(0.5), rel=0.3)
    assert 0 < both["logit_error"] < 0.3
    assert both["weight_bytes"] < plain["weight_bytes"]
    # 4 layers, 2 KV heads of 16: two bytes a number, or one and a float32 scale per head.
    assert plain["kv_bytes_per_token"] == 2 * 4 * 2 * 16 * 2
    assert both["kv_bytes_per_token"] == 2 * 4 * 2 * (16 + 4)
    assert min(row[name] for row in (plain, both) for name in row if name.endswith("_per_s")) > 0
    done = tokentwin("quality", *flags, "--quantization", "int4_wo")
    assert done.out.count("\nnone ") == done.out.count("\nint4_wo ") == 1


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--quantization", "int3"), "int8_wo"),
        (("--kv-cache-dtype", "int2"), "int8"),
        (("--window", "4"), "at least 16"),
        (("--window", "500"), "at most 240"),
        (("--dtype", "float32"), "float32"),
    ],
)
def test_what_cannot_be_is_one_line(
    folder: Path, tokentwin: Command, flags: tuple[str, ...], words: str
) -> None:
    done = tokentwin("quality", "--model", str(folder), "--device", "cpu", *flags)
    assert done.code == UsageError.exit_code
    assert words in done.err.splitlines()[-1]
