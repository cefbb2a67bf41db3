"""The progress bar of a run, on standard error: time, requests done, speed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sim.world import Progress


@contextmanager
def progress_bar(
    *, silent: bool = False, doing: str = "Simulating", clock: str = "simulated"
) -> Iterator[Callable[[Progress], None] | None]:
    """A callback that draws, or None where nobody would see it. `doing` and `clock` are its words."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    if silent or not console.is_terminal:
        yield None
        return
    bar = Bar(
        TextColumn(doing),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[clock]}"),
        TextColumn("{task.fields[speed]}"),
        console=console,
        transient=True,
    )
    with bar:
        task = bar.add_task("run", total=None, clock="", speed="")

        def told(state: Progress) -> None:
            speed = state.done / state.wall_s if state.wall_s > 0 else 0.0
            bar.update(
                task,
                completed=state.done,
                total=state.total,
                clock=f"{state.sim_s:,.0f} s {clock}",
                speed=f"{speed:,.0f} requests/s",
            )

        yield told
