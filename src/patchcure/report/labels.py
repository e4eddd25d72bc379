"""Names beside points, so that none covers another, a point, or the frame."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RADII = (9, 14, 22, 32, 44, 58, 74, 92, 112, 134, 160)
"""How far from its point a name may stand, in typographic points; the nearest free place is taken."""
ANGLES = (0, 90, -90, 180, 45, -45, 135, -135, 20, -20, 160, -160, 70, -70, 110, -110)
CLOSE = 14
"""From a name that is further away than this, a thin line goes to its point."""
POINT, LINE = 5.0, 1.5
"""Half the width of what a name keeps off."""
Spot = tuple[float, float]


def place(axis: Axes, named: Sequence[tuple[Spot, str, str]], lines: Sequence[Sequence[Spot]] = ()) -> None:
    """Write (point, name, colour) beside the points.

    Call it when limits, scales and the layout of the figure are final. Names keep off each other, off the points and,
    if they can, off the lines that are drawn there; one for which there is no place is left out.
    """
    figure = axis.get_figure(root=True)
    if figure is None or not named:
        return
    figure.draw_without_rendering()
    unit = figure.dpi / 72
    frame = axis.get_window_extent().extents
    spots = axis.transData.transform([spot for spot, _, _ in named])
    points = [_box(spot, POINT * unit) for spot in spots]
    names: list[Any] = []
    drawn = [_box(spot, LINE * unit) for line in lines for spot in _along(axis.transData.transform(list(line)), unit)]
    for at in sorted(range(len(named)), key=lambda at: (-spots[at][1], spots[at][0])):
        (spot, name, colour), pixel = named[at], spots[at]
        others = np.array([*names, *(box for box in points if not np.allclose(box, points[at]))]).reshape(-1, 4)
        text = axis.annotate(name, spot, (0, 0), textcoords="offset points", fontsize=7, color=colour)
        text.set_in_layout(False)
        size = np.array(text.get_window_extent().size) + 2 * unit
        strict = (points + names + drawn, others, RADII[:7])
        for kept, uncrossed, radii in (strict, (points + names, others, RADII), (points + names, others[:0], RADII)):
            found = _free(pixel, size, unit, frame, np.array(kept), uncrossed, radii)
            if found is not None:
                break
        text.remove()
        if found is None:
            continue
        (dx, dy), box = found
        names.append(box)
        far = math.hypot(dx, dy) > CLOSE + 0.5
        drawn += [_box(step, LINE * unit) for step in _leader(pixel, (dx, dy), unit)]
        axis.annotate(
            name,
            spot,
            (dx, dy),
            textcoords="offset points",
            fontsize=7,
            color=colour,
            ha=("right", "center", "left")[1 + _side(dx)],
            va=("top", "center", "bottom")[1 + _side(dy)],
            arrowprops={"arrowstyle": "-", "lw": 0.5, "color": colour, "shrinkA": 1, "shrinkB": 3} if far else None,
        ).set_in_layout(False)


def _free(
    pixel: Any, size: Any, unit: float, frame: Any, taken: Any, others: Any, radii: Sequence[int]
) -> tuple[Spot, Any] | None:
    """The nearest offset at which a text of this size covers nothing that is taken and its line none of the others."""
    for radius, angle in itertools.product(radii, map(math.radians, ANGLES)):
        dx, dy = radius * math.cos(angle), radius * math.sin(angle)
        sides = np.array([_side(dx), _side(dy)])
        middle = pixel + unit * np.array([dx, dy]) + sides * size / 2
        box = np.concatenate([middle - size / 2, middle + size / 2])
        inside = (box[:2] >= frame[:2]).all() and (box[2:] <= frame[2:]).all()
        line = (_box(step, 0) for step in _leader(pixel, (dx, dy), unit))
        if inside and _apart(box, taken) and all(_apart(step, others) for step in line):
            return (dx, dy), box
    return None


def _apart(box: Any, others: Any) -> bool:
    return bool(((box[:2] >= others[:, 2:]).any(1) | (box[2:] <= others[:, :2]).any(1)).all())


def _leader(pixel: Any, offset: Spot, unit: float) -> list[Any]:
    """Spots on the line from a point to its name, if that is far away."""
    far = math.hypot(*offset) > CLOSE + 0.5
    return list(_along([pixel, pixel + unit * np.array(offset)], unit))[2:] if far else []


def _side(offset: float) -> int:
    """Does a text at this offset stand before, around or behind it?"""
    return 0 if abs(offset) < 4 else 1 if offset > 0 else -1


def _box(spot: Any, half: float) -> Any:
    return np.concatenate([spot - half, spot + half])


def _along(corners: Any, unit: float) -> Iterator[Any]:
    """Spots on a line through these corners, close to each other."""
    for one, two in itertools.pairwise(corners):
        steps = max(1, int(math.dist(one, two) / (3 * unit)))
        yield from (one + (two - one) * step / steps for step in range(steps + 1))
