"""A small convolutional network through which interval bounds stay tight."""

from __future__ import annotations

from torch import nn

from patchcure.geometry import Grid


def small_cnn(
    image: int | tuple[int, int] | Grid, num_classes: int, in_chans: int = 3, width: int = 16
) -> nn.Sequential:
    """Two convolutions of 4x4 and two linear layers, for images of about 28 to 32 pixels.

    Depth and width loosen interval bounds, so the networks that are trained with them are small.

    >>> import torch
    >>> small_cnn(28, num_classes=10, in_chans=1)(torch.rand(2, 1, 28, 28)).shape
    torch.Size([2, 10])
    """
    grid = Grid.of(image)
    height, width_ = ((side - 4) // 2 + 1 - 3 for side in (grid.height, grid.width))
    if height < 1 or width_ < 1:
        raise ValueError(f"This network reads images of at least 10x10 pixels, got {grid.height}x{grid.width}.")
    return nn.Sequential(
        nn.Conv2d(in_chans, width, 4, stride=2),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(2 * width * height * width_, 100),
        nn.ReLU(),
        nn.Linear(100, num_classes),
    )
