"""Ctrl-C while a simulation runs: stop between two events, so that what happened so far is whole."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from sim.world import Progress


@contextmanager
def between_events(
    progress: Callable[[Progress], None] | None = None,
) -> Iterator[Callable[[Progress], None]]:
    """A progress callback that passes on to `progress` and raises KeyboardInterrupt there after a Ctrl-C.

    A second Ctrl-C interrupts at once. Outside the main thread, or where interrupts are ignored (nohup), nothing
    changes.
    """
    pressed = False

    def press(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    def told(state: Progress) -> None:
        if pressed:
            raise KeyboardInterrupt
        if progress is not None:
            progress(state)

    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is not signal.default_int_handler:
        yield told
        return
    signal.signal(signal.SIGINT, press)
    try:
        yield told
    finally:
        signal.signal(signal.SIGINT, before)
