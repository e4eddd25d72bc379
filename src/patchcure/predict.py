"""Predict image files: the label, what the masks said, and a picture of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import ImageOps

from patchcure.certificate import ALARM
from patchcure.data import imagenet_classes, preprocessing
from patchcure.defense import Defense
from patchcure.images import read_image
from patchcure.picture import picture

IMAGENET_CLASSES = 1000


@dataclass(frozen=True)
class Answer:
    """What a defense says of one file.

    Args:
        file: as it was given.
        label: None for an alarm, or where there is a problem.
        name: the label's name, if the classes' names are known.
        unanimous: did the masks agree?
        alarm: did a detector raise one?
        suspicion: top, left, bottom and right of where a patch may be, in the pixels that the model reads.
        evaluations: how often the LRF part ran.
        picture: the figure that was written.
        problem: why the file was skipped.
    """

    file: str
    label: int | None = None
    name: str | None = None
    unanimous: bool = False
    alarm: bool = False
    suspicion: tuple[int, int, int, int] | None = None
    evaluations: int = 0
    picture: str | None = None
    problem: str | None = None


def predict_files(
    defense: Defense,
    files: Iterable[str | Path],
    names: Sequence[str] | None = None,
    pictures: str | Path | None = None,
) -> Iterator[Answer]:
    """The answer for each file, as it is ready; a file that is no image gets a problem instead.

    Args:
        names: the classes' names.
        pictures: a folder for one figure per image.
    """
    if names is not None and len(names) != defense.model.num_classes:
        raise ValueError(f"Expected {defense.model.num_classes} names of classes, one for each, got {len(names)}.")
    prepare, taken = preprocessing(defense), set[str]()
    for file in files:
        try:
            image, _ = read_image(file)
            pixels = prepare(ImageOps.exif_transpose(image)).to(defense.model.mean.device)
        except (ValueError, OSError) as error:
            yield Answer(str(file), problem=str(error))
            continue
        drawing = None
        if pictures is None:
            prediction = defense.predict(pixels[None])
        else:
            drawing = Path(pictures) / f"{_free(Path(file).stem, taken)}.png"
            prediction = picture(defense, pixels, drawing, names=names)
        label, box = int(prediction.labels[0]), prediction.suspicion[0]
        yield Answer(
            file=str(file),
            label=None if label == ALARM else label,
            name=names[label] if names and label != ALARM else None,
            unanimous=bool(prediction.unanimous[0]),
            alarm=bool(prediction.alarm[0]),
            suspicion=None if box is None else (box.top, box.left, box.bottom, box.right),
            evaluations=int(prediction.evaluations[0]),
            picture=None if drawing is None else str(drawing),
        )


def class_names(defense: Defense) -> list[str] | None:
    """ImageNet's for a model of 1000 classes; of others nothing is known."""
    return imagenet_classes() if defense.model.num_classes == IMAGENET_CLASSES else None


def _free(stem: str, taken: set[str]) -> str:
    """A name that no other picture of this run has."""
    name, number = stem, 2
    while name in taken:
        name, number = f"{stem}-{number}", number + 1
    taken.add(name)
    return name
