"""Small, quick models of every family, with random weights that let every pixel matter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings
from torch import Tensor, nn

from patchcure import AnyClassifier, Box, SplitModel, SplitResNet, SplitViT
from patchcure._torchvision import ensure_torchvision
from patchcure.models.bagnet import DESIGNS, BagResNet
from patchcure.models.vit import Flavour

settings.register_profile("patchcure", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("patchcure")

CLASSES = 5


def scramble(model: nn.Module, seed: int = 0) -> nn.Module:
    """Give every parameter and every batch statistic a random value, so that no path through the network is dead."""
    random = torch.Generator().manual_seed(seed)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if not tensor.is_floating_point() or name in ("mean", "std"):
            continue
        noise = torch.randn(tensor.shape, generator=random)
        if name.endswith("running_var"):
            tensor.data.copy_(0.5 + noise.abs())
        elif tensor.ndim > 1 and "token" not in name and "embed" not in name.rpartition(".")[2]:
            tensor.data.copy_(noise * (2 / tensor[0].numel()) ** 0.5)
        else:
            tensor.data.copy_(0.3 * noise + (1.0 if name.endswith("weight") else 0.0))
    return model.eval()


def vit(
    window: int | tuple[int, int],
    k: int,
    flavour: Flavour = "ours",
    image: int | tuple[int, int] = 32,
    **options: object,
) -> SplitViT:
    """A ViT of three blocks with tokens of 8x8 pixels."""
    ensure_torchvision()
    from timm.models.vision_transformer import VisionTransformer

    backbone = VisionTransformer(
        img_size=image,
        patch_size=8,
        embed_dim=24,
        depth=3,
        num_heads=3,
        num_classes=CLASSES,
        global_pool="avg",
        class_token=flavour == "published",
        fc_norm=None,
    )
    model = SplitViT(backbone, window, k, flavour, **options)  # type: ignore[arg-type]
    scramble(model)
    return model


def resnet(
    layers: int, field: int, k: int, image: int | tuple[int, int] = 48, flavour: Flavour = "ours", width: int = 8
) -> SplitResNet:
    """A BagNet (k = layers) or a hybrid, with few channels."""
    design = DESIGNS[layers]
    network = BagResNet(design, design.kernels[field], design.blocks_before(k), CLASSES, width=width)
    model = SplitResNet(network, image, k, flavour)
    scramble(model)
    return model


def classifier(image: int | tuple[int, int] = 12) -> AnyClassifier:
    """A small convolutional network with masks on its pixels."""
    network = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.GELU(), nn.AdaptiveAvgPool2d(3), nn.Flatten(), nn.Linear(72, CLASSES)
    )
    model = AnyClassifier(network, image, CLASSES)
    scramble(model)
    return model


FAMILIES: dict[str, Callable[[], SplitModel]] = {
    "vit-1x1-k0": lambda: vit(1, 0),
    "vit-2x2-k1": lambda: vit(2, 1, image=(48, 32)),
    "vit-4x1-k2": lambda: vit((4, 1), 2),
    "vit-2x1-k3": lambda: vit((2, 1), 3, image=48),
    "vit-published-1x1-k0": lambda: vit(1, 0, "published"),
    "vit-published-4x1-k1": lambda: vit((4, 1), 1, "published", norm_order="after-pool"),
    "vit-published-2x2-k2": lambda: vit(2, 2, "published", image=48),
    "vit-published-4x1-k3": lambda: vit((4, 1), 3, "published"),
    "bagnet50-17": lambda: resnet(50, 17, 50, 64),
    "bagnet50-33-published": lambda: resnet(50, 33, 50, (64, 80), "published"),
    "bagnet50-45": lambda: resnet(50, 45, 50, 80),
    "resnet50-17-k1": lambda: resnet(50, 17, 1, 16),
    "resnet50-17-k10": lambda: resnet(50, 17, 10, 32),
    "resnet50-33-k22": lambda: resnet(50, 33, 22, 48),
    "resnet50-45-k40": lambda: resnet(50, 45, 40, 80),
    "bagnet18-9": lambda: resnet(18, 9, 18, 32),
    "bagnet18-13-published": lambda: resnet(18, 13, 18, 32, "published"),
    "resnet18-5-k5": lambda: resnet(18, 5, 5, 24),
    "resnet18-13-k9": lambda: resnet(18, 13, 9, (24, 32)),
    "classifier": lambda: classifier((12, 14)),
}


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> SplitModel:
    """One small model of each family."""
    torch.manual_seed(0)
    return FAMILIES[request.param]()


@pytest.fixture
def build() -> dict[str, Callable[..., SplitModel]]:
    """The builders of small models: vit, resnet, classifier."""
    return {"vit": vit, "resnet": resnet, "classifier": classifier}


def by_cell(model: SplitModel, features: Tensor) -> Tensor:
    """Features as (batch, grid height, grid width, values of that cell), for every family."""
    grid = (model.grid.height, model.grid.width)
    if features.ndim == 4 and tuple(features.shape[2:]) == grid and features.shape[1] != model.grid.cells:
        return features.permute(0, 2, 3, 1)
    return features.reshape(len(features), *grid, -1)


@pytest.fixture
def outside() -> Callable[[SplitModel, Tensor, Box], Tensor]:
    """The features of all cells that are not in a box, one row for each image."""

    def select(model: SplitModel, features: Tensor, box: Box) -> Tensor:
        keep = torch.ones(model.grid.height, model.grid.width, dtype=torch.bool)
        keep[box.top : box.bottom, box.left : box.right] = False
        return by_cell(model, features)[:, keep]

    return select


@pytest.fixture
def three_colours(tmp_path: Path) -> Path:
    """A folder of small pictures of three classes: red, green and blue with some noise."""
    from PIL import Image

    random = np.random.default_rng(0)
    folder = tmp_path / "colours"
    for split, each in (("train", 8), ("test", 4)):
        for channel, name in enumerate(("blue", "green", "red")):
            place = folder / split / name
            place.mkdir(parents=True)
            for index in range(each):
                pixels = random.integers(0, 90, (24, 24, 3), dtype=np.uint8)
                pixels[..., 2 - channel] += 150
                Image.fromarray(pixels).save(place / f"{index}.png")
    return folder
