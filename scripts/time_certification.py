"""Time certification beside the plain loops over all pairs of masks, on trained weights; verdicts must be equal.

    python scripts/time_certification.py elastic-vit-ti-cifar10:14x2-k9 --data sample:cifar10

Any defense that patchcure.load takes, any data that it can open.

For each: the time of `Defense.certify(detail="verdict")` over that of the reference, which follows the paper's
pseudocode one pair at a time, and over that of a loop that is already quick (features once, then all ordered pairs of
an image in one batch through the same fast `logits`).
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import Tensor

from patchcure import Defense, load, reference
from patchcure.data import open_data, subset
from patchcure.evaluate import pixels


def compare(name: str, defense: Defense, images: Tensor, labels: Tensor) -> None:
    """Print one line; fail if a verdict differs."""
    masks = defense.masks.hidden
    pairs = (masks[:, None] | masks).flatten(0, 1)
    defense.certify(images[:2], labels[:2], detail="verdict")
    start = time.perf_counter()
    fast = defense.certify(images, labels, detail="verdict").strict.tolist()
    ours = time.perf_counter() - start
    plain, batched = [], []
    loop = batches = 0.0
    for image, y in zip(images, labels.tolist(), strict=True):
        start = time.perf_counter()
        plain.append(all([reference.label(defense.model, image, pair) == y for pair in pairs]))
        loop += time.perf_counter() - start
        start = time.perf_counter()
        with torch.no_grad():
            jobs = torch.zeros(len(pairs), dtype=torch.long)
            logits = defense.model.logits(defense.model.features(image[None]), jobs, pairs)
        batched.append(bool((logits.argmax(1) == y).all()))
        batches += time.perf_counter() - start
    if not fast == plain == batched:
        raise SystemExit(f"{name}: the verdicts differ: {fast}, {plain} and {batched}.")
    print(
        f"{name}: {len(images)} images, {sum(plain)} certified, {len(masks)} masks: {ours / loop:.4f} of the reference "
        f"({loop:.1f} s), {ours / batches:.3f} of all pairs in one batch ({batches:.1f} s)",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("defenses", nargs="+", help="as for patchcure.load")
    parser.add_argument("--data", default="sample:cifar10", help="as for patchcure.data.open_data")
    parser.add_argument("--count", type=int, default=20, help="how many images")
    asked = parser.parse_args()
    data = open_data(asked.data)
    for name in asked.defenses:
        defense = load(name)
        images, items = pixels(defense, data, subset(len(data), asked.count))
        compare(name, defense, images, torch.tensor([item.label for item in items]))


if __name__ == "__main__":
    main()
