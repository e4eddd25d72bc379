"""A patch on the image before the resize: which pixels of the model it touches, for torch's filters and PIL's."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor

from patchcure import Box, Defense, Grid, MaskSet, PatchThreat, Resize, SplitModel
from patchcure._torchvision import ensure_torchvision

RESIZES = {
    "32 to 224": Resize(Grid(32, 32), Grid(224, 224)),
    "32 to 224, bilinear": Resize(Grid(32, 32), Grid(224, 224), interpolation="bilinear"),
    "28 to 32": Resize(Grid(28, 28), Grid(32, 32)),
    "64 to 24": Resize(Grid(64, 64), Grid(24, 24)),
    "64 to 24, bilinear": Resize(Grid(64, 64), Grid(24, 24), interpolation="bilinear"),
    "32 to 256, crop 224": Resize(Grid(32, 32), Grid(224, 224), scaled=Grid(256, 256)),
    "40x30 to 75x64, crop 64": Resize(Grid(40, 30), Grid(64, 64), scaled=Grid(75, 64)),
    "75x100 to 48x64, crop 47": Resize(Grid(75, 100), Grid(47, 47), scaled=Grid(48, 64)),
    "37x53 to 31x64": Resize(Grid(37, 53), Grid(31, 64)),
    "unchanged": Resize(Grid(24, 24), Grid(24, 24)),
}
BOXES = [(0, 0, 5, 5), (9, 11, 14, 16), (3, 2, 4, 3), (20, 15, 24, 22), (0, 10, 24, 11), (17, 17, 22, 24)]
FILTERS = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}


def by_torch(resize: Resize, image: Tensor) -> Tensor:
    return resize(image[None, None])[0, 0]


def by_pil(resize: Resize, image: Tensor) -> Tensor:
    """What torchvision and timm do with a picture: PIL's resize, then the central crop."""
    ensure_torchvision()
    from torchvision.transforms import functional

    scaled = resize.scaled or resize.target
    picture = Image.fromarray(image.numpy().astype(np.float32), mode=None)
    assert picture.mode == "F"
    picture = picture.resize((scaled.width, scaled.height), FILTERS[resize.interpolation])
    cropped = functional.center_crop(picture, [resize.target.height, resize.target.width])
    return torch.from_numpy(np.asarray(cropped).copy())


def patched(image: Tensor, box: Box, content: str) -> Tensor:
    result = image.clone()
    where = (slice(*box.rows), slice(*box.cols))
    result[where] = torch.nan if content == "nan" else 1 - result[where]
    return result


@pytest.mark.parametrize("content", ["nan", "random"])
@pytest.mark.parametrize("backend", [by_torch, by_pil])
@pytest.mark.parametrize("name", RESIZES)
def test_only_touched_pixels_change(name: str, backend: Callable[[Resize, Tensor], Tensor], content: str) -> None:
    resize = RESIZES[name]
    image = torch.rand(resize.source.height, resize.source.width)
    clean = backend(resize, image)
    for box in (Box(*corners) for corners in BOXES):
        changed = backend(resize, patched(image, box, content)) != clean
        touched = resize.touched(box)
        assert resize.target.box.contains(touched)
        inside = torch.zeros_like(changed)
        inside[touched.top : touched.bottom, touched.left : touched.right] = True
        assert not bool((changed & ~inside).any())
        assert bool(changed.any()) or touched.area == 0


@pytest.mark.parametrize("name", ["32 to 224", "32 to 224, bilinear", "28 to 32", "32 to 256, crop 224", "64 to 24"])
def test_touched_is_tight(name: str) -> None:
    """NaN shows every pixel whose filter reads the box: at most two pixels fewer on each side than we say."""
    resize = RESIZES[name]
    image = torch.rand(resize.source.height, resize.source.width)
    for box in (Box(*corners) for corners in BOXES):
        rows, cols = by_torch(resize, patched(image, box, "nan")).isnan().nonzero().T
        touched = resize.touched(box)
        assert int(rows.min()) - touched.top <= 2 and touched.bottom - 1 - int(rows.max()) <= 2
        assert int(cols.min()) - touched.left <= 2 and touched.right - 1 - int(cols.max()) <= 2


@given(
    source=st.integers(1, 300),
    target=st.integers(1, 300),
    extra=st.integers(0, 40),
    start=st.floats(0, 1, exclude_max=True),
    size=st.integers(1, 40),
    interpolation=st.sampled_from(["bilinear", "bicubic"]),
)
def test_any_sizes(source: int, target: int, extra: int, start: float, size: int, interpolation: str) -> None:
    """One axis of any size, with NaN as the witness, for both libraries."""
    resize = Resize(Grid(source, 2), Grid(target, 2), Grid(target + extra, 2), interpolation)
    first = int(start * source)
    box = Box(first, 0, min(first + size, source), 2)
    for backend in (by_torch, by_pil):
        reached = backend(resize, patched(torch.full((source, 2), 0.5), box, "nan")).isnan()[:, 0].nonzero()[:, 0]
        touched = resize.touched(box)
        assert all(touched.top <= row < touched.bottom for row in reached.tolist())


@pytest.mark.parametrize(("height", "width"), [(32, 32), (48, 64), (90, 60)])
def test_timms_evaluation_transform(height: int, width: int) -> None:
    """timm scales the short side and crops the middle, on bytes."""
    ensure_torchvision()
    from timm.data.transforms_factory import create_transform

    transform = create_transform(56, interpolation="bicubic", crop_pct=0.875, mean=(0, 0, 0), std=(1, 1, 1))
    short = min(height, width)
    resize = Resize(Grid(height, width), Grid(56, 56), Grid(64 * height // short, 64 * width // short))
    random = np.random.default_rng(0)
    pixels = random.integers(0, 256, (height, width, 3), dtype=np.uint8)

    def run(array: np.ndarray) -> Tensor:
        result: Tensor = transform(Image.fromarray(array))
        return result

    for box in (Box(*corners) for corners in BOXES):
        attacked = pixels.copy()
        attacked[box.top : box.bottom, box.left : box.right] ^= 255
        changed = (run(attacked) != run(pixels)).any(0)
        touched = resize.touched(box)
        changed[touched.top : touched.bottom, touched.left : touched.right] = False
        assert not bool(changed.any())


@torch.no_grad()
@pytest.mark.parametrize("source", [24, (30, 36), 90])
def test_from_source_pixels_to_features(
    source: int | tuple[int, int],
    build: dict[str, Callable[..., SplitModel]],
    outside: Callable[[SplitModel, Tensor, Box], Tensor],
) -> None:
    """The attacker writes on the small picture; no feature outside the threat's boxes changes by one bit."""
    model = build["vit"](1, 2, image=48)
    resize = Resize(Grid.of(source), Grid(48, 48))
    threat = PatchThreat.square(3, resize.source).before(resize)
    reach = threat.on_features(model.grid, model.corrupted).footprints[0]
    defense = Defense(model, threat)
    image = torch.rand(1, 3, resize.source.height, resize.source.width)
    clean = model.features(resize(image))
    one = torch.zeros(1, dtype=torch.long)
    reached = 0
    for row in range(0, len(reach.rows), 7):
        for col in range(row % 3, len(reach.cols), 3):
            attacked = image.clone()
            attacked[..., row : row + 3, col : col + 3] = torch.rand(3, 3, 3).round()
            features = model.features(resize(attacked))
            box = Box.of(reach.rows[row], reach.cols[col])
            assert torch.equal(outside(model, features, box), outside(model, clean, box))
            reached += not torch.equal(features, clean)
            covering = defense.masks.coverage.covers[defense.masks.coverage.maps[0][row, col]]
            mask = defense.masks.hidden[covering][:1]
            assert torch.equal(model.logits(features, one, mask), model.logits(clean, one, mask))
    assert reached > 20


def test_the_scaled_patch_alone_is_not_enough(build: dict[str, Callable[..., SplitModel]]) -> None:
    """A patch of 3 pixels on 24 becomes 6 on 48, plus what the filter spreads: masks for 6 pixels are refused."""
    model = build["vit"](1, 2, image=48)
    threat = PatchThreat.square(3, 24).before(Resize(Grid(24, 24), Grid(48, 48)))
    naive = MaskSet.covering(PatchThreat.square(6, 48).on_features(model.grid, model.corrupted))
    with pytest.raises(ValueError, match="do not cover the threat"):
        Defense(model, threat, naive)


def test_errors() -> None:
    with pytest.raises(ValueError, match=r"expected one of .*bicubic.*, got 'nearest'"):
        Resize(Grid(8, 8), Grid(16, 16), interpolation="nearest")
    with pytest.raises(ValueError, match="does not fit in the resized image"):
        Resize(Grid(8, 8), Grid(16, 16), scaled=Grid(16, 12))
    with pytest.raises(ValueError, match="Expected images of"):
        RESIZES["28 to 32"](torch.rand(1, 3, 32, 32))
    with pytest.raises(ValueError, match="its resize reads"):
        PatchThreat.square(5, 224).before(RESIZES["32 to 224"])
