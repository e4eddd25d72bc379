"""A table that is ready to be written: Markdown, LaTeX or CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

MISSING = "–"


@dataclass(frozen=True)
class Estimate:
    """A measured value with its interval, and how many digits are shown."""

    value: float
    low: float
    high: float
    digits: int = 1

    def __str__(self) -> str:
        value, low, high = (f"{number:.{self.digits}f}" for number in (self.value, self.low, self.high))
        return f"{value} ({low}–{high})"


@dataclass(frozen=True)
class Published:
    """A number of the paper's, and the ratio to PatchCleanser's that the paper prints in parentheses."""

    value: float
    ratio: float

    def __str__(self) -> str:
        return f"{self.value} ({self.ratio})"


Cell = str | float | Estimate | Published | None


@dataclass(frozen=True)
class Sheet:
    """Rows of cells below a header; None is a cell without a value.

    >>> sheet = Sheet("demo", "A table", ("defense", "clean"), (("PCURE", Estimate(78.31, 76.2, 80.1)), ("DRS", None)))
    >>> print(markdown(sheet))
    ### A table
    <BLANKLINE>
    | defense | clean |
    | --- | ---: |
    | PCURE | 78.3 (76.2–80.1) |
    | DRS | – |
    <BLANKLINE>
    """

    name: str
    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.header):
                raise ValueError(f"{self.name}: expected {len(self.header)} cells in a row, got {len(row)}: {row}.")


def markdown(sheet: Sheet) -> str:
    """A GitHub table with its title above and its notes below."""
    lines = [f"### {sheet.title}", ""]
    lines += [_bars(sheet.header), _bars(["---", *["---:"] * (len(sheet.header) - 1)])]
    lines += [_bars([_text(cell).replace("|", "\\|") for cell in row]) for row in sheet.rows]
    if sheet.notes:
        lines += ["", *(f"- {note}" for note in sheet.notes)]
    return "\n".join([*lines, ""])


def latex(sheet: Sheet) -> str:
    """A table environment (it needs the package booktabs)."""
    lines = [
        "\\begin{table}",
        "  \\centering",
        f"  \\caption{{{_escape(sheet.title)}}}",
        f"  \\label{{tab-{sheet.name}}}",
    ]
    lines += [f"  \\begin{{tabular}}{{l{'r' * (len(sheet.header) - 1)}}}", "    \\toprule"]
    lines += [_ampersands(sheet.header), "    \\midrule", *map(_ampersands, sheet.rows)]
    lines += ["    \\bottomrule", "  \\end{tabular}"]
    lines += [f"  \\par\\footnotesize {_escape(note)}" for note in sheet.notes]
    return "\n".join([*lines, "\\end{table}", ""])


def comma_separated(sheet: Sheet) -> str:
    """Numbers for programs: an estimate has three columns, and a cell without a value is empty."""
    wide = [any(isinstance(row[at], Estimate) for row in sheet.rows) for at in range(len(sheet.header))]
    out = io.StringIO()
    lines = csv.writer(out, lineterminator="\n")
    header = zip(sheet.header, wide, strict=True)
    lines.writerow(
        [name for title, three in header for name in ([title, f"{title} low", f"{title} high"] if three else [title])]
    )
    for row in sheet.rows:
        lines.writerow([value for cell, three in zip(row, wide, strict=True) for value in _values(cell, three)])
    return out.getvalue()


FORMATS: dict[str, tuple[str, Callable[[Sheet], str]]] = {
    "markdown": ("md", markdown),
    "latex": ("tex", latex),
    "csv": ("csv", comma_separated),
}
"""By name: the file's ending and what writes it."""


def write(sheet: Sheet, kind: str = "markdown", folder: str | Path | None = None) -> str:
    """The sheet in one of `FORMATS`; with a folder, also as a file there."""
    if kind not in FORMATS:
        raise ValueError(f"format: expected one of {', '.join(FORMATS)}, got {kind!r}.")
    ending, writer = FORMATS[kind]
    text = writer(sheet)
    if folder is not None:
        (writable(folder) / f"{sheet.name}.{ending}").write_text(text, "utf-8")
    return text


def writable(folder: str | Path) -> Path:
    """Make a folder if it is not there."""
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
        (path / ".patchcure").touch()
        (path / ".patchcure").unlink()
    except OSError as error:
        raise ValueError(f"Cannot write in {path}: {error.strerror}. Give another folder with --out.") from None
    return path


def _text(cell: Cell) -> str:
    return MISSING if cell is None else str(cell)


def _values(cell: Cell, three: bool) -> list[str]:
    if isinstance(cell, Estimate):
        return [f"{number:.{cell.digits + 2}f}" for number in (cell.value, cell.low, cell.high)]
    plain = cell.value if isinstance(cell, Published) else cell
    return ["" if plain is None else str(plain), *["", ""] * three]


def _bars(cells: list[str] | tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"


def _ampersands(row: tuple[Cell, ...]) -> str:
    return "    " + " & ".join(_escape(_text(cell)) for cell in row) + " \\\\"


def _escape(text: str) -> str:
    """Text for LaTeX: its special signs as themselves."""
    signs = {
        "\\": "\\textbackslash{}",
        "~": "\\textasciitilde{}",
        "^": "\\textasciicircum{}",
        "–": "--",
        "×": "$\\times$",
    }
    return "".join(signs.get(sign, f"\\{sign}" if sign in "&%$#_{}" else sign) for sign in text)
