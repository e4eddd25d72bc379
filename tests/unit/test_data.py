"""Datasets by name or folder, and from stored images to the model's pixels."""

from __future__ import annotations

import hashlib
import importlib
import pickle
import sys
from collections.abc import Callable
from pathlib import Path

import digits_vit
import numpy as np
import pytest
import torch
from PIL import Image

import patchcure
from patchcure import Grid, Resize
from patchcure._torchvision import ensure_torchvision
from patchcure.data import open_data, preprocessing, subset
from patchcure.preprocess import Preprocess

Make = Callable[..., Path]


def noise(height: int, width: int, seed: int = 0) -> Image.Image:
    pixels = np.random.RandomState(seed).randint(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


@pytest.fixture
def folder(tmp_path: Path) -> Make:
    """Write images below a folder, by their paths."""

    def make(*paths: str) -> Path:
        for number, path in enumerate(paths):
            file = tmp_path / "photos" / path
            file.parent.mkdir(parents=True, exist_ok=True)
            noise(20, 30, number).save(file)
        return tmp_path / "photos"

    return make


def test_a_folder_of_class_folders(folder: Make) -> None:
    root = folder("dog/b.png", "cat/z.png", "cat/deep/a.PNG", "dog/a.jpg")
    (root / "cat" / "notes.txt").write_text("no image")
    (root / ".hidden").mkdir()
    data = open_data(f"folder:{root}")
    assert (data.name, data.classes, list(data.labels)) == ("folder:photos", ("cat", "dog"), [0, 0, 1, 1])
    assert list(data.keys) == ["cat/deep/a.PNG", "cat/z.png", "dog/a.jpg", "dog/b.png"]
    item = data[1]
    assert item.image.mode == "RGB" and item.image.size == (30, 20) and item.label == 0
    assert item.sha256 == hashlib.sha256((root / "cat" / "z.png").read_bytes()).hexdigest()
    assert [item.label for item in data] == list(data.labels)
    with pytest.raises(IndexError, match="images 0 to 3, got 4"):
        data[4]


def test_splits_of_a_folder(folder: Make) -> None:
    root = folder("train/a/1.png", "train/b/2.png", "val/a/3.png")
    assert len(open_data(f"folder:{root}", split="train")) == 2
    assert list(open_data(f"folder:{root}").keys) == ["a/3.png"]
    root = folder("test/b/4.png")
    assert list(open_data(f"folder:{root}").keys) == ["b/4.png"]
    assert list(open_data(f"folder:{root}", split="val").keys) == ["a/3.png"]
    root = folder("__MACOSX/a/1.png", "raw/5.png")
    assert list(open_data(f"folder:{root}", split="val").keys) == ["a/3.png"], "other folders are ignored"


def test_a_class_may_be_called_train(folder: Make) -> None:
    assert open_data(f"folder:{folder('bus/1.png', 'train/2.png')}").classes == ("bus", "train")


def test_the_fingerprint_tells_other_files_and_labels(folder: Make) -> None:
    root = folder("a/1.png", "b/2.png")
    first = open_data(f"folder:{root}").fingerprint
    assert first == open_data(f"folder:{root}", split="train").fingerprint
    (root / "b" / "2.png").rename(root / "a" / "2.png")
    assert open_data(f"folder:{root}").fingerprint != first


@pytest.mark.parametrize("names", [("n01440764", "n03000684"), ("0000", "0491")])
def test_imagenet_labels_come_from_the_folders_names(folder: Make, names: tuple[str, str]) -> None:
    data = open_data(f"imagenet:{folder(*(f'val/{name}/x.jpg' for name in names))}")
    assert list(data.labels) == [0, 491]
    assert len(data.classes) == 1000
    assert (data.name, data.classes[0], data.classes[491]) == ("imagenet", "tench", "chain saw")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("folder:{root}/nowhere", "There is no folder .*nowhere"),
        ("folder:{root}/empty", "holds no images: expected a folder for each class"),
        ("folder", "expected a folder, as in folder:DIR"),
        ("imagenet:{root}/photos", "dog is no class of ImageNet: expected folders named by WordNet ids"),
        ("folder:{root}/half", "no folder for the test split: expected test or val"),
        ("cifar11", "Unknown data 'cifar11': expected one of imagenet:DIR, folder:DIR, cifar10"),
        ("sample:mnist", "sample: expected one of imagenet, cifar10, cifar100, got 'mnist'"),
    ],
)
def test_bad_data_is_told_in_one_line(folder: Make, tmp_path: Path, spec: str, message: str) -> None:
    folder("dog/1.png")
    (tmp_path / "empty").mkdir()
    (tmp_path / "half" / "train" / "a").mkdir(parents=True)
    with pytest.raises((ValueError, OSError), match=message) as caught:
        open_data(spec.format(root=tmp_path))
    assert "\n" not in str(caught.value)


def test_damaged_and_odd_images_are_named(folder: Make) -> None:
    root = folder("a/1.jpg", "a/2.png", "a/4.png")
    for name in ("1.jpg", "2.png"):
        content = (root / "a" / name).read_bytes()
        (root / "a" / name).write_bytes(content[: len(content) // 2])
    (root / "a" / "3.png").write_text("text")
    Image.fromarray(np.zeros((9, 9), dtype=np.uint16)).save(root / "a" / "4.png")
    data = open_data(f"folder:{root}")
    problems = ["1.jpg is a damaged image", "2.png is a damaged", "3.png is not an image", "4.png has more than 8 bits"]
    for index, problem in enumerate(problems):
        with pytest.raises(ValueError, match=problem):
            data[index]


def test_torchvisions_layout_of_cifar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small CIFAR-10 in torchvision's own files, with their hashes in place of the real ones."""
    ensure_torchvision()
    from torchvision.datasets import CIFAR10

    base = tmp_path / CIFAR10.base_folder
    base.mkdir()
    batch = {"data": np.arange(3 * 3072, dtype=np.uint8).reshape(3, 3072), "labels": [3, 8, 0]}
    names = {"label_names": [f"class {number}" for number in range(10)]}
    for name, content in {"test_batch": batch, "data_batch_1": batch, "batches.meta": names}.items():
        (base / name).write_bytes(pickle.dumps(content))

    def listed(name: str) -> list[str]:
        return [name, hashlib.md5((base / name).read_bytes()).hexdigest()]

    monkeypatch.setattr(CIFAR10, "train_list", [listed("data_batch_1")])
    monkeypatch.setattr(CIFAR10, "test_list", [listed("test_batch")])
    monkeypatch.setattr(CIFAR10, "meta", {**CIFAR10.meta, "md5": listed("batches.meta")[1]})
    monkeypatch.setenv("PATCHCURE_DATA", str(tmp_path))
    data = open_data("cifar10")
    assert (data.name, data.classes[3], list(data.labels)) == ("cifar10", "class 3", [3, 8, 0])
    assert data[1].image.size == (32, 32)
    assert data[1].sha256 == hashlib.sha256(data[1].image.tobytes()).hexdigest()
    assert open_data(f"cifar10:{tmp_path}", split="train").fingerprint == data.fingerprint


def test_class_folders_serve_as_cifar(folder: Make) -> None:
    data = open_data(f"cifar10:{folder('test/airplane/1.png', 'test/bird/2.png')}")
    assert (data.name, data.classes) == ("cifar10", ("airplane", "bird"))


def test_foolboxs_sample_is_found_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "foolbox"
    (package / "data").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    noise(32, 32).save(package / "data" / "cifar10_00_3.png")
    noise(32, 32).save(package / "data" / "cifar100_00_49.png")
    monkeypatch.syspath_prepend(tmp_path)
    data = open_data("sample:cifar10")
    assert (data.name, list(data.labels), len(data.classes)) == ("sample:cifar10", [3], 10)


@pytest.mark.parametrize(("spec", "module"), [("sample:cifar10", "foolbox"), ("hf:mnist", "datasets")])
def test_a_missing_extra_is_named(spec: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec(module):
        pytest.skip(f"{module} is installed")
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'patchcure\[(foolbox|hf)\]'"):
        open_data(spec)


def test_a_hub_dataset(folder: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    root = folder("test/cat/1.png", "test/dog/2.png", "train/cat/3.png", "train/dog/4.png")
    data = open_data(f"hf:{root}")
    assert (data.classes, list(data.labels)) == (("cat", "dog"), [0, 1])
    assert data[1].sha256 == hashlib.sha256((root / "test" / "dog" / "2.png").read_bytes()).hexdigest()


def test_the_subset_is_frozen() -> None:
    assert subset(1797, 5, seed=1) == [202, 428, 1184, 1227, 1576]
    assert subset(5) == subset(5, 9) == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="at least 1 image, got 0"):
        subset(5, 0)


@pytest.mark.parametrize(("height", "width"), [(300, 400), (401, 300), (256, 256), (100, 90), (224, 1000)])
@pytest.mark.parametrize("crop", [0.875, 0.9, 1.0])
def test_photographs_are_cropped_as_by_timm(height: int, width: int, crop: float) -> None:
    ensure_torchvision()
    from timm.data.transforms_factory import create_transform

    expected = create_transform(224, crop_pct=crop, interpolation="bicubic", mean=(0, 0, 0), std=(1, 1, 1))
    image = noise(height, width)
    found = Preprocess(Grid(224, 224), crop=crop)(image)
    assert found.shape == (3, 224, 224)
    assert torch.allclose(found, expected(image), atol=1e-6)


def test_thumbnails_are_resized_whole() -> None:
    image = noise(32, 32)
    whole = torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255
    assert torch.equal(Preprocess(Grid(32, 32))(image), whole)
    image = noise(32, 32).point([64 + value // 2 for value in range(256)] * 3)  # Pillow clips between its two passes
    whole = torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255
    enlarged = Preprocess(Grid(224, 224))(image)
    reference = Resize(Grid(32, 32), Grid(224, 224))(whole[None])[0]
    assert (enlarged - reference).abs().max() < 0.02  # Pillow rounds to bytes, torch does not


def test_a_threat_before_the_resize_uses_exactly_that_resize() -> None:
    defense = patchcure.build("PCURE-ViT-Ti-6x1-k3", image_size=96, num_classes=10, patch=2, resize_from=32)
    prepare = preprocessing(defense)
    image = noise(32, 32)
    whole = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None] / 255
    assert defense.threat.resize is not None
    assert torch.equal(prepare(image), defense.threat.resize(whole)[0])
    with pytest.raises(ValueError, match="images of 32x32 before their resize, but this one has 33x32"):
        prepare(noise(33, 32))


def test_the_digits_are_scikit_learns() -> None:
    data = open_data("digits")
    images, labels = digits_vit.digits("test")
    grey = Preprocess(Grid(8, 8), channels=1)
    found = torch.stack([grey(item.image) for item in data])
    assert torch.equal(torch.tensor(data.labels), labels)
    assert (found - images).abs().max() <= 0.5 / 255 + 1e-6
    assert len(open_data("digits", split="train")) == 1297


def test_the_crop_is_part_of_the_recipe(tmp_path: Path) -> None:
    defense = patchcure.build("PCURE-ViT-Ti-6x1-k3", image_size=96, num_classes=10, patch=16, crop_pct=0.9)
    patchcure.save(defense, tmp_path / "mine.safetensors")
    assert preprocessing(patchcure.load(tmp_path / "mine.safetensors")).crop == 0.9
    assert "patchcure.data" not in sys.modules["patchcure"].__dict__
