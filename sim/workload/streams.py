"""The random generators of a tenant."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Streams:
    """One generator for each purpose, so that one option does not shift another's draws."""

    rows: np.random.Generator
    order: np.random.Generator
    arrivals: np.random.Generator
    turns: np.random.Generator
    think: np.random.Generator

    @classmethod
    def of(cls, seed: int, tenant: str) -> Streams:
        """Depends on the seed and the tenant's name alone: adding a tenant changes nobody else's draws."""
        digest = hashlib.sha256(tenant.encode()).digest()
        key = tuple(int.from_bytes(digest[i : i + 4], "little") for i in range(0, 16, 4))
        root = np.random.SeedSequence(seed, spawn_key=key)
        return cls(*(np.random.default_rng(child) for child in root.spawn(5)))
