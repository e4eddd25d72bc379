"""Names beside points, so that none covers another, a point, or the frame."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.transforms import Bbox

RADII = (9, 14, 22, 32, 44, 58, 74, 92, 112, 134, 160)
"""How far from its point a name may stand, in typographic points; the nearest free place is taken."""
ANGLES = (0, 90, -90, 180, 45, -45, 135, -135, 20, -20, 160, -160, 70, -70, 110, -110)
Spot = tuple[float, float]


def place(axis: Axes, named: Sequence[tuple[Spot, str, str]], lines: Sequence[Sequence[Spot]] = ()) -> None:
    """Write (point, name, colour) beside the points, with a thin line to a name that had to go further away.

    Call it when limits, scales and the layout of the figure are final. Names keep off each other, off the points and,
    if they can, off the lines that are drawn there; one for which there is no place is left out.
    """
    from matplotlib.text import Text

    figure = axis.get_figure(root=True)
    assert figure is not None
    figure.draw_without_rendering()
    scale = figure.dpi / 72
    frame = axis.get_window_extent()
    taken = [_around(axis.transData.transform(spot), 5 * scale) for spot, _, _ in named]
    drawn = [
        _around(spot, 1.5 * scale) for line in lines for spot in _along(axis.transData.transform(list(line)), scale)
    ]
    for spot, name, colour in sorted(named, key=lambda point: (-point[0][1], point[0][0])):
        places = [(radius, math.radians(angle)) for radius in RADII for angle in ANGLES]
        near = [pair for pair in places if pair[0] <= RADII[5]]
        for (radius, angle), kept in [(pair, taken + drawn) for pair in near] + [(pair, taken) for pair in places]:
            dx, dy = radius * math.cos(angle), radius * math.sin(angle)
            text = axis.annotate(
                name,
                spot,
                (dx, dy),
                textcoords="offset points",
                fontsize=7,
                color=colour,
                ha="left" if dx > 1 else "right" if dx < -1 else "center",
                va="center" if abs(dy) < radius / 2 else "bottom" if dy > 0 else "top",
                arrowprops={"arrowstyle": "-", "lw": 0.5, "color": colour, "shrinkA": 1, "shrinkB": 3, "alpha": 0.7}
                if radius > RADII[1]
                else None,
            )
            text.set_in_layout(False)
            box = Text.get_window_extent(text).padded(1.0)  # without the line
            inside = frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 and box.y1 <= frame.y1
            if inside and not any(box.overlaps(other) for other in kept):
                taken.append(box)
                break
            text.remove()


def _around(spot: Any, half: float) -> Bbox:
    from matplotlib.transforms import Bbox

    return Bbox([[spot[0] - half, spot[1] - half], [spot[0] + half, spot[1] + half]])


def _along(corners: Any, scale: float) -> Iterator[Any]:
    """Spots on a line through these corners, close to each other."""
    for one, two in itertools.pairwise(corners):
        steps = max(1, int(math.dist(one, two) / (3 * scale)))
        yield from (one + (two - one) * step / steps for step in range(steps + 1))
