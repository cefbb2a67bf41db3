"""A device profile in plain text of 80 columns: facts, coefficients, fit errors, hull, provenance."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

from costmodel.profile import DeviceProfile, KernelFit

WIDTH = 80
_VALUES = 16
"""Column at which what a profile says of its device begins."""


def render_profile(profile: DeviceProfile) -> str:
    """What `tokentwin profile show NAME` prints."""
    facts, host = profile.facts, profile.host
    peaks = ", ".join(f"{name} {value / 1e12:,.0f}" for name, value in facts.peak_flops.items())
    device = {
        "profile": profile.content_hash,
        "memory": f"{facts.memory_bytes / 1e9:,.1f} GB, {facts.hbm_bytes_per_s / 1e12:.3f} TB/s, "
        f"L2 {facts.l2_bytes / 2**20:.0f} MiB",
        "dense peak": f"{peaks} TFLOP/s on {facts.num_sms} multiprocessors",
        "link": f"{facts.link_bytes_per_s / 1e9:,.0f} GB/s each way; {facts.tdp_w:.0f} W",
        "host": f"{host.step_s * 1e6:.0f} us a step + {host.per_seq_s * 1e6:.1f} us a sequence "
        f"+ {host.per_token_s * 1e6:.2f} us a token; {host.launch_s * 1e6:.1f} us a launch",
    }
    lines = [*_hung(f"{facts.name}: ", facts.product), ""]
    for title, text in device.items():
        lines += _hung(f"  {title}".ljust(_VALUES), text)
    lines += [
        "",
        *_under("facts from", [f"{name}: {source}" for name, source in facts.sources.items()]),
        *_under("host from", [host.source]),
        "",
        "  kernel                  points   formula  measured  held-out     bias  noise",
    ]
    for name, fit in profile.kernels():
        e = fit.errors
        errors = f"{_percent(e.train)} {_percent(e.measured)} {_percent(e.held_out)}"
        bias = _percent(e.held_out_bias, signed=True)
        lines.append(f"  {name:<22}{fit.num_points:>8,} {errors} {bias} {100 * fit.noise_log_std:>5.1f}%")
    lines += _hung(
        "  (",
        "mean absolute relative error: of the formula alone, with residuals at measured shapes, and on shapes left out "
        "of the fit, four folds at a time, with its mean sign)",
    )
    for name, fit in profile.kernels():
        lines += ["", *_kernel(name, fit)]
    lines += ["", *_provenance(profile)]
    return "\n".join(lines)


def _hung(label: str, text: str, columns: int | None = None) -> list[str]:
    """`text` after `label`, its further lines below its first or so many columns in."""
    below = " " * (len(label) if columns is None else columns)
    return _wrap(text, label, below) or [label.rstrip()]


def _wrap(text: str, first: str, others: str) -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=first,
        subsequent_indent=others,
        break_on_hyphens=False,
        break_long_words=False,
    )


def _under(title: str, entries: Iterable[str]) -> list[str]:
    """Entries below a title, the further lines of each two columns in."""
    lines = [f"  {title}:"]
    for entry in entries:
        lines += _wrap(entry, " " * 4, " " * 6)
    return lines if len(lines) > 1 else []


def _percent(value: float | None, *, signed: bool = False) -> str:
    if value is None:
        return f"{'-':>9}"
    return f"{100 * value:>+8.2f}%" if signed else f"{100 * value:>8.2f}%"


def _kernel(name: str, fit: KernelFit) -> list[str]:
    borrowed = fit.source.startswith("borrowed ")
    lines = [f"  {name}", *_hung("    " if borrowed else "    from ", fit.source, 6)]
    row = ""
    for pair in (f"{c} {v:.4g}" for c, v in fit.coefficients.items()):
        if row and 4 + len(row) + 3 + len(pair) > WIDTH:
            lines.append(f"    {row}")
            row = ""
        row = f"{row}   {pair}" if row else pair
    lines += [f"    {row}"] if row else []
    if fit.hull:
        hull = ", ".join(f"{axis} {low:g}..{high:g}" for axis, (low, high) in fit.hull.items())
        shapes = f"{len(fit.residual.shapes)} shapes; " if fit.residual else ""
        lines += _hung("    hull: ", f"{shapes}{hull}")
    if fit.cleaning:
        dropped = ", ".join(f"{count} {reason}" for reason, count in fit.cleaning.items())
        lines += _hung("    dropped: ", dropped)
    return lines


def _provenance(profile: DeviceProfile) -> list[str]:
    p = profile.provenance
    several = (
        ("source", "sources", p.repositories),
        ("engine", "engines", p.engine_versions),
        ("table", "tables", p.tables),
        ("note", "notes", p.notes),
    )
    lines = _hung("  measured: ", p.measured)
    for one, many, values in several:
        lines += _under(one if len(values) == 1 else many, values)
    lines += [f"  fitted on: {p.fitted_on}"] if p.fitted_on else []
    return lines + (_hung("  made by: ", p.fitted_by) if p.fitted_by else [])
