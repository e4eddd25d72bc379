"""What all figures share: a canvas, points (the paper's hollow, ours filled), fronts, names, legends."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from patchcure.report.labels import place
from patchcure.report.points import FAMILIES, THE_PAPER, Point, front
from patchcure.report.sheet import Estimate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

GREY = "#555555"
"""The paper's colour."""
COLOURS = ("#1565c0", "#c62828", "#1b7f3b", "#ef6c00", "#6a1b9a", "#00838f", "#ad1457", "#4e342e")
"""One for each group of measured points."""
DASHES = ("-", "--", ":")
"""For lines beyond the colours."""
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "patchcure",
    "font.size": 9.0,
    "axes.grid": True,
    "grid.alpha": 0.25,
}


def canvas(title: str, panels: int, width: float, height: float) -> tuple[Figure, list[Axes]]:
    """A figure with panels side by side."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    figure.suptitle(title, fontsize=11)
    return figure, list(figure.subplots(1, panels, squeeze=False)[0])


def colours(groups: Iterable[str]) -> dict[str, str]:
    """A colour for each group."""
    ours = [group for group in dict.fromkeys(groups) if group != THE_PAPER]
    return {THE_PAPER: GREY} | {group: COLOURS[at % len(COLOURS)] for at, group in enumerate(ours)}


def dot(axis: Axes, x: Estimate, y: Estimate, marker: str, colour: str, hollow: bool) -> None:
    """One point, with its intervals if it has any."""
    spreads = [(e.value - e.low, e.high - e.value) for e in (x, y)]
    if not hollow:
        bars = [[[low], [high]] for low, high in spreads]
        axis.errorbar(x.value, y.value, bars[1], bars[0], fmt="none", ecolor=colour, elinewidth=0.7, alpha=0.6)
    axis.plot(x.value, y.value, **mark(marker, colour, hollow), zorder=3)


def mark(marker: str, colour: str, hollow: bool) -> dict[str, Any]:
    """How a point looks."""
    size = {"*": 9.0, "p": 7.0}.get(marker, 5.5)
    fill = "white" if hollow else colour
    return {
        "marker": marker,
        "markersize": size,
        "markeredgecolor": colour,
        "markerfacecolor": fill,
        "linestyle": "none",
    }


def curve(axis: Axes, along: Sequence[tuple[float, Estimate]], colour: str, hollow: bool) -> None:
    """Points joined by a line."""
    ordered = sorted(along, key=lambda point: point[0])
    axis.plot([x for x, _ in ordered], [y.value for _, y in ordered], color=colour, lw=1, alpha=0.7)
    for x, y in ordered:
        dot(axis, Estimate(x, x, x), y, "o", colour, hollow)


def trade_off(axis: Axes, shown: Sequence[Point], x: str, y: str, paint: Callable[[Point], str]) -> None:
    """Points of two qualities by name, the Pareto front of those of one group and one colour, and their names."""
    there = [(point, getattr(point, x), getattr(point, y)) for point in shown]
    drawn = [(point, one, two) for point, one, two in there if one is not None and two is not None]
    fronts: dict[tuple[str, str], list[tuple[float, float]]] = {}
    lines: list[list[tuple[float, float]]] = []
    for point, one, two in drawn:
        colour = paint(point)
        fronts.setdefault((point.group, colour), []).append((one.value, two.value))
        dot(axis, one, two, point.marker, colour, point.group == THE_PAPER)
        lines += [[(one.value, two.low), (one.value, two.high)], [(one.low, two.value), (one.high, two.value)]]
    for (group, colour), spots in fronts.items():
        line = front(spots)
        style = "--" if group == THE_PAPER else "-"
        axis.plot(*zip(*line, strict=True), color=colour, lw=0.9, ls=style, alpha=0.6, drawstyle="steps-pre")
        lines += [[(a, b), (a, d), (c, d)] for (a, b), (c, d) in itertools.pairwise(line)]
    place(axis, [((one.value, two.value), point.short, paint(point)) for point, one, two in drawn], lines)


def legend(figure: Figure, handles: Sequence[Line2D]) -> None:
    """Below the panels, in as many columns as there is room for."""
    longest = max(len(str(handle.get_label())) for handle in handles)
    columns = int(figure.get_figwidth() * 72 / (5 * longest + 45))
    figure.legend(
        handles=list(handles),
        loc="outside lower center",
        ncols=max(1, min(columns, len(handles), 5)),
        fontsize=8,
        frameon=False,
    )


def entry(text: str, color: str, **look: Any) -> Line2D:
    """One line of a legend."""
    from matplotlib.lines import Line2D

    return Line2D([], [], color=color, label=text, **look)


def sources(by: dict[str, str], shown: Sequence[Point]) -> list[Line2D]:
    """The legend of who measured, on what."""
    return [
        entry(group if group == THE_PAPER else f"measured, {group}", colour, **mark("o", colour, group == THE_PAPER))
        for group, colour in by.items()
        if any(point.group == group for point in shown)
    ]


def families(shown: Sequence[Point]) -> list[Line2D]:
    """The legend of the markers."""
    found = {point.family for point in shown}
    return [entry(name, GREY, **mark(marker, GREY, True)) for name, (_, marker) in FAMILIES.items() if name in found]


def fronts() -> list[Line2D]:
    """The legend of the Pareto fronts."""
    return [entry("Pareto front, paper", GREY, lw=0.9, ls="--"), entry("Pareto front, measured", GREY, lw=0.9)]


def logarithmic(axis: Axes, ticks: Sequence[float] = (0.003, 0.01, 0.03, 0.1, 0.3, 1)) -> None:
    """A logarithmic x axis with plain numbers."""
    from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

    axis.set_xscale("log")
    axis.xaxis.set_major_locator(FixedLocator(list(ticks)))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
