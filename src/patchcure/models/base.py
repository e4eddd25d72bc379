"""The contract of a model that can be split: features once, logits under many masks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from patchcure.geometry import Box, Grid

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

LINEAR_JOBS = 8192
"""`max_jobs` where the LRF part is only a pooling and a linear layer."""


LOCAL_CELLS = 4096
"""On grids with more cells than this, a single cell says nothing and asking each one would take forever."""


class SplitModel(nn.Module, ABC):
    """A classifier cut at layer k: a part with a small receptive field (SRF) and a part with a large one (LRF).

    What every model promises, and every proof uses:

    * `features` of a cell depend only on the pixels in that cell's receptive field, so a patch changes nothing
      outside ``corrupted(patch)``; and rows and columns are mapped apart from each other.
    * `logits` never lets the value of a hidden cell into its arithmetic.

    Args:
        image: the pixels that the model reads.
        grid: the cells of its feature map, where masks live.
        num_classes: how many logits it gives.
        mean, std: the colours' mean and standard deviation; normalisation is inside the model.
        max_jobs: how many (image, mask) jobs the LRF part computes at once; bounds the memory.
    """

    backbone: nn.Module
    """The network itself; its parameters keep the names of their library."""
    mean: Tensor
    std: Tensor
    crop: float = 0.875
    """The share of a resized photograph's side that the model is evaluated on (timm's crop_pct)."""

    def __init__(
        self,
        image: Grid,
        grid: Grid,
        num_classes: int,
        mean: Sequence[float] = IMAGENET_MEAN,
        std: Sequence[float] = IMAGENET_STD,
        max_jobs: int = 64,
    ) -> None:
        super().__init__()
        if max_jobs < 1:
            raise ValueError(f"max_jobs: expected at least 1, got {max_jobs}.")
        self.image, self.grid, self.num_classes, self.max_jobs = image, grid, num_classes, max_jobs
        self.register_buffer("mean", torch.tensor(mean, device="cpu").view(-1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std, device="cpu").view(-1, 1, 1), persistent=False)

    @abstractmethod
    def features(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b ..."]:
        """The SRF part, called once: images in [0, 1] to one entry per cell."""

    @abstractmethod
    def masked(
        self, prepared: Any, images: Int[Tensor, " j"], hidden: Bool[Tensor, "j cells"]
    ) -> Float[Tensor, "j classes"]:
        """The LRF part for a few jobs of the same length (see `lengths`), each with a visible cell."""

    def prepare(self, features: Float[Tensor, "b ..."], jobs: int) -> Any:
        """What all of an image's jobs share, one entry per cell; `masked` reads it. By default the features."""
        return features

    @abstractmethod
    def corrupted(self, box: Box) -> Box:
        """The paper's Map, exact: the cells that read some pixel of `box`."""

    @abstractmethod
    def receptive(self, cells: Box) -> Box:
        """The pixels that these cells read."""

    def lengths(self, hidden: Bool[Tensor, "j cells"]) -> Int[Tensor, " j"]:
        """How much of each job is visible, in the unit of the model's work; jobs of equal length go together."""
        return (~hidden).sum(1)

    def at_once(self, length: int) -> int:
        """How many jobs of this length `masked` should take at once: at most `max_jobs`."""
        return self.max_jobs

    def logits(
        self, features: Float[Tensor, "b ..."], images: Int[Tensor, " j"], hidden: Bool[Tensor, "j h w"]
    ) -> Float[Tensor, "j classes"]:
        """One row of logits per job; job j is image ``images[j]`` with the cells ``hidden[j]`` taken away.

        This is the only door to the LRF part.
        """
        prepared = self.prepare(features, len(images))
        flat = hidden.flatten(1)
        visible = self.lengths(flat)
        if bool((visible == 0).any()):
            raise ValueError("A job hides every cell, so its prediction would mean nothing: use smaller masks.")
        order = visible.argsort(stable=True)
        rows = []
        for group in order.split(_runs(visible[order])):
            parts = -(-len(group) // self.at_once(int(visible[group[0]])))
            rows += [self.masked(prepared, images[part], flat[part]) for part in group.tensor_split(parts)]
        return torch.cat(rows)[order.argsort()]

    def under(self, images: Float[Tensor, "b c h w"], hidden: Bool[Tensor, "b h2 w2"]) -> Float[Tensor, "b classes"]:
        """The logits of each image with cells of its own hidden: what training needs, one mask for each image."""
        return self.logits(self.features(images), torch.arange(len(images), device=images.device), hidden)

    def by_cell(self, features: Float[Tensor, "b ..."]) -> Float[Tensor, "b cells d"]:
        """The features of each cell, in the order of the flattened grid; a model that keeps them otherwise says how."""
        if features.shape[1] != self.grid.cells:
            raise ValueError(
                f"Expected features with one entry for each of {self.grid.cells} cells, got {tuple(features.shape)}: "
                f"{type(self).__name__} must override by_cell."
            )
        return features.reshape(len(features), self.grid.cells, -1)

    def local_logits(self, features: Float[Tensor, "b ..."]) -> Float[Tensor, "b cells classes"]:
        """What each cell alone says: its logits when all other cells are hidden.

        A patch changes only the rows of the cells that it corrupts, because `logits` never sees a hidden cell. Models
        whose logits are sums over cells (k = L) answer without the jobs.
        """
        cells = self.grid.cells
        if cells > LOCAL_CELLS:
            raise ValueError(
                f"Expected a grid of at most {LOCAL_CELLS} cells for an operation that asks every cell alone, got "
                f"{self.grid.height}x{self.grid.width}: split the model at a later layer or use larger windows."
            )
        device = job_device(features)
        images = torch.arange(len(features), device=device).repeat_interleave(cells)
        others = ~torch.eye(cells, dtype=torch.bool, device=device)
        hidden = others.view(cells, self.grid.height, self.grid.width).repeat(len(features), 1, 1)
        return self.logits(features, images, hidden).view(len(features), cells, self.num_classes)

    def forward(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b classes"]:
        """The undefended model: the same network with no cell hidden."""
        return self.unmasked(self.features(images))

    def unmasked(self, features: Float[Tensor, "b ..."]) -> Float[Tensor, "b classes"]:
        """The logits of all images with nothing hidden."""
        device = job_device(features)
        nothing = torch.zeros(len(features), self.grid.height, self.grid.width, dtype=torch.bool, device=device)
        return self.logits(features, torch.arange(len(features), device=device), nothing)

    def plain(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b classes"]:
        """The network that this model was made from, as its library runs it: what a defense is compared with."""
        logits: Tensor = self.backbone(self.normalize(images))
        return logits

    def normalize(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c h w"]:
        """Subtract the mean colour and divide by the standard deviation."""
        return (images - self.mean.to(images)) / self.std.to(images)


def job_device(features: Tensor) -> torch.device:
    """Where jobs are described: beside the features, but in real memory even if those are on the meta device."""
    return torch.device("cpu") if features.is_meta else features.device


def _runs(values: Int[Tensor, " j"]) -> list[int]:
    """The lengths of the runs of equal values."""
    lengths: list[int] = torch.unique_consecutive(values, return_counts=True)[1].tolist()
    return lengths


def visible_sum(
    values: Float[Tensor, "b cells d"], images: Int[Tensor, " j"], hidden: Bool[Tensor, "j h w"]
) -> Float[Tensor, "j d"]:
    """For each job, the sum of its image's values over the visible cells; there is no loop over jobs.

    A hidden value cannot leak: it is finite (others are replaced first), finite times zero is exactly zero, and adding
    zero changes no sum. A visible value that is not finite makes the sum NaN.

    >>> values = torch.tensor([[[1.0], [2.0], [float("nan")]]])
    >>> visible_sum(values, torch.tensor([0, 0]), torch.tensor([[[False, False, True]], [[False, True, False]]]))
    tensor([[3.],
            [nan]])
    """
    usable = values.isfinite()
    finite = torch.where(usable, values, 0)
    if (each := _same_masks(images, hidden, len(values))) is not None:
        sums = _sums(finite, hidden[:each]).flatten(0, 1)
    else:
        order = images.argsort(stable=True)
        parts = order.split(torch.bincount(images, minlength=len(values)).tolist())
        found = [_sums(finite[i : i + 1], hidden[part])[0] for i, part in enumerate(parts) if len(part)]
        sums = torch.cat(found)[order.argsort()]
    broken = ~usable.all(-1)
    if sums.is_meta or not bool(broken.any()):
        return sums
    poisoned = (broken[images] & ~hidden.flatten(1)).any(1, keepdim=True)
    return torch.where(poisoned, torch.nan, sums)


def _same_masks(images: Int[Tensor, " j"], hidden: Bool[Tensor, "j h w"], batch: int) -> int | None:
    """If the jobs are the same masks for one image after the other: how many."""
    each = len(images) // batch
    if each * batch != len(images) or each == 0:
        return None
    same = torch.arange(batch, device=images.device).repeat_interleave(each)
    if not torch.equal(images, same) or not bool((hidden.view(batch, each, -1) == hidden[:each].flatten(1)).all()):
        return None
    return each


def _sums(values: Float[Tensor, "b cells d"], hidden: Bool[Tensor, "j h w"]) -> Float[Tensor, "b j d"]:
    """Sums over the visible cells of each image, under each mask.

    Masks are boxes, so the rows of all jobs show few distinct patterns. Where that saves work, each pattern is summed
    once in each row (a small table), and a job adds up its rows' entries.
    """
    jobs, height, width = hidden.shape
    if jobs * width > 4 * height:
        patterns, which = torch.unique(hidden.flatten(0, 1), dim=0, return_inverse=True)
        if 4 * (len(patterns) * width + jobs) < jobs * width:
            table = torch.matmul((~patterns).to(values), values.unflatten(1, (height, width))).flatten(0, 2)
            start = torch.arange(len(values) * height, device=which.device).view(-1, 1, height) * len(patterns)
            entry = (start + which.view(jobs, height)).flatten(0, 1).to(values.device)
            return torch.nn.functional.embedding_bag(entry, table, mode="sum").view(len(values), jobs, -1)
    return (~hidden.flatten(1)).to(values) @ values
