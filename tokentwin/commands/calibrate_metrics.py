"""`tokentwin calibrate from-metrics`: a profile moved to what a real server's requests say."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from calibration.metrics_fit import read_case, refit
from costmodel.profile import load_profile
from experiments.results import writable
from serving.errors import UsageError
from tokentwin.config_file import print_config, with_config
from tokentwin.flag_tables import CONFIG_FLAGS, DEPLOYMENT
from tokentwin.flags import Flag, as_path, takes
from tokentwin.job import make_deployment
from tokentwin.outputs import check_file

OWN = (
    Flag("profile", str, "The profile to start from: a shipped name or a file."),
    Flag("output", Path, "The profile file to write.", aliases=("-o",)),
)
SERVED = tuple(flag for flag in DEPLOYMENT if flag.name != "gpu")
KNOWN = {flag.name: flag for flag in (*OWN, *SERVED, *CONFIG_FLAGS)}


@takes(OWN, SERVED, CONFIG_FLAGS)
def from_metrics(requests: Annotated[Path, Parameter(converter=as_path)], /, **flags: Any) -> int:
    """Fit host terms and a scale per phase to recorded requests, and say how far the profile moved.

    REQUESTS is a run folder of ours, or a JSON of vllm bench serve --save-detailed (say how it was served: --model and
    the engine's flags). Kernel shapes are kept.
    Example: tokentwin calibrate from-metrics bench.json --profile h200 --model llama-3.1-8b -o my-h200.json
    """
    given = with_config(flags, KNOWN)
    if given.get("print_config"):
        return print_config(given, known=KNOWN)
    for name in ("profile", "output"):
        if name not in given:
            raise UsageError(f"--{name} is missing; calibrate from-metrics needs --profile and --output")
    output = Path(given["output"])
    check_file(output)
    profile = load_profile(given["profile"])
    served = sorted({flag.name for flag in SERVED} & set(given))
    deployment = make_deployment({**given, "gpu": given["profile"]}) if served else None
    case = read_case(requests, given["profile"], deployment)
    found = refit(case, profile)
    with writable(output):
        output.write_text(found.profile.to_json() + "\n", encoding="utf-8")
    sys.stdout.write("\n".join(found.lines()) + f"\n\nWrote {output}; use it with --gpu {output}\n")
    return 0
