"""Any image classifier at k = 0: masks on the pixels (PatchCleanser)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from patchcure.geometry import Box, Grid
from patchcure.models.base import IMAGENET_MEAN, IMAGENET_STD, SplitModel


class AnyClassifier(SplitModel):
    """A network used as it is; a cell is a pixel, and a hidden pixel has the mean colour.

    Args:
        network: maps normalised images to logits.
        image: the size of the images it reads.
        num_classes: how many logits it gives.

    >>> model = AnyClassifier(nn.Sequential(nn.Flatten(), nn.Linear(48, 2)), image=4, num_classes=2)
    >>> model(torch.rand(5, 3, 4, 4)).shape
    torch.Size([5, 2])
    """

    def __init__(
        self,
        network: nn.Module,
        image: int | tuple[int, int] | Grid,
        num_classes: int,
        mean: Sequence[float] = IMAGENET_MEAN,
        std: Sequence[float] = IMAGENET_STD,
        max_jobs: int = 32,
    ) -> None:
        grid = Grid.of(image)
        super().__init__(grid, grid, num_classes, mean, std, max_jobs)
        self.backbone = network

    def corrupted(self, box: Box) -> Box:
        return box.intersect(self.grid.box)

    def receptive(self, cells: Box) -> Box:
        return cells

    def features(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c h w"]:
        return self.normalize(images)

    def masked(
        self, prepared: Float[Tensor, "b c h w"], images: Int[Tensor, " j"], hidden: Bool[Tensor, "j cells"]
    ) -> Float[Tensor, "j classes"]:
        gone = hidden.view(-1, 1, self.grid.height, self.grid.width).to(prepared.device)
        logits: Tensor = self.backbone(torch.where(gone, 0, prepared[images]))
        return logits
