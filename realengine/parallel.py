"""Tensor parallelism: heads and MLP columns divided among ranks, partial sums added over `torch.distributed`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """This process's place among `size` ranks of the default process group (NCCL on GPUs, Gloo on the CPU)."""

    rank: int = 0
    size: int = 1

    def rows(self, weight: Tensor, parts: int | None = None) -> Tensor:
        """This rank's share of an output dimension: [out / size, in].

        With fewer `parts` (KV heads) than ranks, neighbouring ranks share a part.
        """
        if self.size == 1:
            return weight
        parts = self.size if parts is None or parts >= self.size else parts
        width = weight.shape[0] // parts
        part = self.rank * parts // self.size
        return weight[part * width : (part + 1) * width]

    def columns(self, weight: Tensor) -> Tensor:
        """This rank's share of an input dimension: [out, in / size]; the products of all ranks add up."""
        if self.size == 1:
            return weight
        width = weight.shape[1] // self.size
        return weight[:, self.rank * width : (self.rank + 1) * width]

    def vocabulary(self, head: Tensor) -> Tensor:
        """This rank's rows of the LM head, zero rows added so that all ranks have as many."""
        if self.size == 1:
            return head
        width = -(-head.shape[0] // self.size)
        share = head[self.rank * width : (self.rank + 1) * width]
        if len(share) == width:
            return share
        return torch.cat((share, share.new_zeros(width - len(share), head.shape[1])))

    def sum(self, partial: Tensor) -> Tensor:
        """The sum of every rank's `partial`, in place."""
        if self.size > 1:
            dist.all_reduce(partial)
        return partial

    def gather(self, part: Tensor) -> Tensor:
        """Every rank's last axis side by side."""
        if self.size == 1:
            return part
        parts = [torch.empty_like(part) for _ in range(self.size)]
        dist.all_gather(parts, part.contiguous())
        return torch.cat(parts, dim=-1)

    def least(self, number: int, device: torch.device) -> int:
        """The smallest `number` of all ranks."""
        if self.size == 1:
            return number
        box = torch.tensor(number, device=device)
        dist.all_reduce(box, dist.ReduceOp.MIN)
        return int(box)


SINGLE = TensorParallel()
