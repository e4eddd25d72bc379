"""From the picture that is stored, or that an attacker sees, to the pixels that a model reads."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from patchcure.geometry import Box, Grid, Interval

if TYPE_CHECKING:
    from PIL import Image

SUPPORT = {"bilinear": 1.0, "bicubic": 2.0}
"""Half the width of each filter, in pixels of the coarser image."""

ROUNDING = 1e-3
"""Filters round their ends in floating point; we count a pixel that this much more would touch."""

THUMBNAIL = 64
"""Images of at most this side are no photographs: nothing is cropped away."""

BICUBIC = 3
"""Pillow's number for it."""


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


@dataclass(frozen=True)
class Preprocess:
    """From a stored image to the pixels that a model reads, as timm evaluates.

    A photograph's short side is resized (bicubic) to the model's side over `crop`, and the centre is kept. An image of
    at most 64 pixels a side (CIFAR, SVHN, digits) is resized whole.

    Args:
        target: the pixels that the model reads.
        channels: 3, or 1 for grey.
        crop: the share of the resized side that is kept.
        resize: where a threat is put on the images before a resize: that resize, and no other image size.
    """

    target: Grid
    channels: int = 3
    crop: float = 0.875
    resize: Resize | None = None

    def __post_init__(self) -> None:
        if self.channels not in (1, 3):
            raise ValueError(f"Stored images have 3 channels or 1, but the model reads {self.channels}.")
        if not 0 < self.crop <= 1:
            raise ValueError(f"crop: expected 0 < crop <= 1, got {self.crop}.")

    def __call__(self, image: Image.Image) -> Float[Tensor, "c h w"]:
        """The model's pixels, in [0, 1]."""
        if self.resize is None:
            return self._tensor(self._fitted(image))
        source = self.resize.source
        if image.size != (source.width, source.height):
            raise ValueError(
                f"The threat is on images of {source.height}x{source.width} before their resize, but this one has "
                f"{image.height}x{image.width} pixels."
            )
        return self.resize(self._tensor(image)[None])[0]

    def _tensor(self, image: Image.Image) -> Float[Tensor, "c h w"]:
        mode = "RGB" if self.channels == 3 else "L"
        pixels = torch.frombuffer(bytearray(image.convert(mode).tobytes()), dtype=torch.uint8)
        return pixels.view(image.height, image.width, self.channels).permute(2, 0, 1).float() / 255

    def _fitted(self, image: Image.Image) -> Image.Image:
        height, width = self.target.height, self.target.width
        if max(image.size) <= THUMBNAIL:
            return image.resize((width, height), BICUBIC)
        tall, wide = math.floor(height / self.crop), math.floor(width / self.crop)
        if image.height * wide <= image.width * tall:
            scaled = (max(wide, tall * image.width // image.height), tall)
        else:
            scaled = (wide, max(tall, wide * image.height // image.width))
        left, top = round((scaled[0] - width) / 2), round((scaled[1] - height) / 2)
        return image.resize(scaled, BICUBIC).crop((left, top, left + width, top + height))
