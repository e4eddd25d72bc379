"""Time certification beside the plain loop over all pairs of masks, on trained weights; verdicts must be equal.

    python scripts/time_certification.py                                        # the demo's digits, every split
    python scripts/time_certification.py --weights vit_tiny_patch16_224.safetensors --images val
                                          # PatchCleanser with a ViT-Ti; folders named by class number, as val/0007

For each: the time of `Defense.certify(detail="verdict")` over that of `patchcure.reference` on every ordered pair, and
over that of the same loop when it stops at an image's first wrong pair.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from torch import Tensor

from patchcure import AnyClassifier, Defense, MaskSet, PatchThreat, demo, reference
from patchcure._torchvision import ensure_torchvision


def compare(name: str, defense: Defense, images: Tensor, labels: Tensor) -> None:
    """Print one line; fail if a verdict differs."""
    defense.certify(images[:2], labels[:2], detail="verdict")
    start = time.perf_counter()
    fast = defense.certify(images, labels, detail="verdict").strict.tolist()
    ours = time.perf_counter() - start
    every = stopping = 0.0
    plain = []
    for image, y in zip(images, labels.tolist(), strict=True):
        start, wrong = time.perf_counter(), None
        for first in defense.masks.hidden:
            for second in defense.masks.hidden:
                if reference.label(defense.model, image, first | second) != y and wrong is None:
                    wrong = time.perf_counter() - start
        whole = time.perf_counter() - start
        every, stopping = every + whole, stopping + (whole if wrong is None else wrong)
        plain.append(wrong is None)
    if fast != plain:
        raise SystemExit(f"{name}: the verdicts differ: {fast} and {plain}.")
    print(
        f"{name}: {len(images)} images, {sum(plain)} certified, {len(defense.masks)} masks: {ours / every:.4f} of all "
        f"pairs ({every:.1f} s), {ours / stopping:.4f} of the loop that stops",
        flush=True,
    )


def digits(count: int) -> None:
    """Every split of the demo's network."""
    images, labels = demo.digits("test")
    for k in demo.SPLITS:
        defense = Defense(demo.split_vit(demo.network(), demo.WINDOW, k), demo.THREAT)
        compare(f"digits k={k}", defense, images[:count], labels[:count])


def photographs(weights: Path, folder: Path, count: int) -> None:
    """PatchCleanser with timm's ViT-Ti."""
    ensure_torchvision()
    import timm

    network = timm.create_model("vit_tiny_patch16_224", checkpoint_path=str(weights))
    model = AnyClassifier(network, 224, 1000, (0.5,) * 3, (0.5,) * 3)
    threat = PatchThreat.square("2%", 224)
    masks = MaskSet.covering(threat.on_features(model.grid, model.corrupted), per_axis=3)
    found = sorted(folder.glob("*/*"))
    files = found[:: max(1, len(found) // count)][:count]
    labels = torch.tensor([int(file.parent.name) for file in files])
    compare(
        "PatchCleanser-ViT-Ti, 3x3 masks", Defense(model, threat, masks), torch.stack([read(f) for f in files]), labels
    )


def read(file: Path) -> Tensor:
    """A photograph as the ViT-Ti was trained to see it: short side 248, the middle 224 pixels."""
    import numpy
    from PIL import Image

    photo = Image.open(file).convert("RGB")
    scale = 248 / min(photo.size)
    photo = photo.resize((round(scale * photo.width), round(scale * photo.height)), Image.Resampling.BICUBIC)
    left, top = (photo.width - 224) // 2, (photo.height - 224) // 2
    pixels = numpy.asarray(photo.crop((left, top, left + 224, top + 224)))
    return torch.from_numpy(pixels.copy()).permute(2, 0, 1).float() / 255


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--images", type=Path)
    parser.add_argument("--count", type=int, default=20, help="how many images")
    asked = parser.parse_args()
    if (asked.weights is None) != (asked.images is None):
        parser.error("--weights and --images belong together")
    if asked.weights is None:
        digits(asked.count)
    else:
        photographs(asked.weights, asked.images, asked.count)
