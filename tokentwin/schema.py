"""JSON schemas of what users write: configurations of commands, workload files, sweep files.

An editor checks and completes a file that begins with `# yaml-language-server: $schema=…/tokentwin.schema.json`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import TypeAdapter

from serving.errors import UsageError, nearest
from sim.deployment import Deployment
from sim.workload import WorkloadSpec
from tokentwin.config_file import COMMA_SEPARATED, NOT_IN_FILES
from tokentwin.flags import Flag

if TYPE_CHECKING:
    from cyclopts import App

DIALECT = "https://json-schema.org/draft/2020-12/schema"
LIMITS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
Schema = dict[str, Any]
Kind = Literal["config", "workload", "sweep"]
KINDS: tuple[Kind, ...] = ("config", "workload", "sweep")


def schema(kind: Kind, command: str | None = None) -> Schema:
    """The schema of a kind of file; of `config`, for one command's flags or for those of all commands.

    Raises UsageError for a command that takes no configuration, with the nearest.
    """
    if kind == "workload":
        return workload_schema()
    if kind == "sweep":
        return sweep_schema()
    commands = dict(commands_with_flags())
    if command is None:
        return config_schema(commands)
    if command not in commands:
        raise UsageError(f"--command {command!r} takes no --config; {nearest(command, commands)}")
    return config_schema({command: commands[command]})


def commands_with_flags() -> Iterator[tuple[str, Mapping[str, Flag]]]:
    """Every command that takes `--config`, with its flags by name."""
    from tokentwin.cli import make_app

    for name, command in _walk(make_app()):
        flags: Mapping[str, Flag] = getattr(command, "flags", {})
        if "config" in flags:
            yield name, flags


def _walk(app: App, before: str = "") -> Iterator[tuple[str, Callable[..., Any]]]:
    for name in app:
        if name.startswith("-"):
            continue
        inner = app[name]
        if inner.default_command is not None:
            yield before + name, inner.default_command
        yield from _walk(inner, f"{before}{name} ")


def config_schema(commands: Mapping[str, Mapping[str, Flag]]) -> Schema:
    """What `--config` takes: a flat mapping of flags. Dashes and aliases are allowed, and not offered."""
    owners: dict[str, list[str]] = {}
    rows: dict[str, list[Flag]] = {}
    for command, flags in commands.items():
        for name, flag in flags.items():
            if name not in NOT_IN_FILES:
                owners.setdefault(name, []).append(command)
                rows.setdefault(name, []).append(flag)
    properties = {name: _property(rows[name], owners[name], len(commands)) for name in rows}
    other = {}
    for name, same in rows.items():
        for spelled in _other_names(same):
            other[f"^{spelled}$"] = {"$ref": f"#/properties/{name}"}
    what = f"tokentwin {next(iter(commands))}" if len(commands) == 1 else "a tokentwin command"
    return {
        "$schema": DIALECT,
        "title": f"Configuration of {what}",
        "description": "Flags of --config FILE, by name.",
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
        "patternProperties": dict(sorted(other.items())),
        "$defs": _deployment()["$defs"],
    }


def _other_names(flags: list[Flag]) -> list[str]:
    """How else a flag may be written in a file: with dashes, and its aliases."""
    name = flags[0].name
    aliases = [alias.lstrip("-") for flag in flags for alias in flag.aliases]
    spelled = [name.replace("_", "-"), *aliases, *(alias.replace("-", "_") for alias in aliases)]
    return [each for each in dict.fromkeys(spelled) if each != name]


def _property(flags: list[Flag], owners: list[str], commands: int) -> Schema:
    """One flag, which several commands may have with types and words of their own."""
    kinds = list({_key(values): values for values in map(_values, flags)}.values())
    one = kinds[0] if len(kinds) == 1 else {"anyOf": kinds}
    words = flags[0].help
    if flags[0].default is not None:
        words += f" Default: {flags[0].default}."
    if len(owners) < commands:
        words += f" ({', '.join(owners)})"
    return {"description": words, **one}


def _key(values: Schema) -> str:
    return repr(sorted(values.items(), key=str))


@lru_cache(maxsize=1)
def _deployment() -> Schema:
    """The schema of a deployment: with limits, and with what lies below its structured fields."""
    return Deployment.model_json_schema()


@lru_cache(maxsize=1024)
def _values(flag: Flag) -> Schema:
    """What `config_file.typed` takes for a flag, null among it."""
    field = Deployment.model_fields.get(flag.name)
    if flag.several:
        scalar = {"type": ["string", "number", "null"]}
        pairs = {"type": "object", "additionalProperties": {"type": ["string", "number"]}}
        return {"anyOf": [scalar, {"type": "array", "items": scalar}, pairs]}
    if flag.kind is Path:
        return {"type": ["string", "null"], "format": "path"}
    if field is not None and (flag.structured or field.annotation == flag.kind):
        values: Schema = _deployment()["properties"][flag.name]
        about = {name: values[name] for name in ("type", "enum", "items", *LIMITS) if name in values}
        parts = [*values.get("anyOf", [about])]
        parts += [] if {"type": "null"} in parts else [{"type": "null"}]
    else:
        values = TypeAdapter(flag.kind | None).json_schema()
        parts = values.get("anyOf", [values])
    if any(part.get("type") == "string" and "enum" not in part for part in parts):
        parts = [*parts, {"type": "number"}]
    if flag.name in COMMA_SEPARATED:
        parts = [*parts, {"type": "array", "items": {"type": ["string", "number"]}}]
    if all(set(part) <= {"type", *LIMITS} for part in parts):
        limits = {name: value for part in parts for name, value in part.items() if name != "type"}
        return {"type": [part["type"] for part in parts], **limits}
    return {"anyOf": parts}


def workload_schema() -> Schema:
    """A workload file of tenants, as `--dataset-path FILE.yaml` takes it."""
    found = WorkloadSpec.model_json_schema()
    texts = {"RandomSpec": ("range_ratio", ["number", "string"]), "ArrivalSpec": ("rate_points", ["string"])}
    for model, (name, kinds) in texts.items():  # what their validators read besides
        row = found["$defs"][model]["properties"][name]
        kept = {key: row.pop(key) for key in ("anyOf", "$ref") if key in row}
        row["anyOf"] = [*kept.get("anyOf", [kept]), {"type": kinds}]
    return {"$schema": DIALECT, **found, "title": "Workload of TokenTwin"}


def sweep_schema() -> Schema:
    """A sweep file, as `tokentwin sweep FILE.yaml` takes it."""
    from tokentwin.commands.sweep import BASE_FLAGS

    whole = {"type": "integer", "minimum": 1}
    seed = {"type": "integer", "minimum": 0}
    space = {"$ref": "#/$defs/space"}
    goal = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
    limits = {"type": "object", "additionalProperties": {"type": "number"}}
    search = {
        "trials": whole,
        "batch": whole,
        "seed": seed,
        "minimize": goal,
        "maximize": goal,
        "subject_to": limits,
    }
    sample = {"points": whole, "seed": seed, "space": space}
    ways: Schema = {
        "grid": {"$ref": "#/$defs/axes", "description": "All combinations of lists of values."},
        "points": {
            "type": "array",
            "minItems": 1,
            "items": {"$ref": "#/$defs/flags"},
            "description": "A list of points, each a mapping of flags.",
        },
        "random": _object(sample, ("points", "space")) | {"description": "A random sample."},
        "optuna": _object(search | {"space": space}, ("trials", "space"))
        | {"description": "A search by Optuna."},
    }
    name = {"type": ["string", "number"], "description": "Name of the folder; that of the file by default."}
    top: Schema = {
        "name": name,
        "num_runs": whole | {"description": "Runs of each point. Default: 1."},
        "base": {"$ref": "#/$defs/flags", "description": "Flags of all points."},
    }
    return {
        "$schema": DIALECT,
        "title": "Sweep of TokenTwin",
        "description": "base, and one of grid, points, random and optuna.",
        **_object(top | ways, ()),
        "oneOf": [{"required": [way]} for way in ways],
        "$defs": _axes(config_schema({"sweep": BASE_FLAGS})),
    }


def _axes(flags: Schema) -> Schema:
    """What a flag may be in each place of a sweep: a value, a list of them, or a space."""
    tenants = {"^tenants\\.[^.]+\\..+$": {"description": "A field of a tenant of the workload file."}}
    ends = {"low": {"type": "number"}, "high": {"type": "number"}, "log": {"type": "boolean"}}
    spread = _object(ends, ("low", "high"))
    named = {"_benchmark_name": {"type": "string", "description": "Name of the point's folder."}}

    def several(name: str) -> Schema:
        return {"type": "array", "minItems": 1, "items": {"$ref": f"#/$defs/flags/properties/{name}"}}

    def every(make: Callable[[str], Schema]) -> Schema:
        rows = flags["properties"]
        patterns = {
            spelled: make(ref["$ref"].rsplit("/")[-1]) for spelled, ref in flags["patternProperties"].items()
        }
        words = {name: {"description": rows[name]["description"], **make(name)} for name in rows}
        return _object(words, ()) | {"patternProperties": patterns | tenants}

    return {
        "flags": _object(named | flags["properties"], ())
        | {
            "patternProperties": {
                spelled: {"$ref": f"#/$defs/flags/properties/{ref['$ref'].rsplit('/')[-1]}"}
                for spelled, ref in flags["patternProperties"].items()
            }
            | tenants
        },
        **flags["$defs"],
        "axes": every(several),
        "space": every(lambda name: {"anyOf": [several(name), spread]}),
    }


def _object(properties: Schema, required: tuple[str, ...]) -> Schema:
    out: Schema = {"type": "object", "additionalProperties": False, "properties": properties}
    return out | ({"required": list(required)} if required else {})
