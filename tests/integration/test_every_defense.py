"""One table over all defenses: whatever has a name keeps the same contract."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import patchcure
from patchcure import Defense
from patchcure.certificate import ALARM
from patchcure.names import known, parse

FAMILIES: dict[str, dict[str, Any]] = {
    "PCURE-ViT-Ti-2x1-k2": {"image_size": (64, 96)},
    "PCURE-BagNet9-R18-k18": {"image_size": (24, 32), "patch": 2},
    "PCURE-BagNet5-R18-k5": {"image_size": (16, 20), "patch": 2, "masks_per_axis": 2},
    "PatchCleanser-ViT-Ti": {"image_size": (32, 48), "masks_per_axis": 2},
    "PatchCleanser-ResNet18": {"image_size": (32, 48), "masks_per_axis": 2},
    "PatchGuard-ViT-Ti-2x1": {"image_size": (64, 96)},
    "PatchGuard++-BagNet9-R18": {"image_size": (24, 32), "patch": 2},
    "CBN-BagNet9-R18": {"image_size": (24, 32), "patch": 2},
    "BagCert-BagNet9-R18": {"image_size": (24, 32), "patch": 2},
    "MR-ViT-Ti": {"image_size": (32, 48), "masks_per_axis": 2},
    "HiCert-ViT-Ti": {"image_size": (32, 48), "masks_per_axis": 2},
    "CrossCert-ResNet18": {"image_size": (32, 48), "masks_per_axis": 2},
    "ViP-detect-ViT-Ti": {"image_size": (48, 64)},
    "PatchCensor-ViT-Ti": {"image_size": (48, 64)},
    "ScaleCert-ResNet18": {"image_size": (16, 20), "patch": 2, "masks_per_axis": 2},
    "IBP-CNN": {"image_size": (12, 14), "patch": 2},
    "DRS-ResNet18-b4-s4": {"image_size": (16, 24), "patch": 2},
    "DRS-ResNet18-block8-s8": {"image_size": (16, 24), "patch": 2},
    "S-ViT-Ti-b16-s16": {"image_size": (32, 96)},
    "ECViT-Ti-b16-s16": {"image_size": (32, 96)},
    "ViP-Ti-b16-s16": {"image_size": (32, 96)},
}
"""Small instances of every family, on images that are not square, with five classes."""

CLASSES = 5


@pytest.fixture(scope="module", params=FAMILIES)
def defense(request: pytest.FixtureRequest) -> Defense:
    torch.manual_seed(0)
    options = {"patch": 8, "num_classes": CLASSES, **FAMILIES[request.param]}
    return patchcure.build(request.param, **options)


@pytest.fixture(scope="module")
def images(defense: Defense) -> Tensor:
    size = (len(defense.model.mean), defense.model.image.height, defense.model.image.width)
    return torch.rand(3, *size, generator=torch.Generator().manual_seed(0))


def same(first: Defense, second: Defense, images: Tensor) -> None:
    """The same answers and the same proofs."""
    labels = torch.arange(len(images)) % CLASSES
    one, two = first.predict(images), second.predict(images)
    assert torch.equal(one.labels, two.labels) and torch.equal(one.alarm, two.alarm)
    assert one.suspicion == two.suspicion and torch.equal(one.evaluations, two.evaluations)
    proof, again = first.certify(images, labels), second.certify(images, labels)
    assert torch.equal(proof.certified, again.certified) and torch.equal(proof.largest_patch, again.largest_patch)


def test_every_family_is_here() -> None:
    """Each class of names, and each word before the network, has its row."""
    rows = {(type(parse(name)), name.split("-")[0]) for name in FAMILIES}
    assert rows >= {(type(parse(name)), name.split("-")[0]) for name in known()}
    assert {parse(name).operation for name in FAMILIES if isinstance(parse(name).operation, str)} >= {
        operation for name in known() if isinstance(operation := parse(name).operation, str)
    }


def test_predict_and_certify(defense: Defense, images: Tensor) -> None:
    """Labels in range, alarms only without a label, promises that agree with the answers and with each other."""
    answer = defense.predict(images)
    assert answer.labels.shape == (3,) and bool(((answer.labels >= ALARM) & (answer.labels < CLASSES)).all())
    assert bool((answer.alarm | (answer.labels != ALARM)).all())
    assert int(answer.evaluations.max()) <= defense.operation.worst_evaluations(defense.model, defense.masks)
    assert defense(images).shape == (3, CLASSES)
    labels = answer.labels.clamp(min=0)
    proof = defense.certify(images, labels)
    verdict = defense.certify(images, labels, detail="verdict")
    assert torch.equal(proof.certified, verdict.certified)
    assert not bool((proof.strict & ~proof.certified).any())
    for shape, safe in zip(defense.threat.shapes, proof.safe, strict=True):
        height, width = defense.threat.image.height, defense.threat.image.width
        assert safe.shape == (3, height - shape[0] + 1, width - shape[1] + 1)
        assert bool(safe[proof.certified].all())
    wrong = defense.certify(images, (labels + 1) % CLASSES).certified & (answer.labels != ALARM)
    assert not bool(wrong.any()), "another label than the answer is certified"


def test_a_batch_of_one(defense: Defense, images: Tensor) -> None:
    together = defense.predict(images)
    labels = torch.arange(3) % CLASSES
    proofs = defense.certify(images, labels)
    for index, image in enumerate(images.split(1)):
        alone = defense.predict(image)
        assert torch.equal(alone.labels, together.labels[index : index + 1])
        assert torch.equal(alone.alarm, together.alarm[index : index + 1])
        proof = defense.certify(image, labels[index : index + 1])
        assert torch.equal(proof.certified, proofs.certified[index : index + 1])
        assert torch.equal(proof.largest_patch, proofs.largest_patch[index : index + 1])


def test_copies_files_and_double_precision(defense: Defense, images: Tensor, tmp_path: Path) -> None:
    same(copy.deepcopy(defense), defense, images)
    patchcure.save(defense, tmp_path / "mine.safetensors")
    same(patchcure.load(tmp_path / "mine.safetensors"), defense, images)
    double = copy.deepcopy(defense).double()
    assert torch.equal(double.predict(images.double()).labels, defense.predict(images).labels)
    double.certify(images.double(), torch.zeros(3, dtype=torch.long))


def test_the_meta_device_counts_but_does_not_predict(defense: Defense, images: Tensor) -> None:
    ghost = copy.deepcopy(defense).to("meta")
    nothing = images.to("meta")
    assert ghost(nothing).shape == (3, CLASSES)
    labels = torch.zeros(3, dtype=torch.long)
    for call in (lambda: ghost.predict(nothing), lambda: ghost.certify(nothing, labels)):
        with pytest.raises(ValueError, match=r"meta device.*benchmark\.gmacs"):
            call()


@pytest.mark.parametrize("name", known())
def test_every_name_builds(name: str) -> None:
    """On the meta device, with the defaults of its paper; and tells what it is."""
    with torch.device("meta"):
        defense = patchcure.build(name)
    assert defense.recipe is not None and defense.recipe["name"] == name
    assert defense.threat.describe().startswith("one patch of ")
    assert defense.operation.worst_evaluations(defense.model, defense.masks) >= 1
