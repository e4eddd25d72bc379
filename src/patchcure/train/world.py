"""The processes that train together, as torchrun starts them, and the device of each."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from patchcure._device import usable
from patchcure.shards import Shard

PATIENCE = timedelta(hours=2)
"""How long a process waits for the others: one may have the slower half of the held-out images."""


def place(device: str | None) -> torch.device:
    """Where this process computes: the device that is asked for, or CUDA if there is one; each its own GPU."""
    asked = device or ("cuda" if torch.cuda.is_available() else "cpu")
    where = usable(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if asked == "cuda" else asked)
    if where.type == "cuda":
        torch.cuda.set_device(where)
    return where


@dataclass(frozen=True)
class World:
    """All the processes of a run: which one this is, how many there are, and where this one computes."""

    rank: int
    size: int
    device: torch.device

    @classmethod
    def join(cls, device: torch.device) -> World:
        """Meet the others, if there are any."""
        here = Shard.here()
        if here.world > 1 and not dist.is_initialized():
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=PATIENCE)
        return cls(here.rank, here.world, device)

    def share(self, batch: int) -> range:
        """Which images of a step are this process's."""
        if batch % self.size:
            raise ValueError(f"optimiser.batch: {batch} images cannot be dealt to {self.size} processes.")
        each = batch // self.size
        return range(self.rank * each, (self.rank + 1) * each)

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its average over all processes."""
        if self.size == 1:
            return
        flat = torch.cat([tensor.detach().flatten() for tensor in tensors])
        dist.all_reduce(flat)
        parts = (flat / self.size).split([tensor.numel() for tensor in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.detach().copy_(part.view_as(tensor))

    def total(self, *counts: int) -> list[int]:
        """The sums of these numbers over all processes."""
        sums = torch.tensor(counts, device=self.device)
        if self.size > 1:
            dist.all_reduce(sums)
        found: list[int] = sums.tolist()
        return found

    def wait(self) -> None:
        """Until all processes are here."""
        self.total(0)
