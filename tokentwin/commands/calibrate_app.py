"""`tokentwin calibrate`: measure this machine, or fit tables or recorded requests."""

from __future__ import annotations

from cyclopts import App

from tokentwin.commands.calibrate_device import device

app = App(name="calibrate", help="Make a device profile of measurements.", help_format="plaintext")
app.default(device)
app.command("tokentwin.commands.calibrate:fit", name="fit", help="Fit a profile to tables of kernel timings.")
app.command(
    "tokentwin.commands.calibrate_metrics:from_metrics",
    name="from-metrics",
    help="Fit host terms and a scale per phase to a server's recorded requests.",
)
app.command(
    "tokentwin.commands.calibrate_text:text",
    name="text",
    help="Measure what tokenising, detokenising and writing events cost here.",
)
