"""Local logits equal the plain reference at every k, the rules equal their definitions, and every name works."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import patchcure
from patchcure import Box, Defense, PatchThreat, SplitModel, reference
from patchcure.operations import ClippedMean, LocalDetection, RegionVotes, RobustMasking, SecureOperation
from patchcure.operations.base import tolerance

SPLITS = [
    *(
        ("PCURE-ViT-Ti-2x1-k" + k, {"image_size": (32, 48), "patch_size": 8, "flavour": flavour})
        for k in ("0", "2", "12")
        for flavour in ("ours", "published")
    ),
    ("PCURE-BagNet9-R18-k18", {"image_size": (32, 36)}),
    ("PCURE-BagNet5-R18-k7", {"image_size": (20, 24)}),
]


def built(name: str, **options: Any) -> SplitModel:
    torch.manual_seed(3)
    model = patchcure.build(name, num_classes=5, patch=2, operation="region-votes", **options).model
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    return model


@pytest.mark.parametrize(("name", "options"), SPLITS, ids=str)
def test_a_cell_alone_is_all_other_cells_hidden(name: str, options: dict[str, Any]) -> None:
    model = built(name, **options)
    images = torch.rand(2, 3, model.image.height, model.image.width, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        local = model.local_logits(model.features(images))
    assert local.shape == (2, model.grid.cells, 5)
    for cell in range(0, model.grid.cells, max(1, model.grid.cells // 5)):
        others = torch.ones(model.grid.cells, dtype=torch.bool)
        others[cell] = False
        plain = reference.logits(model, images[1], others.view(model.grid.height, model.grid.width))
        assert (local[1, cell] - plain).abs().amax() <= tolerance(plain[None])


@pytest.mark.parametrize(("name", "options"), SPLITS, ids=str)
def test_a_patch_changes_only_the_cells_that_it_corrupts(name: str, options: dict[str, Any]) -> None:
    """At k < L too: so an operation on local logits is sound with a model split anywhere."""
    model = built(name, **options)
    random = torch.Generator().manual_seed(2)
    image = torch.rand(1, 3, model.image.height, model.image.width, generator=random)
    box = Box(5, 9, 9, 13)
    attacked = image.clone()
    attacked[..., box.top : box.bottom, box.left : box.right] = torch.rand(3, 4, 4, generator=random).round()
    with torch.no_grad():
        before, after = (model.local_logits(model.features(x))[0] for x in (image, attacked))
    reach = model.corrupted(box)
    owned = torch.zeros(model.grid.height, model.grid.width, dtype=torch.bool)
    owned[reach.top : reach.bottom, reach.left : reach.right] = True
    same = (before == after).all(1)
    assert bool(same[~owned.flatten()].all()) and not bool(same.all())


def test_a_single_pixel_is_not_asked() -> None:
    defense = patchcure.build("PatchCleanser-ResNet18", image_size=96, num_classes=3, operation="robust-masking")
    with pytest.raises(ValueError, match=r"at most 4096 cells .* got 96x96: split the model at a later layer"):
        defense.predict(torch.rand(1, 3, 96, 96))


def windows_of(defense: Defense) -> list[list[int]]:
    return [row.nonzero()[:, 0].tolist() for row in defense.masks.hidden.flatten(1)]


def plain_masking(local: Tensor, windows: list[list[int]]) -> int:
    scores = []
    for label in range(local.shape[1]):
        evidence = [max(0.0, float(u)) for u in local[:, label]]
        scores.append(math.fsum(evidence) - max(math.fsum(evidence[cell] for cell in window) for window in windows))
    return scores.index(max(scores))


def plain_clipping(local: Tensor, windows: list[list[int]]) -> int:
    means = [math.fsum(math.tanh(0.05 * float(u) - 1) for u in local[:, c]) for c in range(local.shape[1])]
    return means.index(max(means))


def plain_votes(local: Tensor, windows: list[list[int]]) -> int:
    votes = [sum(float(u) > 0 for u in local[:, label]) for label in range(local.shape[1])]
    return votes.index(max(votes))


def plain_detection(local: Tensor, windows: list[list[int]]) -> int:
    mean = [math.fsum(local[:, c].tolist()) / len(local) for c in range(local.shape[1])]
    label = mean.index(max(mean))
    for window in windows:
        left = [mean[c] - math.fsum(local[window, c].tolist()) / len(local) for c in range(local.shape[1])]
        share = math.exp(max(left)) / sum(math.exp(value) for value in left)
        if left.index(max(left)) != label and share > 0.4:
            return -1
    return label


PLAIN = [
    (RobustMasking(), plain_masking),
    (ClippedMean(), plain_clipping),
    (RegionVotes(), plain_votes),
    (LocalDetection(tau=0.4), plain_detection),
]


@pytest.mark.parametrize(("operation", "plain"), PLAIN, ids=lambda value: type(value).__name__)
def test_rules_are_their_definitions(operation: SecureOperation, plain: Any) -> None:
    model = built("PCURE-BagNet9-R18-k18", image_size=(32, 36))
    defense = Defense(model, PatchThreat.square(5, (32, 36)), operation=operation)
    channels = next(module.in_features for module in model.modules() if isinstance(module, nn.Linear))
    features = torch.randn(60, model.grid.cells, channels, generator=torch.Generator().manual_seed(5)) * 3
    with torch.no_grad():
        prediction = operation.predict(model, features, defense.masks)
        local = model.local_logits(features)
    assert prediction.labels.tolist() == [plain(u.double(), windows_of(defense)) for u in local]
    assert len(prediction.labels.unique()) > 3
    one_by_one = [int(operation.predict(model, f[None], defense.masks).labels) for f in features]
    assert prediction.labels.tolist() == one_by_one


TABLE = [
    *(f"PatchGuard-BagNet{field}" for field in (17, 33, 45)),
    *(f"PatchGuard-ViT-Ti-{window}" for window in ("14x2", "14x1", "2x2")),
    "PatchGuard++-BagNet33",
    "CBN-BagNet17",
    "BagCert-BagNet17",
    "BagCert-ViT-Ti-14x2-k9",
    "CBN-BagNet9-R18",
]


@pytest.mark.parametrize("name", TABLE)
def test_every_name_predicts_and_certifies(name: str) -> None:
    """Images that are not square, another number of classes, one image and more, double precision, copies."""
    vit = "ViT" in name
    size = (56, 112) if vit else (32, 40) if "R18" in name else (96, 112)
    options: dict[str, Any] = {"patch_size": 4} if vit else {}
    torch.manual_seed(0)
    defense = patchcure.build(name, image_size=size, num_classes=7, patch=(5, 6), **options)
    images = torch.rand(2, 3, *size, generator=torch.Generator().manual_seed(4))
    prediction = defense.predict(images)
    labels = defense(images).argmax(1)
    proof = defense.certify(images, labels)
    rows, cols = size[0] - 4, size[1] - 5
    assert prediction.labels.shape == proof.certified.shape == proof.largest_patch.shape == (2,)
    assert proof.safe[0].shape == (2, rows, cols) and proof.failed.shape == (2, 2)
    assert torch.equal(proof.certified, proof.safe[0].flatten(1).all(1))
    alone = copy.deepcopy(defense).predict(images[:1])
    assert int(alone.labels) == int(prediction.labels[0])
    double = copy.deepcopy(defense).double()
    assert double.certify(images.double(), labels).margin.dtype == torch.float64
    assert torch.equal(double.predict(images.double()).labels, prediction.labels)


@pytest.mark.parametrize(
    ("name", "masks", "operation"),
    [
        ("PatchGuard-BagNet17", 441, RobustMasking()),
        ("PatchGuard-BagNet33", 289, RobustMasking()),
        ("PatchGuard-BagNet45", 196, RobustMasking()),
        ("PatchGuard-ViT14x2", 6, RobustMasking()),
        ("PatchGuard-ViT14x1", 12, RobustMasking()),
        ("PatchGuard-ViT2x2", 36, RobustMasking()),
        ("PatchGuard++-BagNet33", 289, LocalDetection()),
        ("CBN-BagNet17", 441, ClippedMean()),
        ("BagCert-BagNet17", 441, RegionVotes()),
        ("CBN-ViT14x2-k6", 6, ClippedMean()),
        ("PatchGuard-ViT-L-14x2", 6, RobustMasking()),
    ],
)
def test_names_of_the_paper(name: str, masks: int, operation: SecureOperation) -> None:
    with torch.device("meta"):
        defense = patchcure.build(name)
    assert (len(defense.masks), defense.operation) == (masks, operation)
    assert str(patchcure.names.parse(name)) == name and defense.model.num_classes == 1000


@pytest.mark.parametrize("name", ["PatchGuard-BagNet", "CBN-ResNet50", "BagCert-ViT14x2-k", "PatchGuard+-BagNet33"])
def test_unknown_names_are_answered(name: str) -> None:
    with pytest.raises(ValueError, match=f"Unknown defense '{name}'".replace("+", r"\+")):
        patchcure.build(name)


def test_a_rule_survives_a_file(tmp_path: Any) -> None:
    defense = patchcure.build("CBN-BagNet9-R18", image_size=32, num_classes=4, patch=3)
    patchcure.save(defense, tmp_path / "mine.safetensors")
    again = patchcure.load(tmp_path / "mine.safetensors")
    assert again.operation == ClippedMean() and again.masks == defense.masks
    images = torch.rand(2, 3, 32, 32)
    assert torch.equal(again.predict(images).labels, defense.predict(images).labels)
