"""`tokentwin compare` from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.tokentwin.shell import SMALL, Command

TRAFFIC = ("--dataset-name", "random", "--num-prompts", "12", "--request-rate", "8", "--replications", "2")


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    base, variant = tmp_path / "base.yaml", tmp_path / "tp2.yaml"
    base.write_text("model: llama-3.1-8b\ngpu: h200\n")
    variant.write_text("model: llama-3.1-8b\ngpu: h200\ntensor-parallel-size: 2\n")
    return base, variant


def test_files_are_compared_and_saved(tokentwin: Command, files: tuple[Path, Path], tmp_path: Path) -> None:
    answer = tokentwin("compare", *files, *TRAFFIC, "-o", tmp_path / "out")
    assert (answer.code, answer.err) == (0, "")
    assert "tensor_parallel_size 1 -> 2" in answer.out
    document = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert document["variants"][0]["changes"]["mean_tpot"]["effect"] == "gain"
    assert document["variants"][0]["changes"]["output_throughput_per_gpu"]["effect"] == "loss"
    assert (tmp_path / "out" / "compare.html").stat().st_size > 1_000_000
    printed = tokentwin("compare", *files, *TRAFFIC, "--json")
    assert json.loads(printed.out) == document


def test_equal_files_do_not_differ(tokentwin: Command, files: tuple[Path, Path], tmp_path: Path) -> None:
    same = tmp_path / "same.yaml"
    same.write_text(files[0].read_text())
    answer = tokentwin("compare", files[0], same, *TRAFFIC)
    assert answer.code == 0
    assert "No difference in any of" in answer.out
    assert "Gains" not in answer.out


def test_searches_for_the_same_answers_are_variants(
    tokentwin: Command, files: tuple[Path, Path], tmp_path: Path
) -> None:
    plain = files[0]
    beams, best, same = (tmp_path / f"{name}.yaml" for name in ("beams", "best", "same"))
    beams.write_text(plain.read_text() + "beam_width: 4\n")
    best.write_text(plain.read_text() + "best_of: 3\n")
    same.write_text(plain.read_text() + "best_of: 1\n")
    answer = tokentwin("compare", plain, beams, best, same, *TRAFFIC, "--osl", "20", "--json")
    assert (answer.code, answer.err) == (0, "")
    searched, sampled, equal = json.loads(answer.out)["variants"]
    assert searched["differs"] == {"beam_width": [None, 4]}
    assert sampled["differs"] == {"best_of": [1, 3]}
    assert equal["notes"] == ["the same deployment as the base"]
    assert not any(change["effect"] != "no difference" for change in equal["changes"].values())
    for variant in (searched, sampled):
        changes = variant["changes"]
        # What is shown at its end begins to be shown 19 steps later.
        assert changes["mean_ttft"]["effect"] == "loss"
        assert changes["mean_ttft"]["variant"] == changes["mean_e2el"]["variant"]
        assert not [name for name in changes if name.endswith(("_tpot", "_itl"))]
        assert "no TPOT or ITL" in variant["notes"][0]
    turned = tokentwin("compare", beams, plain, *TRAFFIC, "--osl", "20", "--json")
    (back,) = json.loads(turned.out)["variants"]
    assert back["changes"]["mean_ttft"]["effect"] == "gain"


def test_wrong_usage_is_one_line(tokentwin: Command, files: tuple[Path, Path], tmp_path: Path) -> None:
    base, variant = files
    alone = tokentwin("compare", base, *TRAFFIC)
    assert (alone.code, "at least one variant" in alone.error) == (2, True)
    twice = tokentwin("compare", base, base, *TRAFFIC)
    assert (twice.code, "given twice" in twice.error) == (2, True)
    one = tokentwin("compare", base, variant, *TRAFFIC[:-1], "1")
    assert (one.code, "--replications must be at least 2" in one.error) == (2, True)
    base.write_text(base.read_text() + "request_rate: 2\n")
    variant.write_text(variant.read_text() + "request_rate: 4\n")
    other = tokentwin("compare", base, variant, "--dataset-name", "random")
    assert other.code == 2
    assert "request_rate is 2.0 in base and 4.0 in tp2" in other.error
    huge = tmp_path / "huge.yaml"
    huge.write_text("model: llama-3.1-70b\ngpu: rtx4090\nrequest_rate: 2\n")
    infeasible = tokentwin("compare", base, huge, "--dataset-name", "random")
    assert infeasible.code == 2
    assert "huge.yaml" in infeasible.error


def test_folders_are_paired_and_take_no_flags_of_a_simulation(tokentwin: Command, tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    once = (*SMALL[:-3], "60", "--request-rate", "8", "--replications", "1")
    for folder, more in ((a, ()), (b, ("--max-num-seqs", "1"))):
        assert tokentwin("simulate", *once, *more, "-o", folder).code == 0
    answer = tokentwin("compare", a, b, "--json")
    assert answer.code == 0, answer.err
    (variant,) = json.loads(answer.out)["variants"]
    assert variant["differs"]["max_num_seqs"][1] == 1
    assert variant["changes"]["mean_queue"]["effect"] == "loss"
    wrong = tokentwin("compare", a, b, "--request-rate", "3")
    assert (wrong.code, "--request-rate has no effect" in wrong.error) == (2, True)
    mixed = tokentwin("compare", a, tmp_path / "b.yaml")
    assert (mixed.code, "compare like with like" in mixed.error) == (2, True)


def test_a_base_that_is_not_there_is_said_first(tokentwin: Command) -> None:
    assert "nosuch.yaml: there is no such file or folder" in tokentwin("compare", "nosuch.yaml").error
