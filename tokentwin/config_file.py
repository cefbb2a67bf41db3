"""`--config FILE`: the flags of a command as YAML, and `--print-config`, which writes such a file.

Keys are the flags' names with dashes or underscores. Paths are relative to the current folder, as flags are.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Mapping
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, cast, get_args, get_origin, get_type_hints

import yaml
from pydantic import TypeAdapter, ValidationError

from serving.errors import UsageError
from sim.deployment import Built
from sim.fleet.spec import set_by_all
from sim.workload.flags import known_flags
from sim.workload.yaml_lines import DuplicateKey, load_yaml, yaml_problem
from tokentwin.flag_tables import CONFIG_FLAGS, DEPLOYMENT, SIMULATE
from tokentwin.flags import TEXTS, Command, Flag, find, no_value, takes

NOT_IN_FILES = ("config", "print_config")
COMMA_SEPARATED = ("metric_percentiles", "percentile_metrics", "sweep_load", "link_vars")
"""Texts that may be lists in a file."""


def with_config(
    flags: Mapping[str, Any], known: Mapping[str, Flag], *, unused: Iterable[str] = ()
) -> dict[str, Any]:
    """The given flags over those of the file that `--config` names. Raises UsageError naming file, line and key.

    Keys in `unused` may be in the file and are left out, with a note on stderr.
    """
    given = {name: value for name, value in flags.items() if value is not None}
    if "config" not in given:
        return given
    return {**read_config(Path(given["config"]), known, unused=unused), **given}


def read_config(path: Path, known: Mapping[str, Flag], *, unused: Iterable[str] = ()) -> dict[str, Any]:
    """The flags in a YAML file, with the types that the command line would give them."""
    readable = {name: flag for name, flag in known.items() if name not in NOT_IN_FILES}
    passed_over = {name: SIMULATE[name] for name in unused if name not in known}
    out: dict[str, Any] = {}
    lines: dict[str, int] = {}
    left_out = []
    for key, value, line in _entries(path):
        where = f"--config {path}, line {line}"
        flag = _flag(key, value, readable, passed_over, where)
        if flag.name in lines:
            raise UsageError(
                f"{where}: {flag.name} is given twice, first in line {lines[flag.name]}; keep one"
            )
        lines[flag.name] = line
        if flag.name in passed_over:
            left_out.append(flag.name)
        elif value is not None:
            out[flag.name] = typed(flag, value, where)
    if left_out:
        sys.stderr.write(f"note: {path}: no effect here of {', '.join(left_out)}\n")
    return out


def _entries(path: Path) -> list[tuple[str, Any, int]]:
    """Key, value and line (from 1) of each entry of the file."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        node = yaml.compose(text, yaml.SafeLoader)
        _check_twice(path, node)
        content = load_yaml(text)
    except OSError as error:
        raise UsageError(f"--config {path}: {error.strerror}; name a YAML file") from None
    except DuplicateKey as error:
        raise UsageError(f"--config {path}: {yaml_problem(error)}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f" (line {mark.line + 1})" if mark is not None else ""
        raise UsageError(
            f"--config {path}: not YAML{where}; write lines such as model: llama-3.1-8b"
        ) from None
    if not text.strip():
        raise UsageError(f"--config {path}: is empty; write lines such as model: llama-3.1-8b")
    if content is None:
        return []  # comments
    if not isinstance(content, dict) or not isinstance(node, yaml.MappingNode):
        raise UsageError(f"--config {path}: expected lines such as model: llama-3.1-8b")
    lines = {str(entry.value): entry.start_mark.line + 1 for entry, _ in node.value}
    return [(str(key), value, lines.get(str(key), 1)) for key, value in content.items()]


def _check_twice(path: Path, node: yaml.Node | None) -> None:
    """Raises UsageError for a key of the file that is given twice."""
    first: dict[str, int] = {}
    for entry, _ in node.value if isinstance(node, yaml.MappingNode) else ():
        line = entry.start_mark.line + 1
        if entry.value in first:
            raise UsageError(
                f"--config {path}, line {line}: {entry.value} is given twice, first in line {first[entry.value]}; "
                "keep one"
            )
        first[str(entry.value)] = line


def _flag(
    key: str, value: Any, known: Mapping[str, Flag], passed_over: Mapping[str, Flag], where: str
) -> Flag:
    """The flag of an entry. Raises UsageError that says what it may have been meant to be."""
    try:
        flag = find(key, {**known, **passed_over}, where)
    except UsageError:
        inner = [name for name in value if _is_known(str(name), known)] if isinstance(value, dict) else []
        if inner:
            fix = (
                "give a sweep's file to tokentwin sweep"
                if key == "base"
                else f"move them up, and leave {key} out"
            )
            raise UsageError(
                f"{where}: {key} is no flag, and below it are flags one level too deep ({', '.join(inner)}); {fix}"
            ) from None
        if _is_known(key, SIMULATE) and key not in NOT_IN_FILES:
            raise UsageError(
                f"{where}: {key} is a flag of tokentwin simulate that this command does not take; leave it out"
            ) from None
        raise
    if isinstance(value, dict) and not flag.several and not flag.structured:
        inner = [str(name) for name in value]
        also = [name for name in inner if _is_known(name, known)]
        fix = f"one level too deep; move {', '.join(also)} up" if also else "and takes one value"
        raise UsageError(f"{where}: {flag.name} has keys below it ({', '.join(inner)}), {fix}")
    return flag


def _is_known(key: str, known: Mapping[str, Flag]) -> bool:
    try:
        find(key, known, "")
    except UsageError:
        return False
    return True


def typed(flag: Flag, value: Any, where: str) -> Any:
    """A value of a file with the type that the command line would give it. Raises UsageError, beginning with `where`."""
    if flag.structured:
        return value  # checked with the deployment
    if flag.kind in (Path, *TEXTS) and value == "":
        raise UsageError(f"{where}: {flag.name}: {no_value(flag.name, flag.kind)}")
    if flag.several and isinstance(value, list | tuple | dict) and not value:
        raise UsageError(f"{where}: {flag.name}: the list is empty; give at least one, or leave it out")
    if flag.several:
        if isinstance(value, str):
            value = [value] if flag.name == "alert" else value.split()
        elif isinstance(value, dict):
            mark = "=" if flag.name in ("metadata", "price") else ":"
            value = [f"{name}{mark}{limit}" for name, limit in value.items()]
        elif isinstance(value, list | tuple):
            value = ["none" if each is None else _word(each) for each in value]
    elif flag.kind is str and isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    elif flag.kind in (int, float, int | None, float | None) and isinstance(value, bool):
        raise UsageError(f"{where}: {flag.name}: must be a number, got {str(value).lower()}")
    elif flag.name in COMMA_SEPARATED and isinstance(value, list | tuple):
        value = ",".join(map(str, value))
    try:
        return TypeAdapter(flag.kind).validate_python(value)
    except ValidationError as error:
        what = error.errors(include_url=False)[0]["msg"].replace("Input should be", "must be")
        what = what.replace("a valid string", "text in quotes") if isinstance(value, int | float) else what
        raise UsageError(
            f"{where}: {flag.name}: {what[:1].lower()}{what[1:]}, got {str(value)[:40]!r}"
        ) from None


def _word(value: Any) -> Any:
    """A number of a list as the command line has it; anything else as it is."""
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def print_config(
    given: Mapping[str, Any], built: Built | None = None, known: Mapping[str, Flag] = SIMULATE
) -> int:
    """Print a YAML file that gives the same answer (`config_text`), and return the exit code."""
    sys.stdout.write(config_text(given, built, known))
    return 0


def config_text(
    given: Mapping[str, Any], built: Built | None = None, known: Mapping[str, Flag] = SIMULATE
) -> str:
    """A YAML file that gives the same answer: the deployment, the traffic, then the other flags that were given.

    With `built` the deployment is whole, its limits worked out, as far as `known` has flags for it.
    """
    parts = []
    names = {flag.name for flag in DEPLOYMENT}
    deployment = {name: value for name, value in given.items() if name in names}
    if built is not None:
        limits = built.limits
        whole = built.deployment.model_dump(mode="json")
        own = set_by_all(built.deployment.pools)
        if not built.pools:  # they have limits of their own
            whole |= {
                "max_num_seqs": limits.max_num_seqs,
                "max_num_batched_tokens": limits.max_num_batched_tokens,
                "max_model_len": limits.max_model_len,
                "async_scheduling": limits.async_scheduling,
            }
        deployment = {
            name: _without_none(value) if known[name].structured else value
            for name, value in whole.items()
            if name in known and not (known[name].structured and not value) and name not in own
        }
        memory = f"{limits.num_pages:,} KV pages of {limits.page_tokens} tokens on each replica"
        parts.append(f"# {memory}; profile {built.profile.name} {built.profile.content_hash}")
    traffic = {name: given[name] for name in given if name in known_flags() and name != "goodput"}
    rest = {n: v for n, v in given.items() if n not in {*names, *traffic, *NOT_IN_FILES}}
    seed = {"seed": 0} if "seed" in known else {}
    parts += [text for text in (_yaml(deployment), _yaml(traffic), _yaml(seed | rest)) if text]
    return "\n".join(parts)


def _without_none(value: Any) -> Any:
    """A mapping without the keys that are not set."""
    if isinstance(value, list):
        return [_without_none(each) for each in value]
    if isinstance(value, dict):
        return {name: _without_none(each) for name, each in value.items() if each is not None}
    return value


def _yaml(values: Mapping[str, Any]) -> str:
    plain = {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}
    return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True) if plain else ""


def configurable(command: Command) -> Command:
    """Give a command `--config` and `--print-config`, when it does nothing else with them.

    Positional arguments stay on the command line. Options without a default may then come from the file.
    """
    options = [p for p in inspect.signature(command).parameters.values() if p.kind is p.KEYWORD_ONLY]
    hints = get_type_hints(command, include_extras=True)
    rows: Mapping[str, Flag] = getattr(command, "flags", {})
    flags = tuple(rows[p.name] if p.name in rows else _flag_of(p, hints[p.name]) for p in options)
    known = {flag.name: flag for flag in (*flags, *CONFIG_FLAGS)}
    required = {p.name for p in options if p.default is p.empty}

    @wraps(command)
    def configured(*arguments: Any, **values: Any) -> Any:
        given = with_config(values, known)
        for flag in flags:
            if flag.name in required and flag.name not in given:
                raise UsageError(f"{flag.option} is missing; {flag.help[:1].lower()}{flag.help[1:]}")
        if given.pop("print_config", False):
            return print_config(given, known=known)
        given.pop("config", None)
        return command(*arguments, **given)

    own = [p for p in inspect.signature(command).parameters.values() if p.kind is not p.KEYWORD_ONLY]
    del configured.__wrapped__
    configured.__annotations__ = {p.name: hints[p.name] for p in own} | {"flags": Any, "return": int}
    configured.__signature__ = inspect.Signature(own)  # type: ignore[attr-defined]
    return cast("Command", takes(flags, CONFIG_FLAGS)(configured))


def _flag_of(option: inspect.Parameter, hint: Any) -> Flag:
    """An option of a signature (`Annotated[type, Parameter(…)]`) as a flag."""
    kind, how = (get_args(hint)[0], get_args(hint)[1]) if get_origin(hint) is Annotated else (hint, None)
    leaves = (
        [leaf for leaf in get_args(kind) if leaf is not type(None)] if type(None) in get_args(kind) else []
    )
    shown = None if option.default in (option.empty, None, False) else str(option.default)
    alias = () if how is None or how.alias is None else how.alias
    return Flag(
        option.name,
        leaves[0] if len(leaves) == 1 else kind,
        (how.help if how is not None else None) or "",
        aliases=(alias,) if isinstance(alias, str) else tuple(alias),
        default=shown,
        negative=option.default is not False,
    )
