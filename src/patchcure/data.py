"""Labelled images by name or folder: `open_data("cifar10")`, `open_data("folder:photos")`."""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from patchcure._torchvision import ensure_torchvision
from patchcure.defense import Defense
from patchcure.images import Data, Item, decode, from_arrays, from_files
from patchcure.preprocess import Preprocess

if TYPE_CHECKING:
    from timm.data.imagenet_info import ImageNetInfo

Split = Literal["train", "val", "test"]
FOLDERS: dict[str, tuple[str, ...]] = {
    "train": ("train",),
    "val": ("val", "validation", "valid", "test"),
    "test": ("test", "val", "validation", "valid"),
}
"""The folders that hold a split, the best first."""
ENDINGS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
"""What counts as an image in a folder, as in torchvision."""
FORMS = "imagenet:DIR, folder:DIR, cifar10, cifar100, svhn (each also with :DIR), hf:NAME, digits, sample:NAME"


def open_data(spec: str, root: str | Path | None = None, split: Split = "test") -> Data:
    """A dataset by name or folder; what is missing of CIFAR and SVHN, torchvision downloads.

    Args:
        spec: one of
            ``folder:DIR``: a folder for each class, perhaps below ``train/`` and ``val/`` or ``test/``;
            ``imagenet:DIR``: the same, with labels among ImageNet's 1000 by the folders' names: WordNet ids or numbers;
            ``cifar10``, ``cifar100``, ``svhn``: in torchvision's layout (or in class folders) in `root` or ``:DIR``;
            ``hf:NAME`` or ``hf:NAME:CONFIG``: a dataset of the Hugging Face hub (or a local path);
            ``digits``: scikit-learn's 8x8 pixels, 500 of them for testing;
            ``sample:imagenet``, ``sample:cifar10``, ``sample:cifar100``: 20 images that come with foolbox.
        root: where torchvision's datasets are; by default $PATCHCURE_DATA, else a folder in the user's cache.
        split: ``"val"`` is ``"test"`` where a dataset has only two parts.

    >>> data = open_data("digits")
    >>> len(data), data.classes[:3], data[0].image.size, data[0].label
    (500, ('0', '1', '2'), (8, 8), 2)
    """
    if split not in FOLDERS:
        raise ValueError(f"split: expected one of {', '.join(FOLDERS)}, got {split!r}.")
    kind, _, rest = spec.partition(":")
    if kind in ("folder", "imagenet"):
        if not rest:
            raise ValueError(f"{kind}: expected a folder, as in {kind}:DIR.")
        return _folder(kind, Path(rest), split) if kind == "folder" else _imagenet(Path(rest), split)
    if kind in TORCHVISION:
        return _torchvision(kind, Path(rest or root or _home()), split)
    if kind == "hf" and rest:
        return _hub(rest, split)
    if kind == "sample":
        return _sample(rest or "imagenet")
    if spec == "digits":
        return _digits(split)
    raise ValueError(f"Unknown data {spec!r}: expected one of {FORMS}.")


def preprocessing(defense: Defense) -> Preprocess:
    """How stored images become the pixels that a defense's model reads."""
    model = defense.model
    return Preprocess(model.image, len(model.mean), model.crop, defense.threat.resize)


def subset(n: int, limit: int | None = None, seed: int = 0) -> list[int]:
    """The numbers of `limit` of `n` images, drawn at random, in order; the same on every machine.

    >>> subset(10, 3, seed=0)
    [2, 4, 8]
    """
    import numpy as np

    if limit is not None and limit < 1:
        raise ValueError(f"limit: expected at least 1 image, got {limit}.")
    if limit is None or limit >= n:
        return list(range(n))
    chosen: list[int] = np.random.RandomState(seed).permutation(n)[:limit].tolist()  # frozen by NumPy
    return sorted(chosen)


def _below(root: Path, split: str) -> Path:
    """The folder of a split, or the root where its folders are classes; beside train and test others are ignored."""
    if not root.is_dir():
        raise FileNotFoundError(f"There is no folder {root}.")
    found = {path.name for path in _subfolders(root)}
    apart = found & set(FOLDERS["test"])
    if not found or not (found <= {"train", *FOLDERS["test"]} or ("train" in found and apart)):
        return root
    for name in FOLDERS[split]:
        if name in found:
            return root / name
    raise ValueError(f"{root} has no folder for the {split} split: expected {' or '.join(FOLDERS[split])}.")


def _subfolders(root: Path) -> list[Path]:
    return sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))


def _listing(root: Path) -> tuple[list[str], list[tuple[Path, int]]]:
    """The class folders and the images in them."""
    folders = _subfolders(root)
    items = [
        (file, label)
        for label, folder in enumerate(folders)
        for file in sorted(folder.rglob("*"))
        if file.suffix.lower() in ENDINGS and not file.name.startswith(".")
    ]
    if not items:
        raise ValueError(f"{root} holds no images: expected a folder for each class, with images in it.")
    return [folder.name for folder in folders], items


def _folder(kind: str, root: Path, split: str) -> Data:
    place = _below(root, split)
    classes, items = _listing(place)
    return from_files(f"folder:{root.resolve().name}" if kind == "folder" else kind, split, place, classes, items)


def _imagenet(root: Path, split: str) -> Data:
    """Class folders that are named by WordNet ids or by numbers, all 1000 or some."""
    place = _below(root, split)
    folders, items = _listing(place)
    numbers = {wordnet: number for number, wordnet in enumerate(_imagenet_info().label_names())}
    numbers |= {name: int(name) for name in folders if name.isdecimal() and int(name) < len(numbers)}
    if unknown := [name for name in folders if name not in numbers]:
        raise ValueError(
            f"{place / unknown[0]} is no class of ImageNet: expected folders named by WordNet ids (n01440764) or by "
            "numbers (0000 to 0999); for other classes use folder:DIR."
        )
    found = [(file, numbers[folders[label]]) for file, label in items]
    return from_files("imagenet", split, place, imagenet_classes(), found)


def imagenet_classes() -> list[str]:
    """The names of ImageNet's 1000 classes."""
    info = _imagenet_info()
    return [info.index_to_description(number).split(",")[0] for number in range(info.num_classes())]


def _imagenet_info() -> ImageNetInfo:
    ensure_torchvision()
    from timm.data.imagenet_info import ImageNetInfo

    return ImageNetInfo()


TORCHVISION = {"cifar10": "CIFAR10", "cifar100": "CIFAR100", "svhn": "SVHN"}


def _home() -> Path:
    if folder := os.environ.get("PATCHCURE_DATA"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "patchcure" / "data"


def _torchvision(kind: str, root: Path, split: str) -> Data:
    if root.is_dir() and {"train", "test"} & {path.name for path in _subfolders(root)}:
        return _folder(kind, root, split)
    ensure_torchvision()
    from torchvision import datasets

    part = "train" if split == "train" else "test"
    make = getattr(datasets, TORCHVISION[kind])
    chosen = {"split": part} if kind == "svhn" else {"train": part == "train"}
    try:
        found = make(root, **chosen)
    except ImportError as error:
        raise ModuleNotFoundError("svhn is read by scipy: pip install 'patchcure[svhn]'.") from error
    except RuntimeError:  # not there, or incomplete
        found = _download(lambda: make(root, download=True, **chosen), kind, root)
    if kind == "svhn":
        pixels, labels, classes = found.data.transpose(0, 2, 3, 1), found.labels.tolist(), list("0123456789")
    else:
        pixels, labels, classes = found.data, found.targets, found.classes
    return from_arrays(kind, split, classes, pixels.copy(order="C"), labels)


def _download(make: Callable[[], Any], kind: str, root: Path) -> Any:
    """One process at a time; the others find it there."""
    root.mkdir(parents=True, exist_ok=True)
    with (root / f".{kind}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            return make()
        except (OSError, RuntimeError) as error:
            raise OSError(
                f"{kind} is not complete in {root} and could not be downloaded ({error}): give {kind}:DIR."
            ) from error


def _hub(name: str, split: str) -> Data:
    try:
        import datasets
    except ImportError as error:
        raise ModuleNotFoundError("hf:NAME is read by datasets: pip install 'patchcure[hf]'.") from error
    path, _, config = name.partition(":")
    parts = datasets.load_dataset(path, config or None)
    have = next((part for part in FOLDERS[split] if part in parts), None)
    if have is None:
        raise ValueError(f"hf:{name} has no {split} split, only {', '.join(parts)}.")
    table = parts[have]
    images = [key for key, kind in table.features.items() if isinstance(kind, datasets.Image)]
    labels = [key for key, kind in table.features.items() if isinstance(kind, datasets.ClassLabel)]
    if len(images) != 1 or len(labels) != 1:
        raise ValueError(f"hf:{name}: expected one column of images and one of labels, got {images} and {labels}.")
    table = table.cast_column(images[0], datasets.Image(decode=False))

    def fetch(index: int) -> Item:
        row, source = table[index], f"hf:{name} {have} image {index}"
        content = row[images[0]]["bytes"] or Path(row[images[0]]["path"]).read_bytes()
        return Item(decode(content, source), row[labels[0]], hashlib.sha256(content).hexdigest(), source)

    known = list(table[labels[0]])
    classes = tuple(table.features[labels[0]].names)
    return Data(f"hf:{name}", split, classes, known, [str(index) for index in range(len(known))], fetch)


TEST_DIGITS, DIGITS_SEED = 500, 0
"""How many of scikit-learn's digits are the test split, and the seed that chose them."""


def scikit_digits(split: str) -> tuple[Any, Any]:
    """scikit-learn's digits as arrays: images (n, 8, 8) with values from 0 to 16, and labels; the split is fixed."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ModuleNotFoundError("The digits come with scikit-learn: pip install scikit-learn.") from error
    import numpy as np

    data = load_digits()
    order = np.random.RandomState(DIGITS_SEED).permutation(len(data.target))  # frozen by NumPy
    chosen = order[TEST_DIGITS:] if split == "train" else order[:TEST_DIGITS]
    return data.images[chosen], data.target[chosen]


def _digits(split: str) -> Data:
    images, labels = scikit_digits(split)
    pixels = (images[..., None] / 16 * 255).round().astype("uint8").repeat(3, -1)
    return from_arrays("digits", split, list("0123456789"), pixels, labels.tolist())


SAMPLES: dict[str, tuple[str, ...]] = {
    "imagenet": tuple(map(str, range(1000))),
    "cifar10": ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    "cifar100": tuple(map(str, range(100))),
}
"""Sets of sample images and the names of their classes; numbers where there are many."""


def _sample(name: str) -> Data:
    """Files such as cifar10_00_3.png, the last number being the label; foolbox itself is not imported."""
    if name not in SAMPLES:
        raise ValueError(f"sample: expected one of {', '.join(SAMPLES)}, got {name!r}.")
    spec = find_spec("foolbox")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("The sample images come with foolbox: pip install 'patchcure[demo]'.")
    folder = Path(spec.origin).parent / "data"
    items = [(file, int(file.stem.rsplit("_", 1)[1])) for file in sorted(folder.glob(f"{name}_*"))]
    return from_files(f"sample:{name}", "test", folder, SAMPLES[name], items)
