"""The command line: verbs, no logic."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table

import patchcure
from patchcure.cli.choose import choose
from patchcure.cli.evaluate import evaluate
from patchcure.cli.options import Json, MasksPerAxis, Operation, Patch, Patches, size
from patchcure.cli.predict import predict
from patchcure.cli.report import plot, reproduce, table
from patchcure.cli.train import train

if TYPE_CHECKING:
    from patchcure.demo import Result

app = typer.Typer(
    help="Image classifiers that are provably robust to adversarial patches.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

for verb in (evaluate, predict, choose, train, table, plot, reproduce):
    app.command()(verb)

MISTAKES = (ValueError, OSError, ImportError, FloatingPointError)
"""What a user can cause and mend: shown as one line, without a traceback."""


def main() -> None:
    """Run the command line; a mistake of the user is one line on stderr and exit code 2."""
    try:
        sys.exit(app(args=spread(sys.argv[1:]), standalone_mode=False))
    except MISTAKES as error:
        message = str(error)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        if not hasattr(error, "format_message"):  # typer's own exceptions: options and arguments
            raise
        message = error.format_message()
    if message:
        print("patchcure:", " ".join(message.split()), file=sys.stderr)
    sys.exit(2)


def spread(arguments: list[str]) -> list[str]:
    """Repeat --batch before each of the numbers that follow it.

    >>> spread(["bench", "--batch", "1", "4", "--json"])
    ['bench', '--batch', '1', '--batch', '4', '--json']
    """
    result: list[str] = []
    several = False
    for argument in arguments:
        several = argument == "--batch" or (several and argument.isdigit())
        if several and argument.isdigit() and result[-1] != "--batch":
            result.append("--batch")
        result.append(argument)
    return result


def version(asked: bool) -> None:
    """Print the version and stop."""
    if asked:
        typer.echo(f"patchcure {patchcure.__version__}")
        raise typer.Exit()


@app.callback()
def options(
    _: Annotated[bool, typer.Option("--version", callback=version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """Image classifiers that are provably robust to adversarial patches."""


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="The folder for the picture.")] = Path("demo-output"),
    limit: Annotated[int, typer.Option(help="How many images.")] = 20,
    as_json: Json = False,
) -> None:
    """Attack a ViT on small photographs, undefended and at several operating points; three minutes, no network."""
    from patchcure.demo import run

    progress = Console(stderr=True)
    with progress.status("Loading") as status:
        result = run(out, limit, say=status.update)
    if as_json:
        typer.echo(json.dumps(asdict(result), indent=2))
        return
    console = Console()
    console.print(_table(result))
    console.print(f"How one attacked image was decided: {result.picture}", soft_wrap=True)


@app.command()
def names(as_json: Json = False) -> None:
    """List the instances that have a name (`patchcure zoo` lists trained weights)."""
    from patchcure.names import known

    typer.echo(json.dumps(known(), indent=2) if as_json else "\n".join(known()))


@app.command()
def zoo(as_json: Json = False) -> None:
    """List the weights that come with the package, and what was measured with them."""
    from patchcure.zoo import cards

    found = cards()
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    tables: dict[str, Table] = {}
    for row in sorted((row for card in found for row in card["results"]), key=lambda row: -row["certified"]):
        measured = f"{row['data']}: {row['threat']}"
        if measured not in tables:
            tables[measured] = Table(Column("weights", overflow="fold"), box=SIMPLE_HEAD)
            for column in ("images", "clean", "certified", "alarms"):
                tables[measured].add_column(column, justify="right")
        name = row["defense"] + (f" --operation {row['operation']}" if "operation" in row else "")
        shares = (f"{row[share]:.1%}" if share in row else "–" for share in ("clean", "certified", "alarms"))
        tables[measured].add_row(name, str(row["images"]), *shares)
    console = Console()
    for measured, listed in tables.items():
        console.print(measured, listed, sep="\n", soft_wrap=True)


@app.command()
def describe(
    name: Annotated[str, typer.Argument(help="A name of `patchcure names` or `patchcure zoo`, or a file.")],
    patch: Patch = None,
    patches: Patches = None,
    image_size: Annotated[int | None, typer.Option(help="The side of the images in pixels.")] = None,
    masks_per_axis: MasksPerAxis = None,
    mask_stride: Annotated[int | None, typer.Option(help="Cells between masks, instead.")] = None,
    operation: Operation = None,
    as_json: Json = False,
) -> None:
    """Show the grid, the masks and the threat of an instance or of trained weights."""
    import torch

    from patchcure.zoo import named

    options = {
        "patch": None if patch is None else size(patch),
        "patches": patches,
        "image_size": image_size,
        "masks_per_axis": masks_per_axis,
        "mask_stride": mask_stride,
        "operation": operation,
    }
    with torch.device("meta"):
        defense = named(name, **{key: value for key, value in options.items() if value is not None})
    facts = _facts(name, defense)
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    width = max(map(len, facts))
    for key, value in facts.items():
        typer.echo(f"{key.replace('_', ' '):<{width}}  {value}")


@app.command()
def bench(
    names: Annotated[
        list[str] | None, typer.Argument(help="Names of `patchcure names` or `patchcure zoo`, or files.")
    ] = None,
    batch: Annotated[list[int] | None, typer.Option(help="Batch sizes, such as 1 4 8 32. [default: 4]")] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads.", min=1)] = None,
    rounds: Annotated[int, typer.Option(help="How often defended and undefended take turns.", min=1)] = 7,
    flavour: Annotated[str | None, typer.Option(help="ours or published, for networks that have both.")] = None,
    reference: Annotated[bool, typer.Option("--reference", help="Time the plain reference too.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write a record to this file, or add to it.")] = None,
    show: Annotated[Path | None, typer.Option(help="Show such a record instead of measuring.")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print a table for a page.")] = False,
    as_json: Json = False,
) -> None:
    """Measure instances beside their undefended networks, turn by turn: speed, work and memory."""
    import torch

    from patchcure.benchmark import bench as measure
    from patchcure.benchmark_record import Record, cells
    from patchcure.benchmark_record import markdown as page

    if (show is None) == (not names):
        raise ValueError("Expected names of instances to measure, or a record to --show.")
    if threads is not None:
        torch.set_num_threads(threads)
    if show is not None:
        record = Record.read(show)
    else:
        options = {} if flavour is None else {"flavour": flavour}
        with Console(stderr=True).status("Measuring"):
            rows = list(measure(names or [], batch or [4], rounds, reference, **options))
        record = Record.now(sys.argv[1:], rows)
    if out is not None:
        record = record.after(Record.read(out)) if out.exists() else record
        record.write(out)
    if as_json:
        typer.echo(json.dumps([asdict(row) for row in record.rows], indent=2))
        return
    if markdown:
        typer.echo(page(record))
        return
    sheet = Table(caption=record.caption, box=SIMPLE_HEAD, padding=(0, 0, 0, 1))
    lines = cells(record)
    for title, least in zip(lines[0], (0, 5, 5, 11), strict=False):
        sheet.add_column(title, justify="right" if sheet.columns else "left", min_width=least, overflow="fold")
    for title in lines[0][4:]:
        sheet.add_column(title.replace(" ", "\n"), justify="right")
    for line in lines[1:]:
        sheet.add_row(*(cell.replace(" (", "\n(") for cell in line))
    Console().print(sheet)


def _table(result: Result) -> Table:
    """The result for people."""
    sheet = Table(title=f"{result.images} images of CIFAR-10, {result.threat}", caption=f"{result.seconds:.0f} s")
    sheet.add_column("defense")
    for title in ("clean", "attacked", "certified", "masks", "speed"):
        sheet.add_column(title, justify="right")
    for row in result.rows:
        defended = row.masks > 0
        sheet.add_row(
            row.name,
            f"{row.clean:.1%}",
            f"{row.attacked:.1%}",
            f"{row.certified:.1%}" if defended else "–",
            str(row.masks) if defended else "–",
            f"{row.speed:.2f}x ({row.spread[0]:.2f}–{row.spread[1]:.2f})" if defended else "1x",
        )
    return sheet


def _facts(name: str, defense: patchcure.Defense) -> dict[str, str | int]:
    """What there is to know about a defense before any image is seen."""
    model, masks = defense.model, defense.masks
    row, column = model.grid.height // 2, model.grid.width // 2
    field = model.receptive(patchcure.Box(row, column, row + 1, column + 1))
    boxes = sorted((box for mask in masks.masks for box in mask), key=lambda box: box.area)
    largest = f"{boxes[-1].height}x{boxes[-1].width} cells" if boxes else "none"
    several = f", {defense.threat.count} at once" if boxes and defense.threat.count > 1 else ""
    return {
        "name": name,
        "threat": defense.threat.describe(),
        "image": f"{model.image.height}x{model.image.width} pixels",
        "grid": f"{model.grid.height}x{model.grid.width} cells",
        "receptive_field": f"{field.height}x{field.width} pixels",
        "mask": f"{largest}{several}",
        "masks": len(masks),
        "pairs": masks.pairs,
        "operation": type(defense.operation).__name__,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }
