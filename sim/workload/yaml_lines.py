"""YAML in which a key given twice is an error, and where a key of a file is, so that an error can name its line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml


class DuplicateKey(yaml.constructor.ConstructorError):
    """A key is given twice in one mapping."""


class _UniqueKeys(yaml.SafeLoader):
    """YAML in which a key given twice is an error instead of the last one winning."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            if isinstance(key_node, yaml.ScalarNode) and key_node.tag != "tag:yaml.org,2002:merge":
                if key_node.value in seen:
                    problem = f"key {key_node.value!r} is given twice; keep one"
                    raise DuplicateKey(None, None, problem, key_node.start_mark)
                seen.add(key_node.value)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep=deep)
        return mapping


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The same for `json.loads(..., object_pairs_hook=unique_keys)`. Raises ValueError."""
    out = dict(pairs)
    if len(out) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"key {twice!r} is given twice; keep one")
    return out


def load_yaml(text: str) -> Any:
    """The content of a YAML text. Raises `yaml.YAMLError` (`DuplicateKey` for a key given twice), ValueError and others
    that the loader lets through; `yaml_problem` puts them into words."""
    return yaml.load(text, _UniqueKeys)


def yaml_problem(error: Exception) -> str:
    """`line 3: key 'gpu' is given twice; keep one`, or `line 3: not YAML`; without a line where none is known."""
    mark = getattr(error, "problem_mark", None)
    what = error.problem if isinstance(error, DuplicateKey) else "not YAML"
    return str(what) if mark is None else f"line {mark.line + 1}: {what}"


def line_of(text: str, location: Sequence[int | str]) -> int | None:
    """The line (from 1) of the key or entry at `location`, or of the deepest part of it that is in the file.

    Parts that the file does not have, such as the tag of a union, are passed over. None where nothing is there.
    """
    try:
        node = yaml.compose(text, yaml.SafeLoader)
    except yaml.YAMLError:
        return None
    line = None
    for part in location:
        found = _inside(node, part)
        if found is not None:
            mark, node = found
            line = mark.start_mark.line + 1
    return line


def _inside(node: yaml.Node | None, part: int | str) -> tuple[yaml.Node, yaml.Node] | None:
    """What marks the place, and what is there."""
    if isinstance(node, yaml.MappingNode):
        return next((entry for entry in node.value if entry[0].value == str(part)), None)
    if isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
        return node.value[part], node.value[part]
    return None
