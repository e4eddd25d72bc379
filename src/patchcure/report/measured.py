"""A folder of measured results: of `patchcure evaluate`, and what `patchcure bench --json` printed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from patchcure.benchmark import Row
from patchcure.names import parse
from patchcure.report.paper import Entry, Quantity
from patchcure.report.sheet import Cell, Estimate
from patchcure.result import Result, Share

ROWS = TypeAdapter(list[Row])


@dataclass(frozen=True)
class Measured:
    """All results of a folder, and all measured speeds.

    Args:
        masks: how many masks there were, by the name of the file of records.
    """

    results: tuple[Result, ...] = ()
    speeds: tuple[Row, ...] = ()
    masks: Mapping[str, int] = field(default_factory=dict)

    def case(self, result: Result, speeds: dict[int, Row], measures: Quantity) -> Case:
        """What a row is told of a result."""
        return Case(result, speeds, measures, self.masks.get(result.records))

    def speeds_of(self, entry: Entry) -> dict[int, Row]:
        """The measured speeds of the paper's row by batch size."""
        return {} if entry.variant or entry.operation else self.speeds_by(entry.instance or "")

    def speeds_by(self, instance: str) -> dict[int, Row]:
        """The measured speeds of an instance by batch size."""
        return {row.batch: row for row in self.speeds if row.name == instance}


@dataclass(frozen=True)
class Case:
    """What was measured for one row of a table: a result, speeds, or both."""

    result: Result | None
    speeds: dict[int, Row]
    measures: Quantity = "defense"
    masks: int | None = None

    def cell(self, column: str) -> Cell:
        """The measured value for one of the paper's columns.

        Speeds of an unmasked split network are not measured: the undefended network of an instance is the one that
        it was made from.
        """
        result, speed = self.result, self.result.speed if self.result else None
        undefended = self.measures != "defense"
        if column == "clean" and result:
            return percent(result.undefended if undefended else result.clean)
        if column == "certified" and result and not undefended:
            return percent(result.certified)
        if self.measures == "unmasked":
            return None
        if column == "throughput" and speed:
            return round(speed.undefended if undefended else speed.throughput, 2)
        if column == "throughput":
            column = f"batch{min(self.speeds, key=lambda batch: abs(batch - 4), default=0)}"
        if column.startswith("batch"):
            row = self.speeds.get(int(column.removeprefix("batch")))
            return round(row.undefended if undefended else row.throughput, 2) if row else None
        row = next(iter(self.speeds.values()), None)
        if column == "gflops" and row:
            return round(row.undefended_gmacs if undefended else row.gmacs, 1)
        if undefended:
            return None
        if column == "gflops" and result and result.gmacs is not None:
            return round(result.gmacs, 1)
        if column in ("latency", "memory") and row:
            return round(row.latency_ms if column == "latency" else row.peak_mb, 1)
        return None

    def relative(self) -> Estimate | None:
        """Throughput over that of the undefended network."""
        speed = self.result.speed if self.result and self.result.speed else next(iter(self.speeds.values()), None)
        if self.measures != "defense" or speed is None:
            return None
        return Estimate(speed.relative, speed.relative_low, speed.relative_high, digits=3)


def percent(share: Share | None) -> Estimate | None:
    """A share as a cell in per cent."""
    return None if share is None else Estimate(100 * share.value, 100 * share.low, 100 * share.high)


def read(folder: str | Path) -> Measured:
    """Read all results in a folder: one object a file from `evaluate`, or a list of rows from `bench --json`."""
    path = Path(folder)
    if not path.is_dir():
        raise ValueError(f"results: expected a folder with JSON files of `patchcure evaluate`, got {path}.")
    results: list[Result] = []
    speeds: list[Row] = []
    for file in sorted(path.glob("*.json")):
        if file.read_bytes().lstrip().startswith(b"["):
            speeds += _speeds(file)
        else:
            results.append(_sound(Result.load(file), file))
    if not results and not speeds:
        raise ValueError(f"{path} has no results: expected the JSON files that `patchcure evaluate` writes.")
    masks = {result.records: _masks(path / result.records) for result in results}
    return Measured(tuple(results), tuple(speeds), {name: count for name, count in masks.items() if count})


def canonical(instance: str) -> str:
    """An instance's name in its usual form, or what a defense without a name is called.

    >>> canonical("PCURE-ViT-B-14x2-k9")
    'PCURE-ViT14x2-k9'
    """
    try:
        return str(parse(instance))
    except ValueError:
        return instance


def _speeds(file: Path) -> list[Row]:
    try:
        return ROWS.validate_json(file.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f"{file} is not what `patchcure bench --json` prints: {where}: {first['msg']}.") from None


def _sound(result: Result, file: Path) -> Result:
    """Refuse what cannot be: shares outside 0 to 1, intervals around something else."""
    for key in ("clean", "certified", "undefended", "alarms"):
        share: Share | None = getattr(result, key)
        if share is not None and not 0 <= share.low <= share.value <= share.high <= 1:
            raise ValueError(f"{file}: {key}: expected 0 <= low <= value <= high <= 1, got {share}.")
    return result


def _masks(records: Path) -> int | None:
    """How many masks a file of records was made with, if it is there."""
    if not records.is_file():
        return None
    with records.open("rb") as lines:
        header = json.loads(lines.readline())
    return int(header["masks"]["count"])
