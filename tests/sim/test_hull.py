"""Extrapolations: known before a run from the deployment, after it from what really occurred."""

from __future__ import annotations

from dataclasses import replace

import pytest

from serving.errors import UsageError
from sim.deployment import Built, Deployment, build, simulate
from sim.hull import after_run, before_run, check_strict
from tests.sim.worlds import make_workload


def built(**changes: object) -> Built:
    fields = {"model": "llama-3.1-8b", "gpu": "rtx4090", "max_num_batched_tokens": 2048, "max_num_seqs": 64}
    return build(Deployment.model_validate(fields | changes))


def shrunk(base: Built, group: str, axis: str, box: tuple[float, float]) -> Built:
    """The same deployment, had a kernel been measured over `box` only."""
    fits = getattr(base.profile, group)
    fit = fits["bfloat16"].model_copy(update={"hull": {**fits["bfloat16"].hull, axis: box}})
    profile = base.profile.model_copy(update={group: {**fits, "bfloat16": fit}})
    return replace(base, profile=profile)


def test_a_measured_model_on_its_measured_device_extrapolates_nothing() -> None:
    b = built()
    run = simulate(make_workload([0.0, 0.1], [400, 700], [40, 60]), b)
    assert before_run(b) == after_run(b, run) == ()
    check_strict(after_run(b, run))


def test_device_dtype_and_head_size_are_known_before_the_run() -> None:
    (line,) = before_run(built(quantization="awq"))
    assert "int4_wo: not measured on rtx4090" in line.words
    words = [line.words for line in before_run(built(gpu="h200", model="qwen2.5-0.5b"))]
    assert any("head_dim 64" in line for line in words)
    assert any("lm_head" in line for line in words)
    with pytest.raises(UsageError, match=r"--strict: not measured: .*int4_wo.*calibrate"):
        check_strict(before_run(built(quantization="awq")))


@pytest.mark.parametrize(
    ("group", "axis", "box", "said"),
    [
        ("decode", "batch", (1.0, 2.0), "decode: batch 1 to 3 outside the measured 1 to 2"),
        ("decode", "context", (16.0, 500.0), "outside the measured 16 to 500"),
        ("gemm", "m", (1.0, 256.0), "gemm: m 1 to 500 outside the measured 1 to 256"),
        ("prefill", "tokens", (16.0, 300.0), "outside the measured 16 to 300"),
    ],
)
def test_what_occurred_in_the_run_is_compared_with_the_hull(
    group: str, axis: str, box: tuple[float, float], said: str
) -> None:
    b = shrunk(built(), group, axis, box)
    run = simulate(make_workload([0.0, 0.05, 0.1], [500, 320, 310], [100, 60, 50]), b)
    assert before_run(b) == ()
    lines = [line for line in after_run(b, run) if said in line.words]
    assert lines, [line.words for line in after_run(b, run)]
    assert all(line.steps is None or 0 < line.steps <= 1 for line in lines)
    with pytest.raises(UsageError, match="--strict"):
        check_strict(after_run(b, run))


def test_an_axis_that_was_measured_at_one_value_only_is_called_that() -> None:
    """Of an axis without extent "outside the measured 0 to 0" says nothing."""
    b = built(gpu="h200", max_num_batched_tokens=512)
    run = simulate(make_workload([0.0], [1500], [4]), b)
    (line,) = [each.what for each in after_run(b, run) if each.what.startswith("prefill: context")]
    # 1,500 tokens in chunks of 512, 512 and 476: the last begins behind 1,024.
    assert line == "prefill: context was measured at 0 only; here 0 to 1024"
    fixed = shrunk(built(), "decode", "batch", (4.0, 4.0))
    lines = [line.what for line in after_run(fixed, simulate(make_workload([0.0], [500], [20]), fixed))]
    assert "decode: batch was measured at 4 only; here 1" in lines


def test_pools_alike_say_a_line_once_with_its_share_of_all_steps() -> None:
    pools = [{"name": "a"}, {"name": "b"}]
    b = built(gpu="h200", max_num_batched_tokens=512, pools=pools, router="round_robin")
    # Of 1,500 tokens the second and the third chunk have earlier context, of 500 none.
    for second, behind in ((1500, 4), (500, 2)):
        run = simulate(make_workload([0.0, 0.0], [1500, second], [4, 40]), b)
        assert set(run.steps.replica) == {0, 1}
        (line,) = [each for each in after_run(b, run) if each.what.startswith("prefill: context")]
        assert line.steps == pytest.approx(behind / len(run.steps))


def test_more_ranks_than_collectives_were_measured_over_are_named() -> None:
    known = ("all_reduce", "expert_exchange")
    for changes, said in (
        ({"gpu": "h200", "model": "qwen3-32b", "tensor_parallel_size": 8}, []),
        (
            {"gpu": "h200", "model": "qwen3-32b", "tensor_parallel_size": 16},
            ["all_reduce: num_gpus 16 outside the measured 2 to 8"],
        ),
        (
            {"gpu": "rtxpro6000", "model": "qwen3-30b-a3b", "data_parallel_size": 16},
            ["expert_exchange: num_gpus 16 outside the measured 2 to 8"],
        ),
    ):
        assert [line.words for line in before_run(built(**changes)) if line.words.startswith(known)] == said


def test_one_value_outside_the_hull_is_said_once() -> None:
    words = [line.words for line in before_run(built(gpu="h200", model="qwen2.5-0.5b"))]
    assert any("gemm: n 151936 outside the measured" in line for line in words)


def test_chunks_behind_a_context_are_marked_where_only_whole_prompts_were_measured() -> None:
    b = built(gpu="h200", max_num_batched_tokens=512)
    run = simulate(make_workload([0.0], [1500], [4]), b)
    assert any("prefill: context" in line.words for line in after_run(b, run))
    whole = simulate(make_workload([0.0], [500], [4]), b)
    assert not any("prefill: context" in line.words for line in after_run(b, whole))
