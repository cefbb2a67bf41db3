"""Which tile a kernel uses: the environment's, else one measured on this device and kept on disk, else the default.

Candidates are listed in Python, per architecture, beside each kernel; `bench.py --tune` times them and calls `remember`.
Nothing is measured behind the user's back: a first request, or the capture of a graph, is no place for it. What was
measured holds for one device, one Triton and one state of the kernel's source.
"""

from __future__ import annotations

import hashlib
import json
import os
from functools import lru_cache
from pathlib import Path

import triton

from realengine.kernels.launch import Device, Tile

CACHE_VARIABLE = "TOKENTWIN_KERNEL_CACHE"
"""Folder of the files of measured tiles; default `$XDG_CACHE_HOME/tokentwin/kernels`."""
TILE_VARIABLE = "TOKENTWIN_KERNEL_TILES"
"""Tiles that win over everything, as in `decode_attention=16,64,4,3;gemm_int8=…` (rows, columns, warps, stages)."""

Tiles = dict[int, list[Tile]]


def tile_for(kernel: str, case: str, tiles: Tiles, device: Device) -> Tile:
    """The tile of `kernel` for one case (a head size, a number of bits)."""
    forced = _forced(os.environ.get(TILE_VARIABLE, "")).get(kernel)
    if forced is not None:
        return forced
    measured = _measured(str(cache_file(device))).get(_key(kernel, case))
    return Tile(*measured) if measured else candidates(tiles, device)[0]


def candidates(tiles: Tiles, device: Device) -> list[Tile]:
    """The list of the newest architecture that is not newer than the device.

    Blackwell's desktop and workstation cards (12.x) have Ada's shared memory, 99 KiB a thread block, and take Ada's
    tiles: Hopper's need up to 227 KiB (CUDA C++ Programming Guide, technical specifications per compute capability).
    """
    like = 89 if device.arch >= 120 else device.arch
    return tiles[max(arch for arch in tiles if arch <= like)]


def remember(kernel: str, case: str, tile: Tile, device: Device) -> None:
    """Keep a measured tile on disk; the next `tile_for` finds it, in this process too."""
    path = cache_file(device)
    path.parent.mkdir(parents=True, exist_ok=True)
    known = dict(_measured(str(path)))
    known[_key(kernel, case)] = [tile.rows, tile.columns, tile.warps, tile.stages]
    # Written beside and renamed: another process reads the old file or the new one, never half of one.
    draft = path.with_suffix(f".{os.getpid()}")
    draft.write_text(json.dumps(known, indent=1, sort_keys=True))
    draft.replace(path)
    _measured.cache_clear()


def cache_file(device: Device) -> Path:
    """Where the tiles of a device are kept."""
    folder = os.environ.get(CACHE_VARIABLE)
    if not folder:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = str(Path(base, "tokentwin", "kernels"))
    name = "".join(c if c.isalnum() else "-" for c in device.name.lower())
    return Path(folder, f"{name}.json")


def _key(kernel: str, case: str) -> str:
    return f"{kernel}/{case}@{_version(kernel)}"


@lru_cache
def _version(kernel: str) -> str:
    source = (Path(__file__).parent / f"{kernel}.py").read_bytes()
    return hashlib.sha1(source + triton.__version__.encode()).hexdigest()[:12]


@lru_cache
def _measured(path: str) -> dict[str, list[int]]:
    try:
        known: dict[str, list[int]] = json.loads(Path(path).read_text())
    except (OSError, ValueError):
        return {}  # no file yet, or one that a crash left behind: the defaults serve
    return known


@lru_cache
def _forced(text: str) -> dict[str, Tile]:
    tiles = {}
    for item in filter(None, text.split(";")):
        kernel, _, numbers = item.partition("=")
        try:
            tiles[kernel.strip()] = Tile(*(int(n) for n in numbers.split(",")))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{TILE_VARIABLE}: {item!r} is not kernel=rows,columns,warps,stages") from error
    return tiles
