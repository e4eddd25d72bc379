"""Sets of masks, and the exact check that they cover a threat."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from patchcure.geometry import Box, Grid, Interval, pair
from patchcure.threat import FeatureThreat, Footprint

Mask = tuple[Box, ...]
"""A mask hides the union of some boxes of cells: one box for one patch, K for K patches."""

MANY = 1024
FEW_PER_AXIS = 6
"""Where masks at every cell would be more than that, so many on each axis are the default (PatchCleanser's)."""

TOO_MUCH = 1 << 28
"""Tables of masks with more bytes than this are refused."""

GROUPS = 6
"""At most this many kinds of masks are made for a threat with many shapes."""


@dataclass(frozen=True)
class MaskSet:
    """Masks on a grid of cells that cover a threat: wherever the patches are, some mask hides every corrupted cell.

    A set that does not cover its threat, or in which two masks together hide everything, does not construct.

    Args:
        masks: what each mask hides.
        threat: what they must cover.
        together: how many masks an operation applies at once (2 for double masking, 1 for one-round detectors). With 0,
            for a rule that uses no masks, the set is empty and only says what the threat is.

    >>> from patchcure import PatchThreat
    >>> threat = PatchThreat.square(32, image=224)
    >>> masks = MaskSet.covering(threat.on_features(Grid(224, 224), lambda box: box), per_axis=6)
    >>> len(masks), masks.masks[0][0].height
    (36, 64)
    """

    masks: tuple[Mask, ...]
    threat: FeatureThreat
    together: int = 2
    hidden: Bool[Tensor, "m h w"] = field(init=False, repr=False, compare=False)
    coverage: Coverage = field(init=False, repr=False, compare=False)
    _others: dict[FeatureThreat, Coverage] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        if self.together not in (0, 1, 2):
            raise ValueError(f"together: operations apply 0, 1 or 2 masks at once, got {self.together}.")
        if bool(self.masks) != bool(self.together):
            raise ValueError(
                f"Expected {'at least one mask' if self.together else 'no masks'} for a rule that applies "
                f"{self.together} together, got {len(self.masks)}."
            )
        grid = self.grid
        hidden = torch.zeros(len(self.masks), grid.height, grid.width, dtype=torch.bool, device="cpu")
        for index, mask in enumerate(self.masks):
            for box in mask:
                if not grid.box.contains(box):
                    raise ValueError(f"Mask {box} is not inside the grid of {grid.height}x{grid.width} cells.")
                hidden[index, box.top : box.bottom, box.left : box.right] = True
        object.__setattr__(self, "hidden", hidden)
        object.__setattr__(self, "coverage", Coverage.of(hidden, self.threat))
        if not self.together:
            return
        if (bare := self.coverage.bare) is not None:
            raise ValueError(
                f"The masks do not cover the threat: no mask hides the corrupted cells {bare}. "
                "Use MaskSet.covering, larger masks or a smaller stride (masks that keep a band: a narrower band)."
            )
        if (blind := _hides_everything(hidden, self.together)) is not None:
            raise ValueError(
                f"Masks {blind} together hide all {grid.height}x{grid.width} cells, so a prediction under them means "
                "nothing. Use a smaller patch, a smaller mask stride (more masks), or a model with a smaller "
                "receptive field."
            )

    @property
    def grid(self) -> Grid:
        return self.threat.grid

    def __len__(self) -> int:
        return len(self.masks)

    @property
    def pairs(self) -> int:
        """The number of unordered pairs, each mask with itself included."""
        return len(self) * (len(self) + 1) // 2

    @classmethod
    def covering(
        cls,
        threat: FeatureThreat,
        stride: int | tuple[int, int] | None = None,
        per_axis: int | tuple[int, int] | None = None,
        together: int = 2,
    ) -> MaskSet:
        """The paper's mask set: masks of p + s - 1 cells at every s-th cell of each axis, p the corrupted extent.

        Args:
            stride: cells between masks, for both axes or as (vertical, horizontal); by default 1, as in the paper, or
                six masks on each axis where that would be more than a thousand masks.
            per_axis: instead of a stride, at most this many masks on each axis.
            together: see the class.
        """
        if not together:
            if stride is not None or per_axis is not None:
                raise ValueError("This rule uses no masks: leave out the mask stride and the masks per axis.")
            return cls((), threat, together)
        if stride is not None and per_axis is not None:
            raise ValueError("Give a mask stride or the masks per axis, not both.")
        grid = threat.grid
        if stride is None and per_axis is None:
            height, width = threat.footprints[0].extent
            many = (grid.height - height + 1) * (grid.width - width + 1) > MANY
            stride, per_axis = (None, FEW_PER_AXIS) if many else (1, None)
        strides = pair(1 if stride is None else stride, "mask stride")
        budget = None if per_axis is None else pair(per_axis, "masks per axis")
        boxes: dict[Box, None] = {}
        for height, width in _few_extents([footprint.extent for footprint in threat.footprints]):
            rows = _axis(grid.height, height, strides[0], None if budget is None else budget[0])
            cols = _axis(grid.width, width, strides[1], None if budget is None else budget[1])
            boxes |= {Box.of(row, col): None for row in rows for col in cols}
        count = min(threat.count, len(boxes))
        if (needed := math.comb(len(boxes), count)) * grid.cells > TOO_MUCH:
            raise ValueError(
                f"{count} patches on {grid.height}x{grid.width} cells would need {needed:,} masks: use a larger mask "
                "stride, or masks per axis."
            )
        return cls(tuple(itertools.combinations(boxes, count)), threat, together)

    def covers(self, threat: FeatureThreat) -> bool:
        """Does some mask hide every corrupted cell, wherever this threat's patches are? Exact."""
        return threat.grid == self.grid and self.coverage_of(threat).bare is None

    def coverage_of(self, threat: FeatureThreat) -> Coverage:
        """Which masks hide which placement of another threat on the same grid."""
        if threat not in self._others:
            self._others[threat] = Coverage.of(self.hidden, threat)
        return self._others[threat]


@dataclass(frozen=True)
class Coverage:
    """Which masks hide which placement of the patches.

    Locations that the same masks hide are alike for every certificate, so they share a *group*. Of K patches, one may
    be in any group; for the others it is enough to look at groups that are hardest to hide (whose masks include no
    other group's masks): whatever hides patches there hides them elsewhere.

    Args:
        covers: for each placement of all patches together, the masks that hide them.
        location: for each placement, the group of its first patch.
        maps: for each shape, the single-location group of every (row, column) at which the patch may start.
        bare: the corrupted cells of a placement that no mask hides, or None.
    """

    covers: Bool[Tensor, "g m"]
    location: Int[Tensor, " g"]
    maps: tuple[Int[Tensor, "_ _"], ...]
    bare: str | None

    @classmethod
    def of(cls, hidden: Bool[Tensor, "m h w"], threat: FeatureThreat) -> Coverage:
        """Compare every mask with every placement of the threat, exactly.

        Neighbouring rows (columns) that every mask treats alike are merged into one first; a box of merged cells is
        hidden when the sum of visible cells in it is zero.
        """
        small, row_map, col_map = _merge_alike(hidden.cpu().numpy())
        visible = np.pad((~small).astype(np.int32), ((0, 0), (1, 0), (1, 0))).cumsum(1).cumsum(2)
        blocks, shapes = [], []
        for footprint in threat.footprints:
            rows, row_of = _unique(footprint.rows, row_map)
            cols, col_of = _unique(footprint.cols, col_map)
            top, bottom = rows[:, 0, None], rows[:, 1, None]
            left, right = cols[None, :, 0], cols[None, :, 1]
            seen = visible[:, bottom, right] - visible[:, top, right] - visible[:, bottom, left] + visible[:, top, left]
            blocks.append((seen == 0).reshape(len(hidden), len(rows) * len(cols)).T)
            shapes.append((row_of, col_of, len(cols)))
        single, group_of = _unique_rows(np.concatenate(blocks))
        maps, offset = [], 0
        for (row_of, col_of, width), block in zip(shapes, blocks, strict=True):
            flat = group_of[offset : offset + len(block)]
            maps.append(torch.from_numpy(flat[row_of[:, None] * width + col_of[None, :]]))
            offset += len(block)
        others = list(itertools.combinations_with_replacement(_hardest(single), threat.count - 1))
        members = np.array([(group, *rest) for group in range(len(single)) for rest in others])
        covers = single[members[:, 0]]
        for column in members.T[1:]:
            covers = covers & single[column]
        bare = None
        if (empty := np.flatnonzero(~covers.any(axis=1))).size:
            bare = " and ".join(str(_example(threat.footprints, maps, int(group))) for group in members[empty[0]])
        return cls(torch.from_numpy(covers), torch.from_numpy(members[:, 0]), tuple(maps), bare)


def _axis(cells: int, corrupted: int, stride: int, budget: int | None) -> list[Interval]:
    """Masks on one axis: size p + s - 1, starts 0, s, 2s, ... and n - m."""
    corrupted = max(corrupted, 1)
    if budget is not None:
        stride = math.ceil((cells - corrupted + 1) / budget)
    size = min(corrupted + stride - 1, cells)
    starts = sorted({*range(0, cells - size + 1, stride), cells - size})
    return [(start, start + size) for start in starts]


def _few_extents(extents: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """At most GROUPS rectangles such that each extent fits in one of them, with the least area in all."""
    unique = sorted(set(extents))
    stairs = [(h, w) for h, w in unique if not any((h, w) != (H, W) and h <= H and w <= W for H, W in unique)]

    def merged(first: int, last: int) -> tuple[int, int]:
        return stairs[last][0], stairs[first][1]  # heights grow and widths shrink along the stairs

    best: dict[tuple[int, int], tuple[int, list[tuple[int, int]]]] = {(0, 0): (0, [])}
    for stop, groups in itertools.product(range(1, len(stairs) + 1), range(1, min(GROUPS, len(stairs)) + 1)):
        options = []
        for start in range(stop):
            if (start, groups - 1) in best:
                area, chosen = best[start, groups - 1]
                shape = merged(start, stop - 1)
                options.append((area + shape[0] * shape[1], [*chosen, shape]))
        if options:
            best[stop, groups] = min(options)
    return best[len(stairs), min(GROUPS, len(stairs))][1]


def _merge_alike(
    hidden: Bool[np.ndarray, "m h w"],
) -> tuple[Bool[np.ndarray, "m r c"], Int[np.ndarray, " h"], Int[np.ndarray, " w"]]:
    """The masks with runs of equal rows and columns merged, and the run of every row and column."""
    rows = np.concatenate([[0], (hidden[:, 1:] != hidden[:, :-1]).any(axis=(0, 2)).cumsum()])
    cols = np.concatenate([[0], (hidden[:, :, 1:] != hidden[:, :, :-1]).any(axis=(0, 1)).cumsum()])
    first = [np.searchsorted(runs, np.arange(runs[-1] + 1)) for runs in (rows, cols)]
    return hidden[:, first[0]][:, :, first[1]], rows, cols


def _unique(
    intervals: Sequence[Interval], runs: Int[np.ndarray, " cells"]
) -> tuple[Int[np.ndarray, "u 2"], Int[np.ndarray, " n"]]:
    """The distinct intervals, counted in runs, and which of them each interval is (an empty one stays empty)."""
    start, stop = np.asarray(intervals).T
    merged = np.stack([runs[np.minimum(start, len(runs) - 1)], np.where(stop > start, runs[stop - 1] + 1, 0)], axis=1)
    merged[stop <= start] = 0
    values, inverse = np.unique(merged, axis=0, return_inverse=True)
    return values, inverse.reshape(-1)


def _unique_rows(
    table: Bool[np.ndarray, "n m"],
) -> tuple[Bool[np.ndarray, "g m"], Int[np.ndarray, " n"]]:
    """The distinct rows of a table, and which of them each row is."""
    if not table.shape[1]:
        return table[:1], np.zeros(len(table), dtype=np.int64)
    packed = np.ascontiguousarray(np.packbits(table, axis=1))
    keys = packed.view(np.dtype((np.void, packed.shape[1]))).reshape(-1)
    _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    return table[first], inverse.reshape(-1)


def _hardest(covers: Bool[np.ndarray, "g m"]) -> list[int]:
    """The groups whose masks include no other group's masks (distinct groups have distinct masks)."""
    count = covers.astype(np.float32)
    includes = count @ count.T == count.sum(axis=1)[None, :]
    return np.flatnonzero(includes.sum(axis=1) == 1).tolist()


def _example(footprints: Sequence[Footprint], maps: Sequence[Tensor], group: int) -> Box:
    """One corrupted box of this group, for a message."""
    for footprint, where in zip(footprints, maps, strict=True):
        if (found := (where == group).nonzero()).numel():
            return Box.of(footprint.rows[int(found[0, 0])], footprint.cols[int(found[0, 1])])
    raise LookupError(f"group {group} has no location")


def _hides_everything(hidden: Bool[Tensor, "m h w"], together: int) -> tuple[int, ...] | None:
    """Masks (at most `together`, 1 or 2) that leave no cell visible, or None."""
    flat = hidden.flatten(1)
    if together * int(flat.sum(1).max()) < flat.shape[1]:
        return None
    for index, row in enumerate(flat):
        blind = row.all() if together == 1 else (row | flat[index:]).all(1).any()
        if bool(blind):
            other = index if together == 1 else index + int((row | flat[index:]).all(1).nonzero()[0])
            return (index, other)
    return None
