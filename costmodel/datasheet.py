"""What vendors state about the shipped devices, figure by figure with its source, and profiles made of
nothing else.

Tensor peaks are dense (vendors often print twice that, with 2:4 sparsity) and with float32 accumulation.
Memory is what the CUDA driver reports to a process, a little less than the label on the box.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from costmodel.profile import DeviceFacts, DeviceProfile, HostTerms, Provenance
from serving.errors import UsageError, nearest

GIB = 1024**3

_H100 = "NVIDIA H100 Tensor Core GPU datasheet, SXM5 column, halved (printed with sparsity)"
_H200 = "NVIDIA H200 Tensor Core GPU datasheet, SXM column, halved (printed with sparsity)"
_A100 = "NVIDIA A100 80GB datasheet, SXM4 column (dense figures)"
_B200 = "NVIDIA DGX B200 / HGX B200 datasheet, per GPU, dense"
_L40S = "NVIDIA L40S datasheet (362.05 bf16, 733 fp8 dense)"
_ADA = "NVIDIA Ada GPU architecture whitepaper, RTX 4090 table (dense, FP32 accumulate)"
_PRO = "NVIDIA RTX PRO 6000 Blackwell Server Edition product page (1,597 GB/s, 96 GB, 600 W)"
_PRO_PEAK = (
    "1,024 dense FP16 FLOP per SM and clock (NVIDIA RTX Blackwell PRO architecture whitepaper: 503.8 TFLOP/s "
    "at 2,617 MHz on 188 SMs), at the 2,493 MHz that the Server Edition's 120 TFLOP/s FP32 imply"
)
_DRIVER = "total memory the CUDA driver reports (torch.cuda.get_device_properties)"

FACTS: dict[str, DeviceFacts] = {
    facts.name: facts
    for facts in (
        DeviceFacts(
            name="h100",
            product="NVIDIA H100 SXM5 80GB",
            memory_bytes=int(79.11 * GIB),
            num_sms=132,
            peak_flops={"bfloat16": 989.4e12, "fp8": 1978.9e12, "int8": 1978.9e12},
            hbm_bytes_per_s=3.35e12,
            l2_bytes=50 * 2**20,
            link_bytes_per_s=450e9,
            host_link_bytes_per_s=64e9,
            tdp_w=700,
            sources={"peak_flops": _H100, "hbm_bytes_per_s": _H100, "link": "NVLink 4, 900 GB/s both ways"},
        ),
        DeviceFacts(
            name="h200",
            product="NVIDIA H200 SXM 141GB",
            memory_bytes=int(139.8 * GIB),
            num_sms=132,
            peak_flops={"bfloat16": 989.4e12, "fp8": 1978.9e12, "int8": 1978.9e12},
            hbm_bytes_per_s=4.8e12,
            l2_bytes=50 * 2**20,
            link_bytes_per_s=450e9,
            host_link_bytes_per_s=64e9,
            tdp_w=700,
            sources={"peak_flops": _H200, "hbm_bytes_per_s": _H200, "link": "NVLink 4, 900 GB/s both ways"},
        ),
        DeviceFacts(
            name="a100",
            product="NVIDIA A100 SXM4 80GB",
            memory_bytes=int(79.15 * GIB),
            num_sms=108,
            peak_flops={"bfloat16": 312e12, "int8": 624e12},
            hbm_bytes_per_s=2.039e12,
            l2_bytes=40 * 2**20,
            link_bytes_per_s=300e9,
            host_link_bytes_per_s=32e9,
            tdp_w=400,
            sources={"peak_flops": _A100, "hbm_bytes_per_s": _A100, "link": "NVLink 3, 600 GB/s both ways"},
        ),
        DeviceFacts(
            name="b200",
            product="NVIDIA B200 SXM 180GB",
            memory_bytes=int(178.35 * GIB),
            num_sms=148,
            peak_flops={"bfloat16": 2250e12, "fp8": 4500e12, "int8": 4500e12, "nvfp4": 9000e12},
            hbm_bytes_per_s=8.0e12,
            l2_bytes=126 * 2**20,
            link_bytes_per_s=900e9,
            host_link_bytes_per_s=64e9,
            tdp_w=1000,
            sources={"peak_flops": _B200, "hbm_bytes_per_s": _B200, "link": "NVLink 5, 1.8 TB/s both ways"},
        ),
        DeviceFacts(
            name="l40s",
            product="NVIDIA L40S 48GB",
            memory_bytes=int(44.39 * GIB),
            num_sms=142,
            peak_flops={"bfloat16": 362.05e12, "fp8": 733e12, "int8": 733e12},
            hbm_bytes_per_s=864e9,
            l2_bytes=96 * 2**20,
            link_bytes_per_s=32e9,
            host_link_bytes_per_s=32e9,
            tdp_w=350,
            sources={
                "peak_flops": _L40S,
                "hbm_bytes_per_s": _L40S,
                "link": "PCIe 4.0 x16, 64 GB/s both ways",
            },
        ),
        DeviceFacts(
            name="rtx4090",
            product="NVIDIA GeForce RTX 4090 24GB",
            memory_bytes=25_250_627_584,
            num_sms=128,
            peak_flops={"bfloat16": 165.2e12, "fp8": 330.3e12, "int8": 660.6e12},
            hbm_bytes_per_s=1.008e12,
            l2_bytes=72 * 2**20,
            link_bytes_per_s=32e9,
            host_link_bytes_per_s=32e9,
            tdp_w=450,
            sources={"peak_flops": _ADA, "hbm_bytes_per_s": _ADA, "link": "PCIe 4.0 x16, 64 GB/s both ways"},
        ),
        DeviceFacts(
            name="rtxpro6000",
            product="NVIDIA RTX PRO 6000 Blackwell Server Edition 96GB",
            memory_bytes=int(94.97 * GIB),
            num_sms=188,
            peak_flops={"bfloat16": 480e12, "fp8": 960e12, "int8": 960e12, "nvfp4": 1920e12},
            hbm_bytes_per_s=1.597e12,
            l2_bytes=128 * 2**20,
            link_bytes_per_s=64e9,
            host_link_bytes_per_s=64e9,
            tdp_w=600,
            sources={
                "peak_flops": _PRO_PEAK,
                "hbm_bytes_per_s": _PRO,
                "link": "PCIe 5.0 x16, 128 GB/s both ways",
            },
        ),
    )
}
for _facts in FACTS.values():
    _facts.sources.setdefault("memory_bytes", _DRIVER)
    _generation = 4 if _facts.host_link_bytes_per_s == 32e9 else 5
    _facts.sources.setdefault(
        "host_link", f"PCIe {_generation}.0 x16, each way (PCI-SIG), as the datasheet names it"
    )

HOST = HostTerms(
    step_s=1.0e-3,
    per_seq_s=8e-6,
    per_token_s=5e-8,
    launch_s=4e-6,
    source=(
        "order of magnitude for vLLM V1 on one GPU, not measured here: about 1 ms of Python per step "
        "(schedule, prepare inputs, update outputs) and 8 us per sequence; 4 us per eager kernel launch"
    ),
)


def device_facts(name: str) -> DeviceFacts:
    """Facts of a shipped device; `UsageError` names the nearest known ones."""
    if name not in FACTS:
        raise UsageError(f"no datasheet facts for device {name!r}; {nearest(name, FACTS)}")
    return FACTS[name]


def facts_of(name_or_path: str) -> DeviceFacts:
    """Facts of a shipped device, or those in a JSON file with the fields of `DeviceFacts`.

    Raises `UsageError` for an unknown name, and for a file that cannot be read or lacks a field.
    """
    path = Path(name_or_path).expanduser()
    if path.suffix != ".json":
        return device_facts(name_or_path)
    try:
        return DeviceFacts.model_validate_json(path.read_text(encoding="utf-8-sig"))
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "the document"
        raise UsageError(f"--device {path}: not the facts of a device ({field}: {first['msg']})") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise UsageError(f"--device {path}: cannot be read: {reason}") from None


def datasheet_profile(facts: DeviceFacts, host: HostTerms = HOST) -> DeviceProfile:
    """A profile with no measurement behind it: every kernel is the roofline with the formulas' default
    efficiencies."""
    return DeviceProfile(
        schema="tokentwin-profile/1",
        facts=facts,
        host=host,
        provenance=Provenance(measured="nothing: datasheet figures and default efficiencies only"),
    )
