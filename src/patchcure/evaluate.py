"""Evaluate a defense on labelled images: one record each, resumable, over as many processes as there are."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

import patchcure
from patchcure.data import preprocessing, subset
from patchcure.defense import Defense
from patchcure.images import Data, Item
from patchcure.operations import OPERATIONS
from patchcure.operations.base import Detail, detects
from patchcure.records import FORMAT, Header, Journal, Record, Records
from patchcure.shards import Shard, finished, merge

DIGITS = 3
"""Significant digits of a margin."""
READERS = 4
"""Threads that read and decode images."""


@dataclass(frozen=True)
class Progress:
    """How far an evaluation is.

    Args:
        done, total: images of this process.
        clean, certified: shares of right and of certified answers so far.
        waiting: what is being waited for, if anything.
    """

    done: int
    total: int
    clean: float
    certified: float
    waiting: str = ""


def evaluate(
    defense: Defense,
    data: Data,
    *,
    out: str | Path,
    limit: int | None = None,
    seed: int = 0,
    batch: int = 32,
    undefended: bool = True,
    detail: Detail = "locations",
    progress: Callable[[Progress], None] = lambda state: None,
    wait: float | None = None,
) -> Records | None:
    """Predict and certify images, and write one record for each to a file as it goes.

    Killed at any moment and started again, it goes on from the last whole block; the file becomes that of an
    uninterrupted run. Under torchrun each process writes a file of its own and rank 0 merges them.

    Args:
        out: the file of records; one that was begun with other weights, threat or data is refused.
        limit: so many images, drawn at random by `seed`.
        batch: images at once. Blocks of images are always the same ones, whoever computes them: a matrix product
            rounds differently in other company.
        undefended: also predict with nothing hidden.
        detail: as in `Defense.certify`; with ``"verdict"`` the largest patch of an image that fails is 0.
        progress: is told after each block.
        wait: see `patchcure.shards.merge`.

    Returns:
        All records; None in a process other than rank 0.

    >>> import tempfile
    >>> from patchcure import AnyClassifier, Defense, PatchThreat
    >>> from patchcure.data import open_data
    >>> network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    >>> model = AnyClassifier(network, image=8, num_classes=10, mean=[0.3], std=[0.4])
    >>> defense = Defense(model, PatchThreat.square(2, image=8))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     records = evaluate(defense, open_data("digits"), out=f"{folder}/records.jsonl", limit=3)
    >>> [row.index for row in records.rows]
    [90, 254, 283]
    """
    out, shard = Path(out), Shard.here()
    if batch < 1:
        raise ValueError(f"batch: expected at least 1, got {batch}.")
    if out.is_dir():
        raise IsADirectoryError(f"{out} is a folder: expected a file for the records.")
    _check(defense, data)
    chosen = subset(len(data), limit, seed)
    blocks = [chosen[start : start + batch] for start in range(0, len(chosen), batch)]
    options = {"batch": batch, "detail": detail, "undefended": undefended}
    head = header(defense, data, len(chosen), seed) | options
    if (rows := finished(out, head, blocks)) is not None:
        return Records(head, tuple(rows)) if shard.rank == 0 else None
    with Journal(shard.path(out), head, shard.of(blocks)) as journal, ThreadPoolExecutor(READERS) as readers:
        total = sum(map(len, journal.blocks))
        progress(_progress(journal.rows, total))
        for block in journal.remaining:
            journal.append(_records(defense, data, block, undefended, detail, readers))
            progress(_progress(journal.rows, total))
        rows = journal.rows
    if shard.rank:
        return None
    if shard.world > 1:
        own = _progress(rows, total)
        rows = merge(out, head, blocks, shard.world, wait, lambda text: progress(replace(own, waiting=text)))
    return Records(head, tuple(rows))


def header(defense: Defense, data: Data, images: int, seed: int) -> Header:
    """Everything that records depend on."""
    model, threat, masks = defense.model, defense.threat, defense.masks
    recipe = defense.recipe
    return {
        "format": FORMAT,
        "defense": recipe["name"] if recipe else f"{type(model).__name__} with {type(defense.operation).__name__}",
        "recipe": json.loads(json.dumps(recipe, default=repr)),
        "operation": operation_name(defense),
        "detects": detects(defense.operation),
        "weights": weights_sha256(defense),
        "masks": {"count": len(masks), "sha256": _sha256(repr(masks.masks).encode())},
        "threat": {
            "text": threat.describe(),
            "shapes": [list(shape) for shape in threat.shapes],
            "patches": threat.count,
            "image": [threat.image.height, threat.image.width],
            "resize": None if threat.resize is None else repr(threat.resize),
        },
        "preprocessing": {
            "image": [model.image.height, model.image.width],
            "crop": model.crop,
            "mean": model.mean.flatten().tolist(),
            "std": model.std.flatten().tolist(),
        },
        "data": {
            "name": data.name,
            "split": data.split,
            "n": len(data),
            "images": images,
            "seed": seed,
            "sha256": data.fingerprint,
        },
        "versions": {"patchcure": patchcure.__version__, "torch": torch.__version__, "timm": version("timm")},
    }


def operation_name(defense: Defense) -> str:
    """The operation as options name it, else in full."""
    names = [name for name, operation in OPERATIONS.items() if operation == defense.operation]
    return names[0] if names else repr(defense.operation)


def weights_sha256(defense: Defense) -> str:
    """Of the network's tensors with their names, types and shapes, in the order of their names."""
    digest = hashlib.sha256()
    for name, tensor in sorted(defense.model.backbone.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def pixels(
    defense: Defense, data: Data, block: Sequence[int], readers: ThreadPoolExecutor | None = None
) -> tuple[Float[Tensor, "b c h w"], list[Item]]:
    """These images as the defense reads them, where it is, and as they are stored."""
    prepare = preprocessing(defense)

    def one(index: int) -> tuple[Tensor, Item]:
        try:
            item = data[index]
            return prepare(item.image), item
        except (ValueError, OSError) as error:
            raise ValueError(f"Image {index} of {data.name}: {error}") from error

    tensors, items = zip(*(readers.map(one, block) if readers else map(one, block)), strict=True)
    return torch.stack(tensors).to(defense.model.mean.device), list(items)


def _check(defense: Defense, data: Data) -> None:
    classes = defense.model.num_classes
    if len(data.classes) != classes:
        raise ValueError(
            f"{data.name} has {len(data.classes)} classes but the model {classes}: evaluate on the data that the model "
            "was trained for."
        )
    for index, label in enumerate(data.labels):
        if not 0 <= label < classes:
            raise ValueError(f"Labels go from 0 to {classes - 1}, but image {index} of {data.name} has {label}.")


@torch.no_grad()
def _records(
    defense: Defense, data: Data, block: Sequence[int], undefended: bool, detail: Detail, readers: ThreadPoolExecutor
) -> list[Record]:
    images, items = pixels(defense, data, block, readers)
    labels = torch.tensor([item.label for item in items], device=images.device)
    try:
        prediction = defense.predict(images)
        certificate = defense.certify(images, labels, detail)
        plain: list[Any] = defense(images).argmax(1).tolist() if undefended else [None] * len(block)
    except FloatingPointError as error:
        raise FloatingPointError(f"Images {block[0]} to {block[-1]} of {data.name}: {error}") from error
    return [
        Record(
            index=index,
            file=item.sha256,
            label=item.label,
            prediction=int(prediction.labels[i]),
            undefended=plain[i],
            certified=bool(certificate.certified[i]),
            margin=_rounded(float(certificate.margin[i])),
            largest=int(certificate.largest_patch[i]),
            alarm=bool(prediction.alarm[i]),
            evaluations=int(prediction.evaluations[i]),
        )
        for i, (index, item) in enumerate(zip(block, items, strict=True))
    ]


def _rounded(margin: float) -> float | None:
    return float(f"{margin:.{DIGITS}g}") if math.isfinite(margin) else None


def _progress(rows: Sequence[Record], total: int) -> Progress:
    count = max(1, len(rows))
    clean = sum(row.prediction == row.label for row in rows) / count
    certified = sum(row.certified for row in rows) / count
    return Progress(len(rows), total, clean, certified)


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
