"""The demo: small ViTs on scikit-learn's digits, undefended and defended, under a real attack."""

from __future__ import annotations

import hashlib
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from patchcure._torchvision import ensure_torchvision
from patchcure.attack import PatchAttack
from patchcure.defense import Defense
from patchcure.masks import MaskSet
from patchcure.models import AnyClassifier, SplitModel, SplitViT
from patchcure.picture import picture
from patchcure.threat import PatchThreat

if TYPE_CHECKING:
    from timm.models.vision_transformer import VisionTransformer

SPLIT_SEED = 0
TEST_IMAGES = 500
MEAN, STD = (0.305,), (0.376,)
"""Of the training images' pixels."""
WINDOW = (1, 1)
"""A token is one row of the image, 1x8 pixels, and so is a window."""
SPLITS = (4, 2, 0)
"""The k that are shown, of a ViT with four blocks."""
PIXEL_STRIDE = (1, 2)
"""Pixels between PatchCleanser's masks, down and across."""
SHOWN = "PCURE-ViT1x1-k2"
"""The defense in the picture."""
THREAT = PatchThreat.square(2, image=8)
ROUNDS, TIMED_IMAGES = 7, 200
"""How often, and on how many images at most, each speed is measured."""


@dataclass(frozen=True)
class Row:
    """One line of the demo's table; shares are in [0, 1].

    Args:
        name: the defense.
        clean: share of right labels on clean images.
        attacked: share of right labels when each image is attacked.
        certified: share of images for which no patch at all can change the right label.
        speed: images per second, relative to the undefended model: the median of the rounds.
        spread: the lowest and the highest of the rounds.
        masks: masks in the first round, 0 for the undefended model.
    """

    name: str
    clean: float
    attacked: float
    certified: float
    speed: float
    spread: tuple[float, float]
    masks: int


@dataclass(frozen=True)
class Result:
    """What the demo found."""

    threat: str
    images: int
    rows: tuple[Row, ...]
    picture: str
    seconds: float


def run(out: Path, limit: int = 100, say: Callable[[str], None] = lambda text: None) -> Result:
    """Attack and certify every contestant on the first `limit` test images; write a picture to the folder `out`.

    Args:
        say: hears what is being done, for a progress line.
    """
    if not 1 <= limit <= TEST_IMAGES:
        raise ValueError(f"limit: expected 1 to {TEST_IMAGES} images, got {limit}.")
    out.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    images, labels = (part[:limit] for part in digits("test"))
    with one_thread():
        models = contestants(network())
        say("Measuring speed")
        speeds = relative_speeds(list(models.values()), images[:TIMED_IMAGES])
        rows = []
        for (name, model), speed in zip(models.items(), speeds, strict=True):
            say(f"Attacking and certifying {name}")
            attacked = PatchAttack().attack(model, images, labels, THREAT)
            rows.append(_row(name, model, images, attacked, labels, speed))
            if name == SHOWN and isinstance(model, Defense):
                file = out / "decision.png"
                best = _most_telling(model, images, attacked, labels)
                picture(model, attacked[best], file, clean=images[best], label=int(labels[best]))
    return Result(THREAT.describe(), limit, tuple(rows), str(file), round(time.perf_counter() - start, 1))


def digits(split: Literal["train", "test"]) -> tuple[Float[Tensor, "n 1 8 8"], Int[Tensor, " n"]]:
    """Images in [0, 1] and labels of scikit-learn's digits; the split is fixed."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ModuleNotFoundError("The demo's digits come with scikit-learn: pip install 'patchcure[demo]'.") from error
    import numpy as np

    data = load_digits()
    order = np.random.RandomState(SPLIT_SEED).permutation(len(data.target))  # frozen by NumPy, unlike torch.randperm
    chosen = order[:TEST_IMAGES] if split == "test" else order[TEST_IMAGES:]
    images = torch.from_numpy(data.images[chosen] / 16).float()[:, None]
    return images, torch.from_numpy(data.target[chosen]).long()


@cache
def card() -> dict[str, Any]:
    """What is known about the weights: data, recipe, architecture, numbers, sha256."""
    content: dict[str, Any] = json.loads((files("patchcure") / "zoo" / "digits.json").read_text("utf-8"))
    return content


def network() -> VisionTransformer:
    """The trained backbone, after its file was checked against the card."""
    from safetensors.torch import load

    data = (files("patchcure") / "zoo" / card()["file"]).read_bytes()
    if (found := hashlib.sha256(data).hexdigest()) != card()["sha256"]:
        raise ValueError(f"{card()['file']} is damaged: expected sha256 {card()['sha256']}, got {found}. Reinstall.")
    backbone = new_network(card()["architecture"])
    backbone.load_state_dict({key: value.float() for key, value in load(data).items()})
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
    """Everything in the demo's table, all with the same weights."""
    height, width = WINDOW
    models: dict[str, SplitModel | Defense] = {"undefended": split_vit(backbone, WINDOW, 0)}
    for k in SPLITS:
        models[f"PCURE-ViT{height}x{width}-k{k}"] = Defense(split_vit(backbone, WINDOW, k), THREAT)
    cleanser = masked_pixels(backbone)
    masks = MaskSet.covering(THREAT.on_features(cleanser.grid, cleanser.corrupted), PIXEL_STRIDE)
    models["PatchCleanser"] = Defense(cleanser, THREAT, masks)
    return {name: model.eval() for name, model in models.items()}


@torch.no_grad()
def relative_speeds(
    models: Sequence[SplitModel | Defense], images: Float[Tensor, "n c h w"]
) -> list[tuple[float, float, float]]:
    """Images per second of each model relative to the first: median, lowest and highest of ROUNDS rounds.

    In each round all models run one after the other, so that a busy moment of the machine strikes all of them.
    """
    ratios = []
    for _ in range(ROUNDS + 1):
        seconds = []
        for model in models:
            start = time.perf_counter()
            answers(model, images)
            seconds.append(time.perf_counter() - start)
        ratios.append([seconds[0] / other for other in seconds])
    return [(statistics.median(each), min(each), max(each)) for each in zip(*ratios[1:], strict=True)]


@torch.no_grad()
def answers(model: SplitModel | Defense, images: Float[Tensor, "n c h w"]) -> Int[Tensor, " n"]:
    """What a contestant answers."""
    answer: Tensor = model.predict(images).labels if isinstance(model, Defense) else model(images).argmax(1)
    return answer


def _row(
    name: str,
    model: SplitModel | Defense,
    images: Tensor,
    attacked: Tensor,
    truth: Int[Tensor, " n"],
    speed: tuple[float, float, float],
) -> Row:
    defense = model if isinstance(model, Defense) else None
    return Row(
        name=name,
        clean=_share(answers(model, images) == truth),
        attacked=_share(answers(model, attacked) == truth),
        certified=_share(defense.certify(images, truth, detail="verdict").certified) if defense else 0.0,
        speed=speed[0],
        spread=speed[1:],
        masks=len(defense.masks) if defense else 0,
    )


def _most_telling(defense: Defense, images: Tensor, attacked: Tensor, truth: Int[Tensor, " n"]) -> int:
    """An image for the picture: certified, and fooled without the defense and in its first round."""
    with torch.no_grad():
        fooled = defense(attacked).argmax(1) != truth
    prediction = defense.predict(attacked)
    outvoted = (prediction.votes != truth[:, None]).sum(1)
    certified = defense.certify(images, truth, detail="verdict").certified
    score = 100 * certified + 100 * (prediction.labels == truth) + 50 * fooled + outvoted
    return int(score.argmax())


def _share(flags: Tensor) -> float:
    return flags.double().mean().item()


@contextmanager
def one_thread() -> Iterator[None]:
    """Networks this small gain little from more threads, and lose much on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
