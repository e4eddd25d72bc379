"""Ablations: masks that hide all but one band or block of cells, for operations that vote."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from patchcure.geometry import Box, Grid, Interval
from patchcure.masks import Mask, MaskSet
from patchcure.threat import FeatureThreat

Kept = tuple[Interval, ...]
"""What is kept of one axis: one interval, or two where it goes over the edge and on from the other side."""


@dataclass(frozen=True)
class Ablation:
    """Keep one box of cells, and hide the rest: a band (only one side given) or a block (both sides).

    An ablation is a mask like any other. A patch leaves it alone exactly when it hides every corrupted cell, so the
    ablations that a placement *touches* are those that do not cover it: `Coverage` counts them by intersection of the
    real cells, wrapped pieces included, for any number of patches.

    Args:
        height, width: the cells to keep; None keeps the whole side of the grid.
        stride: cells between the starts 0, s, 2s, ... of the boxes.
        wrap: a box that goes over an edge goes on from the other side, so that there is one at every s-th cell.
            Otherwise the last box ends at the edge.

    >>> Ablation(width=19, stride=10).on(Grid(224, 224))[-1]  # keeps the columns 220 to 223 and 0 to 14
    (Box(top=0, left=15, bottom=224, right=220),)
    """

    height: int | None = None
    width: int | None = None
    stride: int = 1
    wrap: bool = True

    def __post_init__(self) -> None:
        if self.height is None and self.width is None:
            raise ValueError(
                "An ablation keeps a band (give its width or its height) or a block (give both): got none."
            )
        for what, value in (("height", self.height), ("width", self.width), ("stride", self.stride)):
            if value is not None and value < 1:
                raise ValueError(f"{what} of an ablation: expected a positive whole number, got {value}.")

    def on(self, grid: Grid) -> tuple[Mask, ...]:
        """What each ablation hides, as boxes; in the order of the starts, row by row."""
        rows = self._axis(grid.height, self.height)
        cols = self._axis(grid.width, self.width)
        return tuple(_outside(grid, kept_rows, kept_cols) for kept_rows, kept_cols in itertools.product(rows, cols))

    def masks(self, threat: FeatureThreat) -> MaskSet:
        """These ablations against this threat; refused where some placement of the patches touches all of them."""
        return MaskSet(self.on(threat.grid), threat, together=1)

    def _axis(self, cells: int, size: int | None) -> list[Kept]:
        if size is None or size >= cells:
            return [((0, cells),)]
        if self.wrap:
            return [_wrapped(start, size, cells) for start in range(0, cells, self.stride)]
        starts = sorted({*range(0, cells - size + 1, self.stride), cells - size})
        return [((start, start + size),) for start in starts]


def _wrapped(start: int, size: int, cells: int) -> Kept:
    over = start + size - cells
    return ((start, start + size),) if over <= 0 else ((0, over), (start, cells))


def _outside(grid: Grid, rows: Kept, cols: Kept) -> Mask:
    """Every cell that is not in these rows and these columns."""
    above = [Box.of(gap, (0, grid.width)) for gap in _gaps(rows, grid.height)]
    beside = [Box.of(kept, gap) for kept in rows for gap in _gaps(cols, grid.width)]
    return (*above, *beside)


def _gaps(kept: Kept, cells: int) -> list[Interval]:
    """The intervals between the kept ones (sorted), and before and after them."""
    ends = [0, *(end for interval in kept for end in interval), cells]
    return [(start, stop) for start, stop in zip(ends[::2], ends[1::2], strict=True) if start < stop]
