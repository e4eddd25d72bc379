"""Which operating point is recommended, and what is said when none will do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import patchcure
from patchcure.choose import Point, recommend, variants
from patchcure.result import Share
from patchcure.zoo.files import save_config


def point(name: str, certified: float, clean: float, throughput: float) -> Point:
    return Point(name, None, 6, Share(clean, 0, 1), Share(certified, 0, 1), throughput)


POINTS = [
    point("slow", 0.6, 0.97, 10),
    point("middle", 0.5, 0.95, 40),
    point("beaten", 0.5, 0.94, 30),
    point("fast", 0.4, 0.9, 100),
]


def test_the_best_certified_point_within_the_constraints() -> None:
    assert recommend(POINTS).chosen == POINTS[0]
    choice = recommend(POINTS, min_throughput=20, min_clean=0.92)
    assert choice.chosen == POINTS[1]
    assert [point.name for point in choice.front] == ["slow", "middle", "fast"]
    assert "best certified accuracy of the 2 of 4 points that reach 20 images/s and 92.0% clean" in choice.why
    assert "More would be certified by slow" in choice.why
    assert recommend(POINTS, min_throughput=100).chosen == POINTS[3]


@pytest.mark.parametrize(
    ("throughput", "clean", "advice"),
    [
        (50, 0.92, "lower --min-throughput by 10 for middle.*, or lower --min-clean by 2.00% for fast"),
        (200, 0.96, "clean: lower --min-throughput by 190 for slow"),
        (90, 0.99, "clean: lower --min-clean by 9.00% for fast"),
        (200, 0.98, "lower both, --min-throughput by 100 and --min-clean by 8.00%, for fast"),
    ],
)
def test_what_to_relax_and_by_how_much(throughput: float, clean: float, advice: str) -> None:
    choice = recommend(POINTS, throughput, clean)
    assert choice.chosen is None
    with pytest.raises(AssertionError, match=advice):
        raise AssertionError(choice.why)
    assert ("or lower" in choice.why) == ("or lower" in advice)


def test_the_relaxed_constraint_has_a_point() -> None:
    assert recommend(POINTS, 50 - 10, 0.92).chosen == POINTS[1]
    assert recommend(POINTS, 50, 0.92 - 0.02).chosen == POINTS[3]


@pytest.fixture(scope="module")
def vit() -> patchcure.Defense:
    return patchcure.build("PCURE-ViT-Ti-6x1-k6", image_size=96, num_classes=10, patch=16)


def test_variants_share_the_weights_and_leave_out_the_impossible(vit: patchcure.Defense) -> None:
    made = list(variants(vit, splits=(0, 12), windows=((6, 1), (6, 2), (2, 2)), budgets=(None, 5)))
    names = [(each.recipe or {})["name"] for each in made]
    assert names.count("PCURE-ViT-Ti-6x1-k0") == 2
    assert "PCURE-ViT-Ti-6x2-k0" not in names  # two masks would hide all three windows
    weight = vit.model.backbone.state_dict()["blocks.0.attn.qkv.weight"]
    for each in made:
        assert each.model.backbone.state_dict()["blocks.0.attn.qkv.weight"].data_ptr() == weight.data_ptr()
        assert each.threat == vit.threat
    ks = {
        parsed.rsplit("-k")[-1] for parsed in ((each.recipe or {})["name"] for each in variants(vit, windows=((6, 1),)))
    }
    assert ks == {"0", "3", "6", "9", "12"}


def test_a_hybrid_is_split_at_every_layer_that_it_was_built_for() -> None:
    options = {"image_size": 32, "num_classes": 4, "width": 8, "patch": 5}
    hybrid = patchcure.build("PCURE-BagNet9-R18-k9", bag_k=9, **options)  # type: ignore[arg-type]
    made = {(each.recipe or {})["name"]: each for each in variants(hybrid)}
    assert list(made) == [f"PCURE-BagNet9-R18-k{k}" for k in (0, 1, 3, 5, 7, 9)]
    images = torch.rand(2, 3, 32, 32)
    for each in made.values():
        assert torch.allclose(each(images), hybrid(images), atol=1e-5), "the same network without masks"
    with pytest.raises(ValueError, match="those of a hybrid with bag_k several k"):
        list(variants(patchcure.build("PCURE-BagNet9-R18-k9", **options), splits=(5,)))  # type: ignore[arg-type]


def test_only_a_vit_has_splits_to_vary() -> None:
    cnn = patchcure.build("IBP-CNN", image_size=16, patch=3, operation="double-masking", masks_per_axis=3)
    assert [len(each.masks) for each in variants(cnn, budgets=(2, 4))] == [4, 16]
    with pytest.raises(ValueError, match="only the weights of a ViT serve several k"):
        list(variants(cnn, splits=(0,)))
    with pytest.raises(ValueError, match="together hide all"):
        list(variants(cnn, budgets=(1,)))


def test_a_config_is_loaded_with_its_weights(vit: patchcure.Defense, tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    patchcure.save(vit, tmp_path / "weights" / "mine.safetensors")
    chosen = next(variants(vit, splits=(9,), windows=((6, 1),), budgets=(5,)))
    save_config(chosen, tmp_path / "weights" / "mine.safetensors", tmp_path / "choice.yaml", "why\nso")
    assert (
        (tmp_path / "choice.yaml").read_text().startswith("# why so\nmodel: PCURE-ViT-Ti-6x1-k9\nweights: weights/mine")
    )
    moved = tmp_path.rename(tmp_path.with_name("moved"))
    again = patchcure.load(moved / "choice.yaml")
    images = torch.rand(2, 3, 96, 96)
    assert torch.equal(again(images), chosen(images))
    assert (again.recipe, again.masks.masks) == (chosen.recipe, chosen.masks.masks)
    assert patchcure.load(moved / "choice.yaml", patch=8).threat.shapes == ((8, 8),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: PCURE-ViT14x2-k9\n", "expected model, weights, options"),
        ("- 1\n", "expected model, weights, options"),
        ("model: [", "is not YAML"),
        ("model: PCURE-ViT14x2-k9\nweights: nowhere.bin\noptions: {}\n", "There are no weights at nowhere.bin"),
    ],
)
def test_a_bad_config_is_told(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "choice.yaml").write_text(text)
    with pytest.raises((ValueError, OSError), match=message):
        patchcure.load(tmp_path / "choice.yaml")
