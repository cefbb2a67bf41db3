"""Where a key of a YAML file is, so that an error can name its line."""

from __future__ import annotations

from collections.abc import Sequence

import yaml


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
