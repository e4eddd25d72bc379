"""Options that several verbs share."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from patchcure.defense import Defense
from patchcure.threat import Size

DEFENSE = "A name of `patchcure zoo` (elastic-vit-ti-cifar10:14x2-k9), a file, or an instance with --weights."
"""What `loaded` takes."""
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Weights = Annotated[Path | None, typer.Option(help="The weights of an instance that is given by its name.")]
Patch = Annotated[
    str | None,
    typer.Option(help="2% of the image, 32 pixels a side, or 20x40. [default: the file's, or 2%]"),
]
Patches = Annotated[int | None, typer.Option(help="How many patches at once. [default: the file's, or 1]")]
Operation = Annotated[str | None, typer.Option(help="The secure operation, instead of the defense's own.")]
MasksPerAxis = Annotated[int | None, typer.Option(help="At most so many masks on each axis.")]
Data = Annotated[
    str,
    typer.Option(help="cifar10, cifar100, svhn, imagenet:DIR, folder:DIR, hf:NAME, digits or sample:NAME."),
]
Seed = Annotated[int, typer.Option(help="Which images, with --limit.")]
Batch = Annotated[int, typer.Option(help="Images at once.", min=1)]
Change = Annotated[
    list[str] | None,
    typer.Option("--set", help="Another option of patchcure.build: --set mean=[0.5,0.5,0.5]; may be repeated."),
]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")]


def size(patch: str) -> Size:
    """Read a patch: ``32``, ``2%`` or ``20x40``."""
    if sides := re.fullmatch(r"(\d+)x(\d+)", patch):
        return int(sides[1]), int(sides[2])
    return int(patch) if patch.isdigit() else patch


def setting(text: str) -> tuple[str, Any]:
    """Read KEY=VALUE, the value as YAML.

    >>> setting("mean=[0.5, 0.5, 0.5]")
    ('mean', [0.5, 0.5, 0.5])
    """
    key, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"--set: expected KEY=VALUE, got {text!r}.")
    return key, yaml.safe_load(value)


def loaded(
    name: str,
    weights: Path | None = None,
    patch: str | None = None,
    device: str = "cpu",
    num_classes: int | None = None,
    change: list[str] | None = None,
    **options: Any,
) -> Defense:
    """A defense by name or file; options that are None are left to it.

    Args:
        num_classes: of the data; an instance with weights of its own is built for so many.
        change: further options, as `setting` reads them.
    """
    from patchcure._device import usable
    from patchcure.zoo import load

    options["patch"] = None if patch is None else size(patch)
    if weights is not None:
        options["num_classes"] = num_classes
    given = {key: value for key, value in options.items() if value is not None}
    given |= dict(map(setting, change or []))
    where = usable(device)
    return load(name, weights=weights, **given).to(where)
