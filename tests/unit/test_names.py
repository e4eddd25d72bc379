"""Names round-trip, options arrive, files come back, mistakes are answered."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import patchcure
from patchcure import PatchThreat
from patchcure.names import known, parse
from patchcure.operations import Challenger, DoubleMasking, MinorityReports


def test_names_round_trip() -> None:
    assert len(known()) == len(set(known()))
    for name in [*known(), "PCURE-ViT-S-7x7-k4", "PCURE-BagNet13-R18-k5", "PatchCleanser-convnext_tiny"]:
        assert str(parse(name)) == name
    assert str(parse("PCURE-ViT-14x2-k12")) == "PCURE-ViT14x2-k12"
    assert str(parse("PCURE-ViT-B-14x2-k9")) == "PCURE-ViT14x2-k9"


@pytest.mark.parametrize(
    "name",
    ["PCURE-ViT14x2-k9", "PCURE-ViT2x2-k0", "PCURE-BagNet45-k50", "PCURE-ViT-L-14x2-k24", "PatchCleanser-ViT-B"],
)
def test_instances_of_the_paper_build(name: str) -> None:
    with torch.device("meta"):
        defense = patchcure.build(name)
    assert defense.threat.shapes == ((32, 32),)
    assert defense.model.num_classes == 1000
    assert defense.recipe is not None and defense.recipe["name"] == name


def test_options_arrive() -> None:
    with torch.device("meta"):
        defense = patchcure.build(
            "PCURE-ViT-S-4x2-k9",
            num_classes=7,
            image_size=(192, 256),
            patch=(10, 20),
            mask_stride=(1, 2),
            operation="challenger",
            flavour="published",
        )
    assert defense.model.num_classes == 7
    assert (defense.model.grid.height, defense.model.grid.width) == (3, 8)
    assert defense.threat.shapes == ((10, 20),) and len(defense.masks) == 2 * 4
    assert isinstance(defense.operation, Challenger)
    with torch.device("meta"):
        bag = patchcure.build("PCURE-BagNet9-R18-k7", image_size=32, num_classes=10, patch=5)
        small = patchcure.build("PCURE-ViT-Ti-8x1-k3", image_size=32, patch_size=4, num_classes=10, patch="2.4%")
        source = patchcure.build("PCURE-ViT-Ti-14x1-k9", patch=5, resize_from=32)
        two = patchcure.build("PCURE-ViT2x2-k12", patches=2)
    assert two.threat.count == 2 and len(two.masks) == 630
    assert bag.model.num_classes == 10
    assert (small.model.grid.height, small.model.grid.width) == (1, 8)
    assert source.threat.image.height == 32 and source.threat.target.height == 224
    assert "before the resize to 224x224" in source.threat.describe()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "PCURE-ViT14x2k9"}, "Did you mean PCURE-ViT14x2-k9"),
        ({"name": "patchcleanser"}, "Did you mean PatchCleanser"),
        ({"name": "PatchCleanser-resnet5000"}, "timm has no model 'resnet5000'"),
        ({"name": "PCURE-ViT14x2-k13"}, "12 blocks, so k goes from 0 to 12; got 13"),
        ({"name": "PCURE-ViT14x3-k9"}, r"the width one of \[1, 2, 7, 14\]"),
        ({"name": "PCURE-BagNet33-k12"}, "after each residual block"),
        ({"name": "PCURE-BagNet12-k50"}, "there is no such BagNet"),
        ({"name": "PCURE-ViT14x2-k9", "patch": "200%"}, 'looks like "2%"'),
        ({"name": "PCURE-ViT14x2-k9", "patch": 300}, "does not fit on the image"),
        ({"name": "PCURE-ViT14x2-k9", "patch": 100}, "together hide all 1x7 cells"),
        ({"name": "PCURE-ViT14x2-k9", "operation": "guess"}, "expected one of double-masking"),
        ({"name": "PCURE-ViT14x2-k9", "mask_stride": 0}, "mask stride: expected positive"),
        ({"name": "PCURE-ViT14x2-k9", "mask_stride": 1, "masks_per_axis": 3}, "not both"),
        ({"name": "PCURE-ViT14x2-k9", "in_chans": 1}, "need their own mean and std"),
        ({"name": "PCURE-ViT14x2-k9", "flavour": "mine"}, "expected 'ours' or 'published'"),
        ({"name": "PCURE-ViT14x2-k9", "img_size": 96}, "img_size: no option of a model; expected some of bag_k"),
    ],
)
def test_mistakes_are_answered(arguments: dict[str, object], message: str) -> None:
    with torch.device("meta"), pytest.raises(ValueError, match=message):
        patchcure.build(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options",
    [
        {"operation": MinorityReports(tau=0.3), "patch": 8},
        {"operation": DoubleMasking(reference="unmasked"), "patch": PatchThreat.area("1%", image=96, count=1)},
        {"patch": 2, "resize_from": (30, 40), "flavour": "published"},
    ],
)
def test_save_and_load(options: dict[str, object], tmp_path: Path) -> None:
    defense = patchcure.build("PCURE-ViT-Ti-2x1-k2", image_size=96, num_classes=4, **options)  # type: ignore[arg-type]
    patchcure.save(defense, tmp_path / "mine.safetensors")
    again = patchcure.load(tmp_path / "mine.safetensors")
    assert again.operation == defense.operation
    assert again.threat == defense.threat
    assert again.masks == defense.masks
    image = torch.rand(1, 3, 96, 96)
    assert torch.equal(again(image), defense(image))
    assert [file.name for file in tmp_path.iterdir()] == ["mine.safetensors"]


def test_half_precision_is_half_the_size(tmp_path: Path) -> None:
    defense = patchcure.build("PCURE-BagNet9-R18-k9", image_size=32, num_classes=4, patch=4, width=8)
    patchcure.save(defense, tmp_path / "whole.safetensors")
    patchcure.save(defense, tmp_path / "half.safetensors", half=True)
    assert (tmp_path / "half.safetensors").stat().st_size < 0.7 * (tmp_path / "whole.safetensors").stat().st_size
    again = patchcure.load(tmp_path / "half.safetensors")
    rounded = {key: value.half().float() for key, value in defense.model.backbone.state_dict().items()}
    for key, value in again.model.backbone.state_dict().items():
        assert value.dtype == defense.model.backbone.state_dict()[key].dtype
        assert torch.equal(value.float(), rounded[key])


def test_a_narrow_resnet(tmp_path: Path) -> None:
    defense = patchcure.build("DRS-ResNet18-b4", patch=5, width=8)
    assert defense.model.backbone.state_dict()["fc.weight"].shape == (10, 64)
    patchcure.save(defense, tmp_path / "narrow.safetensors")
    image = torch.rand(1, 3, 32, 32)
    assert torch.equal(patchcure.load(tmp_path / "narrow.safetensors")(image), defense(image))
    for name in ("PatchCleanser-ViT-Ti", "PatchCleanser-convnext_tiny"):
        with pytest.raises(ValueError, match="width: this model has no such option"):
            patchcure.build(name, width=8)
    with pytest.raises(ValueError, match="pretrained: this model has no such option"):
        patchcure.build("PatchCleanser-ResNet18", width=8, pretrained=True)


def test_importing_is_light() -> None:
    program = "import sys, patchcure; print([m for m in ('timm', 'torchvision', 'matplotlib') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
