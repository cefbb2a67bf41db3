"""How wide beams are: by flag, by tenant of a file, by line of a custom file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from serving.errors import UsageError
from sim.workload import load_workload
from sim.workload.describe import describe
from sim.workload.files import parse_spec
from sim.workload.flags import spec_from_flags
from sim.workload.types import Workload

RANDOM = {"dataset_name": "random", "num_prompts": 5, "request_rate": 2.0}


def loaded(**flags: Any) -> Workload:
    return load_workload(spec_from_flags(flags), seed=0)


def lines(path: Path, *entries: dict[str, Any]) -> dict[str, Any]:
    file = path / "requests.jsonl"
    file.write_text(
        "\n".join(json.dumps({"prompt_tokens": 9, "output_tokens": 4} | each) for each in entries)
    )
    return {"dataset_name": "custom", "dataset_path": file}


def widths(workload: Workload) -> list[int] | None:
    return None if workload.beam_width is None else workload.beam_width.tolist()


def test_a_flag_is_for_all_requests_and_none_leaves_no_column() -> None:
    assert widths(loaded(**RANDOM, beam_width=4)) == [4] * 5
    assert widths(loaded(**RANDOM)) is None


def test_each_turn_of_a_session_is_a_search() -> None:
    workload = loaded(**RANDOM, beam_width=2, session_turns_min=2, session_turns_max=3)
    assert widths(workload) == [2] * len(workload)


def test_the_column_follows_its_requests_in_time() -> None:
    tenants = [
        {
            "name": name,
            "dataset": {"name": "random"},
            "num_prompts": 20,
            "arrivals": {"request_rate": 3.0},
            **more,
        }
        for name, more in (
            ("plain", {}),
            ("beams", {"beam_width": 3, "shared_prefix": {"group": "g", "tokens": 8}}),
        )
    ]
    workload = load_workload(parse_spec({"tenants": tenants}), seed=1)
    found = widths(workload)
    assert found is not None
    assert found == [3 * int(tenant) for tenant in workload.tenant]
    assert sorted(found) != found


def test_lines_of_a_custom_file(tmp_path: Path) -> None:
    entries = [{"beam_width": 4, "arrival_s": 2.0}, {"arrival_s": 1.0}, {"beam_width": 0, "arrival_s": 0.0}]
    assert widths(loaded(**lines(tmp_path, *entries))) == [0, 0, 4]
    assert widths(loaded(**lines(tmp_path, {}, {"beam_width": 0}))) is None


@pytest.mark.parametrize("width", [-1, 129, 2.5, "wide", True])
def test_a_line_with_a_wrong_width_is_named(tmp_path: Path, width: object) -> None:
    with pytest.raises(UsageError, match="line 2, column 'beam_width'"):
        loaded(**lines(tmp_path, {}, {"beam_width": width}))


@pytest.mark.parametrize("width", [0, -1, 129])
def test_a_flag_that_makes_no_beam_is_named(width: int) -> None:
    with pytest.raises(UsageError, match="--beam-width"):
        loaded(**RANDOM, beam_width=width)


def test_a_file_and_a_flag_are_one_too_many(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="beam"):
        loaded(**lines(tmp_path, {"beam_width": 2}), beam_width=3)


def test_the_same_prompt_searched_with_another_width_is_another_request() -> None:
    flags = {"dataset_name": "prefix_repetition", "num_prompts": 6, "prefix_repetition_num_prefixes": 1}
    flags |= {"prefix_repetition_suffix_len": 0}
    workload = loaded(**flags, beam_width=2)
    assert workload.repeats().tolist() == [0] * 6
    assert workload.beam_width is not None
    workload.beam_width[3:] = 4
    assert workload.repeats().tolist() == [0, 0, 0, 3, 3, 3]


def test_described() -> None:
    workload = loaded(**RANDOM, beam_width=2)
    assert workload.beam_width is not None
    workload.beam_width[:2] = [0, 8]
    assert describe(workload)["num_beam_searches"] == 4
    assert describe(workload)["tenants"][0]["mean_beam_width"] == (8 + 3 * 2) / 4
    assert describe(workload)["max_beam_width"] == 8
    assert "num_beam_searches" not in describe(loaded(**RANDOM))
