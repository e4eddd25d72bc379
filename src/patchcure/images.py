"""Labelled images: what a dataset is made of, wherever it comes from."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from PIL import Image, UnidentifiedImageError

DEEP = ("I", "F", "I;16", "I;16B", "I;16L", "I;16N")
"""Modes of images with more than 8 bits a channel, which a conversion to RGB would silently clip."""


@dataclass(frozen=True)
class Item:
    """One labelled image.

    Args:
        image: in RGB, as it is stored (see `patchcure.preprocess.Preprocess`).
        label: its class's number.
        sha256: of the file's bytes, or of the pixels where there is no file.
        source: where it came from, for messages.
    """

    image: Image.Image
    label: int
    sha256: str
    source: str


@dataclass(frozen=True)
class Data:
    """A dataset: ``data[i]`` is an `Item`.

    Args:
        name: as in the spec, without the folders above.
        split: train, val or test.
        classes: their names.
        labels: of all images, without opening one.
        keys: the images' names in the dataset.
    """

    name: str
    split: str
    classes: tuple[str, ...] = field(repr=False)
    labels: Sequence[int] = field(repr=False)
    keys: Sequence[str] = field(repr=False)
    fetch: Callable[[int], Item] = field(repr=False)

    def __post_init__(self) -> None:
        if not len(self.labels):
            raise ValueError(f"{self.name} has no images in its {self.split} split: expected at least one.")

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Item:
        if not 0 <= index < len(self):
            raise IndexError(f"{self.name} has the images 0 to {len(self) - 1}, got {index}.")
        return self.fetch(index)

    def __iter__(self) -> Iterator[Item]:
        return map(self.__getitem__, range(len(self)))

    @cached_property
    def fingerprint(self) -> str:
        """The sha256 of the classes, the images' names and their labels, in order."""
        lines = [*self.classes, "", *(f"{label} {key}" for label, key in zip(self.labels, self.keys, strict=True))]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def read_image(file: str | Path) -> tuple[Image.Image, bytes]:
    """An image in RGB and the bytes of its file."""
    return decode(content := Path(file).read_bytes(), str(file)), content


def decode(content: bytes, source: str) -> Image.Image:
    """The whole image in these bytes, in RGB; anything else is a ValueError that names the source."""
    try:
        with Image.open(io.BytesIO(content)) as image:
            if image.mode not in DEEP:
                return image.convert("RGB")
            mode = image.mode
    except UnidentifiedImageError:
        raise ValueError(f"{source} is not an image in a known format.") from None
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(f"{source} is a damaged image: {error}.") from error
    raise ValueError(f"{source} has more than 8 bits a channel (mode {mode}): convert it to 8 bits first.")


def from_files(name: str, split: str, root: Path, classes: Sequence[str], items: Sequence[tuple[Path, int]]) -> Data:
    """Images from files below `root`, with their labels."""

    def fetch(index: int) -> Item:
        file, label = items[index]
        image, content = read_image(file)
        return Item(image, label, hashlib.sha256(content).hexdigest(), str(file))

    keys = [file.relative_to(root).as_posix() for file, _ in items]
    return Data(name, split, tuple(classes), [label for _, label in items], keys, fetch)


def from_arrays(name: str, split: str, classes: Sequence[str], pixels: Any, labels: Sequence[int]) -> Data:
    """Images from an array (n, height, width, 3) of bytes."""

    def fetch(index: int) -> Item:
        digest = hashlib.sha256(pixels[index].tobytes()).hexdigest()
        return Item(Image.fromarray(pixels[index]), labels[index], digest, f"{name} {split} image {index}")

    return Data(name, split, tuple(classes), labels, [str(index) for index in range(len(labels))], fetch)
