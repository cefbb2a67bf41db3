"""Batch policies: what one step contains. Built in: `chunked` (vLLM V1), `adaptive`, `continuous`, `static`.

A policy of your own is a class with `schedule(step)`; `--policy my_module:MyPolicy` loads it. See `load_policy`.
"""

from __future__ import annotations

from serving.policies.adaptive import Adaptive
from serving.policies.base import CHUNKING, BatchPolicy, load_policy, policy_names
from serving.policies.chunked import Chunked
from serving.policies.continuous import Continuous
from serving.policies.static import Static

__all__ = [
    "CHUNKING",
    "Adaptive",
    "BatchPolicy",
    "Chunked",
    "Continuous",
    "Static",
    "load_policy",
    "policy_names",
]
