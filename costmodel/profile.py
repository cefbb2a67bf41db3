"""A device profile: what the vendor states, what was fitted to measurements, how well, and where from.

One JSON file. Everything a prediction uses is in it, so two runs with the same profile hash price alike.
"""

from __future__ import annotations

import hashlib
import json
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from costmodel.engine_version import is_newer, is_version, standing_for
from serving.errors import UsageError, nearest

KernelKind = Literal[
    "gemm", "prefill", "decode", "decode_mixed", "all_reduce", "moe", "elementwise", "sampler"
]
SCHEMA = "tokentwin-profile/1"


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class DeviceFacts(_Frozen):
    """Datasheet figures. Peaks are dense (no structured sparsity) and, for 16 bit, with float32
    accumulation."""

    name: str
    product: str
    memory_bytes: int = Field(gt=0)
    """Memory the driver reports, which is what an engine's utilisation fraction is taken of."""
    num_sms: int = Field(gt=0)
    peak_flops: dict[str, float]
    """FLOP/s by arithmetic: bfloat16, and fp8, int8, nvfp4 where the device has them."""
    hbm_bytes_per_s: float = Field(gt=0)
    l2_bytes: int = Field(gt=0)
    link_bytes_per_s: float = Field(gt=0)
    """GPU-to-GPU bandwidth in one direction (half of what vendors print for both)."""
    load_bytes_per_s: float | None = Field(default=None, gt=0)
    """Rate at which weights were loaded where the profile was measured: for cold starts. None where it was not."""
    host_link_bytes_per_s: float | None = Field(default=None, gt=0)
    """Bandwidth between device and host memory in one direction; None where it is not stated."""
    tdp_w: float = Field(gt=0)
    sources: dict[str, str]
    """Where each figure comes from."""


class FitErrors(_Frozen):
    """Mean absolute relative errors of a fit, as fractions."""

    train: float | None = None
    """The fitted formula alone, on the rows it was fitted to."""
    measured: float | None = None
    """Formula plus residual table at the measured rows."""
    held_out: float | None = None
    """Rows whose whole shape was left out of formula and residuals (four folds)."""
    held_out_bias: float | None = None
    """Mean signed error of the same predictions."""


class ResidualTable(_Frozen):
    """log(measured / formula) on a grid, per measured shape; interpolated to other shapes by kriging."""

    shapes: list[list[float]]
    grid: list[list[float]]
    """One list of coordinates per grid axis; the table has one column per point of their product."""
    log_ratio_e4: list[list[int]]
    """Row per shape, in units of 1e-4."""
    length_scales: list[float]
    """Per shape axis, in natural-log units: how far a residual is believed. Attention may have two more, of
    the coordinates that `costmodel.residual.shape_features` adds."""
    nugget: float
    """Noise variance over signal variance."""
    metric: Literal["euclidean", "cityblock"] = "euclidean"
    """Distance of shapes: along the diagonal, or the sum of the distances along the axes."""
    clip: float | None = None
    """Before a residual is carried to other shapes, what it differs by from what its neighbours say of it is cut to
    this many times what is usual in its column. None: carried as it is."""
    everywhere_e4: list[int] | None = None
    """Per column, in units of 1e-4: added at every shape, measured or not. For profiles moved to what was recorded."""


class KernelFit(_Frozen):
    """One kernel's formula coefficients, its residual table, and the facts about the fit."""

    kind: KernelKind
    coefficients: dict[str, float]
    shape_axes: list[str] = []
    grid_axes: list[str] = []
    residual: ResidualTable | None = None
    errors: FitErrors = FitErrors()
    hull: dict[str, tuple[float, float]] = {}
    """Smallest and largest measured value per axis."""
    num_points: int = 0
    cleaning: dict[str, int] = {}
    """Rows dropped from the table, by reason."""
    noise_log_std: float = 0.03
    """Spread of repeated measurements, in log units, for jitter and intervals."""
    source: str = "datasheet roofline with default efficiencies, not fitted"

    @property
    def fitted(self) -> bool:
        return self.num_points > 0

    def measured_at(self, axis: str, value: float) -> bool:
        """Whether `value` lies within what was measured along an axis."""
        low, high = self.hull.get(axis, (1.0, 0.0))
        return low <= value <= high


class HostTerms(_Frozen):
    """Time of the engine's host process per step: scheduling, input preparation, output handling."""

    step_s: float = Field(ge=0)
    per_seq_s: float = Field(ge=0)
    per_token_s: float = Field(default=0.0, ge=0)
    launch_s: float = Field(ge=0)
    """Host time to launch one kernel outside a CUDA graph."""
    source: str


class Provenance(_Frozen):
    """What was measured, by whom, and which program made the profile of it."""

    measured: str
    repositories: list[str] = []
    tables: list[str] = []
    """File name and SHA-256 prefix of each table read."""
    engine_versions: list[str] = []
    fitted_on: str = ""
    fitted_by: str = ""
    notes: list[str] = []


class DeviceProfile(_Frozen):
    """Everything `costmodel.pricer.StepPricer` knows about a device."""

    schema_: str = Field(default=SCHEMA, alias="schema")
    facts: DeviceFacts
    gemm: dict[str, KernelFit] = {}
    """By number format: bfloat16, fp8, fp8_block, nvfp4, int8_wo, int4_wo, sq."""
    gemm_version: str = ""
    """First engine version whose library multiplies as in `gemm`, where that of others was measured too."""
    other_gemms: dict[str, dict[str, KernelFit]] = {}
    """By first engine version, then by number format, for the formats that its library multiplies otherwise."""
    prefill: dict[str, KernelFit] = {}
    """By KV cache format: bfloat16, fp8."""
    decode: dict[str, KernelFit] = {}
    decode_mixed: dict[str, KernelFit] = {}
    """Decode rows that share a step with a prefill chunk, where the kernel treats them differently."""
    all_reduce: KernelFit | None = None
    all_reduce_version: str = ""
    """Engine version that `all_reduce` was measured with, where those of others were measured too."""
    other_all_reduces: dict[str, KernelFit] = {}
    """By engine version."""
    nccl_all_reduce: KernelFit | None = None
    """By NCCL at any size: what an engine has whose own all-reduce is switched off."""
    expert_exchange: KernelFit | None = None
    """All-gather and reduce-scatter, one after the other, with the all-reduce's formula: bytes are those of one."""
    moe: dict[str, KernelFit] = {}
    elementwise: KernelFit | None = None
    sampler: KernelFit | None = None
    host: HostTerms
    provenance: Provenance

    @model_validator(mode="after")
    def _versions_are_named(self) -> Self:
        named = (self.gemm_version, *self.other_gemms)
        if self.other_gemms and not all(map(is_version, named)):
            given = ", ".join(map(repr, named))
            raise ValueError(
                f"gemm_version and the keys of other_gemms are versions such as 0.19, not {given}"
            )
        lacking = {name for fits in self.other_gemms.values() for name in fits} - set(self.gemm)
        if lacking:
            raise ValueError(
                f"other_gemms has {', '.join(sorted(lacking))}, which gemm lacks: add the newest's"
            )
        return self

    @property
    def name(self) -> str:
        return self.facts.name

    @property
    def content_hash(self) -> str:
        """First 16 hex digits of the SHA-256 of the canonical JSON."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def to_json(self) -> str:
        """Canonical compact JSON: keys sorted, no spaces."""
        unset = {"all_reduce_version", "other_all_reduces"} if not self.other_all_reduces else set()
        if not self.other_gemms:
            unset |= {"gemm_version", "other_gemms"}
        unset |= {
            single for single in ("nccl_all_reduce", "expert_exchange") if getattr(self, single) is None
        }
        document = self.model_dump(mode="json", by_alias=True, exclude=unset)
        return json.dumps(document, sort_keys=True, separators=(",", ":"))

    def kernels(self) -> list[tuple[str, KernelFit]]:
        """Every fit with a printable name such as `gemm/bfloat16`."""
        found: list[tuple[str, KernelFit]] = []
        for group in ("gemm", "prefill", "decode", "decode_mixed", "moe"):
            fits: dict[str, KernelFit] = getattr(self, group)
            found += [(f"{group}/{name}", fit) for name, fit in fits.items()]
            if group == "gemm":
                for version, others in self.other_gemms.items():
                    found += [(f"gemm/{name}/{version}", fit) for name, fit in others.items()]
        for single in ("all_reduce", "nccl_all_reduce", "expert_exchange", "elementwise", "sampler"):
            fit = getattr(self, single)
            if fit is not None:
                found.append((single, fit))
            if single == "all_reduce":
                found += [(f"all_reduce/{v}", other) for v, other in self.other_all_reduces.items()]
        return found

    @property
    def products(self) -> str:
        """The first engine version that multiplies as in `gemm`, where that is not the newest; else ''."""
        return self.gemm_version if any(is_newer(v, self.gemm_version) for v in self.other_gemms) else ""

    def versioned_gemm(self, fmt: str) -> KernelFit | None:
        """The fit that prices products of a number format, where those of other engine versions were measured too."""
        priced = fmt if fmt in self.gemm else "bfloat16"
        return self.gemm[priced] if any(priced in fits for fits in self.other_gemms.values()) else None

    def for_engine(self, version: str, num_gpus: int) -> DeviceProfile:
        """The profile with what stands for this engine version as its own: products, and all-reduces over `num_gpus`.

        That is the newest one measured that is not newer, or the oldest; of the all-reduces those measured over so many
        devices, where there are any. One device has none.
        """
        update = self._products_of(version) | self._all_reduce_of(version, num_gpus)
        return self.model_copy(update=update) if update else self

    def with_nccl(self) -> DeviceProfile:
        """The profile with NCCL's all-reduce as its own, whatever the engine's version."""
        update: dict[str, Any] = {
            "all_reduce": self.nccl_all_reduce,
            "all_reduce_version": "",
            "other_all_reduces": {},
        }
        return self.model_copy(update=update)

    def _products_of(self, version: str) -> dict[str, Any]:
        if not self.other_gemms:
            return {}
        chosen = standing_for(version, (self.gemm_version, *self.other_gemms))
        if chosen == self.gemm_version:
            return {}
        fits = self.other_gemms[chosen]
        kept = {**self.other_gemms, self.gemm_version: {name: self.gemm[name] for name in fits}}
        others = {v: kept[v] for v in sorted(kept) if v != chosen}
        return {"gemm": {**self.gemm, **fits}, "gemm_version": chosen, "other_gemms": others}

    def _all_reduce_of(self, version: str, num_gpus: int) -> dict[str, Any]:
        if num_gpus == 1 or self.all_reduce is None or not self.other_all_reduces:
            return {}
        fits = {self.all_reduce_version: self.all_reduce, **self.other_all_reduces}
        over = [v for v, fit in fits.items() if fit.measured_at("num_gpus", num_gpus)]
        chosen = standing_for(version, over or fits)
        others = {v: fits[v] for v in sorted(fits) if v != chosen}
        return {"all_reduce": fits[chosen], "all_reduce_version": chosen, "other_all_reduces": others}


def list_profiles() -> tuple[str, ...]:
    """Names of the shipped profiles."""
    folder = resources.files("costmodel") / "profiles"
    return tuple(sorted(f.name[:-5] for f in folder.iterdir() if f.name.endswith(".json")))


def load_profile(name_or_path: str | Path) -> DeviceProfile:
    """A shipped profile by name (case and `-`, `_`, `sxm` ignored) or a profile file.

    Raises `UsageError` for an unknown name (with the nearest ones) or a file that is not a profile.
    """
    text = str(name_or_path)
    if not text.strip():
        raise UsageError("--gpu is empty; name one (tokentwin profile list) or give a profile file")
    path = Path(text).expanduser()
    if path.is_file():
        try:
            content = path.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not text"
            raise UsageError(f"--gpu {text}: cannot be read: {reason}") from None
        return _parse(content, where=text)
    known = list_profiles()
    key = text.lower().replace("-", "").replace("_", "").replace(" ", "").removesuffix("sxm")
    if key in known:
        return _shipped(key)
    if path.is_dir():
        raise UsageError(f"--gpu {text}: is a folder; name the profile file in it")
    if path.suffix == ".json":
        raise UsageError(f"--gpu {text}: no such file")
    raise UsageError(
        f"--gpu {text!r} is not a shipped profile; {nearest(key, known)} (or give a profile file)"
    )


@lru_cache(maxsize=16)
def _shipped(name: str) -> DeviceProfile:
    file = resources.files("costmodel") / "profiles" / f"{name}.json"
    return _parse(file.read_text(encoding="utf-8"), where=name)


def _parse(text: str, *, where: str) -> DeviceProfile:
    try:
        profile = DeviceProfile.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "the document"
        reason = first["msg"].removeprefix("Value error, ")
        raise UsageError(f"--gpu {where}: not a device profile ({field}: {reason})") from None
    if profile.schema_ != SCHEMA:
        raise UsageError(f"--gpu {where}: profile schema {profile.schema_!r}, this version reads {SCHEMA!r}")
    return profile
