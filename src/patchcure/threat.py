"""What the attacker may do: which boxes of pixels, of which image, how many at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property

from patchcure.geometry import Box, Grid, Interval, pair
from patchcure.preprocess import Resize

Size = int | str | tuple[int, int]


@dataclass(frozen=True)
class PatchThreat:
    """Any content in `count` rectangles of the given shapes, anywhere on an image.

    Args:
        shapes: the (height, width) of the patches, in pixels of `image`; one that fits in another adds nothing.
        image: the pixels that the attacker sees.
        count: how many patches at once; each may have any of the shapes.
        resize: set when the attacker works on the image *before* the preprocessing resizes it for the model;
            None when the patch is put on the pixels that the model reads.

    >>> PatchThreat.square("2%", image=224).shapes
    ((32, 32),)
    """

    shapes: tuple[tuple[int, int], ...]
    image: Grid
    count: int = 1
    resize: Resize | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "shapes", _maximal([pair(shape, "patch") for shape in self.shapes]))
        for height, width in self.shapes:
            if height > self.image.height or width > self.image.width:
                raise ValueError(
                    f"A patch of {height}x{width} pixels does not fit on the image of "
                    f"{self.image.height}x{self.image.width}: choose a smaller patch."
                )
        if self.count < 1:
            raise ValueError(f"Expected at least one patch, got count={self.count}.")
        if self.resize is not None and self.resize.source != self.image:
            raise ValueError(
                f"The threat lives on an image of {self.image} but its resize reads {self.resize.source}: "
                "give the size of the image before the resize."
            )

    @classmethod
    def square(cls, size: int | str, image: int | tuple[int, int] | Grid, count: int = 1) -> PatchThreat:
        """One square of `size` pixels a side (``32``), or of a share of the image (``"2%"``, side rounded up)."""
        grid = Grid.of(image)
        if isinstance(size, str):
            pixels = math.ceil(_pixels(size, grid))
            size = math.isqrt(pixels - 1) + 1
        return cls((pair(size, "patch"),), grid, count)

    @classmethod
    def rectangles(
        cls, shapes: Iterable[tuple[int, int]], image: int | tuple[int, int] | Grid, count: int = 1
    ) -> PatchThreat:
        """Rectangles of any of these (height, width)."""
        return cls(tuple(shapes), Grid.of(image), count)

    @classmethod
    def area(cls, share: str, image: int | tuple[int, int] | Grid, count: int = 1) -> PatchThreat:
        """Any rectangle, of any aspect, of at most this share of the pixels (``"1%"``).

        >>> len(PatchThreat.area("1%", image=224).shapes)
        41
        """
        grid = Grid.of(image)
        pixels = math.floor(_pixels(share, grid))
        if pixels < 1:
            raise ValueError(f"{share} of {grid.height}x{grid.width} pixels is less than one pixel: choose more.")
        shapes = [(height, min(grid.width, pixels // height)) for height in range(1, min(grid.height, pixels) + 1)]
        return cls(tuple(shapes), grid, count)

    @classmethod
    def of(cls, patch: Size | PatchThreat, image: Grid, count: int = 1) -> PatchThreat:
        """Read the patch of an option: ``32``, ``"2%"``, ``(20, 40)``, or a threat as it is."""
        if isinstance(patch, PatchThreat):
            return patch
        if isinstance(patch, tuple):
            return cls.rectangles([patch], image, count)
        return cls.square(patch, image, count)

    def before(self, resize: Resize) -> PatchThreat:
        """The same patches, put on the image before this resize."""
        return replace(self, resize=resize)

    @property
    def target(self) -> Grid:
        """The pixels that the model reads."""
        return self.image if self.resize is None else self.resize.target

    def with_squares(self, side: int) -> PatchThreat:
        """The same attacker with squares of `side` pixels instead of these shapes."""
        return replace(self, shapes=((side, side),))

    def on_features(self, grid: Grid, corrupted: Callable[[Box], Box]) -> FeatureThreat:
        """The paper's Map: the boxes of cells that the attacker owns, one for every location of every shape.

        `corrupted` tells which cells a box of the model's pixels reaches. Rows and columns are mapped apart: every
        model's receptive field is a product of a row interval and a column interval.
        """
        cells = grid.box

        def reach(box: Box) -> Box:
            touched = box if self.resize is None else self.resize.touched(box)
            return corrupted(touched).intersect(cells) if touched.area else Box(0, 0, 0, 0)

        footprints = []
        for height, width in self.shapes:
            rows = [reach(Box(a, 0, a + height, self.image.width)).rows for a in range(self.image.height - height + 1)]
            cols = [reach(Box(0, b, self.image.height, b + width)).cols for b in range(self.image.width - width + 1)]
            footprints.append(Footprint(tuple(rows), tuple(cols)))
        return FeatureThreat(grid, tuple(footprints), self.count)

    def describe(self) -> str:
        """One line for people.

        >>> PatchThreat.square(32, image=224).describe()
        'one patch of 32x32 pixels anywhere on 224x224'
        """
        if len(self.shapes) <= 3:
            shapes = " or ".join(f"{height}x{width}" for height, width in self.shapes) + " pixels"
        else:
            shapes = f"any of {len(self.shapes)} shapes of at most {max(h * w for h, w in self.shapes)} pixels"
        count = "one patch" if self.count == 1 else f"{self.count} patches"
        where = "" if self.resize is None else f", before the resize to {self.target.height}x{self.target.width}"
        return f"{count} of {shapes} anywhere on {self.image.height}x{self.image.width}{where}"


@dataclass(frozen=True)
class Footprint:
    """One shape's reach: the rows of cells for each vertical placement, the columns for each horizontal one."""

    rows: tuple[Interval, ...]
    cols: tuple[Interval, ...]

    @cached_property
    def extent(self) -> tuple[int, int]:
        """The most rows and columns that one placement corrupts."""
        return max(b - a for a, b in self.rows), max(b - a for a, b in self.cols)


@dataclass(frozen=True)
class FeatureThreat:
    """The attacker as seen on the feature map: `count` boxes, each a footprint at one of its locations."""

    grid: Grid
    footprints: tuple[Footprint, ...] = field(repr=False)
    count: int = 1

    def locations(self) -> Iterable[Box]:
        """Every corrupted box of cells, for every shape and location (repeats included)."""
        for footprint in self.footprints:
            for rows in footprint.rows:
                for cols in footprint.cols:
                    yield Box.of(rows, cols)


def _maximal(shapes: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Drop every shape that fits inside another."""
    if not shapes:
        raise ValueError("A threat needs at least one patch shape, got none.")
    unique = sorted(set(shapes))
    return tuple((h, w) for h, w in unique if not any((h, w) != (H, W) and h <= H and w <= W for H, W in unique))


def _pixels(share: str, grid: Grid) -> Fraction:
    """The number of pixels in ``"2%"`` of an image, exactly."""
    try:
        percent = Fraction(share.strip().removesuffix("%")) if share.strip().endswith("%") else Fraction(0)
    except (ValueError, ZeroDivisionError):
        percent = Fraction(0)
    if not 0 < percent <= 100:
        raise ValueError(f'A share of the image looks like "2%", got {share!r}: use 0 < percent <= 100.')
    return percent / 100 * grid.cells
