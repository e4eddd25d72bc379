"""`patchcure evaluate`: defenses on labelled images."""

from __future__ import annotations

import json
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table

from patchcure.cli.options import (
    DEFENSE,
    Batch,
    Change,
    Data,
    Device,
    Json,
    MasksPerAxis,
    Operation,
    Patch,
    Patches,
    Seed,
    Weights,
    loaded,
)
from patchcure.defense import Defense

if TYPE_CHECKING:
    from patchcure import images
    from patchcure.evaluate import Progress
    from patchcure.result import Result, Share, Timing

QUIET = 60
"""Seconds between two lines of progress where there is no terminal."""


def evaluate(
    names: Annotated[list[str], typer.Argument(help=DEFENSE)],
    data: Data,
    patch: Patch = None,
    patches: Patches = None,
    weights: Weights = None,
    limit: Annotated[int | None, typer.Option(help="So many images, drawn at random.", min=1)] = None,
    seed: Seed = 0,
    batch: Batch = 32,
    split: Annotated[str, typer.Option(help="test, val or train.")] = "test",
    undefended: Annotated[bool, typer.Option(help="Predict with nothing hidden, too.")] = True,
    verdicts: Annotated[
        bool, typer.Option("--verdicts", help="Stop at the first failure of an image: faster, no other patch sizes.")
    ] = False,
    operation: Operation = None,
    masks_per_axis: MasksPerAxis = None,
    image_size: Annotated[int | None, typer.Option(help="The model's side, for an instance with --weights.")] = None,
    change: Change = None,
    out: Annotated[
        Path | None,
        typer.Option(help="The file of records (of several defenses: their folder). [default: in evaluate-output]"),
    ] = None,
    speed: Annotated[bool, typer.Option("--speed", help="Measure the throughput as well.")] = False,
    wait: Annotated[
        float | None, typer.Option(help="Under torchrun: seconds to wait for a process that stands still.")
    ] = None,
    device: Device = "cpu",
    as_json: Json = False,
) -> None:
    """Clean and certified accuracy: one record per image, resumable; and beside them a result."""
    from patchcure.data import open_data
    from patchcure.evaluate import evaluate as run
    from patchcure.result import Result
    from patchcure.shards import Shard

    if speed and Shard.here().world > 1:
        raise ValueError("--speed: several processes would disturb each other; measure in one process.")
    files = _files(names, data, out)
    found = open_data(data, split=split)  # type: ignore[arg-type]
    results = []
    for name, file in zip(names, files, strict=True):
        defense = loaded(
            name,
            weights,
            patch,
            device,
            len(found.classes),
            change,
            patches=patches,
            operation=operation,
            masks_per_axis=masks_per_axis,
            image_size=image_size,
        )
        with shown(Path(name).name) as progress:
            records = run(
                defense,
                found,
                out=file,
                limit=limit,
                seed=seed,
                batch=batch,
                undefended=undefended,
                detail="verdict" if verdicts else "locations",
                progress=progress,
                wait=wait,
            )
        if records is None:
            continue
        timing = _timing(defense, found, [row.index for row in records.rows[:batch]]) if speed else None
        result = Result.of(
            records,
            name,
            file=file.name,
            command=shlex.join(["patchcure", *sys.argv[1:]]),
            speed=timing,
            gmacs=_gmacs(defense) if speed else None,
            device=device,
        )
        result.save(file.with_suffix(".json"))
        results.append(result)
    if not results:
        return
    if as_json:
        summary = [result.summary() for result in results]
        typer.echo(json.dumps(summary if len(names) > 1 else summary[0], indent=2))
        return
    Console().print(_table(results))
    Console().print(f"Records and results: {', '.join(map(str, files))}", soft_wrap=True)


@contextmanager
def shown(name: str) -> Iterator[Callable[[Progress], None]]:
    """Progress on stderr: a bar on a terminal, else a line now and then."""
    console = Console(stderr=True)
    if not console.is_terminal:
        last = time.monotonic()

        def tell(state: Progress) -> None:
            nonlocal last
            if time.monotonic() - last > QUIET:
                last = time.monotonic()
                print(f"{name}: {state.done} of {state.total}, {_running(state)}", file=sys.stderr, flush=True)

        yield tell
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Bar(*columns, TextColumn("{task.fields[running]}"), console=console, transient=True) as bar:
        task = bar.add_task(name, total=None, running="")
        yield lambda state: bar.update(task, total=state.total, completed=state.done, running=_running(state))


def _running(state: Progress) -> str:
    return state.waiting or f"clean {state.clean:.1%}, certified {state.certified:.1%}"


def _files(names: Sequence[str], data: str, out: Path | None) -> list[Path]:
    """Where each defense's records go."""
    if len(names) == 1 and out is not None:
        if out.suffix == ".json":
            raise ValueError(f"--out: {out} is where the result goes, beside the records: use the ending .jsonl.")
        if out.with_suffix(".safetensors").exists():
            raise ValueError(f"--out: {out.with_suffix('.json')} is for the card of those weights: use another name.")
        return [out]
    folder = Path("evaluate-output") if out is None else out
    kind = "" if out else f"-{_word(data)}"
    files = [folder / f"{_word(Path(name).name.removesuffix('.safetensors'))}{kind}.jsonl" for name in names]
    if len(set(files)) < len(files):
        raise ValueError("Two defenses of the same name would share a file of records: evaluate them one by one.")
    return files


def _word(text: str) -> str:
    return re.sub(r"[^\w.+-]+", "-", text).strip("-")


def _timing(defense: Defense, data: images.Data, indices: Sequence[int]) -> Timing:
    from patchcure.benchmark import speed
    from patchcure.evaluate import pixels
    from patchcure.result import Timing

    measured = speed(defense, pixels(defense, data, indices)[0])
    return Timing(**asdict(measured), batch=len(indices))


def _gmacs(defense: Defense) -> float | None:
    """Of the first round, where there is one and the defense can be built anew."""
    from patchcure.benchmark import gmacs

    return gmacs(**defense.recipe)[0] if defense.recipe and defense.operation.together else None


def _table(results: Sequence[Result]) -> Table:
    first = results[0]
    sheet = Table(title=f"{first.n} images of {first.dataset}, {first.threat.text}", caption="with 95 % intervals")
    sheet.add_column("defense", overflow="fold")
    titles = ["undefended", "clean", "certified"]
    titles += ["alarms"] if any(result.alarms for result in results) else []
    for title in [*titles, "evaluations"]:
        sheet.add_column(title, justify="right")
    for result in results:
        shares: list[Share | None] = [getattr(result, title) for title in titles]
        sheet.add_row(Path(result.defense).name, *map(_percent, shares), f"{result.evaluations:.1f}")
    return sheet


def _percent(share: Share | None) -> str:
    return "–" if share is None else f"{share.value:.1%} ({100 * share.low:.1f}–{100 * share.high:.1f})"
