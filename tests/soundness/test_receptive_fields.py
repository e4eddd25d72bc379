"""The Map on real networks: whatever stands in a patch, no feature outside the mapped cells changes by one bit."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from patchcure import AnyClassifier, Box, PatchThreat, SplitModel, SplitResNet, SplitViT
from patchcure.operations.base import tolerance

Outside = Callable[[SplitModel, Tensor, Box], Tensor]
PATCH = 5


def patches(model: SplitModel) -> list[Box]:
    """Patches in the corners, across the middle, at the last pixel that is read, and long thin ones."""
    height, width = model.image.height, model.image.width
    corners = {
        (0, 0),
        (0, width - PATCH),
        (height - PATCH, width - PATCH),
        (height // 2 - 2, width // 2 - 3),
        (3, width // 2),
        (height - PATCH - 2, 1),
    }
    boxes = [Box(top, left, top + PATCH, left + PATCH) for top, left in sorted(corners)]
    return [*boxes, Box(0, 2, height, 3), Box(height - 3, 0, height - 2, width), Box(7, 7, 8, 8)]


def contents(shape: torch.Size, dtype: torch.dtype) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(1)
    noise = torch.rand(shape, generator=random).to(dtype)
    return {
        "random": noise,
        "binary": noise.round(),
        "huge": (noise - 0.5) * 1e30,
        "inf": (noise - 0.5).sign() * torch.inf,
        "nan": torch.full(shape, torch.nan, dtype=dtype),
    }


def hide(model: SplitModel, box: Box, batch: int) -> Tensor:
    hidden = torch.zeros(batch, model.grid.height, model.grid.width, dtype=torch.bool)
    hidden[:, box.top : box.bottom, box.left : box.right] = True
    return hidden


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["single", "double"])
def test_a_patch_changes_nothing_outside_its_cells(family: SplitModel, dtype: torch.dtype, outside: Outside) -> None:
    model = family.to(dtype)
    images = torch.rand(2, 3, model.image.height, model.image.width, dtype=dtype)
    clean = model.features(images)
    each = torch.arange(2)
    checked = reached = 0
    for patch in patches(model):
        cells = model.corrupted(patch)
        assert model.grid.box.contains(cells)
        for content in contents(images.shape, dtype).values():
            attacked = images.clone()
            where = (..., slice(*patch.rows), slice(*patch.cols))
            attacked[where] = content[where]
            features = model.features(attacked)
            assert torch.equal(outside(model, features, cells), outside(model, clean, cells))
            reached += not torch.equal(features, clean)
            if 0 < cells.area < model.grid.cells:
                hidden = hide(model, cells, 2)
                under = model.logits(features, each, hidden)
                assert bool(under.isfinite().all())
                assert torch.equal(under, model.logits(clean, each, hidden))
                checked += 1
    assert reached > 20, "no patch reaches the features at all"
    assert checked > 20


@torch.no_grad()
def test_hidden_cells_hold_anything(family: SplitModel) -> None:
    """Masks take the cells' values out of the arithmetic, also those that no image produces."""
    model, each = family, torch.arange(2)
    features = model.features(torch.rand(2, 3, model.image.height, model.image.width))
    flat_cells = features.shape[1] == model.grid.cells
    random = torch.Generator().manual_seed(0)
    for _ in range(5):
        hidden = torch.rand(model.grid.cells, generator=random) < 0.4
        hidden[int(torch.randint(model.grid.cells, (1,), generator=random))] = False
        shape = (model.grid.height, model.grid.width)
        spread = hidden.view(1, -1, *[1] * (features.ndim - 2)) if flat_cells else hidden.view(1, 1, *shape)
        jobs = hidden.view(1, *shape).expand(2, -1, -1)
        want = model.logits(features, each, jobs)
        assert bool(want.isfinite().all())
        for value in (1e30, torch.inf, torch.nan):
            assert torch.equal(model.logits(torch.where(spread, value, features), each, jobs), want)


@torch.no_grad()
def test_every_mapped_cell_is_reached(family: SplitModel) -> None:
    """The Map is exact: a NaN in one pixel reaches every cell that is said to read it (but for holes in strides)."""
    model = family
    holes = isinstance(model, SplitResNet)  # a 1x1 convolution of stride 2 skips pixels inside its receptive field
    image = torch.rand(1, 3, model.image.height, model.image.width)
    clean = model.features(image)
    for pixel in (Box(9, 8, 10, 9), Box(4, 11, 5, 12)):
        image_nan = image.clone()
        image_nan[..., pixel.top, pixel.left] = torch.nan
        changed = model.features(image_nan) != clean
        cells = model.corrupted(pixel)
        count = changed.flatten(2).any(2).sum() if changed.shape[1] == model.grid.cells else changed.any(1).sum()
        assert int(count) <= cells.area
        if not holes:
            assert int(count) == cells.area


def stride_and_field(model: SplitModel) -> tuple[tuple[int, int], tuple[int, int]]:
    """s and r of the paper's formula, per axis."""
    if isinstance(model, SplitViT):
        return model.pixels, model.pixels
    if isinstance(model, SplitResNet):
        return (model.rows.jump, model.cols.jump), (model.rows.size, model.cols.size)
    assert isinstance(model, AnyClassifier)
    return (1, 1), (1, 1)


@pytest.mark.parametrize("patch", [1, 2, 5, 8, 11])
def test_the_papers_formula(family: SplitModel, patch: int) -> None:
    """p_f = ceil((p + r - 1) / s), capped at the grid, is the most cells over all locations.

    It is exact where some location lies fully inside the part that cells read; near the borders there are fewer.
    """
    model = family
    strides, fields = stride_and_field(model)
    threat = PatchThreat.square(patch, model.image).on_features(model.grid, model.corrupted)
    extent = threat.footprints[0].extent
    grid = (model.grid.height, model.grid.width)
    for axis in range(2):
        formula = math.ceil((patch + fields[axis] - 1) / strides[axis])
        assert extent[axis] <= min(formula, grid[axis])
        if grid[axis] >= 2 * formula:
            assert extent[axis] == formula


@torch.no_grad()
@pytest.mark.parametrize("patch", [Box(10, 10, 14, 14), Box(0, 0, 6, 6)], ids=["middle", "corner"])
def test_winograd_leaks_less_than_the_tolerance(patch: Box, build: dict[str, Callable[..., SplitModel]]) -> None:
    """Without oneDNN, torch computes 3x3 convolutions of 16 images and more in tiles that mix neighbouring cells.

    Rounding then carries a trace of the patch outside its cells; margins must be above that trace.
    """
    model = build["resnet"](18, 13, 18, 32, width=16)
    images = torch.rand(17, 3, 32, 32)
    each, hidden = torch.arange(17), hide(model, model.corrupted(patch), 17)
    with torch.backends.mkldnn.flags(enabled=False):
        clean = model.logits(model.features(images), each, hidden)
        for seed in range(10):
            attacked = images.clone()
            noise = torch.rand(images.shape, generator=torch.Generator().manual_seed(seed)).round()
            where = (..., slice(*patch.rows), slice(*patch.cols))
            attacked[where] = noise[where]
            leak = (model.logits(model.features(attacked), each, hidden) - clean).abs().amax(1)
            assert float((leak / tolerance(clean)).max()) < 0.25
