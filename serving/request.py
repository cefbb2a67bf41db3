"""A request as the scheduler sees it: lengths, prefix identity and state. No text, no clock, no tensors."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from hashlib import sha256
from typing import Protocol

import numpy as np
import numpy.typing as npt


class State(IntEnum):
    """Life of a request: WAITING → RUNNING ⇄ PREEMPTED → FINISHED, or REJECTED before it ever waits."""

    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2
    FINISHED = 3
    REJECTED = 4


class PageKeys(Protocol):
    """Prefix identity: `keys[i]` names page i *and everything before it*; equal keys mean equal tokens."""

    def __len__(self) -> int: ...
    def __getitem__(self, page: int, /) -> Hashable: ...


class TokenKeys:
    """Chained page hashes of real token ids, growing as tokens are appended.

    Key i = SHA-256(key i−1, tokens of page i, `salt`), so that equal pages under different parents differ.
    """

    def __init__(self, page_tokens: int, tokens: Sequence[int] = (), salt: str = "") -> None:
        self._page_tokens = page_tokens
        self._salt = salt.encode()
        self._keys: list[bytes] = []
        self._tail: list[int] = []
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append token ids; every page they complete gets its key."""
        tail, size = self._tail, self._page_tokens
        tail.extend(tokens)
        if len(tail) < size:
            return
        full = len(tail) // size * size
        pages = np.asarray(tail[:full], dtype=np.int64).reshape(-1, size)
        parent = self._keys[-1] if self._keys else self._salt
        for page in pages:
            parent = sha256(parent + page.tobytes()).digest()
            self._keys.append(parent)
        del tail[:full]

    def copy(self) -> TokenKeys:
        """The same, to be grown apart."""
        other = TokenKeys(self._page_tokens)
        other._salt, other._keys, other._tail = self._salt, self._keys.copy(), self._tail.copy()
        return other

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, page: int, /) -> bytes:
        return self._keys[page]


@dataclass(slots=True, eq=False)
class Request:
    """One generation request.

    `keys` cover the pages that other requests may share. Pages past `len(keys)` are private: only this request can
    find them again, after a preemption.
    """

    id: Hashable
    prompt_tokens: int
    max_tokens: int
    """Most tokens to generate (at least 1)."""
    arrival_s: float = 0.0
    priority: int = 0
    """Lower is served first, as in vLLM."""
    deadline_s: float = math.inf
    """When the first token is due; read by the `edf` queue."""
    predicted_tokens: int | None = None
    """Expected output length, read by the `sjf` queue; `max_tokens` where unknown."""
    keys: PageKeys | Sequence[Hashable] = ()
    tenant: int = 0
    weight: float = 1.0
    """Share of the engine that the tenant is owed relative to others, read by the `fair` queue."""
    session: Hashable | None = None
    """The conversation that this is a turn of, read by the `session` eviction order."""
    turn: int = 0

    state: State = State.WAITING
    slot: int = -1
    """Row in the scheduler's arrays while running."""
    num_tokens: int = -1
    """Prompt and generated tokens known so far. While running, the scheduler's arrays are ahead of this field."""
    cached_tokens: int = -1
    """Prefix-cache hit at the first admission, in tokens; -1 until then."""
    preemptions: int = 0
    reason: str = ""
    """Finish reason ("length", "stop", "abort") or why it was rejected."""
    drafts: int = 0
    """Draft tokens proposed for the next step."""
    stale_tokens: int = 0
    """Scheduled tokens of steps still in flight when the request was preempted (asynchronous scheduling)."""
    private_pages: npt.NDArray[np.int32] | None = field(default=None, repr=False)
    """Pages held before the last preemption, to find private ones again."""
    sibling: Request | None = field(default=None, repr=False)
    """Running request with the very same prompt, whose pages this one shares when it is first admitted."""
    swapped_pages: npt.NDArray[np.int32] | None = field(default=None, repr=False)
    """Host pages that hold its KV while it waits after a preemption by swapping."""
    swapped_tokens: int = 0
    external_tokens: int = 0
    """Tokens whose KV another engine computed and sent here: they are not computed at the next admission."""

    def __post_init__(self) -> None:
        if self.num_tokens < 0:
            self.num_tokens = self.prompt_tokens

    @property
    def output_tokens(self) -> int:
        """Tokens generated so far, as of the last time the request left or entered the running set."""
        return self.num_tokens - self.prompt_tokens

    @property
    def done(self) -> bool:
        """Finished or rejected: it will never run again."""
        return self.state >= State.FINISHED
