"""`patchcure train`: what a recipe says."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from patchcure.cli.options import Json, setting

if TYPE_CHECKING:
    from patchcure.train.run import Say

MEMORY = 3600.0
"""Seconds of the past from which the bar tells the time left; a step may take several."""


def train(
    recipe: Annotated[str, typer.Argument(help="A YAML file, or one of the recipes in the package by its name.")],
    data: Annotated[
        str | None, typer.Option(help="The data, instead of the recipe's: folder:DIR, cifar10, ...")
    ] = None,
    weights: Annotated[str | None, typer.Option(help="What to start from, instead of the recipe's.")] = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder. [default: train-output/NAME]")] = None,
    change: Annotated[
        list[str] | None, typer.Option("--set", help="Change a value: --set optimiser.samples=1000; may be repeated.")
    ] = None,
    workers: Annotated[int, typer.Option(help="Processes that prepare images.", min=0)] = 1,
    threads: Annotated[int | None, typer.Option(help="CPU threads.", min=1)] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ... [default: cuda if there is one]")] = None,
    precision: Annotated[
        str | None, typer.Option(help="float32 or bfloat16. [default: bfloat16 where the device has it]")
    ] = None,
    save_every: Annotated[int, typer.Option(help="Steps between two checkpoints.", min=1)] = 200,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Write TensorBoard's files too.")] = False,
    as_json: Json = False,
) -> None:
    """Train one set of weights for all operating points of a recipe; run again, it goes on where it was."""
    import torch

    from patchcure.data import open_data
    from patchcure.shards import Shard
    from patchcure.train import Recipe
    from patchcure.train import train as run

    changes = {key.replace(".", "__"): value for key, value in map(setting, change or [])}
    if data is not None:
        changes["data__train"] = data
    if weights is not None:
        changes["start__weights"] = weights
    chosen = Recipe.load(recipe, **changes)
    folder = out or Path("train-output") / chosen.name
    if threads is not None:
        torch.set_num_threads(threads)
    first = Shard.here().rank == 0
    with _shown(chosen.name, folder if tensorboard else None) if first else nullcontext() as say:
        file = run(
            chosen,
            open_data(chosen.data.train, split="train"),
            folder,
            workers=workers,
            device=device,
            precision=precision,  # type: ignore[arg-type]  # checked there
            save_every=save_every,
            say=say,
        )
    if first:
        typer.echo(json.dumps({"weights": str(file), "card": str(file.with_suffix(".json"))}) if as_json else file)


@contextmanager
def _shown(name: str, folder: Path | None) -> Iterator[Say]:
    """Progress on stderr, and TensorBoard's files if they are wanted."""
    board = None if folder is None else _Board(folder)
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(
        *columns,
        TextColumn("loss {task.fields[loss]}"),
        console=console,
        disable=not console.is_terminal,
        speed_estimate_period=MEMORY,
    ) as bar:
        task = bar.add_task(name, total=None, loss="–")
        began: tuple[int, float] | None = None

        def say(step: int, steps: int, line: dict[str, Any]) -> None:
            nonlocal began
            if board is not None:
                board.add(step, line)
            if "loss" not in line:
                shares = (f"{point} {clean:.1%} / {safe:.1%}" for point, (clean, safe) in line["points"].items())
                text = f"{name}: step {step}, clean / certified on held-out images: {', '.join(shares)}"
                console.print(text, soft_wrap=True, highlight=False)
                return
            bar.update(task, total=steps, completed=step, loss=line["loss"])
            if not console.is_terminal:
                now = time.monotonic()
                first, since = began = began or (step, now)
                left = f", {_time((steps - step) * (now - since) / (step - first))} left" if step > first else ""
                print(f"{name}: step {step} of {steps}, loss {line['loss']}{left}", file=sys.stderr, flush=True)

        try:
            yield say
        finally:
            if board is not None:
                board.close()


class _Board:
    """TensorBoard's files, from the first line on; a resumed run's lines take the place of those that it repeats."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ModuleNotFoundError("--tensorboard needs tensorboard: pip install tensorboard.") from error
        self.make, self.folder = SummaryWriter, folder
        self.writer: Any = None

    def add(self, step: int, line: dict[str, Any]) -> None:
        if self.writer is None:
            self.writer = self.make(self.folder, purge_step=step)
        values: dict[str, float] = {key: line[key] for key in ("loss", "lr", "certified") if key in line}
        for point, (clean, safe) in line.get("points", {}).items():
            values |= {f"clean/{point}": clean, f"certified/{point}": safe}
        for key, value in values.items():
            self.writer.add_scalar(key, value, step)

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()


def _time(seconds: float) -> str:
    """Hours and minutes.

    >>> _time(7290)
    '2:01 h'
    """
    return f"{int(seconds) // 3600}:{int(seconds) // 60 % 60:02} h"
