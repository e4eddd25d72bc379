"""Load a defense with its weights, and save one."""

from __future__ import annotations

import json
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from patchcure._atomic import write_atomically
from patchcure.ablations import Ablation
from patchcure.defense import Defense
from patchcure.geometry import Grid
from patchcure.names import at_point, build
from patchcure.operations import OPERATIONS
from patchcure.preprocess import Resize
from patchcure.threat import PatchThreat
from patchcure.zoo import config, released
from patchcure.zoo.checkpoint import Tensors, fit, read

KEY = "patchcure"
WEIGHTS = Path(__file__).parent
"""Weights that come with the package, each with its card: NAME.safetensors and NAME.json."""
KINDS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (Ablation, PatchThreat, Grid, Resize, *(type(operation) for operation in OPERATIONS.values()))
}
"""What a recipe may hold besides numbers and words."""


def load(name_or_file: str | Path, *, weights: str | Path | None = None, **options: Any) -> Defense:
    """A defense with trained weights.

    Args:
        name_or_file: one of
            weights that come with the package (``elastic-vit-ti-cifar10``);
            a file written by `save` or by training;
            a released checkpoint, whose name tells what it is (``vitsrf14x2_split9_masked.pth.tar``);
            a config with the ending ``.yaml``, as `patchcure choose` writes it;
            the name of an instance (``PCURE-ViT14x2-k9``) together with `weights`.
            The first three may be followed by a colon and another operating point of the same network:
            ``elastic-vit-ti-cifar10:14x2-k9``, ``mine.safetensors:k6``, or a whole name after the colon.
        weights: the file with an instance's weights: released, timm's, or MAE's. A file without a classifier (MAE
            pretraining) leaves the head new, with a warning.
        **options: as for `patchcure.build`; they override what the file says.

    >>> import tempfile
    >>> from patchcure import build
    >>> defense = build("PCURE-ViT-Ti-6x1-k3", image_size=96, num_classes=10, patch=16)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(defense, f"{folder}/mine.safetensors")
    ...     again = load(f"{folder}/mine.safetensors:2x2-k0", operation="challenger")
    >>> len(again.masks), again.model.k
    (4, 0)
    """
    if weights is not None:
        tensors = released.timm_layout(read(Path(weights)))
        defense = build(str(name_or_file), **options)
        fit(defense.model, tensors, str(weights), need_head=False)
        return defense
    place, point = parted(str(name_or_file))
    file = find(place)
    if file.suffix == ".yaml":
        return _configured(file, options)
    recipe = _recipe(file) if file.suffix == ".safetensors" else None
    tensors = read(file)
    if recipe is None:
        name, known = released.instance(file.name, tensors)
        recipe, tensors = {"name": name, **known}, released.timm_layout(tensors)
    if point:
        recipe |= {"name": at_point(recipe["name"], point), "operation": None}
    return _filled({**recipe, **options}, tensors, file.name)


def named(name: str, **options: Any) -> Defense:
    """A defense by any name: weights that come with the package, a file, or an instance, which gets new weights.

    >>> named("elastic-vit-ti-cifar10:14x2-k9").model.k, named("PCURE-ViT-Ti-14x2-k6", num_classes=10).model.k
    (9, 6)
    """
    try:
        find(parted(name)[0])
    except FileNotFoundError:
        return build(name, **options)
    return load(name, **options)


def save_config(defense: Defense, weights: str | Path, file: str | Path, comment: str = "") -> None:
    """Write how to build a defense, and where its weights are, to a small YAML file that `load` takes.

    Args:
        weights: the file that holds them, or another argument of `load`.
    """
    options = dict(_recipe_of(defense))
    plain = json.loads(json.dumps(options, default=_encode))
    config.write(Path(file), plain.pop("name"), str(weights), plain, comment)


def save(defense: Defense, file: str | Path, *, half: bool = False) -> None:
    """Write a defense that `patchcure.build` made, with its weights and everything that `load` needs, to one file.

    Args:
        half: round the weights to float16, for half the size. `load` computes with the rounded weights in float32, so
            measure what you publish: it is another model, by a little.
    """
    from safetensors.torch import save as to_bytes

    recipe = _recipe_of(defense)
    state: dict[str, Tensor] = {key: value.contiguous() for key, value in defense.model.backbone.state_dict().items()}
    if half:
        state = {key: value.half() if value.is_floating_point() else value for key, value in state.items()}
    write_atomically(Path(file), to_bytes(state, metadata={KEY: json.dumps(recipe, default=_encode)}))


def holds(file: str | Path) -> str | None:
    """The instance whose weights a file holds, as what `save` noted or a released file's name tells; else None.

    >>> holds("vitsrf14x2_split9_masked.pth.tar")
    'PCURE-ViT14x2-k9'
    """
    file = Path(file)
    if file.suffix == ".safetensors" and (recipe := _recipe(file)) is not None:
        return str(recipe["name"])
    try:
        return released.instance(file.name, {})[0]
    except ValueError:
        return None


def cards() -> list[dict[str, Any]]:
    """The cards of the weights that come with the package: data, recipes, hours, hash, what was measured.

    >>> "elastic-vit-ti-cifar10" in [card["name"] for card in cards()]
    True
    """
    return [json.loads(file.with_suffix(".json").read_text()) for file in sorted(WEIGHTS.glob("*.safetensors"))]


def parted(name: str) -> tuple[str, str]:
    """What stands before and after the colon; a file may have colons in its name."""
    place, colon, point = name.rpartition(":")
    return (place, point) if colon and not Path(name).exists() else (name, "")


def find(name: str | Path) -> Path:
    """The file itself, or the file of that name in the folder $PATCHCURE_HOME, or among the package's weights."""
    places = [Path(name)]
    if home := os.environ.get("PATCHCURE_HOME"):
        places.append(Path(home) / name)
    for place in [*places, WEIGHTS / f"{name}.safetensors"]:
        if place.is_file():
            return place
    looked = " and ".join(str(place) for place in places)
    ours = ", ".join(sorted(file.stem for file in WEIGHTS.glob("*.safetensors")))
    raise FileNotFoundError(
        f"There are no weights at {looked}, and the package brings only {ours}. Give the path of a file written by "
        "patchcure.save or of a released "
        "checkpoint (or put it in the folder $PATCHCURE_HOME); for an instance such as PCURE-ViT14x2-k9 give its "
        "weights= too, or use patchcure.build for new weights."
    )


def _recipe_of(defense: Defense) -> dict[str, Any]:
    if defense.recipe is None:
        raise ValueError("This defense was not made by patchcure.build, so a file could not say how to make it again.")
    return defense.recipe


def _configured(file: Path, options: dict[str, Any]) -> Defense:
    """A defense from a config: built by its own recipe, with the weights of that file or of that other defense."""
    model, weights, noted = config.read(file)
    chosen = {**json.loads(noted, object_hook=_decode), **options}
    if Path(weights).is_file():
        return load(model, weights=weights, **chosen)
    return load(weights, name=model, **chosen)


def _filled(recipe: dict[str, Any], tensors: Tensors, source: str) -> Defense:
    """Build a defense without spending time on new weights, and give it these."""
    with torch.device("meta"):
        defense = build(**recipe)
    fit(defense.model, tensors, source)
    return defense


def _recipe(file: Path) -> dict[str, Any] | None:
    """What `save` noted about how to build the defense."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as handle:
            metadata = handle.metadata() or {}
    except SafetensorError as error:
        raise ValueError(f"{file} is not a complete safetensors file: {error}.") from error
    recipe: dict[str, Any] | None = json.loads(metadata[KEY], object_hook=_decode) if KEY in metadata else None
    return recipe


def _encode(value: Any) -> dict[str, Any]:
    """A threat or an operation as plain JSON."""
    kind = type(value).__name__
    if kind not in KINDS:
        raise ValueError(f"{value!r} cannot be saved: only the operations of patchcure.operations can.")
    return {"kind": kind, **{field.name: getattr(value, field.name) for field in fields(value)}}


def _decode(value: dict[str, Any]) -> Any:
    """The inverse of `_encode`."""
    kind = value.pop("kind", None)
    if kind is None:
        return value
    if "shapes" in value:
        value["shapes"] = tuple((height, width) for height, width in value["shapes"])
    return KINDS[kind](**value)
