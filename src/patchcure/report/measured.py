"""A folder of measured results: of `patchcure evaluate`, and what `patchcure bench --json` printed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from patchcure.benchmark import Row
from patchcure.names import parse
from patchcure.report.paper import Entry, Quantity
from patchcure.report.sheet import Cell, Estimate
from patchcure.result import Result, Share

RESULT, ROWS = TypeAdapter(Result), TypeAdapter(list[Row])


@dataclass(frozen=True)
class Measured:
    """All results of a folder, and all measured speeds."""

    results: tuple[Result, ...] = ()
    speeds: tuple[Row, ...] = ()

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
    """Read all results in a folder: one object a file from `evaluate`, or a list of rows from `bench`."""
    path = Path(folder)
    if not path.is_dir():
        raise ValueError(f"results: expected a folder with JSON files of `patchcure evaluate`, got {path}.")
    results: list[Result] = []
    speeds: list[Row] = []
    for file in sorted(path.glob("*.json")):
        try:
            content = json.loads(file.read_text("utf-8"))
            if isinstance(content, list):
                speeds += ROWS.validate_python(content)
            else:
                results.append(_sound(RESULT.validate_python(content)))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise ValueError(f"{file} is no result of patchcure: {where}: {first['msg']}.") from None
        except ValueError as error:
            raise ValueError(f"{file} is no result of patchcure: {error}") from None
    if not results and not speeds:
        raise ValueError(f"{path} has no results: expected JSON files that `patchcure evaluate --results` wrote.")
    return Measured(tuple(results), tuple(speeds))


def _sound(result: Result) -> Result:
    """Refuse what cannot be: an unknown instance, shares outside 0 to 1, intervals around something else."""
    parse(result.instance)
    for key in ("clean", "certified", "undefended", "alarms"):
        share: Share | None = getattr(result, key)
        if share is not None and not 0 <= share.low <= share.value <= share.high <= 1:
            raise ValueError(f"{key}: expected 0 <= low <= value <= high <= 1, got {share}.")
    return result
