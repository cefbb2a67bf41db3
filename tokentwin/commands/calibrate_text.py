"""`tokentwin calibrate text FOLDER`: what tokenising, detokenising and writing cost here, as the twin takes it."""

from __future__ import annotations

import sys
from dataclasses import asdict
from importlib import resources
from json import dumps
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from serving.errors import UsageError
from tokentwin.config_file import configurable
from tokentwin.flags import as_path


@configurable
def text(
    tokenizer: Annotated[
        Path, Parameter(help="Folder with a tokenizer.json, or that file.", converter=as_path)
    ],
    /,
    *,
    dataset_path: Annotated[
        Path | None, Parameter(help="Text to use; by default one of 650 words of English and code.")
    ] = None,
    completions: Annotated[
        bool, Parameter(help="Events of completions instead of chat.", negative=())
    ] = False,
    json: Annotated[bool, Parameter(help="Print JSON.", negative=())] = False,
) -> int:
    """Measure on this machine what text costs a server for each token and each event, and say it in options of simulate.

    Example: tokentwin calibrate text models/smollm2
    """
    from calibration.text_costs import measure

    try:
        from tokentwin.commands.serve import load_codec
        from tokentwin.server.backend import Delta
        from tokentwin.server.chunks import Answers

        folder = tokenizer.parent if tokenizer.name == "tokenizer.json" else tokenizer
        if not (folder / "tokenizer.json").is_file():
            raise UsageError(f"{tokenizer}: there is no tokenizer.json; name a folder that has one")
        codec = load_codec(folder)
    except ModuleNotFoundError as error:
        raise UsageError(f"reading a tokenizer needs {error.name}: pip install 'tokentwin[serve]'") from None
    answers = Answers("chatcmpl-" + "0" * 32, folder.resolve().name, 1_700_000_000, not completions)
    found = measure(
        codec.encode,
        codec.detokenizer,
        lambda piece: answers.chunk(0, Delta(0, [], piece), usage=False),
        _text(dataset_path),
    )
    out_us = found.detokenize_us_per_token + found.write_us_per_event
    if json:
        sys.stdout.write(dumps(asdict(found), indent=1) + "\n")
        return 0
    rows = (
        ("Tokenise a token (us):", found.tokenize_us_per_token, ""),
        ("Tokenise a request (us):", found.tokenize_us_per_request, "beside its tokens"),
        ("Detokenise a token (us):", found.detokenize_us_per_token, "one at a time, as they come"),
        ("Write an event (us):", found.write_us_per_event, "JSON of one token"),
        ("Event (bytes):", found.event_bytes, "without HTTP's framing"),
        ("Text of a token (bytes):", found.token_bytes, ""),
    )
    lines = [f"{name:<28}{value:>10.2f}    {note}".rstrip() for name, value, note in rows]
    network = f"{{event_bytes: {found.event_bytes:.0f}, token_bytes: {found.token_bytes:.2f}}}"
    lines += [
        "",
        f"For simulate: --tokenize-us-per-token {found.tokenize_us_per_token:.3g} --detokenize-us-per-token {out_us:.3g}",
        f"  --network '{network}' beside what else it says",
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def _text(path: Path | None) -> str:
    if path is None:
        return (resources.files("realengine") / "data" / "quality_text.txt").read_text(encoding="utf-8")
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--dataset-path {path}: {getattr(error, 'strerror', None) or error}") from None
