"""Tiles: the environment's, else the measured one on disk, else the default of the architecture."""

from __future__ import annotations

from pathlib import Path

import pytest

from realengine.kernels import decode_attention, prefill_attention, quant_gemm, tune
from realengine.kernels.launch import Device, Tile

TILES = {80: [Tile(16, 16, 4, 1), Tile(16, 32, 4, 1)], 90: [Tile(16, 64, 4, 1)]}
DEVICE = Device("Some GPU / 80GB", 89, 128)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv(tune.TILE_VARIABLE, raising=False)
    monkeypatch.delenv(tune.CACHE_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tune._measured.cache_clear()
    return tmp_path / "tokentwin" / "kernels" / "some-gpu---80gb.json"


def test_the_default_is_the_first_of_the_newest_architecture_not_newer_than_the_device() -> None:
    assert tune.tile_for("norm", "d64", TILES, DEVICE) == Tile(16, 16, 4, 1)
    assert tune.tile_for("norm", "d64", TILES, Device("newer", 100, 100)) == Tile(16, 64, 4, 1)
    assert tune.tile_for("norm", "d64", TILES, Device("desktop", 120, 188)) == Tile(16, 16, 4, 1)


def test_a_measured_tile_is_kept_on_disk_for_its_device_case_and_source(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tune.remember("norm", "d64", Tile(16, 32, 4, 1), DEVICE)
    assert cache.exists()
    assert tune.tile_for("norm", "d64", TILES, DEVICE) == Tile(16, 32, 4, 1)
    assert tune.tile_for("norm", "d128", TILES, DEVICE) == Tile(16, 16, 4, 1)
    assert tune.tile_for("norm", "d64", TILES, Device("other", 89, 128)) == Tile(16, 16, 4, 1)
    monkeypatch.setattr(tune, "_version", lambda kernel: "changed")
    assert tune.tile_for("norm", "d64", TILES, DEVICE) == Tile(16, 16, 4, 1)


def test_a_broken_file_is_as_good_as_none(cache: Path) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text('{"half a')
    assert tune.tile_for("norm", "d64", TILES, DEVICE) == Tile(16, 16, 4, 1)
    tune.remember("norm", "d64", Tile(16, 32, 4, 1), DEVICE)
    assert tune.tile_for("norm", "d64", TILES, DEVICE) == Tile(16, 32, 4, 1)


def test_the_environment_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(tune.TILE_VARIABLE, "norm=32,64,8,2; other=1,2,3,4")
    assert tune.tile_for("norm", "d64", TILES, DEVICE) == Tile(32, 64, 8, 2)
    monkeypatch.setenv(tune.TILE_VARIABLE, "norm=32,64")
    with pytest.raises(ValueError, match="norm=32,64"):
        tune.tile_for("norm", "d64", TILES, DEVICE)
    monkeypatch.setenv(tune.CACHE_VARIABLE, str(tmp_path / "here"))
    assert tune.cache_file(DEVICE).parent == tmp_path / "here"


def test_every_kernel_has_tiles_for_the_interpreter_ampere_and_hopper() -> None:
    for tiles in (
        decode_attention.TILES,
        decode_attention.INT4_TILES,
        prefill_attention.TILES,
        prefill_attention.QUANTISED_TILES,
        quant_gemm.TILES,
        quant_gemm.FEW_TILES,
    ):
        assert {0, 80, 90} <= set(tiles)
