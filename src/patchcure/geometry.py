"""Integer rectangles and the grids they live on: pixels of an image, cells of a feature map."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral

Interval = tuple[int, int]
"""A half-open range of rows or columns: ``(start, stop)``."""


def pair(value: int | tuple[int, int], what: str) -> tuple[int, int]:
    """Read a positive size given as one number (both axes) or as (height, width).

    >>> pair(3, "stride")
    (3, 3)
    """
    sides = tuple(value) if isinstance(value, tuple | list) else (value, value)
    if len(sides) != 2 or not all(isinstance(side, Integral) and side > 0 for side in sides):
        raise ValueError(f"{what}: expected positive whole numbers, got {value!r}.")
    return int(sides[0]), int(sides[1])


@dataclass(frozen=True, order=True)
class Box:
    """Rows ``top <= r < bottom`` and columns ``left <= c < right``.

    >>> Box(0, 0, 2, 3).contains(Box(0, 1, 2, 2))
    True
    """

    top: int
    left: int
    bottom: int
    right: int

    def __post_init__(self) -> None:
        if self.bottom < self.top or self.right < self.left:
            raise ValueError(f"A box needs top <= bottom and left <= right, got {self}.")

    @classmethod
    def of(cls, rows: Interval, cols: Interval) -> Box:
        """The box of these rows and columns."""
        return cls(rows[0], cols[0], rows[1], cols[1])

    @property
    def rows(self) -> Interval:
        return self.top, self.bottom

    @property
    def cols(self) -> Interval:
        return self.left, self.right

    @property
    def height(self) -> int:
        return self.bottom - self.top

    @property
    def width(self) -> int:
        return self.right - self.left

    @property
    def area(self) -> int:
        return self.height * self.width

    def contains(self, other: Box) -> bool:
        """Is every cell of `other` in this box?"""
        if other.area == 0:
            return True
        inside_rows = self.top <= other.top and other.bottom <= self.bottom
        return inside_rows and self.left <= other.left and other.right <= self.right

    def intersect(self, other: Box) -> Box:
        """The cells in both boxes (an empty box when there are none)."""
        top, left = max(self.top, other.top), max(self.left, other.left)
        return Box(top, left, max(top, min(self.bottom, other.bottom)), max(left, min(self.right, other.right)))

    def hull(self, other: Box) -> Box:
        """The smallest box that contains both."""
        return Box(
            min(self.top, other.top),
            min(self.left, other.left),
            max(self.bottom, other.bottom),
            max(self.right, other.right),
        )


@dataclass(frozen=True)
class Grid:
    """The cells ``(row, column)`` of an image or of a feature map.

    >>> Grid(1, 7).cells
    7
    """

    height: int
    width: int

    def __post_init__(self) -> None:
        pair((self.height, self.width), "grid")

    @classmethod
    def of(cls, size: int | tuple[int, int] | Grid) -> Grid:
        """A grid from one side, from (height, width), or from itself."""
        return size if isinstance(size, Grid) else cls(*pair(size, "size"))

    @property
    def cells(self) -> int:
        return self.height * self.width

    @property
    def box(self) -> Box:
        return Box(0, 0, self.height, self.width)
