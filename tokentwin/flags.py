"""Flags as data: one row says a flag's name, type, aliases and help. Signatures, config files and the Python API
all read these rows, so that a flag exists once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_origin

from serving.errors import UsageError, nearest

Command = TypeVar("Command", bound=Callable[..., Any])
NO_PATH = "is empty; give a path, and . for the current folder"
_NO_TEXT = {
    "model": "is empty; name one (tokentwin model list) or give its folder or config.json",
    "gpu": "is empty; name one (tokentwin profile list) or give a profile file",
}


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag. `name` has underscores, as in Python and in config files; the command line writes dashes."""

    name: str
    kind: Any
    """Type of a given value; a flag that is not given is None."""
    help: str
    group: str = "Options"
    aliases: tuple[str, ...] = ()
    default: str | None = None
    """What holds when the flag is not given, in words."""
    negative: bool = True
    """Whether a switch has a `--no-…` that takes it back."""
    structured: bool = False
    """A mapping or a list: as such in a file, as JSON on the command line."""

    @property
    def option(self) -> str:
        """`--max-num-seqs` for `max_num_seqs`."""
        return "--" + self.name.replace("_", "-")

    @property
    def several(self) -> bool:
        """Whether it takes a list of values."""
        return bool(self.kind == list[str])


def takes(*tables: Iterable[Flag]) -> Callable[[Command], Command]:
    """Give a command `def f(**flags)` the flags of `tables` as its keyword-only parameters, None by default.

    The command's attribute `flags` has them by name.
    """
    flags = [flag for table in tables for flag in table]

    def decorate(command: Command) -> Command:
        own = [p for p in inspect.signature(command).parameters.values() if p.kind is not p.VAR_KEYWORD]
        given = [_parameter(flag) for flag in flags]
        command.flags = {flag.name: flag for flag in flags}  # type: ignore[attr-defined]
        command.__signature__ = inspect.Signature([*own, *given])  # type: ignore[attr-defined]
        command.__annotations__ = {
            **{p.name: command.__annotations__[p.name] for p in own},
            **{p.name: p.annotation for p in given},
        }
        return command

    return decorate


def _parameter(flag: Flag) -> inspect.Parameter:
    from cyclopts import Group, Parameter
    from cyclopts.help import DefaultFormatter

    how = Parameter(
        help=flag.help,
        alias=flag.aliases,
        group=Group(
            flag.group,
            sort_key=GROUPS.index(flag.group) if flag.group in GROUPS else len(GROUPS),
            help_formatter=DefaultFormatter(column_specs=_columns),
        ),
        show_default=flag.default if flag.default is not None else False,
        consume_multiple=1 if flag.several else None,
        negative=None if flag.negative else (),
        negative_iterable=(),
        converter=_converter(flag),
    )
    annotation: Any = Annotated[flag.kind | None, how]
    return inspect.Parameter(flag.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _whole(kind: Any, tokens: Any) -> int:
    """An integer; cyclopts would round 1.5 without a word."""
    value = tokens[0].value
    try:
        return int(value)
    except ValueError:
        raise ValueError(f"must be a whole number, got {value!r}") from None


def _converter(flag: Flag) -> Callable[[Any, Any], Any] | None:
    """What makes a value of the words of the command line, where cyclopts alone would take too much."""
    if flag.kind in (int, int | None):
        return _whole
    if flag.kind is Path:
        return as_path
    return as_text if flag.kind in TEXTS else None


TEXTS = (str, str | None, list[str])


def no_value(name: str, kind: Any = str) -> str:
    """What is wrong with an empty value of a flag of that name and kind, a path or a text."""
    return NO_PATH if kind is Path else _NO_TEXT.get(name, "is empty; give a value, or leave it out")


def as_path(kind: Any, tokens: Any) -> Path | list[Path]:
    """A path or a list; an empty one would be the current folder, and comes of a shell variable that is not set."""
    if not all(token.value for token in tokens):
        raise ValueError(NO_PATH)
    paths = [Path(token.value) for token in tokens]
    return paths if get_origin(kind) is list else paths[0]


def as_text(kind: Any, tokens: Any) -> str | list[str]:
    """A text or a list of them; an empty one would be no option at all."""
    texts = [str(token.value) for token in tokens]
    if not all(texts):
        option = tokens[0].keyword
        raise ValueError(no_value(option.lstrip("-")) if option else "is empty; give a value")
    return texts if get_origin(kind) is list else texts[0]


def _columns(console: Any, options: Any, entries: Any) -> Any:
    """Cyclopts' columns with room for the longest of our names."""
    from cyclopts.help.specs import ColumnSpec, DescriptionColumn, NameRenderer

    width = min(36, console.width * 45 // 100)
    name = ColumnSpec(
        renderer=NameRenderer(max_width=width), header="Option", style="cyclopts.name", max_width=width
    )
    return name, DescriptionColumn


def at_least(given: Mapping[str, Any], name: str, least: int = 1, *, default: Any = None) -> Any:
    """The number that was given for a flag, or `default`. Raises UsageError below `least`."""
    value = given.get(name, default)
    if value is not None and value < least:
        raise UsageError(f"--{name.replace('_', '-')} must be at least {least}, got {value}")
    return value


GROUPS = ("Deployment", "Traffic", "Arrivals", "Datasets", "Promises", "Run", "Output", "Observability")
"""Groups of flags in the order in which help prints them."""


def find(name: str, flags: Mapping[str, Flag], where: str) -> Flag:
    """The flag that `name` means (dashes or underscores, aliases too). Raises UsageError with the nearest."""
    plain = name.strip().lstrip("-").replace("-", "_")
    for flag in flags.values():
        if plain == flag.name or plain in (a.lstrip("-").replace("-", "_") for a in flag.aliases):
            return flag
    raise UsageError(f"{where}: unknown key {name!r}; {nearest(plain, flags)}")
