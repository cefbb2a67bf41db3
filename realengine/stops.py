"""Where a text ends: stop strings across token boundaries, and what may be shown before one could begin."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Feed text as it comes; `add` returns what may be shown, holding back what might be the start of a stop string."""

    def __init__(self, strings: Sequence[str], *, include: bool = False) -> None:
        self._strings = tuple(strings)
        self._include = include
        self._held = ""
        self.found: str | None = None
        """The stop string that ended the text."""

    def add(self, text: str) -> str:
        """Text that can be shown after `text` arrived; nothing any more once a stop string was found."""
        if not self._strings:
            return text
        if self.found is not None:
            return ""
        self._held += text
        # The earliest end counts, as if characters came one by one; of those that end together, the longest.
        ends = [
            (at + len(string), at, string) for string in self._strings if (at := self._held.find(string)) >= 0
        ]
        if ends:
            end, start, self.found = min(ends)
            shown, self._held = self._held[: end if self._include else start], ""
            return shown
        keep = max(self._overlap(string) for string in self._strings)
        shown = self._held[: len(self._held) - keep]
        self._held = self._held[len(self._held) - keep :]
        return shown

    def _overlap(self, string: str) -> int:
        """Characters at the end of what is held that a stop string begins with."""
        for length in range(min(len(string) - 1, len(self._held)), 0, -1):
            if self._held.endswith(string[:length]):
                return length
        return 0

    def finish(self) -> str:
        """What was held back, when the text ended otherwise."""
        held, self._held = self._held, ""
        return held
