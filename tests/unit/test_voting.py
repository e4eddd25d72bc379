"""Defenses that vote: every name builds and works, options arrive, mistakes are answered."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import patchcure
from patchcure import Grid, MaskSet, PatchThreat
from patchcure.ablations import Ablation
from patchcure.models import DroppingViT, TwoSignClassifier
from patchcure.names import known, parse
from patchcure.operations import Voting

NAMES = {
    "DRS-ResNet50-b25": (224, 56),
    "DRS-ResNet18-b4": (32, 8),
    "DRS-ResNet18-block12": (1024, 256),
    "S-ViT-b19-s10": (23, 6),
    "S-ViT-b19-s5": (45, 11),
    "S-ViT-b37-s1": (224, 68),
    "ECViT-b37": (224, 68),
    "ViP-b19-s10": (23, 6),
}
"""The ablations of each name, and how many of them the paper's 2 % patch touches at most."""

SMALL: dict[str, dict[str, Any]] = {
    "DRS-ResNet18-b4": {"num_classes": 7, "image_size": (8, 12), "patch": 2},
    "DRS-ResNet18-block4-s3": {"num_classes": 7, "image_size": 8, "patch": 1, "in_chans": 1},
    "S-ViT-Ti-b19-s10": {"num_classes": 3, "image_size": (64, 96), "patch": 8},
    "ECViT-Ti-b12-s8": {"num_classes": 3, "image_size": (64, 48), "patch": (4, 9)},
    "ViP-Ti-b8-s10": {"num_classes": 4, "image_size": (48, 80), "patch": 8, "patches": 2},
    "PCURE-ViT-Ti-4x1-k11": {"num_classes": 3, "image_size": (64, 96), "patch": 8, "operation": "voting"},
    "PCURE-BagNet9-R18-k18": {"num_classes": 3, "image_size": (24, 32), "patch": 2, "operation": "voting"},
}


@pytest.mark.parametrize("name", NAMES)
def test_instances_build_on_the_meta_device(name: str) -> None:
    with torch.device("meta"):
        defense = patchcure.build(name)
        images = torch.rand(2, 3, defense.model.image.height, defense.model.image.width)
        assert defense(images).shape == (2, defense.model.num_classes)
    assert str(parse(name)) == name
    assert isinstance(defense.operation, Voting)
    touched = (~defense.masks.coverage.covers).sum(1)
    assert (len(defense.masks), int(touched.max())) == NAMES[name]
    drs = name.startswith("DRS")
    assert defense.operation.threshold == (0.2 if drs else None)
    assert isinstance(defense.model, TwoSignClassifier if drs else DroppingViT)


def test_names_round_trip() -> None:
    assert set(NAMES) <= set(known())
    for name in (*NAMES, *SMALL):
        assert str(parse(name)) == name
    assert str(parse("ViP-B-b19")) == "ViP-b19-s1"
    assert str(parse("ECViT-b37-s1")) == "ECViT-b37"


@pytest.mark.parametrize("name", SMALL)
def test_small_instances_work(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    defense = patchcure.build(name, **SMALL[name])
    model = defense.model
    images = torch.rand(3, len(model.mean), model.image.height, model.image.width)
    prediction = defense.predict(images)
    certificate = defense.certify(images, prediction.labels)
    assert prediction.votes.shape == (3, len(defense.masks))
    assert bool((prediction.evaluations == len(defense.masks)).all()) and not bool(prediction.alarm.any())
    assert bool((prediction.labels < SMALL[name]["num_classes"]).all())
    for safe, (height, width) in zip(certificate.safe, defense.threat.shapes, strict=True):
        assert safe.shape == (3, model.image.height - height + 1, model.image.width - width + 1)
    one, twin = defense.certify(images[:1], prediction.labels[:1]), copy.deepcopy(defense)
    assert torch.equal(one.certified, certificate.certified[:1])
    assert torch.equal(twin.predict(images).labels, prediction.labels)
    exact = twin.double().predict(images.double())
    assert torch.equal(exact.labels, prediction.labels)
    assert twin.certify(images.double(), exact.labels).margin.dtype == torch.float64
    patchcure.save(defense, tmp_path / "mine.safetensors")
    again = patchcure.load(tmp_path / "mine.safetensors")
    assert again.operation == defense.operation and again.masks == defense.masks
    assert torch.equal(again.predict(images).labels, prediction.labels)


def test_other_votes_by_option(tmp_path: Path) -> None:
    voting = Voting(Ablation(height=8, width=16, stride=8, wrap=False), threshold=0.3, top=2)
    defense = patchcure.build("S-ViT-Ti-b19-s10", image_size=48, num_classes=4, patch=4, operation=voting)
    assert len(defense.masks) == 6 * 5
    patchcure.save(defense, tmp_path / "mine.safetensors")
    assert patchcure.load(tmp_path / "mine.safetensors").operation == voting
    hybrid = patchcure.build("S-ViT-Ti-b19-s10", image_size=48, patch=4, operation="double-masking", masks_per_axis=3)
    assert len(hybrid.masks) == 9


def test_identical_ablations_are_computed_once() -> None:
    """Votes are counted as often as their ablation is there."""
    defense = patchcure.build("PCURE-ViT-Ti-4x1-k11", image_size=64, num_classes=3, patch=8, operation="voting")
    twice = MaskSet(defense.masks.masks + defense.masks.masks[:1], defense.masks.threat, together=1)
    model, voting = defense.model, defense.operation
    jobs: list[int] = []
    masked = model.masked

    def counted(prepared: Any, images: Tensor, hidden: Tensor) -> Tensor:
        jobs.append(len(images))
        return masked(prepared, images, hidden)

    model.masked = counted  # type: ignore[method-assign]
    images = torch.rand(2, 3, 64, 64)
    prediction = patchcure.Defense(model, defense.threat, twice, voting).predict(images)
    assert sum(jobs) == 2 * 4 and prediction.evaluations.tolist() == [4, 4]
    assert torch.equal(prediction.votes[:, 4], prediction.votes[:, 0])
    proof = patchcure.Defense(model, defense.threat, twice, voting).certify(images, prediction.labels)
    assert proof.certified.shape == (2,)


def test_a_small_image_keeps_its_resolution() -> None:
    """A ResNet's usual stem would leave one cell of 32 pixels."""
    with torch.device("meta"):
        small = patchcure.build("DRS-ResNet18-b4").model.backbone
        large = patchcure.build("DRS-ResNet50-b25").model.backbone
    assert small.conv1.weight.shape == (64, 6, 3, 3) and small.conv1.stride == (1, 1)  # type: ignore[union-attr]
    assert large.conv1.weight.shape == (64, 6, 7, 7)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "S-ViT-b224"}, r"do not cover the threat.*a narrower band"),
        ({"name": "S-ViT-b0-s1"}, "width of an ablation: expected a positive"),
        ({"name": "S-ViT-b19-s0"}, "stride of an ablation: expected a positive"),
        ({"name": "S-ViT-b19-s10", "mask_stride": 4}, "which have their own stride"),
        ({"name": "S-ViT-b19-s10", "image_size": 225}, "not cut into whole tokens"),
        ({"name": "S-ViT-b19-s10", "flavour": "published"}, "no such option"),
        ({"name": "S-ViT-b19", "patch": 220}, "do not cover the threat"),
        ({"name": "DRS-ResNet18-b4", "mean": (0.5, 0.5, 0.5)}, "reads the colours as they are"),
        ({"name": "DRS-ResNet18-b4", "pretrained": True}, "no such option"),
        ({"name": "DRS-ResNet7-b4"}, "timm has no model 'resnet7'"),
        ({"name": "SViT-b19-s10"}, "Did you mean .*S-ViT"),
    ],
)
def test_mistakes_are_answered(arguments: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with torch.device("meta"), pytest.raises(ValueError, match=message):
        patchcure.build(**arguments)


def test_impossible_votes_do_not_construct() -> None:
    with pytest.raises(ValueError, match=r"expected a probability in \(0, 1\]"):
        Voting(threshold=1.5)
    with pytest.raises(ValueError, match="top: expected at least 1"):
        Voting(top=0)
    with pytest.raises(ValueError, match="give its width or its height"):
        Ablation()
    defense = patchcure.build("DRS-ResNet18-b4", image_size=16, num_classes=3, patch=2, operation=Voting(top=3))
    with pytest.raises(ValueError, match="every label is among the first 3 of 3"):
        defense.certify(torch.rand(1, 3, 16, 16), torch.tensor([0]))


@pytest.mark.parametrize("wrap", [True, False])
@pytest.mark.parametrize(("height", "width"), [(None, 5), (3, None), (3, 5), (20, 5)])
@pytest.mark.parametrize("stride", [1, 2, 5])
def test_ablations_keep_what_they_say(height: int | None, width: int | None, stride: int, wrap: bool) -> None:
    """Cell by cell, from the definition."""
    grid = Grid(9, 13)
    masks = Ablation(height, width, stride, wrap).masks(PatchThreat.square(1, grid).on_features(grid, lambda box: box))

    def kept(cells: int, size: int | None) -> list[set[int]]:
        if size is None or size >= cells:
            return [set(range(cells))]
        starts = range(0, cells, stride) if wrap else sorted({*range(0, cells - size + 1, stride), cells - size})
        return [{(start + n) % cells for n in range(size)} for start in starts]

    wanted = [
        [[not (r in rows and c in cols) for c in range(13)] for r in range(9)]
        for rows in kept(9, height)
        for cols in kept(13, width)
    ]
    assert masks.hidden.tolist() == wanted
    assert len(set(masks.masks)) == len(masks)


def test_the_picture_in_the_docs() -> None:
    """docs/voting.md says that the patch touches three of the six bands (scripts/draw_docs.py draws them)."""
    docs = Path(__file__).parents[2] / "docs"
    assert "![Six bands, three of them touched by the patch](pictures/voting.png)" in (docs / "voting.md").read_text()
    assert (docs / "pictures" / "voting.png").is_file()
    grid = Grid(1, 22)
    threat = PatchThreat.rectangles([(1, 4)], grid)
    masks = Ablation(width=5, stride=4).masks(threat.on_features(grid, lambda box: box))
    touched = ~masks.coverage.covers[masks.coverage.maps[0][0, 2]]
    assert (len(masks), int(touched.sum())) == (6, 3)
