"""The resize between the picture that an attacker sees and the pixels that a model reads."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from patchcure.geometry import Box, Grid, Interval

SUPPORT = {"bilinear": 1.0, "bicubic": 2.0}
"""Half the width of each filter, in pixels of the coarser image."""

ROUNDING = 1e-3
"""Filters round their ends in floating point; we count a pixel that this much more would touch."""


@dataclass(frozen=True)
class Resize:
    """Resize `source` to `scaled` with an antialiased filter, then keep the central `target` pixels.

    >>> resize = Resize(Grid(32, 32), Grid(224, 224))
    >>> resize(torch.rand(1, 3, 32, 32)).shape
    torch.Size([1, 3, 224, 224])
    >>> resize.touched(Box(10, 10, 15, 15)).height  # not 35: the filter reads beyond the pixel
    57
    """

    source: Grid
    target: Grid
    scaled: Grid | None = None
    interpolation: str = "bicubic"

    def __post_init__(self) -> None:
        if self.interpolation not in SUPPORT:
            raise ValueError(f"interpolation: expected one of {sorted(SUPPORT)}, got {self.interpolation!r}.")
        scaled = self.scaled or self.target
        if scaled.height < self.target.height or scaled.width < self.target.width:
            raise ValueError(f"The crop {self.target} does not fit in the resized image {scaled}.")
        object.__setattr__(self, "scaled", scaled)

    @property
    def _crop(self) -> Box:
        scaled = self.scaled or self.target
        top = round((scaled.height - self.target.height) / 2)
        left = round((scaled.width - self.target.width) / 2)
        return Box(top, left, top + self.target.height, left + self.target.width)

    def __call__(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c H W"]:
        """Resize a batch; values stay in [0, 1]."""
        if tuple(images.shape[-2:]) != (self.source.height, self.source.width):
            raise ValueError(f"Expected images of {self.source}, got a batch of shape {tuple(images.shape)}.")
        scaled = self.scaled or self.target
        crop = self._crop
        resized = torch.nn.functional.interpolate(
            images, (scaled.height, scaled.width), mode=self.interpolation, align_corners=False, antialias=True
        )
        return resized[..., crop.top : crop.bottom, crop.left : crop.right].clamp(0, 1)

    def touched(self, box: Box) -> Box:
        """The target pixels whose filter reads some source pixel of `box` (empty if cropped away)."""
        scaled, crop = self.scaled or self.target, self._crop
        rows = self._touched(box.rows, self.source.height, scaled.height, crop.rows)
        cols = self._touched(box.cols, self.source.width, scaled.width, crop.cols)
        return Box.of(rows, cols)

    def _touched(self, span: Interval, source: int, scaled: int, crop: Interval) -> Interval:
        scale = source / scaled
        support = SUPPORT[self.interpolation] * max(scale, 1.0)
        hit = []
        for index in range(*crop):
            center = (index + 0.5) * scale
            first = max(math.floor(center - support + 0.5 - ROUNDING), 0)
            stop = min(math.floor(center + support + 0.5 + ROUNDING), source)
            if first < span[1] and span[0] < stop:
                hit.append(index - crop[0])
        return (hit[0], hit[-1] + 1) if hit else (0, 0)
