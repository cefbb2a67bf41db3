"""One page of what `scripts/on_gpu.sh` left in its folder; says so when the folder is too large to keep."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

LIMIT_BYTES = 16 * 10**6


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    sys.stdout.write("\n".join(lines(options.folder, options.device)) + "\n")


def lines(folder: Path, device: str) -> list[str]:
    """The page."""
    out = ["", f"TokenTwin on {device}: what was measured", ""]
    for row in (folder / "stages.tsv").read_text(encoding="utf-8").splitlines():
        name, word, took = row.split("\t")
        out.append(f"{name:<14}{word:<14}{took:>5} s")
    out += ["", *_bench(folder), *_speed(folder), *_profile(folder), *_live(folder)]
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    word = "" if size < LIMIT_BYTES else ": too large to keep, the limit is 16 MB"
    return [*out, "", f"{folder}: {size / 1e6:.1f} MB{word}"]


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _bench(folder: Path) -> list[str]:
    found = _read(folder / "kernel_bench.json")
    if not found:
        return []
    ceiling = found["ceilings"]
    out = [
        f"kernels on {found['device']}: copies {ceiling['copy_gb_s']:.0f} GB/s, products "
        f"{ceiling['product_tflops']:.2f} TFLOP/s; share of the roofline, and time against a peer's"
    ]
    for f in found["kernels"]:
        times = ((f["peer"], f["peer_ms"]), ("FlashInfer", f.get("flashinfer_ms")))
        peers = ", ".join(f"{name}: {ms / f['ms']:.2f}x ours" for name, ms in times if ms is not None)
        out.append(f"  {f['name'][:40]:<42}{f['share']:>7.1%}  {peers}")
    if all(f.get("flashinfer_ms") is None for f in found["kernels"]):
        out.append("  FlashInfer: not installed (or no GPU), so not compared")
    return [*out, ""]


def _speed(folder: Path) -> list[str]:
    found = _read(folder / "engine_speed.json")
    if not found:
        return []
    out = [f"engine, {found['model']}"]
    out += [
        f"  {r['step']:<14}{r['ms']:>9.2f} ms{r['tokens_per_s']:>10,.0f} tokens/s"
        f"{r['share_of_bandwidth']:>8.1%} of bandwidth{r['share_of_arithmetic']:>8.1%} of FLOPs"
        for r in found["steps"]
    ]
    if rival := _read(folder / "against_transformers.json"):
        out.append(
            f"  {rival['requests']} requests at once: {rival['tokens_per_s']:,.0f} tokens/s, "
            f"{rival['ratio']:.2f} times transformers {rival['transformers']}"
        )
    return [*out, ""]


def _profile(folder: Path) -> list[str]:
    found = _read(folder / "profile-quantised.json") or _read(folder / "profile.json")
    if not found:
        return []
    kinds = ", ".join(f"{group}: {' '.join(found[group])}" for group in ("gemm", "decode", "prefill"))
    return [f"profile: {kinds}", *(f"  {note}" for note in found["provenance"]["notes"]), ""]


def _live(folder: Path) -> list[str]:
    found = _read(folder / "live" / "live.json")
    if not found:
        return []
    out = [f"live validation: capacity {found['capacity_rps']:.3g} requests/s, wander {found['wander']:.1%}"]
    for load in found["loads"]:
        errors = {f"{f['metric']} {f['statistic']}": f["error"] for f in load["figures"]}
        shown = ("ttft mean", "ttft p95", "tpot mean", "e2el mean")
        out.append(
            f"  load {load['load']:g}: " + ", ".join(f"{name} {errors[name] or 0.0:+.1%}" for name in shown)
        )
    if found["coverage"] is not None:
        out.append(f"  intervals cover {found['coverage']:.0%} of the figures")
    return out


if __name__ == "__main__":
    main()
