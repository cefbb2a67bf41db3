"""Tables as pandas DataFrames. pandas is imported when a table is asked for, and not before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from serving.errors import UsageError

if TYPE_CHECKING:
    from pandas import DataFrame


def frame(
    columns: Mapping[str, Any], *, index: Sequence[Any] | None = None, name: str | None = None
) -> DataFrame:
    """Columns of equal length as a DataFrame; `index` has one label per row, and `name` is what they are.

    Raises UsageError where pandas is not installed.
    """
    table: DataFrame = pandas().DataFrame(dict(columns), index=None if index is None else list(index))
    return table.rename_axis(name) if name is not None else table


def pandas() -> Any:
    """The module. Raises UsageError where it is not installed."""
    try:
        return import_module("pandas")
    except ModuleNotFoundError:
        raise UsageError(
            "tables need pandas, which is not installed: pip install 'tokentwin[notebook]'"
        ) from None
