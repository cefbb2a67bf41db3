"""`tokentwin conformance DIR`: does our scheduler decide as the recorded ones did?"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from calibration.conformance import check_folder
from tokentwin.flags import as_path


def conformance(
    folder: Annotated[Path, Parameter(help="Folder of recorded schedules, *.json.gz.", converter=as_path)], /
) -> int:
    """Replay recorded vLLM schedules and compare every decision; exit 1 if any differs."""
    result = check_folder(folder)
    sys.stdout.write(f"{result}\n")
    if result.differences:
        sys.stdout.write(f"first difference: {result.differences[0]}\n")
        return 1
    return 0
