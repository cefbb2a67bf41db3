"""One torch thread: two of them wait for each other whenever a neighbour runs, and tests run side by side."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
