"""Where a request that is admitted begins: behind a cached prefix, its sibling's prompt, what was swapped out or sent by
another engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from serving.request import Request, State

if TYPE_CHECKING:
    from serving.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class Start:
    """`num_tokens` need not be computed: `shared` pages hold them, the page after those being a copy or swapped in."""

    shared: list[int]
    num_tokens: int
    copied_page: int = 0
    """Partly filled page of a sibling, to be copied before it is written to; 0: none."""
    swapped: bool = False
    """The tokens are on the host."""
    host: tuple[int, ...] = ()
    """Host pages of the cached prefix that follow `shared`."""


def find_start(scheduler: Scheduler, request: Request, *, may_wait: bool) -> Start | None:
    """Where `request` would begin now; None when it had better wait for its sibling's prompt (if it may)."""
    size = scheduler.config.page_tokens
    if request.swapped_pages is not None:
        return Start([], request.swapped_tokens, swapped=True)
    if (sibling := request.sibling) is not None and sibling.state is State.RUNNING:
        if not scheduler.seqs.prefilling[sibling.slot]:
            return _fork(scheduler, request, sibling)
        if may_wait:
            return None
    shared = scheduler.seqs.find_prefix(request, scheduler.serial(request))
    tier = scheduler.tier
    if tier is not None and not request.external_tokens:
        host = tier.find(request.keys, len(shared), (request.num_tokens - 1) // size)
        if host:
            return Start(shared, (len(shared) + len(host)) * size, host=tuple(host))
    return Start(shared, max(len(shared) * size, request.external_tokens))


def _fork(scheduler: Scheduler, request: Request, sibling: Request) -> Start:
    """Share the prompt's pages; the last token is computed again, for its logits, in a page of the fork's own."""
    num_tokens = request.prompt_tokens - 1
    full, rest = divmod(num_tokens, scheduler.config.page_tokens)
    pages = scheduler.seqs.pages_of(sibling.slot)
    return Start(pages[:full].tolist(), num_tokens, copied_page=int(pages[full]) if rest else 0)
