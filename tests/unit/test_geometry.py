"""Boxes and grids, against sets of cells."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from patchcure import Box, Grid
from patchcure.geometry import pair


@st.composite
def boxes(draw: st.DrawFn) -> Box:
    top, left = draw(st.integers(0, 6)), draw(st.integers(0, 6))
    return Box(top, left, top + draw(st.integers(0, 5)), left + draw(st.integers(0, 5)))


def cells(box: Box) -> set[tuple[int, int]]:
    return {(r, c) for r in range(*box.rows) for c in range(*box.cols)}


@given(boxes(), boxes())
def test_boxes_are_sets_of_cells(first: Box, second: Box) -> None:
    assert first.area == len(cells(first)) == first.height * first.width
    assert first.contains(second) == (cells(second) <= cells(first))
    assert cells(first.intersect(second)) == cells(first) & cells(second)
    hull = first.hull(second)
    assert hull.contains(first) and hull.contains(second)
    if first.area and second.area:
        assert hull.rows == (min(first.top, second.top), max(first.bottom, second.bottom))
    assert Box.of(first.rows, first.cols) == first


def test_grid() -> None:
    assert Grid.of(3) == Grid.of((3, 3)) == Grid.of(Grid(3, 3)) == Grid(3, 3)
    assert Grid(2, 5).cells == 10 == Grid(2, 5).box.area


def test_errors() -> None:
    with pytest.raises(ValueError, match="top <= bottom and left <= right"):
        Box(2, 0, 1, 3)
    with pytest.raises(ValueError, match="grid: expected positive whole numbers"):
        Grid(0, 3)
    with pytest.raises(ValueError, match=r"stride: expected positive whole numbers, .*got 0"):
        pair(0, "stride")


@pytest.mark.parametrize("value", [(2.9, 3), (3, 2.5)])
def test_fractions_are_refused(value: tuple[float, float]) -> None:
    """Cutting 2.9 pixels to 2 would certify a smaller patch than was asked for."""
    with pytest.raises(ValueError, match="expected positive whole numbers"):
        pair(value, "patch")  # type: ignore[arg-type]
