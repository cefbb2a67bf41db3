"""Peak figures against the vendors' tables, device by device: dense, never the doubled figure of structured sparsity.

Vendors print tensor peaks "with sparsity" more often than without; 2:4 sparsity doubles them exactly, and tools that
copy that figure promise twice the prefill speed there is.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from costmodel.profile import DeviceFacts, list_profiles, load_profile


@dataclass(frozen=True)
class Vendor:
    """Dense TFLOP/s (float32 accumulation for 16 bit) or TOP/s, TB/s and the GB on the label; None: not on the device."""

    bfloat16: float
    fp8: float | None
    int8: float
    nvfp4: float | None
    hbm_tb_s: float
    label_gb: float
    page: str


VENDORS = {
    "a100": Vendor(312, None, 624, None, 2.039, 80, "A100 80GB datasheet, SXM: 312 (624 with sparsity)"),
    "h100": Vendor(989.4, 1978.9, 1978.9, None, 3.35, 80, "H100 datasheet, SXM: 1,979 and 3,958 with sparsity"),
    "h200": Vendor(989.4, 1978.9, 1978.9, None, 4.8, 141, "H200 datasheet, SXM: 1,979 and 3,958 with sparsity"),
    "b200": Vendor(2250, 4500, 4500, 9000, 8.0, 180, "DGX B200 datasheet / 8: 72 PF FP8, 144 PF FP4 with sparsity"),
    "l40s": Vendor(362.05, 733, 733, None, 0.864, 48, "L40S datasheet: 362.05 (733 with sparsity), FP8 733 (1,466)"),
    "rtx4090": Vendor(165.2, 330.3, 660.6, None, 1.008, 24, "Ada whitepaper: 165.2 (330.4 with sparsity)"),
    "rtxpro6000": Vendor(
        480, 960, 960, 1920, 1.597, 96, "RTX Blackwell PRO whitepaper: 503.8 dense at 2,617 MHz; 2,493 MHz here"
    ),
}  # fmt: skip


def problems(facts: DeviceFacts, vendor: Vendor) -> list[str]:
    """What is wrong with a device's figures, in words."""
    found = []
    for arithmetic in ("bfloat16", "fp8", "int8", "nvfp4"):
        dense, stated = getattr(vendor, arithmetic), facts.peak_flops.get(arithmetic)
        if dense is None or stated is None:
            if dense != stated:
                found.append(f"{facts.name}: {arithmetic} is {stated}, the vendor has {dense}")
            continue
        ratio = stated / (dense * 1e12)
        if abs(ratio - 2) < 0.01:
            found.append(
                f"{facts.name}: {arithmetic} {stated / 1e12:g} TFLOP/s is the sparse figure, 2 x {dense:g}"
            )
        elif abs(ratio - 1) > 0.001:
            found.append(
                f"{facts.name}: {arithmetic} is {stated / 1e12:g} TFLOP/s, dense is {dense:g} ({vendor.page})"
            )
    if abs(facts.hbm_bytes_per_s / (vendor.hbm_tb_s * 1e12) - 1) > 0.001:
        found.append(
            f"{facts.name}: HBM {facts.hbm_bytes_per_s / 1e12:g} TB/s, the vendor has {vendor.hbm_tb_s}"
        )
    share = facts.memory_bytes / (vendor.label_gb * 2**30)
    if not 0.92 <= share <= 1.0:  # the driver keeps some, and GDDR with ECC in band a sixteenth
        found.append(f"{facts.name}: memory is {share:.1%} of the {vendor.label_gb:g} GB on the label")
    return found


def test_every_shipped_profile_is_in_the_table() -> None:
    assert set(list_profiles()) == set(VENDORS)


@pytest.mark.parametrize("name", VENDORS)
def test_peaks_are_the_vendors_dense_figures(name: str) -> None:
    assert problems(load_profile(name).facts, VENDORS[name]) == []


@pytest.mark.parametrize("name", VENDORS)
def test_a_sparse_figure_is_called_out_by_name(name: str) -> None:
    facts = load_profile(name).facts
    for arithmetic, dense in facts.peak_flops.items():
        doubled = facts.model_copy(update={"peak_flops": {**facts.peak_flops, arithmetic: 2 * dense}})
        (line,) = problems(doubled, VENDORS[name])
        assert line.startswith(f"{name}: {arithmetic}")
        assert "sparse" in line


def test_wrong_bandwidth_memory_and_missing_arithmetic_are_found() -> None:
    facts = load_profile("h200").facts
    for update in (
        {"hbm_bytes_per_s": 3.35e12},
        {"memory_bytes": 80 * 2**30},
        {"peak_flops": {"bfloat16": 989.4e12}},
    ):
        assert problems(facts.model_copy(update=update), VENDORS["h200"])
