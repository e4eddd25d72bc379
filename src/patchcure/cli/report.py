"""`patchcure table`, `plot` and `reproduce`: the paper's numbers and measured ones beside each other."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from patchcure.cli.evaluate import shown
from patchcure.cli.options import Batch, Data, Json

Results = Annotated[
    Path | None,
    typer.Option(help="The folder of results of `evaluate` and of `bench --json`. [default: only the paper's numbers]"),
]
All = Annotated[bool, typer.Option("--all", help="All of them.")]


def table(
    names: Annotated[list[str] | None, typer.Argument(help="Such as main; without a name they are listed.")] = None,
    every: All = False,
    results: Results = None,
    form: Annotated[str, typer.Option("--format", help="markdown, latex or csv.")] = "markdown",
    out: Annotated[Path | None, typer.Option(help="Also write a file for each table in this folder.")] = None,
    as_json: Json = False,
) -> None:
    """Tables of the paper, with measured results beside its numbers."""
    from patchcure.report import MEASURED, PAPER, read, write
    from patchcure.report import table as make

    if not names and not every:
        _list({spec.id: spec.title for spec in PAPER.tables} | {MEASURED: "All that was measured"}, as_json)
        return
    measured = read(results) if results else None
    sheets = [make(name, measured) for name in names or [*(spec.id for spec in PAPER.tables), MEASURED]]
    texts = [write(sheet, form, out) for sheet in sheets]
    typer.echo(json.dumps([asdict(sheet) for sheet in sheets], indent=2) if as_json else "\n".join(texts))


def plot(
    names: Annotated[
        list[str] | None, typer.Argument(help="Such as throughput; without a name they are listed.")
    ] = None,
    every: All = False,
    results: Results = None,
    out: Annotated[Path, typer.Option(help="The folder for the pictures.")] = Path("plot-output"),
    as_json: Json = False,
) -> None:
    """Figures of the paper as PNG and SVG: its points hollow, measured ones filled."""
    from patchcure.report import PAPER, plot_all, read
    from patchcure.report import plot as draw

    if not names and not every:
        _list({spec.id: spec.title for spec in PAPER.figures}, as_json)
        return
    measured = read(results) if results else None
    files = [file for name in names for file in draw(name, measured, out)] if names else plot_all(measured, out)
    typer.echo(json.dumps([str(file) for file in files], indent=2) if as_json else "\n".join(map(str, files)))


def reproduce(
    name: Annotated[str, typer.Argument(help="A table; `patchcure table` lists them.")],
    data: Data = "",
    weights: Annotated[Path | None, typer.Option(help="A folder with files of weights.")] = None,
    limit: Annotated[int | None, typer.Option(help="So many images, drawn at random.", min=1)] = None,
    batch: Batch = 32,
    out: Annotated[Path, typer.Option(help="The folder for records and results.")] = Path("reproduce-output"),
    form: Annotated[str, typer.Option("--format", help="markdown, latex or csv.")] = "markdown",
    as_json: Json = False,
) -> None:
    """Run what a table of the paper needs, and show the paper's and the measured numbers beside each other."""
    from patchcure.report import write
    from patchcure.report.reproduce import reproduce as run

    sheet, skipped = run(name, data or None, weights, out, limit=limit, batch=batch, shown=shown)
    for line in skipped:
        typer.echo(f"skipped: {line}", err=True)
    typer.echo(json.dumps({**asdict(sheet), "skipped": skipped}, indent=2) if as_json else write(sheet, form))


def _list(titles: dict[str, str], as_json: bool) -> None:
    width = max(map(len, titles))
    lines = [f"{name:<{width}}  {title}" for name, title in titles.items()]
    typer.echo(json.dumps(titles, indent=2) if as_json else "\n".join(lines))
