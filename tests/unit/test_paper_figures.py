"""The numbers in the paper: mask sizes, strides, how many masks and pairs."""

from __future__ import annotations

import pytest
import torch

from patchcure import Grid, MaskSet, PatchThreat, SplitModel, SplitResNet, SplitViT
from patchcure._torchvision import ensure_torchvision
from patchcure.models.bagnet import DESIGNS, BagResNet

THREAT = PatchThreat.square("2%", 224)


def masks_of(model: SplitModel, per_axis: int | None = None) -> MaskSet:
    return MaskSet.covering(THREAT.on_features(model.grid, model.corrupted), per_axis=per_axis)


@pytest.mark.parametrize(("budget", "stride"), [(6, 33), (5, 39), (4, 49), (3, 65), (2, 97)])
def test_budgets_of_patchcleanser(budget: int, stride: int) -> None:
    pixels = THREAT.on_features(Grid(224, 224), lambda box: box)
    masks = MaskSet.covering(pixels, per_axis=budget, together=1)
    boxes = [box for (box,) in masks.masks]
    tops = sorted({box.top for box in boxes})
    assert {box.height for box in boxes} == {box.width for box in boxes} == {32 + stride - 1}
    assert tops[:-1] == [stride * n for n in range(len(tops) - 1)]
    assert tops[-1] == 224 - (32 + stride - 1)
    assert len(masks) == budget**2


def test_six_masks_of_64_pixels() -> None:
    masks = MaskSet.covering(THREAT.on_features(Grid(224, 224), lambda box: box), per_axis=6)
    assert len(masks) == 36
    assert masks.masks[0][0].height == masks.masks[0][0].width == 64
    assert masks.pairs == 666


@pytest.mark.parametrize(
    ("window", "grid", "size", "count", "pairs"),
    [
        ((14, 2), Grid(1, 7), (1, 2), 6, 21),
        ((14, 1), Grid(1, 14), (1, 3), 12, 78),
        ((2, 2), Grid(7, 7), (2, 2), 36, 666),
    ],
)
@pytest.mark.parametrize("k", [0, 6, 12])
def test_vit(window: tuple[int, int], grid: Grid, size: tuple[int, int], count: int, pairs: int, k: int) -> None:
    ensure_torchvision()
    from timm.models.vision_transformer import VisionTransformer

    with torch.device("meta"):
        backbone = VisionTransformer(embed_dim=24, num_heads=3)
    model = SplitViT(backbone, window, k)
    masks = masks_of(model)
    assert model.grid == grid
    assert {(box.height, box.width) for (box,) in masks.masks} == {size}
    assert (len(masks), masks.pairs) == (count, pairs)


@pytest.mark.parametrize(
    ("field", "side", "size", "count"), [(9, 27, 5, 529), (17, 26, 6, 441), (33, 24, 8, 289), (45, 23, 10, 196)]
)
def test_bagnet(field: int, side: int, size: int, count: int) -> None:
    design = DESIGNS[50]
    with torch.device("meta"):
        network = BagResNet(design, design.kernels[field], 16, 1000)
    model = SplitResNet(network, 224, 50)
    masks = masks_of(model)
    assert model.grid == Grid(side, side)
    assert (model.rows.size, model.rows.jump) == (field, 8)
    assert {(box.height, box.width) for (box,) in masks.masks} == {(size, size)}
    assert len(masks) == count


@pytest.mark.parametrize("k", [1, 10, 22, 40, 46])
def test_hybrids_have_smaller_fields(k: int) -> None:
    design = DESIGNS[50]
    with torch.device("meta"):
        network = BagResNet(design, design.kernels[33], design.blocks_before(k), 10, width=8)
    model = SplitResNet(network, 224, k)
    assert model.rows.size <= 33
    assert model.rows.jump == (1 if k < 4 else 2 if k < 13 else 4 if k < 25 else 8)
    assert masks_of(model, per_axis=6).covers(THREAT.on_features(model.grid, model.corrupted))


@pytest.mark.parametrize("k", [-1, 0, 2, 3, 5, 49, 51])
def test_splits_inside_a_block_are_refused(k: int) -> None:
    with pytest.raises(ValueError, match=f"can be split after its stem and after each residual block.*got {k}"):
        DESIGNS[50].blocks_before(k)
