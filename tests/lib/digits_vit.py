"""A tiny trained ViT on scikit-learn's digits: real weights for tests that must be quick."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from patchcure._torchvision import ensure_torchvision
from patchcure.data import scikit_digits
from patchcure.defense import Defense
from patchcure.masks import MaskSet
from patchcure.models import AnyClassifier, SplitModel, SplitViT
from patchcure.threat import PatchThreat

if TYPE_CHECKING:
    from timm.models.vision_transformer import VisionTransformer

HERE = Path(__file__).parent
MEAN, STD = (0.305,), (0.376,)
"""Of the training images' pixels."""
WINDOW = (1, 1)
"""A token is one row of the image, 1x8 pixels, and so is a window."""
SPLITS = (4, 2, 0)
"""The k that are tested, of a ViT with four blocks."""
PIXEL_STRIDE = (1, 2)
"""Pixels between PatchCleanser's masks, down and across."""
THREAT = PatchThreat.square(2, image=8)


def digits(split: Literal["train", "test"]) -> tuple[Float[Tensor, "n 1 8 8"], Int[Tensor, " n"]]:
    """Images in [0, 1] and labels, exactly as scikit-learn has them."""
    images, labels = scikit_digits(split)
    return torch.from_numpy(images / 16).float()[:, None], torch.from_numpy(labels).long()


@cache
def card() -> dict[str, Any]:
    """What is known about the weights: data, recipe, architecture, numbers, sha256."""
    content: dict[str, Any] = json.loads((HERE / "digits_vit.json").read_text("utf-8"))
    return content


def network() -> VisionTransformer:
    """The trained backbone."""
    from safetensors.torch import load_file

    backbone = new_network(card()["architecture"])
    state = load_file(HERE / "digits_vit.safetensors")
    backbone.load_state_dict({key: value.float() for key, value in state.items()})
    return backbone.eval()


def new_network(architecture: dict[str, Any]) -> VisionTransformer:
    """A timm ViT of this architecture with new weights."""
    ensure_torchvision()
    from timm.models.vision_transformer import VisionTransformer

    return VisionTransformer(**architecture)


def split_vit(backbone: VisionTransformer, window: tuple[int, int], k: int) -> SplitViT:
    """The backbone cut at block k; the same weights serve every window and every k."""
    return SplitViT(backbone, window, k, mean=MEAN, std=STD, max_jobs=512)


def masked_pixels(backbone: VisionTransformer) -> AnyClassifier:
    """The backbone as PatchCleanser uses it: whole, with masks on the pixels."""
    whole = SplitViT(backbone, 1, 0, mean=(0.0,), std=(1.0,), max_jobs=512)  # AnyClassifier normalises
    return AnyClassifier(whole, image=8, num_classes=10, mean=MEAN, std=STD, max_jobs=512)


def contestants(backbone: VisionTransformer) -> dict[str, SplitModel | Defense]:
    """The undefended network and its defenses, all with the same weights."""
    height, width = WINDOW
    models: dict[str, SplitModel | Defense] = {"undefended": split_vit(backbone, WINDOW, 0)}
    for k in SPLITS:
        models[f"PCURE-ViT{height}x{width}-k{k}"] = Defense(split_vit(backbone, WINDOW, k), THREAT)
    cleanser = masked_pixels(backbone)
    masks = MaskSet.covering(THREAT.on_features(cleanser.grid, cleanser.corrupted), PIXEL_STRIDE)
    models["PatchCleanser"] = Defense(cleanser, THREAT, masks)
    return {name: model.eval() for name, model in models.items()}
