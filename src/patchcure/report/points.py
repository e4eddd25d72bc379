"""What figures show: the paper's points and the measured ones, and which of them no other beats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from patchcure.instances import BagName, BandName, CleanserName, LocalName, Name, ViTName
from patchcure.names import parse
from patchcure.report.matching import data, label, rows
from patchcure.report.measured import Case, Measured, percent
from patchcure.report.paper import PAPER, Entry, PaperFigure
from patchcure.report.sheet import Estimate
from patchcure.result import Result

THE_PAPER = "paper"
FAMILIES: dict[str, tuple[tuple[type, ...], str]] = {
    "PatchCURE": ((ViTName, BagName), "*"),
    "masks on pixels": ((CleanserName,), "p"),
    "votes of bands": ((BandName,), "s"),
    "local logits": ((LocalName,), "^"),
    "others": ((object,), "D"),
}
"""Kinds of defenses: the classes of their names, and their marker."""


@dataclass(frozen=True)
class Point:
    """One defense: accuracies in per cent, throughput relative to the undefended network; None if unknown.

    Args:
        group: `THE_PAPER`, or the data that it was measured on.
        masks: how many there were, where that was recorded.
        variant: said beside the name where one instance was measured with several sets of masks.
    """

    name: str
    instance: Name | None
    group: str
    clean: Estimate | None
    certified: Estimate | None
    relative: Estimate | None
    result: Result | None = None
    masks: int | None = None
    variant: str = ""

    @property
    def family(self) -> str:
        """The kind of defense."""
        return next(family for family, (kinds, _) in FAMILIES.items() if isinstance(self.instance, kinds))

    @property
    def marker(self) -> str:
        return FAMILIES[self.family][1]

    @property
    def short(self) -> str:
        """The name without what everybody knows."""
        name = self.name.removeprefix("PCURE-ViT-").removeprefix("PCURE-").removesuffix("-k50")
        return name + self.variant

    @property
    def sizes(self) -> list[tuple[float, float]]:
        """Steps of certified accuracy by the patch's side in per cent of the image's, as far as it was measured."""
        if self.result is None or not self.result.sizes:
            return []
        image, steps = min(self.result.threat.image), self.result.sizes
        return [(0.0, 100 * steps[0].certified), *((100 * step.side / image, 100 * step.certified) for step in steps)]


def points(figure: PaperFigure, measured: Measured, everything: bool = False) -> list[Point]:
    """The paper's points of a figure, then what was measured for the table that they are from.

    Args:
        everything: all that was measured, on any dataset, of defenses that recover the label from one patch.
    """
    published = [_published(entry) for entry in PAPER.points(figure) if entry.measures == "defense"]
    if everything or figure.table is None:
        recover = [one for one in measured.results if one.alarms is None and one.threat.patches == 1]
        return published + _varied([_measured(measured.case(result, {}, "defense"), result) for result in recover])
    cases = [case for _, _, case in rows(PAPER.table(figure.table), measured) if case and case.measures == "defense"]
    return published + _varied([_measured(case, case.result) for case in cases if case.result])


def finest(shown: Sequence[Point]) -> list[Point]:
    """Of each instance on each dataset, the points with the most masks."""
    most: dict[tuple[str, str], int] = {}
    for point in shown:
        most[point.name, point.group] = max(point.masks or 0, most.get((point.name, point.group), 0))
    return [point for point in shown if (point.masks or 0) == most[point.name, point.group]]


def front(shown: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The Pareto front: the points that no other beats in both, by the first.

    >>> front([(1, 44), (0.3, 46), (0.6, 40), (0.01, 61)])
    [(0.01, 61), (0.3, 46), (1, 44)]
    """
    best: list[tuple[float, float]] = []
    for x, y in sorted(shown, reverse=True):
        if not best or y > best[-1][1]:
            best.append((x, y))
    return best[::-1]


def several_masks(shown: Sequence[Point]) -> list[Point]:
    """The points of instances that were measured with several sets of masks on one dataset."""
    sets: dict[tuple[str, str], set[int | None]] = {}
    for point in shown:
        sets.setdefault((point.name, point.group), set()).add(point.masks)
    return [point for point in shown if len(sets[point.name, point.group] - {None}) > 1]


def _varied(shown: list[Point]) -> list[Point]:
    several = several_masks(shown)
    return [replace(point, variant=f", {point.masks} masks") if point in several else point for point in shown]


def _published(entry: Entry) -> Point:
    numbers = entry.number("clean"), entry.number("certified"), PAPER.relative(entry)
    clean, certified, relative = (None if value is None else Estimate(value, value, value) for value in numbers)
    return Point(entry.row, _name(entry.instance or entry.row), THE_PAPER, clean, certified, relative)


def _measured(case: Case, result: Result) -> Point:
    accuracies = percent(result.clean), percent(result.certified)
    return Point(label(result), _name(result.instance), data(result), *accuracies, case.relative(), result, case.masks)


def _name(instance: str) -> Name | None:
    try:
        return parse(instance)
    except ValueError:  # a defense without a name
        return None
