"""`patchcure predict`: labels of image files."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from patchcure.cli.options import DEFENSE, Change, Device, Json, Operation, Patch, Patches, Weights, loaded

if TYPE_CHECKING:
    from patchcure.predict import Answer


def predict(
    images: Annotated[list[Path], typer.Argument(help="Image files.")],
    defense: Annotated[str, typer.Option(help=DEFENSE)],
    picture: Annotated[Path | None, typer.Option(help="A folder for figures of how each image was decided.")] = None,
    classes: Annotated[Path | None, typer.Option(help="A file with the classes' names, one a line.")] = None,
    weights: Weights = None,
    patch: Patch = None,
    patches: Patches = None,
    operation: Operation = None,
    change: Change = None,
    device: Device = "cpu",
    as_json: Json = False,
) -> None:
    """Labels of images, whether the masks agreed, and where a patch may be; damaged files are skipped (exit code 1)."""
    from patchcure.predict import class_names, predict_files

    names = None if classes is None else classes.read_text("utf-8").splitlines()
    count = None if names is None else len(names)
    model = loaded(defense, weights, patch, device, count, change, patches=patches, operation=operation)
    answers = []
    for answer in predict_files(model, images, class_names(model) if names is None else names, picture):
        answers.append(answer)
        if answer.problem is not None:
            typer.echo(f"patchcure: {answer.problem}", err=True)
        elif not as_json:
            typer.echo(_sentence(answer))
    if as_json:
        typer.echo(json.dumps([asdict(answer) for answer in answers], indent=2))
    if any(answer.problem is not None for answer in answers):
        raise typer.Exit(1)


def _sentence(answer: Answer) -> str:
    label = "alarm" if answer.label is None else answer.name or str(answer.label)
    parts = [f"{answer.file}: {label}"]
    if answer.alarm and answer.label is not None:
        parts.append("with an alarm")
    parts.append("the masks agree" if answer.unanimous else "the masks disagree")
    if answer.suspicion is not None:
        top, left, bottom, right = answer.suspicion
        parts.append(f"suspicious: rows {top} to {bottom}, columns {left} to {right}")
    if answer.picture is not None:
        parts.append(f"see {answer.picture}")
    return ", ".join(parts)
