"""The numbers that the paper published, as data: `paper.json`, every row marked as the paper's."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib import resources
from typing import Literal, TypeVar

from pydantic import TypeAdapter

Quantity = Literal["defense", "undefended", "unmasked"]
"""What a row is about: a defense, the network that it was made from, or the split network with nothing hidden."""


@dataclass(frozen=True)
class Column:
    """What a column holds, and its unit (empty for yes or no)."""

    title: str
    unit: str

    def __str__(self) -> str:
        return f"{self.title} ({self.unit})" if self.unit else self.title


@dataclass(frozen=True)
class Entry:
    """One row of one table.

    Args:
        row: the name that the paper gives it.
        instance: our name of that defense (of the defense whose network is meant, where `measures` says so).
        values: by the column's key; None where the paper has none.
        measures: whether the row is about the defense or about its network.
        operation: if it is another than the instance's own.
        dataset: if the rows of one table have several.
        base: the row of the undefended network that its throughput is compared with.
        relative: the ratios to PatchCleanser's numbers that the paper prints in parentheses.
        variant: a setting that the instance's name does not tell; no measured result is put in such a row.
        notes: what a reader must know, such as a number that differs between two tables of the paper.
    """

    table: str
    row: str
    instance: str | None
    values: Mapping[str, float | str | None]
    source: Literal["paper"]
    measures: Quantity = "defense"
    operation: str | None = None
    dataset: str | None = None
    base: str | None = None
    relative: Mapping[str, float] = field(default_factory=dict)
    variant: str | None = None
    notes: tuple[str, ...] = ()

    def number(self, column: str) -> float | None:
        """The value of a column, if it is a number."""
        value = self.values.get(column)
        return value if isinstance(value, float | int) else None


@dataclass(frozen=True)
class PaperTable:
    """One table: its columns, and what was evaluated (detectors: True, False, or None for both kinds)."""

    id: str
    label: str
    title: str
    columns: tuple[str, ...]
    datasets: tuple[str, ...]
    patch: str
    patches: int
    detectors: bool | None


@dataclass(frozen=True)
class PaperFigure:
    """One figure. The paper's source has no numbers of figures: points are rows of a table (none if table is None)."""

    id: str
    label: str
    title: str
    table: str | None
    rows: tuple[str, ...] | Literal["all"]


@dataclass(frozen=True)
class Paper:
    """All of it."""

    source: Literal["paper"]
    title: str
    hardware: str
    batch: int
    columns: Mapping[str, Column]
    tables: tuple[PaperTable, ...]
    figures: tuple[PaperFigure, ...]
    entries: tuple[Entry, ...]

    def table(self, name: str) -> PaperTable:
        """A table by its name.

        >>> PAPER.table("two-patches").title
        'Two patches of 32x32 pixels on ImageNet'
        """
        return _named("table", name, self.tables)

    def figure(self, name: str) -> PaperFigure:
        """A figure by its name."""
        return _named("figure", name, self.figures)

    def rows(self, table: str) -> tuple[Entry, ...]:
        """The rows of a table, in the paper's order.

        >>> PAPER.rows("main")[8].values
        {'clean': 80.0, 'certified': 46.7, 'throughput': 58.4}
        """
        return tuple(entry for entry in self.entries if entry.table == table)

    def points(self, figure: PaperFigure) -> tuple[Entry, ...]:
        """The rows that a figure shows."""
        rows = self.rows(figure.table) if figure.table else ()
        return rows if figure.rows == "all" else tuple(entry for entry in rows if entry.row in figure.rows)

    def relative(self, entry: Entry) -> float | None:
        """Throughput over that of the undefended network on the same hardware.

        >>> round(PAPER.relative(PAPER.rows("main")[8]), 2)
        0.3
        """
        found = self._bases.get((entry.table, entry.base)) or self._bases.get(("undefended", entry.base))
        mine, base = entry.number("throughput"), found.number("throughput") if found else None
        return mine / base if mine is not None and base is not None else None

    @cached_property
    def _bases(self) -> dict[tuple[str, str | None], Entry]:
        return {(entry.table, entry.row): entry for entry in self.entries if entry.measures != "defense"}


Thing = TypeVar("Thing", PaperTable, PaperFigure)


def _named(kind: str, name: str, things: Iterable[Thing]) -> Thing:
    known = {thing.id: thing for thing in things}
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        guess = f"Did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"There is no {kind} {name!r}. {guess}Known are {', '.join(known)}.")
    return known[name]


PAPER = TypeAdapter(Paper).validate_python(
    json.loads(resources.files("patchcure.report").joinpath("paper.json").read_text("utf-8"))
)
"""What the paper published."""
