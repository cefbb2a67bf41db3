"""How fast the kernels are: time against the floor set by bytes and operations, and against PyTorch's own.

`python -m realengine.kernels.bench` first measures the two ceilings of the device (a large copy, a large bfloat16
product), then every kernel at Llama-3.1-8B's shapes (beside FlashInfer's attention where that is installed). Share =
floor / time, where the floor is the larger of the bytes a kernel must move over the copy bandwidth and the operations
it must do over the product rate. `--tune` first times the tiles of each kernel and keeps the best on disk. With
`--device cpu` the references run, which checks the benchmark.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from realengine.kernels.bench_cases import Case, cases


@dataclass(frozen=True)
class Ceilings:
    """What the device was measured to do."""

    copy_gb_s: float
    """Bytes read plus bytes written by a large copy."""
    product_tflops: float


@dataclass(frozen=True)
class Figure:
    """One kernel at one shape."""

    name: str
    ms: float
    floor_ms: float
    share: float
    bound: str
    """What sets the floor: bytes or operations."""
    gb_s: float
    tflops: float
    peer: str | None
    peer_ms: float | None
    flashinfer_ms: float | None = None


def seconds(run: Callable[[], object], device: torch.device, *, quick: bool) -> float:
    """Median time of one call. On CUDA a captured graph is replayed, with the L2 cache overwritten before each."""
    if device.type != "cuda":
        run()
        start = time.thread_time()
        run()
        calls = 1 + int(1e-2 / max(time.thread_time() - start, 1e-5))  # long enough for a coarse clock
        times = []
        for _ in range(3 if quick else 7):
            start = time.thread_time()
            for _ in range(calls):
                run()
            times.append((time.thread_time() - start) / calls)
        return max(statistics.median(times), 1e-9)
    cuda: Any = torch.cuda
    with cuda.stream(cuda.Stream()):  # kernels compile, and libraries make their handles, before the capture
        for _ in range(3):
            run()
    cuda.synchronize()
    graph = cuda.CUDAGraph()
    with cuda.graph(graph):
        run()
    flush = torch.empty(256 << 20, dtype=torch.int8, device=device)
    marks = [cuda.Event(enable_timing=True) for _ in range(2 * (10 if quick else 40))]
    for start_mark, end_mark in zip(marks[::2], marks[1::2], strict=True):
        flush.zero_()
        start_mark.record()
        graph.replay()
        end_mark.record()
    cuda.synchronize()
    pairs = zip(marks[::2], marks[1::2], strict=True)
    return float(statistics.median(a.elapsed_time(b) for a, b in pairs)) / 1e3


def ceilings(device: torch.device) -> Ceilings:
    """Copy bandwidth and rate of bfloat16 products, on random numbers."""
    small = device.type != "cuda"
    source = torch.randint(0, 255, (64 << 20 if small else 4 << 30,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = seconds(lambda: target.copy_(source), device, quick=False)
    side = 512 if small else 8192
    kind = torch.float32 if small else torch.bfloat16
    a, b = (torch.randn(side, side, device=device).to(kind) for _ in range(2))
    product = seconds(lambda: a @ b, device, quick=False)
    return Ceilings(2 * source.numel() / copy / 1e9, 2 * side**3 / product / 1e12)


def measure(case: Case, ceiling: Ceilings, device: torch.device, *, quick: bool) -> Figure:
    """One kernel, and its peer in PyTorch if it has one."""
    took = seconds(case.run, device, quick=quick)
    by_bytes = case.bytes / (ceiling.copy_gb_s * 1e9)
    by_operations = case.operations / (ceiling.product_tflops * 1e12)
    floor = max(by_bytes, by_operations)
    peer_ms, flashinfer_ms = (
        None if run is None else seconds(run, device, quick=quick) * 1e3 for run in (case.peer, case.library)
    )
    return Figure(
        case.name,
        took * 1e3,
        floor * 1e3,
        floor / took,
        "bytes" if by_bytes >= by_operations else "operations",
        case.bytes / took / 1e9,
        case.operations / took / 1e12,
        case.peer_name,
        peer_ms,
        flashinfer_ms,
    )


def tune(all_cases: list[Case], device: torch.device, *, quick: bool) -> list[str]:
    """Time the tiles of every tunable case and keep the best; what was chosen, in words."""
    from realengine.kernels.tune import remember

    chosen = []
    for case in all_cases:
        if case.tunable is None:
            continue
        times = {}
        for tile in case.tunable.tiles:
            try:
                times[tile] = seconds(lambda c=case.tunable, t=tile: c.run(t), device, quick=quick)  # type: ignore[misc]
            except Exception as error:  # a tile that does not fit this device is no candidate
                chosen.append(f"{case.name}: {tile} does not run ({type(error).__name__})")
        if times:
            best = min(times, key=lambda tile: times[tile])
            remember(case.tunable.kernel, case.tunable.case, best, case.tunable.device)
            listed = ", ".join(
                f"{t.rows}×{t.columns}/{t.warps}/{t.stages} {s * 1e3:.3f}" for t, s in times.items()
            )
            chosen.append(f"{case.name}: {best} of {listed} ms")
    return chosen


def table(figures: list[Figure]) -> str:
    """A row per kernel."""
    rows = [f"{'kernel':<46}{'ms':>9}{'share':>8}{'of':>12}{'GB/s':>8}{'TFLOP/s':>9}  peer"]
    for f in figures:
        peers = ((f.peer, f.peer_ms), ("FlashInfer", f.flashinfer_ms))
        peer = "; ".join(f"{name} {ms:.3f} ms, {ms / f.ms:.2f}×" for name, ms in peers if ms is not None)
        rows.append(
            f"{f.name:<46}{f.ms:>9.3f}{f.share:>8.1%}{f.bound:>12}{f.gb_s:>8.0f}{f.tflops:>9.2f}  {peer}"
        )
    return "\n".join(rows)


def run(device: torch.device, *, quick: bool, tuned: bool = False, only: str = "") -> dict[str, Any]:
    """Everything as one JSON-able object."""
    chosen = []
    if tuned:
        chosen = tune([c for c in cases(device, quick=quick) if only in c.name], device, quick=quick)
    ceiling = ceilings(device)
    figures = []
    for case in cases(device, quick=quick):
        if only in case.name:
            figures.append(measure(case, ceiling, device, quick=quick))
            del case  # its tensors go before the next case makes its own
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return {
        "device": name,
        "torch": torch.__version__,
        "ceilings": asdict(ceiling),
        "tuned": chosen,
        "kernels": [asdict(figure) for figure in figures],
    }


def main(arguments: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m realengine.kernels.bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N or cpu")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions; on the CPU, tiny shapes")
    parser.add_argument("--tune", action="store_true", help="first time the tiles and keep the best on disk")
    parser.add_argument("--only", default="", help="only kernels whose name contains this")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU that PyTorch can use here; --device cpu runs the references")
    if device.type == "cpu":
        torch.set_num_threads(1)  # its clock is the thread's own
    if options.tune and device.type != "cuda":
        parser.error("--tune needs a GPU")
    result = run(device, quick=options.quick, tuned=options.tune, only=options.only)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    ceiling = result["ceilings"]
    lines = [
        f"{result['device']}: copies {ceiling['copy_gb_s']:.0f} GB/s, products {ceiling['product_tflops']:.2f} TFLOP/s",
        *result["tuned"],
        table([Figure(**figure) for figure in result["kernels"]]),
    ]
    print("\n".join(lines))  # noqa: T201


if __name__ == "__main__":
    main()
