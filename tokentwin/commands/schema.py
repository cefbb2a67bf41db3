"""`tokentwin schema`: JSON schemas of configurations, workloads and sweeps, for editors."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Literal

from cyclopts import Parameter


def schema(
    kind: Annotated[
        Literal["config", "workload", "sweep"],
        Parameter(help="Of files for --config, of workload files (tenants), or of sweep files."),
    ] = "config",
    /,
    *,
    command: Annotated[
        str | None,
        Parameter(
            help="Only the flags of this command, such as simulate or 'workload describe'; by default of all."
        ),
    ] = None,
) -> int:
    """Print the JSON schema of a kind of file, by which an editor checks and completes it.

    Example: tokentwin schema > tokentwin.schema.json, and in the first line of the file
    # yaml-language-server: $schema=tokentwin.schema.json
    """
    from serving.errors import UsageError
    from tokentwin import schema as schemas

    if command is not None and kind != "config":
        raise UsageError(f"--command has no effect on the schema of a {kind}; leave it out")
    sys.stdout.write(json.dumps(schemas.schema(kind, command), indent=1, ensure_ascii=False) + "\n")
    return 0
