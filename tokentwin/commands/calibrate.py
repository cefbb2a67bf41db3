"""`tokentwin calibrate fit`: a device profile from tables of kernel timings."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from tokentwin.config_file import configurable
from tokentwin.flags import as_path
from tokentwin.outputs import check_file


@configurable
def fit(
    *tables: Annotated[
        Path,
        Parameter(
            help="Tables of kernel timings (CSV or Parquet), or folders of them: our own microbenchmarks, "
            "AIConfigurator, LLMServingSim or Vidur; the layout is told by the columns.",
            converter=as_path,
        ),
    ],
    device: Annotated[
        str,
        Parameter(help="Name of a device with known facts, such as h200, or a JSON file of its facts."),
    ],
    output: Annotated[Path, Parameter(alias="-o", help="The profile file to write.")],
    context_splits: Annotated[
        float,
        Parameter(
            help="Thread blocks over which prefill spreads earlier context: 1 for FlashAttention 2, 32 for 3."
        ),
    ] = 1.0,
    engine: Annotated[
        str, Parameter(help="Whose tables to take of an AIConfigurator tree: vllm, sglang or trtllm.")
    ] = "vllm",
    folds: Annotated[int, Parameter(help="Folds of the held-out error; 0 skips it and is faster.")] = 4,
) -> int:
    """Fit a profile to tables of kernel timings and print its errors.

    Example: tokentwin calibrate fit microbench.parquet --device h200 -o my-h200.json

    docs/calibration.md describes the layouts, the cleaning and the errors.
    """
    from calibration.assemble import fit_profile
    from calibration.fit import Options
    from costmodel.datasheet import facts_of
    from costmodel.profile import Provenance
    from costmodel.render import render_profile
    from experiments.results import writable
    from serving.errors import UsageError

    if not tables:
        raise UsageError("calibrate fit needs tables: name one or more CSV files, Parquet files or folders")
    check_file(output)
    profile = fit_profile(
        tables,
        facts_of(device),
        options=Options(folds=folds),
        context_splits=context_splits,
        engine=engine,
        provenance=Provenance(
            measured="kernel timings given by the user", fitted_by="tokentwin calibrate fit"
        ),
        progress=_say,
    )
    with writable(output):
        output.write_text(profile.to_json() + "\n", encoding="utf-8")
    sys.stdout.write(f"{render_profile(profile)}\n\nWrote {output}; use it with --gpu {output}\n")
    return 0


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
