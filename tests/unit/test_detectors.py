"""Detectors and interval bounds by name: they build, answer, certify and travel, and follow their rules exactly."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import patchcure
from patchcure import Defense, PatchThreat, reference
from patchcure.names import parse
from patchcure.operations import Agreement, CrossCert, DoubleMasking, HiCert, IntervalBounds, MinorityReports, ScaleCert

PAPER: dict[str, tuple[object, int, int]] = {
    "MR-ViT-B": (MinorityReports(), 36, 224),
    "HiCert-ViT-B": (HiCert(), 36, 224),
    "CrossCert-ViT-B": (CrossCert(), 36, 224),
    "ViP-detect": (Agreement(), 144, 14),
    "PatchCensor": (Agreement(), 144, 14),
    "ScaleCert-ResNet50": (ScaleCert(), 36, 110),
    "IBP-CNN": (IntervalBounds(), 0, 32),
}
"""The operation, the number of masks and the grid's side of each name."""

SMALL: dict[str, dict[str, Any]] = {
    "MR-ViT-Ti": {"patch_size": 8},
    "HiCert-ResNet18": {},
    "CrossCert-ViT-Ti": {"patch_size": 8, "masks_per_axis": 3, "patch": 3},
    "ViP-detect-ViT-Ti": {"patch_size": 8},
    "PatchCensor-ViT-Ti": {"patch_size": 8},
    "ScaleCert-ResNet18": {},
    "IBP-CNN": {"patch": 16},
}


@pytest.mark.parametrize("name", PAPER)
def test_names_of_the_table(name: str) -> None:
    operation, masks, side = PAPER[name]
    assert str(parse(name)) == name and name in patchcure.names.known()
    with torch.device("meta"):
        defense = patchcure.build(name)
    assert defense.operation == operation
    assert len(defense.masks) == masks and defense.model.grid.height == side
    assert defense.recipe is not None and defense.recipe["operation"] == parse(name).operation
    assert defense.threat.shapes == (((5, 5),) if name == "IBP-CNN" else ((32, 32),))


@pytest.mark.parametrize("name", ["MR-ResNet50", "HiCert-convnext_tiny", "ViP-detect-ViT-L", "PatchCensor-ViT-S"])
def test_names_round_trip(name: str) -> None:
    assert str(parse(name)) == name
    assert str(parse("ViP-detect-ViT-B")) == "ViP-detect"


@pytest.mark.parametrize("name", ["ScaleCert-ResNet34", "ViP-detected", "IBP-CNN2", "MR-"])
def test_unknown_names(name: str) -> None:
    with pytest.raises(ValueError, match="Unknown defense"):
        parse(name)


def small(name: str, **options: Any) -> Defense:
    torch.manual_seed(0)
    everything = {"image_size": (24, 32), "num_classes": 7, "patch": 5, "masks_per_axis": 2, **SMALL[name], **options}
    if name == "IBP-CNN" or "ViP" in name or "Censor" in name:
        del everything["masks_per_axis"]
    return patchcure.build(name, **everything)


@pytest.mark.parametrize("name", SMALL)
def test_predict_and_certify(name: str, tmp_path: Path) -> None:
    """Batches and single images, not square, seven classes; copies, files and float64 give the same answers."""
    defense = small(name)
    images = torch.rand(3, 3, 24, 32, generator=torch.Generator().manual_seed(1))
    answers = defense.predict(images)
    assert answers.labels.shape == (3,) and answers.votes.shape == (3, len(defense.masks))
    labels = defense(images).argmax(1)
    proof = defense.certify(images, labels)
    side = defense.threat.shapes[0][0]
    assert proof.safe[0].shape == (3, 25 - side, 33 - side)
    assert not bool((proof.strict & ~proof.certified).any())
    assert bool((answers.labels[proof.strict & ~answers.alarm] == labels[proof.strict & ~answers.alarm]).all())
    assert int(answers.evaluations.max()) <= defense.operation.worst_evaluations(defense.model, defense.masks)
    one = defense.predict(images[:1])
    assert int(one.labels) == int(answers.labels[0]) and bool(one.alarm) == bool(answers.alarm[0])
    assert torch.equal(defense.certify(images[:1], labels[:1], "verdict").certified, proof.certified[:1])
    patchcure.save(defense, tmp_path / "defense.safetensors")
    loaded = patchcure.load(tmp_path / "defense.safetensors")
    assert loaded.operation == defense.operation and loaded.masks == defense.masks
    for other in (copy.deepcopy(defense), loaded):
        assert torch.equal(other.predict(images).votes, answers.votes)
        assert torch.equal(other.certify(images, labels, "verdict").certified, proof.certified)
    double = copy.deepcopy(defense).double()
    assert double.certify(images[:1].double(), labels[:1], "verdict").margin.dtype == torch.float64
    assert torch.equal(double.predict(images.double()).labels, answers.labels)


@pytest.mark.parametrize("side", range(1, 120, 7))
def test_windows_of_tokens_have_the_published_size(side: int) -> None:
    """t = ceil((p + 15) / 16) tokens: the exact footprint never needs more, and somewhere needs as many."""
    with torch.device("meta"):
        model = parse("ViP-detect").model()
    footprint = PatchThreat.square(side, 224).on_features(model.grid, model.corrupted).footprints[0]
    assert footprint.extent == (math.ceil((side + 15) / 16),) * 2


def test_a_detector_is_its_rule() -> None:
    """Agreement, HiCert, ScaleCert and CrossCert, one image and one mask at a time."""
    base = small("ViP-detect-ViT-Ti", patch=8)
    cross = Defense(base.model, PatchThreat.square(1, (24, 32)), operation=CrossCert())
    model, masks = base.model, base.masks
    with torch.no_grad():
        model.backbone.head.weight.normal_(std=3.0)  # type: ignore[operator, union-attr]
    images = torch.rand(5, 3, 24, 32, generator=torch.Generator().manual_seed(2))
    nothing = torch.zeros_like(masks.hidden[0])
    tau = 0.9
    seen = set()
    for image in images:
        f = reference.label(model, image, nothing)
        logits = [reference.logits(model, image, hidden) for hidden in masks.hidden]
        votes = [int(row.argmax()) for row in logits]
        sure = [float(row.softmax(0).max()) for row in logits]
        agreed = f if all(vote == f for vote in votes) else -1
        seen.add(agreed >= 0)
        assert int(Defense(model, base.threat, masks, Agreement()).predict(image[None]).labels) == agreed
        hicert = agreed if all(s >= tau for s in sure) else -1
        assert int(Defense(model, base.threat, masks, HiCert(tau)).predict(image[None]).labels) == hicert
        count = math.ceil(0.5 * model.grid.cells)
        importance = model.by_cell(model.features(image[None]))[0].abs().sum(1)
        kept = []
        for hidden in [*masks.hidden, nothing]:
            order = [i for i in importance.argsort(descending=True).tolist() if not hidden.flatten()[i]]
            away = torch.ones_like(nothing.flatten())
            away[order[:count]] = False
            kept.append(reference.label(model, image, away.view_as(nothing)))
        scale = kept[-1] if len(set(kept)) == 1 else -1
        assert int(Defense(model, base.threat, masks, ScaleCert(0.5)).predict(image[None]).labels) == scale
        answer = cross.predict(image[None])
        assert int(answer.labels) == reference.infer(model, image, cross.masks)
        assert bool(answer.alarm) == any(vote != int(answer.labels) for vote in answer.votes[0].tolist())
        assert answer.evaluations.sum() >= len(cross.masks)
    assert seen == {True, False}, "both answers should be exercised"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: HiCert(1.0), r"tau: expected a confidence in \[0, 1\), got 1.0"),
        (lambda: ScaleCert(0.0), r"share: expected a share of the cells in \(0, 1\], got 0.0"),
        (lambda: CrossCert(DoubleMasking("unmasked")), "recovery: expected DoubleMasking"),
    ],
)
def test_mistakes_are_answered(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_nothing_to_trust_is_an_error() -> None:
    """A NaN in the unmasked prediction is no label."""
    for name in ("ViP-detect-ViT-Ti", "IBP-CNN"):
        defense = small(name)
        with torch.no_grad():
            next(reversed(list(defense.parameters())))[0] = torch.nan
        with pytest.raises(FloatingPointError, match="NaN or infinite"):
            defense.predict(torch.rand(1, 3, 24, 32))
