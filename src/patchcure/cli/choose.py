"""`patchcure choose`: an operating point for this machine."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from patchcure.cli.options import (
    DEFENSE,
    Batch,
    Change,
    Data,
    Device,
    Json,
    Patch,
    Patches,
    Seed,
    Weights,
    loaded,
    size,
)

if TYPE_CHECKING:
    from patchcure.choose import Choice


def choose(
    model: Annotated[str, typer.Option(help=DEFENSE)],
    data: Data,
    min_throughput: Annotated[float, typer.Option(help="Images per second, at least.", min=0)] = 0.0,
    min_clean: Annotated[float, typer.Option(help="Clean accuracy from 0 to 1, at least.", min=0, max=1)] = 0.0,
    patch: Patch = None,
    patches: Patches = None,
    weights: Weights = None,
    k: Annotated[list[int] | None, typer.Option(help="Splits to try; may be given several times.")] = None,
    window: Annotated[list[str] | None, typer.Option(help="Windows to try, such as 14x2; several times.")] = None,
    masks_per_axis: Annotated[list[int] | None, typer.Option(help="Budgets of masks to try; several times.")] = None,
    limit: Annotated[int, typer.Option(help="So many images, drawn at random.", min=1)] = 200,
    seed: Seed = 0,
    batch: Batch = 16,
    split: Annotated[str, typer.Option(help="val, test or train.")] = "val",
    change: Change = None,
    out: Annotated[Path | None, typer.Option(help="Where to write the choice, for patchcure.load.")] = None,
    device: Device = "cpu",
    as_json: Json = False,
) -> None:
    """Measure the ways to run one set of weights on this machine, and recommend one (exit code 1: none will do)."""
    from patchcure.choose import choose as run
    from patchcure.data import open_data

    found = open_data(data, split=split)  # type: ignore[arg-type]
    defense = loaded(model, weights, patch, device, len(found.classes), change, patches=patches)
    windows = []
    for text in window or []:
        sides = size(text)
        windows.append(sides if isinstance(sides, tuple) else (int(sides), int(sides)))
    with Console(stderr=True).status("Measuring") as status:
        choice = run(
            defense,
            found,
            str(weights or model),
            out,
            min_throughput=min_throughput,
            min_clean=min_clean,
            splits=k or (),
            windows=windows,
            budgets=masks_per_axis or (None,),
            limit=limit,
            seed=seed,
            batch=batch,
            progress=lambda name, state: status.update(f"{name}: {state.done} of {state.total} images"),
        )
    if as_json:
        typer.echo(json.dumps(asdict(choice), indent=2))
    else:
        Console().print(_table(choice))
        Console().print(choice.why, soft_wrap=True)
    if choice.chosen is None:
        raise typer.Exit(1)


def _table(choice: Choice) -> Table:
    sheet = Table(caption="* on the Pareto front of certified accuracy, clean accuracy and throughput")
    sheet.add_column("point", overflow="fold")
    for title in ("masks", "certified", "clean", "images/s", ""):
        sheet.add_column(title, justify="right")
    for point in sorted(choice.points, key=lambda point: point.worth, reverse=True):
        budget = "" if point.masks_per_axis is None else f", {point.masks_per_axis} an axis"
        mark = "chosen" if point == choice.chosen else "*" if point in choice.front else ""
        shares = f"{point.certified.value:.1%}", f"{point.clean.value:.1%}"
        sheet.add_row(f"{point.name}{budget}", str(point.masks), *shares, f"{point.throughput:.4g}", mark)
    return sheet
