"""`--config FILE`: the flags of a command as YAML, and `--print-config`, which writes such a file.

Keys are the flags' names with dashes or underscores. Paths are relative to the current folder, as flags are.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from serving.errors import UsageError
from sim.deployment import Built
from sim.workload.flags import known_flags
from tokentwin.flags import Flag, find

NOT_IN_FILES = ("config", "print_config")


def with_config(flags: Mapping[str, Any], known: Mapping[str, Flag]) -> dict[str, Any]:
    """The given flags over those of the file that `--config` names. Raises UsageError naming file and key."""
    given = {name: value for name, value in flags.items() if value is not None}
    if "config" not in given:
        return given
    return {**read_config(Path(given["config"]), known), **given}


def read_config(path: Path, known: Mapping[str, Flag]) -> dict[str, Any]:
    """The flags in a YAML file, with the types that the command line would give them."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UsageError(f"--config {path}: {error.strerror}; name a YAML file") from None
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f" (line {mark.line + 1})" if mark is not None else ""
        raise UsageError(
            f"--config {path}: not YAML{where}; write lines such as model: llama-3.1-8b"
        ) from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UsageError(f"--config {path}: expected lines such as model: llama-3.1-8b")
    readable = {name: flag for name, flag in known.items() if name not in NOT_IN_FILES}
    out: dict[str, Any] = {}
    for key, value in content.items():
        flag = find(str(key), readable, f"--config {path}")
        if flag.name in out:
            raise UsageError(f"--config {path}: {flag.name} is given twice; keep one")
        if value is not None:
            out[flag.name] = typed(flag, value, f"--config {path}")
    return out


def typed(flag: Flag, value: Any, where: str) -> Any:
    """A value of a file with the type that the command line would give it. Raises UsageError, beginning with `where`."""
    if flag.several:
        if isinstance(value, str):
            value = value.split()
        elif isinstance(value, dict):
            mark = "=" if flag.name == "metadata" else ":"
            value = [f"{name}{mark}{limit}" for name, limit in value.items()]
    elif flag.kind is str and isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    try:
        return TypeAdapter(flag.kind).validate_python(value)
    except ValidationError as error:
        what = error.errors(include_url=False)[0]["msg"].replace("Input should be", "must be")
        raise UsageError(
            f"{where}: {flag.name}: {what[:1].lower()}{what[1:]}, got {str(value)[:40]!r}"
        ) from None


def print_config(flags: Mapping[str, Any], built: Built) -> str:
    """A YAML file that gives the same run: the deployment with its limits worked out, then the flags given."""
    d, limits = built.deployment, built.limits
    deployment = d.model_dump(mode="json") | {
        "max_num_seqs": limits.max_num_seqs,
        "max_num_batched_tokens": limits.max_num_batched_tokens,
        "max_model_len": limits.max_model_len,
        "async_scheduling": limits.async_scheduling,
    }
    traffic = {name: flags[name] for name in flags if name in known_flags() and name != "goodput"}
    rest = {n: v for n, v in flags.items() if n not in {*deployment, *traffic, *NOT_IN_FILES}}
    memory = f"{limits.num_pages:,} KV pages of {limits.page_tokens} tokens on each replica"
    parts = [f"# {memory}; profile {built.profile.name} {built.profile.content_hash}", _yaml(deployment)]
    parts += [text for text in (_yaml(traffic), _yaml({"seed": 0} | rest)) if text]
    return "\n".join(parts)


def _yaml(values: Mapping[str, Any]) -> str:
    plain = {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}
    return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True) if plain else ""
