"""A benchmark written down: its rows, and the machine and the versions they were measured with."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path

import torch

import patchcure
from patchcure._atomic import write_atomically
from patchcure.benchmark import Row


@dataclass(frozen=True)
class Record:
    """What `patchcure bench --out` writes.

    Args:
        commands: what measured it, one after the other.
        cpu, threads: the processor, and how many threads it ran.
        versions: of what decides the speed.
        rows: the measurements.
    """

    commands: tuple[str, ...]
    cpu: str
    threads: int
    versions: dict[str, str]
    rows: tuple[Row, ...]

    @classmethod
    def now(cls, arguments: Sequence[str], rows: Sequence[Row]) -> Record:
        """These rows, measured just now by these arguments."""
        versions = {"patchcure": patchcure.__version__, "torch": torch.__version__, "timm": version("timm")}
        versions["python"] = platform.python_version()
        return cls((" ".join(["patchcure", *arguments]),), processor(), torch.get_num_threads(), versions, tuple(rows))

    @classmethod
    def read(cls, file: Path) -> Record:
        """A record from its file."""
        try:
            content = json.loads(file.read_text("utf-8"))
            return cls(
                **{
                    **content,
                    "commands": tuple(content["commands"]),
                    "rows": tuple(Row(**row) for row in content["rows"]),
                }
            )
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{file}: expected what `patchcure bench --out` writes, got {error}.") from error

    def after(self, earlier: Record) -> Record:
        """These rows after those of an earlier record, of which they replace the ones of the same name and batch."""
        if (earlier.cpu, earlier.threads, earlier.versions) != (self.cpu, self.threads, self.versions):
            raise ValueError("The record was measured on another machine or with other versions: choose another file.")
        new = {(row.name, row.batch) for row in self.rows}
        kept = [row for row in earlier.rows if (row.name, row.batch) not in new]
        return replace(self, commands=(*earlier.commands, *self.commands), rows=(*kept, *self.rows))

    def write(self, file: Path) -> None:
        """Write it for `read`."""
        write_atomically(file, (json.dumps(asdict(self), indent=2) + "\n").encode())

    @property
    def caption(self) -> str:
        """One line on the machine."""
        return f"{self.cpu}, {self.threads} threads, torch {self.versions['torch']}"


def cells(record: Record) -> list[list[str]]:
    """A record for people: the titles, then a line for each row."""
    titles = ["instance", "batch", "img/s", "relative", "attacked img/s", "worst", "ms", "GMAC", "MB", "of limit"]
    compared = any(row.over_reference is not None for row in record.rows)
    lines = [[*titles, "over reference"] if compared else titles]
    for row in record.rows:
        over = ["–" if row.over_reference is None else f"{row.over_reference:.2f}"] if compared else []
        lines.append(
            [
                row.name,
                str(row.batch),
                f"{row.throughput:.2f}",
                f"{row.relative:.3f} ({row.relative_low:.2f}–{row.relative_high:.2f})",
                f"{row.attacked:.2f}",
                str(row.worst_evaluations),
                f"{row.latency_ms:.0f}",
                f"{row.gmacs:.1f}",
                f"{row.peak_mb:.0f}",
                f"{row.of_attainable:.2f}",
                *over,
            ]
        )
    return lines


def markdown(record: Record) -> str:
    """The record as a table for a page."""
    titles, *rows = cells(record)
    lines = [titles, ["---", *["---:"] * (len(titles) - 1)], *rows]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"{table}\n\n{record.caption}"


def processor() -> str:
    """The processor's name."""
    listing = Path("/proc/cpuinfo")
    if listing.exists():
        for line in listing.read_text("utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
