"""Names beside points, so that none covers another, a point, or the frame."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.transforms import Bbox

RADII = (9, 14, 22, 32, 44, 58, 74, 92)
"""How far from its point a name may stand, in typographic points; the nearest free place is taken."""
ANGLES = (0, 90, -90, 180, 45, -45, 135, -135, 20, -20, 160, -160, 70, -70, 110, -110)


def place(axis: Axes, named: Sequence[tuple[float, float, str, str]], others: Sequence[tuple[float, float]] = ()) -> None:
    """Write (x, y, name, colour) beside the points, with a thin line where a name had to go further away.

    Call it when limits, scales and the layout of the figure are final. A name without a free place is left out.
    """
    figure = axis.get_figure(root=True)
    assert figure is not None
    figure.draw_without_rendering()
    scale = figure.dpi / 72
    frame = axis.get_window_extent()
    marks = [axis.transData.transform((x, y)) for x, y in [*((x, y) for x, y, _, _ in named), *others]]
    taken: list[Bbox] = [_around(x, y, 5 * scale) for x, y in marks]
    for x, y, name, colour in sorted(named, key=lambda point: (-point[1], point[0])):
        for radius, angle in ((radius, math.radians(angle)) for radius in RADII for angle in ANGLES):
            dx, dy = radius * math.cos(angle), radius * math.sin(angle)
            text = axis.annotate(
                name,
                (x, y),
                (dx, dy),
                textcoords="offset points",
                fontsize=7,
                color=colour,
                ha="left" if dx > 1 else "right" if dx < -1 else "center",
                va="center" if abs(dy) < radius / 2 else "bottom" if dy > 0 else "top",
                arrowprops={"arrowstyle": "-", "lw": 0.4, "color": colour, "shrinkB": 3} if radius > RADII[1] else None,
            )
            box = text.get_window_extent().padded(1.0)
            inside = frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 and box.y1 <= frame.y1
            if inside and not any(box.overlaps(other) for other in taken):
                taken.append(box)
                break
            text.remove()


def _around(x: float, y: float, half: float) -> Bbox:
    from matplotlib.transforms import Bbox

    return Bbox([[x - half, y - half], [x + half, y + half]])
