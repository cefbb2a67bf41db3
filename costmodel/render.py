"""A device profile in plain text: facts, coefficients, fit errors, hull, provenance."""

from __future__ import annotations

from costmodel.profile import DeviceProfile, KernelFit


def render_profile(profile: DeviceProfile) -> str:
    """What `tokentwin profile show NAME` prints."""
    facts = profile.facts
    peaks = ", ".join(f"{name} {value / 1e12:,.0f}" for name, value in facts.peak_flops.items())
    lines = [
        f"{facts.name}: {facts.product}   (profile {profile.content_hash})",
        "",
        f"  memory        {facts.memory_bytes / 1e9:,.1f} GB, {facts.hbm_bytes_per_s / 1e12:.3f} TB/s, "
        f"L2 {facts.l2_bytes / 2**20:.0f} MiB",
        f"  dense peak    {peaks} TFLOP/s on {facts.num_sms} multiprocessors",
        f"  link          {facts.link_bytes_per_s / 1e9:,.0f} GB/s each way; {facts.tdp_w:.0f} W",
    ]
    lines += [f"    {field}: {source}" for field, source in facts.sources.items()]
    host = profile.host
    lines += [
        "",
        f"  host          {host.step_s * 1e6:.0f} us a step + {host.per_seq_s * 1e6:.1f} us a sequence "
        f"+ {host.per_token_s * 1e6:.2f} us a token; {host.launch_s * 1e6:.1f} us a launch",
        f"    {host.source}",
        "",
        "  kernel                  points   formula  measured  held-out     bias  noise",
    ]
    for name, fit in profile.kernels():
        e = fit.errors
        errors = f"{_percent(e.train)} {_percent(e.measured)} {_percent(e.held_out)}"
        bias = _percent(e.held_out_bias, signed=True)
        lines.append(f"  {name:<22}{fit.num_points:>8,} {errors} {bias} {100 * fit.noise_log_std:>5.1f}%")
    lines += [
        "  (mean absolute relative error: of the formula alone, with residuals at measured shapes, and on",
        "   shapes left out of the fit, four folds at a time, with its mean sign)",
    ]
    for name, fit in profile.kernels():
        lines += ["", *_kernel(name, fit)]
    lines += ["", *_provenance(profile)]
    return "\n".join(lines)


def _percent(value: float | None, *, signed: bool = False) -> str:
    if value is None:
        return f"{'-':>9}"
    return f"{100 * value:>+8.2f}%" if signed else f"{100 * value:>8.2f}%"


def _kernel(name: str, fit: KernelFit) -> list[str]:
    lines = [f"  {name}", f"    from {fit.source}"]
    pairs = [f"{c} {v:.4g}" for c, v in fit.coefficients.items()]
    lines += [f"    {'   '.join(pairs[i : i + 4])}" for i in range(0, len(pairs), 4)]
    if fit.hull:
        hull = ", ".join(f"{axis} {low:g}..{high:g}" for axis, (low, high) in fit.hull.items())
        shapes = f"{len(fit.residual.shapes)} shapes; " if fit.residual else ""
        lines.append(f"    hull: {shapes}{hull}")
    if fit.cleaning:
        lines.append(
            "    dropped: " + ", ".join(f"{count} {reason}" for reason, count in fit.cleaning.items())
        )
    return lines


def _provenance(profile: DeviceProfile) -> list[str]:
    p = profile.provenance
    lines = [f"  measured: {p.measured}"]
    for title, values in (
        ("source", p.repositories),
        ("engine", p.engine_versions),
        ("table", p.tables),
        ("note", p.notes),
    ):
        lines += [f"    {title}: {value}" for value in values]
    if p.fitted_on:
        lines.append(f"    fitted on: {p.fitted_on}")
    if p.fitted_by:
        lines.append(f"    made by: {p.fitted_by}")
    return lines
