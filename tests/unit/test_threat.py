"""What an attacker may do: sizes, shares, shapes, and clear errors."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from patchcure import Box, Grid, PatchThreat


@pytest.mark.parametrize(
    ("share", "image", "side"), [("1%", 224, 23), ("2%", 224, 32), ("3%", 224, 39), ("2.4%", 32, 5), ("100%", 8, 8)]
)
def test_a_share_of_the_pixels_as_a_square(share: str, image: int, side: int) -> None:
    assert PatchThreat.square(share, image).shapes == ((side, side),)


@given(percent=st.decimals("0.1", "99.9", places=1), side=st.integers(3, 130))
def test_a_square_has_at_least_its_share_and_no_row_more(percent: object, side: int) -> None:
    exact = Fraction(str(percent)) / 100 * side * side
    ((height, width),) = PatchThreat.square(f"{percent}%", side).shapes
    assert height == width
    assert height**2 >= exact > (height - 1) ** 2


@pytest.mark.parametrize(
    ("share", "height", "width"), [("1%", 20, 20), ("3%", 17, 30), ("10%", 12, 9), ("40%", 6, 7), ("100%", 4, 3)]
)
def test_any_rectangle_of_at_most_a_share(share: str, height: int, width: int) -> None:
    """Every rectangle of at most that area fits in one of the shapes, and no shape is larger than allowed."""
    shapes = PatchThreat.area(share, (height, width)).shapes
    pixels = Fraction(share[:-1]) / 100 * height * width
    assert all(h * w <= pixels and h <= height and w <= width for h, w in shapes)
    for h in range(1, height + 1):
        for w in range(1, width + 1):
            assert any(h <= H and w <= W for H, W in shapes) == (h * w <= pixels)


@pytest.mark.parametrize(("share", "image", "pixels"), [("57%", 20, 228), ("0.7%", 100, 70), ("1.4%", 100, 140)])
def test_shares_are_exact(share: str, image: int, pixels: int) -> None:
    """0.57 * 400 is 227.99999999999997 in floating point: the rectangle of 228 pixels must not be forgotten."""
    assert max(h * w for h, w in PatchThreat.area(share, image).shapes) == pixels


def test_one_percent_at_224() -> None:
    """The list in the paper is covered: some of its shapes are larger than ours, which have at most 501 pixels."""
    shapes = PatchThreat.area("1%", 224).shapes
    assert len(shapes) == 41
    assert (2, 224) in shapes and (224, 2) in shapes and (22, 22) in shapes
    assert max(h * w for h, w in shapes) <= 501 == math.floor(0.01 * 224 * 224)


def test_shapes_inside_others_are_dropped() -> None:
    threat = PatchThreat.rectangles([(2, 3), (1, 3), (3, 1), (2, 3), (2, 2)], 8)
    assert threat.shapes == ((2, 3), (3, 1))


def test_options() -> None:
    image = Grid(20, 10)
    assert PatchThreat.of(3, image) == PatchThreat.square(3, image)
    assert PatchThreat.of("2%", image) == PatchThreat.square("2%", image)
    assert PatchThreat.of((2, 5), image, 2) == PatchThreat.rectangles([(2, 5)], image, 2)
    threat = PatchThreat.square(1, 4)
    assert PatchThreat.of(threat, image) is threat


def test_descriptions() -> None:
    assert PatchThreat.square(3, 8, count=2).describe() == "2 patches of 3x3 pixels anywhere on 8x8"
    assert "any of 41 shapes of at most" in PatchThreat.area("1%", 224).describe()
    assert "2x3 or 3x1 pixels" in PatchThreat.rectangles([(2, 3), (3, 1)], 8).describe()


def test_the_map_of_every_location() -> None:
    """On an 8x6 image with cells of 2x3 pixels."""
    threat = PatchThreat.square(2, (8, 6))
    mapped = threat.on_features(
        Grid(4, 2), lambda box: Box(box.top // 2, box.left // 3, -(-box.bottom // 2), -(-box.right // 3))
    )
    (footprint,) = mapped.footprints
    assert footprint.rows == ((0, 1), (0, 2), (1, 2), (1, 3), (2, 3), (2, 4), (3, 4))
    assert footprint.cols == ((0, 1), (0, 1), (0, 2), (1, 2), (1, 2))
    assert footprint.extent == (2, 2)
    assert len(list(mapped.locations())) == 35


def test_errors() -> None:
    with pytest.raises(ValueError, match="9x9 pixels does not fit on the image of 8x8: choose a smaller"):
        PatchThreat.square(9, 8)
    with pytest.raises(ValueError, match="at least one patch, got count=0"):
        PatchThreat.square(2, 8, count=0)
    with pytest.raises(ValueError, match="at least one patch shape, got none"):
        PatchThreat.rectangles([], 8)
    with pytest.raises(ValueError, match="less than one pixel: choose more"):
        PatchThreat.area("1%", 8)
    for share in ("2", "x%", "0%", "-1%", "101%", "nan%", "%"):
        with pytest.raises(ValueError, match='looks like "2%"'):
            PatchThreat.square(share, 8)


@pytest.mark.parametrize("size", [0, -1, (0, 3), (2.5, 3), 2.5])
def test_sizes_are_positive_whole_numbers(size: object) -> None:
    with pytest.raises(ValueError, match="expected positive whole numbers"):
        PatchThreat.of(size, Grid(8, 8))  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(0, 3), (2.5, 3)])
def test_shapes_are_checked_however_the_threat_is_made(shape: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="expected positive whole numbers"):
        PatchThreat((shape,), Grid(8, 8))
