"""Mask sets against brute force over sets of cells: coverage in both directions, vacuous pairs, and safe locations."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from patchcure import Box, Grid, MaskSet, PatchThreat
from patchcure.geometry import Interval
from patchcure.operations.base import safe_groups, safe_maps
from patchcure.threat import FeatureThreat, Footprint

Cells = frozenset[tuple[int, int]]


def cells(*boxes: Box) -> Cells:
    return frozenset((r, c) for box in boxes for r in range(*box.rows) for c in range(*box.cols))


def locations(threat: FeatureThreat) -> list[tuple[int, int, int, Cells]]:
    """(shape, row, column, corrupted cells) of every placement of one patch."""
    return [
        (shape, r, c, cells(Box.of(rows, cols)))
        for shape, footprint in enumerate(threat.footprints)
        for r, rows in enumerate(footprint.rows)
        for c, cols in enumerate(footprint.cols)
    ]


def is_covered(masks: list[Cells], threat: FeatureThreat) -> bool:
    """Brute force: wherever all patches are, one mask hides every corrupted cell."""
    distinct = {cells for *_, cells in locations(threat)}
    together = itertools.combinations_with_replacement(distinct, threat.count)
    return all(any(frozenset().union(*corrupted) <= mask for mask in masks) for corrupted in together)


@st.composite
def intervals(draw: st.DrawFn, size: int, empty: bool = True) -> Interval:
    start = draw(st.integers(0, size - 1))
    return start, draw(st.integers(start if empty else start + 1, size))


@st.composite
def grids(draw: st.DrawFn) -> Grid:
    return Grid(draw(st.integers(1, 7)), draw(st.integers(1, 7)))


@st.composite
def threats(draw: st.DrawFn, grid: Grid, most: int = 2) -> FeatureThreat:
    """Any boxes of cells, also such as no receptive field makes."""
    footprints = draw(
        st.lists(
            st.builds(
                lambda rows, cols: Footprint(tuple(rows), tuple(cols)),
                st.lists(intervals(grid.height), min_size=1, max_size=4),
                st.lists(intervals(grid.width), min_size=1, max_size=4),
            ),
            min_size=1,
            max_size=3,
        )
    )
    return FeatureThreat(grid, tuple(footprints), draw(st.integers(1, most)))


@st.composite
def mask_sets(draw: st.DrawFn, grid: Grid) -> list[tuple[Box, ...]]:
    """Unions of up to three boxes, none of which hides everything."""
    box = st.builds(Box.of, intervals(grid.height, empty=False), intervals(grid.width, empty=False))
    masks = draw(st.lists(st.lists(box, min_size=1, max_size=3).map(tuple), min_size=1, max_size=5))
    kept = [mask for mask in masks if len(cells(*mask)) < grid.cells]
    assume(kept)
    return kept


def nothing(grid: Grid) -> FeatureThreat:
    """A threat that corrupts no cell, so that any masks cover it."""
    return FeatureThreat(grid, (Footprint(((0, 0),), ((0, 0),)),))


@settings(max_examples=150)
@given(st.data())
def test_coverage_is_exact(data: st.DataObject) -> None:
    grid = data.draw(grids())
    masks = data.draw(mask_sets(grid))
    threat = data.draw(threats(grid))
    made = MaskSet(tuple(masks), nothing(grid), together=1)
    hidden = [cells(*mask) for mask in masks]
    assert made.covers(threat) == is_covered(hidden, threat)
    if threat.count == 1:
        coverage = made.coverage_of(threat)
        for shape, row, col, corrupted in locations(threat):
            group = coverage.location == coverage.maps[shape][row, col]
            assert coverage.covers[group].tolist() == [[corrupted <= mask for mask in hidden]]


@settings(max_examples=100)
@given(st.data())
def test_safe_locations_are_exact(data: st.DataObject) -> None:
    grid = data.draw(grids())
    masks = data.draw(mask_sets(grid))
    threat = data.draw(threats(grid))
    hidden = [cells(*mask) for mask in masks]
    assume(is_covered(hidden, threat))
    made = MaskSet(tuple(masks), threat, together=1)
    trusted = torch.tensor([data.draw(st.lists(st.booleans(), min_size=len(masks), max_size=len(masks)))])
    good = [mask for mask, use in zip(hidden, trusted[0].tolist(), strict=True) if use]
    places = locations(threat)
    maps = safe_maps(trusted, made)
    unsafe = {
        at[:3]
        for chosen in itertools.combinations_with_replacement(places, threat.count)
        if not any(frozenset().union(*(place[3] for place in chosen)) <= mask for mask in good)
        for at in chosen
    }
    for shape, row, col, _ in places:
        assert bool(maps[shape][0, row, col]) == ((shape, row, col) not in unsafe)
    assert bool(safe_groups(trusted, made.coverage.covers).all()) == (not unsafe)


@settings(max_examples=100)
@given(st.data())
def test_what_does_not_cover_or_hides_everything_is_refused(data: st.DataObject) -> None:
    grid = data.draw(grids())
    masks = data.draw(mask_sets(grid))
    threat = data.draw(threats(grid))
    hidden = [cells(*mask) for mask in masks]
    blind = any(len(a | b) == grid.cells for a, b in itertools.combinations_with_replacement(hidden, 2))
    if not is_covered(hidden, threat):
        with pytest.raises(ValueError, match="do not cover the threat: no mask hides the corrupted cells Box"):
            MaskSet(tuple(masks), threat)
    elif blind:
        with pytest.raises(ValueError, match=r"together hide all \d+x\d+ cells"):
            MaskSet(tuple(masks), threat)
    else:
        assert MaskSet(tuple(masks), threat).covers(threat)


@settings(max_examples=100)
@given(
    image=st.tuples(st.integers(1, 14), st.integers(1, 14)),
    field=st.tuples(st.integers(1, 4), st.integers(1, 3)),
    shapes=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=9),
    stride=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    per_axis=st.none() | st.tuples(st.integers(1, 5), st.integers(1, 5)),
    count=st.integers(1, 2),
)
def test_covering_sets_cover(
    image: tuple[int, int],
    field: tuple[int, int],
    shapes: list[tuple[int, int]],
    stride: tuple[int, int],
    per_axis: tuple[int, int] | None,
    count: int,
) -> None:
    """Cells of `size` pixels every `jump` pixels; all locations of all shapes, by sets of cells."""
    size, jump = field
    assume(all(h <= image[0] and w <= image[1] for h, w in shapes) and min(image) >= size)
    grid = Grid(*((n - size) // jump + 1 for n in image))

    def axis(span: Interval, cells: int) -> Interval:
        hit = [i for i in range(cells) if i * jump < span[1] and span[0] < i * jump + size]
        return (hit[0], hit[-1] + 1) if hit else (0, 0)

    threat = PatchThreat.rectangles(shapes, image, count).on_features(
        grid, lambda box: Box.of(axis(box.rows, grid.height), axis(box.cols, grid.width))
    )
    try:
        masks = MaskSet.covering(threat, None if per_axis else stride, per_axis, together=1)
    except ValueError as error:
        assert "together hide all" in str(error)
        return
    assert is_covered([cells(*mask) for mask in masks.masks], threat)
    if per_axis is not None and len(threat.footprints) == 1 and count == 1:
        assert len({box.top for (box,) in masks.masks}) <= per_axis[0]
        assert len({box.left for (box,) in masks.masks}) <= per_axis[1]


def test_boxes_may_cover_jointly() -> None:
    """Neither half contains the box, but the mask that is their union hides it."""
    grid = Grid(1, 6)
    middle = FeatureThreat(grid, (Footprint(((0, 1),), ((1, 5),)),))
    left, right = Box(0, 0, 1, 3), Box(0, 3, 1, 5)
    assert MaskSet(((left, right),), middle).covers(middle)
    with pytest.raises(ValueError, match="do not cover"):
        MaskSet(((left,), (right,)), middle)


def test_another_grid_is_not_covered() -> None:
    masks = MaskSet(((Box(0, 0, 1, 2),), (Box(0, 2, 1, 4),)), nothing(Grid(1, 7)))
    assert not masks.covers(nothing(Grid(1, 8)))
    assert masks.hidden.sum(dim=(1, 2)).tolist() == [2, 2]
    assert np.array_equal(masks.hidden[0].numpy(), [[True, True, False, False, False, False, False]])


def test_errors() -> None:
    grid = Grid(2, 4)
    with pytest.raises(ValueError, match="Expected at least one mask for a rule that applies 2 together, got 0"):
        MaskSet((), nothing(grid))
    with pytest.raises(ValueError, match="not inside the grid of 2x4 cells"):
        MaskSet(((Box(0, 0, 1, 5),),), nothing(grid))
    with pytest.raises(ValueError, match=r"Masks \(0, 1\) together hide all 2x4 cells"):
        MaskSet(((Box(0, 0, 2, 2),), (Box(0, 2, 2, 4),)), nothing(grid))
    with pytest.raises(ValueError, match="mask stride: expected positive whole numbers"):
        MaskSet.covering(nothing(grid), stride=0)
    with pytest.raises(ValueError, match="a mask stride or the masks per axis, not both"):
        MaskSet.covering(nothing(grid), stride=1, per_axis=2)
    with pytest.raises(ValueError, match="masks per axis: expected positive whole numbers"):
        MaskSet.covering(nothing(grid), per_axis=(0, 2))


@pytest.mark.parametrize("together", [-1, 0, 3])
def test_together_is_one_or_two(together: int) -> None:
    """Other numbers would skip the search for masks that hide everything."""
    thirds = tuple((Box(0, start, 1, start + 2),) for start in (0, 2, 4))
    with pytest.raises(ValueError, match="together"):
        MaskSet(thirds, nothing(Grid(1, 6)), together)


def test_far_too_many_masks_are_refused_at_once() -> None:
    """A mask at every pixel of a 224-pixel image: 37,249 masks, more than 20 GB while their coverage is checked."""
    pixels = PatchThreat.square(32, 224).on_features(Grid(224, 224), lambda box: box)
    with pytest.raises(ValueError, match=r"would need 37,249 masks: use a larger mask stride"):
        MaskSet.covering(pixels, stride=1)
    assert len(MaskSet.covering(pixels)) == 36, "by default six on each axis"
