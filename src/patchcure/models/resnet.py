"""BagNets and their hybrids as models that can be split, with a traced receptive field."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from patchcure.geometry import Box, Grid, Interval
from patchcure.models.bagnet import BagResNet
from patchcure.models.base import IMAGENET_MEAN, IMAGENET_STD, LINEAR_JOBS, SplitModel, visible_sum
from patchcure.models.folding import Fingerprint, fold
from patchcure.models.vit import Flavour


@dataclass(frozen=True)
class Receptive:
    """Along one axis, cell i reads the pixels from start + i * jump to start + i * jump + size."""

    cells: int
    start: int = 0
    jump: int = 1
    size: int = 1

    def through(self, conv: nn.Conv2d, axis: int) -> Receptive:
        """The receptive field after a convolution."""
        kernel, stride = conv.kernel_size[axis], conv.stride[axis]
        padding = conv.padding[axis] if not isinstance(conv.padding, str) else 0
        cells = (self.cells + 2 * padding - kernel) // stride + 1
        if cells < 1:
            raise ValueError("The image is too small for this network: use larger images or a smaller receptive field.")
        start = self.start - padding * self.jump
        return Receptive(cells, start, self.jump * stride, self.size + (kernel - 1) * self.jump)

    def touched(self, pixels: Interval) -> Interval:
        """The cells that read some of these pixels."""
        first = max(0, (pixels[0] - self.start - self.size) // self.jump + 1)
        stop = min(self.cells, -((self.start - pixels[1]) // self.jump))
        return (first, stop) if first < stop else (0, 0)

    def read(self, cells: Interval) -> Interval:
        """The pixels that these cells read (before clipping to the image)."""
        return self.start + cells[0] * self.jump, self.start + (cells[1] - 1) * self.jump + self.size


class Cells(NamedTuple):
    """What each cell holds: its channels, or already its logits."""

    values: Float[Tensor, "b cells d"]
    classified: bool


class SplitResNet(SplitModel):
    """A BagNet (k = all layers) or a hybrid with a ResNet.

    At k = all layers a job's logits are the mean over the visible cells of their logits (the sum in the published
    flavour). In a hybrid the hidden cells are zero and the rest of the network follows.

    Args:
        network: see `BagResNet`.
        image: the size of the images.
        k: the layer of the split, counted in convolutions on the main path; at the end of the BagNet part, or before.
    """

    backbone: BagResNet

    def __init__(
        self,
        network: BagResNet,
        image: int | tuple[int, int] | Grid,
        k: int,
        flavour: Flavour = "ours",
        mean: Sequence[float] = IMAGENET_MEAN,
        std: Sequence[float] = IMAGENET_STD,
        max_jobs: int = 32,
    ) -> None:
        pixels = Grid.of(image)
        rows, cols = Receptive(pixels.height), Receptive(pixels.width)
        blocks = network.design.blocks_before(k)
        if blocks > network.bag_blocks:
            raise ValueError(
                f"k: only {network.bag_blocks} blocks belong to the BagNet part, but k = {k} is after {blocks}."
            )
        for conv in network.srf_convolutions(blocks):
            rows, cols = rows.through(conv, 0), cols.through(conv, 1)
        whole = blocks == len(network.blocks)
        super().__init__(
            pixels, Grid(rows.cells, cols.cells), network.fc.out_features, mean, std, LINEAR_JOBS if whole else max_jobs
        )
        self.backbone = network
        self.rows, self.cols, self.k, self.blocks, self.whole = rows, cols, k, blocks, whole
        self._folded: tuple[Fingerprint, BagResNet] | None = None
        self.flavour: Flavour = flavour

    def corrupted(self, box: Box) -> Box:
        return Box.of(self.rows.touched(box.rows), self.cols.touched(box.cols))

    def receptive(self, cells: Box) -> Box:
        return Box.of(self.rows.read(cells.rows), self.cols.read(cells.cols)).intersect(self.image.box)

    @property
    def network(self) -> BagResNet:
        """The backbone; in inference its folded copy, made anew when a weight has changed."""
        if self.training:
            self._folded = None
        if self.training or torch.is_grad_enabled():
            return self.backbone
        now = Fingerprint(self.backbone)
        if self._folded is None or self._folded[0] != now:
            self._folded = (now, fold(self.backbone))
        return self._folded[1]

    def features(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b ..."]:
        """The BagNet part: a map of channels, or at k = all layers the list of cells with their channels."""
        pixels = self.normalize(images).contiguous(memory_format=torch.channels_last)
        x = self.network.srf(pixels, self.blocks)
        return x.flatten(2).transpose(1, 2) if self.whole else x

    def by_cell(self, features: Float[Tensor, "b ..."]) -> Float[Tensor, "b cells d"]:
        return features if self.whole else features.flatten(2).transpose(1, 2)

    def local_logits(self, features: Float[Tensor, "b ..."]) -> Float[Tensor, "b cells classes"]:
        if not self.whole:
            return super().local_logits(features)
        logits: Tensor = self.backbone.fc(features)
        return logits

    def prepare(self, features: Float[Tensor, "b ..."], jobs: int) -> Float[Tensor, "b ..."] | Cells:
        """At k = all layers: with more jobs than cells it is cheaper to classify the cells."""
        if not self.whole:
            return features
        classify = jobs > features.shape[0] * features.shape[1]
        return Cells(self.local_logits(features) if classify else features, classify)

    def masked(
        self, prepared: Float[Tensor, "b ..."] | Cells, images: Int[Tensor, " j"], hidden: Bool[Tensor, "j cells"]
    ) -> Float[Tensor, "j classes"]:
        boxes = hidden.view(-1, self.grid.height, self.grid.width)
        if not isinstance(prepared, Cells):
            return self.network.lrf(torch.where(boxes[:, None].to(prepared.device), 0, prepared[images]), self.blocks)
        count = (~hidden).sum(1, keepdim=True).to(prepared.values)
        mean = visible_sum(prepared.values, images, boxes) / count
        logits: Tensor = mean if prepared.classified else self.backbone.fc(mean)
        return logits * count if self.flavour == "published" else logits
