"""The paper's figures: its points hollow, measured ones filled; each as PNG and SVG."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from patchcure.instances import ViTName
from patchcure.report.drawing import (
    COLOURS,
    DASHES,
    GREY,
    STYLE,
    canvas,
    colours,
    curve,
    entry,
    families,
    fronts,
    legend,
    logarithmic,
    mark,
    sources,
    trade_off,
)
from patchcure.report.labels import place
from patchcure.report.measured import Measured
from patchcure.report.paper import PAPER
from patchcure.report.points import THE_PAPER, Point, finest, points, several_masks
from patchcure.report.sheet import writable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LEVELS = (
    (0.5, "0.5 to 1 x undefended", "#c62828"),
    (0.1, "0.1 to 0.5 x undefended", "#ef6c00"),
    (0.0, "below 0.1 x undefended", "#6a1b9a"),
)
"""Efficiency: the relative throughput from which a level begins, what it is called, its colour."""
RELATIVE = "throughput relative to the undefended network on the same hardware"
PAPER_SIDE = 100 * 32 / 224
"""The side of the paper's 2 % patch, in per cent of the image's."""
CLEAN, CERTIFIED = "clean accuracy (%)", "certified accuracy (%)"


def plot(name: str, measured: Measured | None = None, folder: str | Path = ".") -> list[Path]:
    """Draw one figure of the paper with what was measured; returns the PNG and the SVG file."""
    import matplotlib

    spec = PAPER.figure(name)
    draw, everything = DRAW[name]
    shown = points(spec, measured or Measured(), everything)
    path = writable(folder)
    with matplotlib.rc_context(STYLE):
        figure = draw(spec.title, shown)
        files = [path / f"{name}.png", path / f"{name}.svg"]
        figure.savefig(files[0], dpi=150)
        figure.savefig(files[1], metadata={"Date": None})
    return files


def plot_all(measured: Measured | None = None, folder: str | Path = ".") -> list[Path]:
    """Draw all figures for which there are numbers."""
    found = measured or Measured()
    drawable = [spec for spec in PAPER.figures if spec.table or several_masks(points(spec, found))]
    return [file for spec in drawable for file in plot(spec.id, found, folder)]


def _throughput(title: str, shown: list[Point]) -> Figure:
    """Certified accuracy against throughput."""
    figure, (axis,) = canvas(title, 1, 7.5, 5.6)
    axis.set_ylabel(CERTIFIED)
    _against_speed(figure, [axis], ["certified"], shown)
    return figure


def _cifar(title: str, shown: list[Point]) -> Figure:
    """Both accuracies against throughput."""
    figure, axes = canvas(title, 2, 9.5, 4.6)
    for axis, text in zip(axes, (CLEAN, CERTIFIED), strict=True):
        axis.set_ylabel(text)
    _against_speed(figure, axes, ["clean", "certified"], shown)
    return figure


def _against_speed(figure: Figure, axes: Sequence[Axes], qualities: Sequence[str], shown: list[Point]) -> None:
    by = colours(point.group for point in shown)
    undefended = entry("undefended network", GREY, lw=0.8, ls=":")
    legend(figure, [*sources(by, shown), *families(shown), *fronts(), undefended])
    speeds = [point.relative.low for point in shown if point.relative]
    for axis, quality in zip(axes, qualities, strict=True):
        axis.set_xlabel(RELATIVE if len(axes) == 1 else RELATIVE.replace(" undefended", "\nundefended"))
        logarithmic(axis)
        axis.set_xlim(min(speeds, default=0.01) / 1.6, 2.2)
        axis.axvline(1, color=GREY, lw=0.8, ls=":")
        trade_off(axis, shown, "relative", quality, lambda point: by[point.group])


def _levels(title: str, shown: list[Point]) -> Figure:
    """Certified against clean accuracy, coloured by throughput; a Pareto front for each level of it."""
    figure, (axis,) = canvas(title, 1, 8.5, 7)
    axis.set(xlabel=CLEAN, ylabel=CERTIFIED)
    handles = [entry(text, colour, **mark("o", colour, False)) for _, text, colour in LEVELS]
    handles += [entry("paper: hollow", GREY, **mark("o", GREY, True)), *families(shown), *fronts()]
    legend(figure, handles)
    trade_off(axis, shown, "clean", "certified", _level)
    return figure


def _level(point: Point) -> str:
    if point.relative is None:
        return GREY
    return next(colour for least, _, colour in LEVELS if point.relative.value >= least)


def _split(title: str, shown: list[Point]) -> Figure:
    """Accuracies and throughput by k, a line for each network and dataset."""
    figure, axes = canvas(title, 3, 10, 4)
    blocks = [(point.name.rpartition("-k")[0], point.instance, point) for point in finest(shown)]
    along = [(name, vit.k, point) for name, vit, point in blocks if isinstance(vit, ViTName)]
    _curves(figure, axes, "k, the layer of the split", along)
    for axis in axes:
        axis.set_xticks(range(0, 1 + max([12, *(k for _, k, _ in along)]), 3))
    return figure


def _masks(title: str, shown: list[Point]) -> Figure:
    """Accuracies and throughput by the number of masks, a line for each instance of which several were measured."""
    several = several_masks(shown)
    if not several:
        raise ValueError(
            "masks: the paper gives no numbers of this figure, and no instance was measured with several sets of masks "
            "(`patchcure evaluate --masks-per-axis`)."
        )
    figure, axes = canvas(title, 3, 10, 4)
    _curves(figure, axes, "number of masks", [(point.name, point.masks or 0, point) for point in several])
    return figure


def _curves(figure: Figure, axes: Sequence[Axes], across: str, shown: Sequence[tuple[str, int, Point]]) -> None:
    """Three panels: clean accuracy, certified accuracy, throughput; (name of the line, x, point)."""
    lines = {f"{name}, {point.group}": point.group == THE_PAPER for name, _, point in shown}
    by = colours(line for line, paper in lines.items() if not paper)
    by |= {line: GREY for line, paper in lines.items() if paper}
    legend(
        figure,
        [entry(line, by[line], **mark("o", by[line], paper) | {"linestyle": "-"}) for line, paper in lines.items()],
    )
    panels = {"clean": CLEAN, "certified": CERTIFIED, "relative": RELATIVE.replace(" undefended", "\nundefended")}
    for axis, (quality, text) in zip(axes, panels.items(), strict=True):
        axis.set(xlabel=across, ylabel=text)
        for line, paper in lines.items():
            along = [(x, getattr(point, quality)) for name, x, point in shown if f"{name}, {point.group}" == line]
            curve(axis, [(x, value) for x, value in along if value is not None], by[line], paper)
        axis.set_ylim(bottom=0 if quality == "relative" else None)


def _patch_sizes(title: str, shown: list[Point]) -> Figure:
    """Certified accuracy by the size of the patch, a panel for each dataset; the paper's points are at 2 %."""
    curves = [point for point in finest(shown) if point.sizes]
    paper = [(point.certified.value, point.short) for point in shown if point.group == THE_PAPER and point.certified]
    groups = list(dict.fromkeys(["imagenet", *(point.group for point in curves)]))
    names = list(dict.fromkeys(point.name for point in curves))
    by = colours(names)
    looks: dict[str, Any] = {
        name: {"color": by[name], "lw": 1.4, "ls": DASHES[at // len(COLOURS) % len(DASHES)]}
        for at, name in enumerate(names)
    }
    figure, axes = canvas(title, len(groups), max(7.5, 4.2 * len(groups)), 5.2)
    handles = [entry(f"measured, {name}", **look) for name, look in looks.items()]
    legend(figure, [entry("paper, one 2 % patch", GREY, **mark("o", GREY, True)), *handles])
    widest = max([2 * PAPER_SIDE, *(point.sizes[-1][0] for point in curves)])
    for axis, group in zip(axes, groups, strict=True):
        axis.set(xlabel="side of the square patch (% of the image's side)", ylabel=CERTIFIED, title=group)
        axis.set(xlim=(0, 1.03 * widest), ylim=(0, 102))
        lines = {point.name: point.sizes for point in curves if point.group == group}
        for name, sizes in lines.items():
            axis.plot(*zip(*sizes, strict=True), drawstyle="steps-pre", **looks[name])
    for value, _ in paper:
        axes[0].plot(PAPER_SIDE, value, **mark("o", GREY, True), zorder=3)
    drawn = [point.sizes for point in curves if point.group == "imagenet"]
    place(axes[0], [((PAPER_SIDE, value), name, GREY) for value, name in paper], drawn)
    return figure


DRAW: dict[str, tuple[Callable[[str, list[Point]], Figure], bool]] = {
    "throughput": (_throughput, False),
    "split": (_split, True),
    "levels": (_levels, False),
    "patch-sizes": (_patch_sizes, True),
    "masks": (_masks, True),
    "cifar": (_cifar, False),
}
"""How each figure is drawn, and whether it shows all datasets (or those of its table)."""
