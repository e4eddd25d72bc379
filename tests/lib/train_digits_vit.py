"""Train the tests' weights: one ViT on scikit-learn's digits that serves every split k and PatchCleanser.

    python tests/lib/train_digits_vit.py              # writes digits_vit.safetensors and digits_vit.json here
    python tests/lib/train_digits_vit.py --validate   # holds out 250 training images to choose settings; writes nothing

Each batch draws one task: a split k with two masks of the mapped size on the k-th feature map, or two pixel masks in
the mean colour. Masks are drawn for each image. The weights are averaged over the last steps.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import digits_vit
import torch
from jaxtyping import Bool
from safetensors.torch import save
from torch import Tensor
from torch.nn.functional import affine_grid, cross_entropy, grid_sample
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from patchcure.data import DIGITS_SEED, TEST_DIGITS
from patchcure.defense import Defense
from patchcure.masks import MaskSet
from patchcure.models import SplitViT

HERE = Path(__file__).parent
ARCHITECTURE: dict[str, Any] = {
    "img_size": 8,
    "patch_size": [1, 8],
    "in_chans": 1,
    "num_classes": 10,
    "global_pool": "avg",
    "class_token": False,
    "embed_dim": 64,
    "depth": 4,
    "num_heads": 4,
    "mlp_ratio": 2,
}
Task = Callable[[Tensor, Tensor], Tensor]
"""Images and labels to the loss under random masks."""


@dataclass(frozen=True)
class Recipe:
    """Everything that the weights depend on, beside the data and the architecture.

    Args:
        pixel: share of the batches with pixel masks.
        hard: share of the other batches with two masks that do not overlap; the rest have masks that do, or none.
        draws: how many pairs of masks are drawn for each image; it learns from the one with the largest loss.
        jitter: strength of the random rotations, shears, scales and shifts.
        average: decay of the average of the weights.
        position: standard deviation of new position embeddings; timm's 0.02 learns slowly where tokens are so small.
    """

    steps: int = 3000
    batch: int = 128
    lr: float = 3e-3
    weight_decay: float = 0.05
    warmup: int = 50
    clip: float = 1.0
    pixel: float = 0.4
    hard: float = 0.6
    draws: int = 3
    jitter: float = 0.04
    average: float = 0.997
    position: float = 0.5
    seed: int = 0


def train(images: Tensor, labels: Tensor, recipe: Recipe) -> Any:
    """The averaged network after all steps."""
    torch.manual_seed(recipe.seed)
    network = digits_vit.new_network(ARCHITECTURE)
    network.pos_embed = torch.nn.Parameter(torch.randn(1, 8, ARCHITECTURE["embed_dim"]) * recipe.position)
    averaged = AveragedModel(network, multi_avg_fn=get_ema_multi_avg_fn(recipe.average))
    optimizer = torch.optim.AdamW(network.parameters(), recipe.lr, weight_decay=recipe.weight_decay, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min(1.0, step / recipe.warmup) * 0.5 * (1 + math.cos(math.pi * step / recipe.steps)),
    )
    split = [
        hidden_windows(digits_vit.split_vit(network, digits_vit.WINDOW, k), recipe)
        for k in range(len(network.blocks) + 1)
    ]
    pixel = hidden_pixels(network, recipe)
    start = time.perf_counter()
    network.train()
    for step in range(recipe.steps):
        task = pixel if torch.rand(()) < recipe.pixel else split[int(torch.randint(len(split), ()))]
        chosen = torch.randint(len(images), (recipe.batch,))
        loss = task(jittered(images[chosen], recipe.jitter), labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), recipe.clip)
        optimizer.step()
        schedule.step()
        averaged.update_parameters(network)
        if step % 500 == 499:
            print(f"step {step + 1}: loss {loss.item():.3f}, {time.perf_counter() - start:.0f} s", flush=True)
    return averaged.module.eval()


def hidden_windows(model: SplitViT, recipe: Recipe) -> Task:
    """Two masks on the feature map; in one batch all images have equally many hidden windows, which is quicker."""
    masks = MaskSet.covering(digits_vit.THREAT.on_features(model.grid, model.corrupted))
    first, second = torch.triu_indices(len(masks), len(masks))
    pairs = torch.cat([masks.hidden[first] | masks.hidden[second], torch.zeros_like(masks.hidden[:1])])
    sizes = pairs.sum((1, 2))
    groups = [pairs[sizes == size] for size in sizes.unique().flip(0)]

    def loss(images: Tensor, labels: Tensor) -> Tensor:
        group = groups[0 if torch.rand(()) < recipe.hard else int(torch.randint(len(groups), ()))]
        features, every = model.features(images), torch.arange(len(images))
        hidden = worst(
            group[torch.randint(len(group), (recipe.draws, len(images)))],
            lambda hidden: cross_entropy(model.logits(features, every, hidden), labels, reduction="none"),
        )
        return cross_entropy(model.logits(features, every, hidden), labels)

    return loss


def hidden_pixels(network: Any, recipe: Recipe) -> Task:
    """Two masks in the mean colour on the pixels; none for one image in six."""
    model = digits_vit.masked_pixels(network)
    masks = MaskSet.covering(digits_vit.THREAT.on_features(model.grid, model.corrupted), digits_vit.PIXEL_STRIDE).hidden

    def loss(images: Tensor, labels: Tensor) -> Tensor:
        def logits(hidden: Tensor) -> Tensor:
            seen: Tensor = model.backbone(torch.where(hidden[:, None], 0, features))
            return seen

        features = model.features(images)
        first, second = torch.randint(len(masks), (2, recipe.draws, len(images)))
        hidden = worst(
            masks[first] | masks[second], lambda hidden: cross_entropy(logits(hidden), labels, reduction="none")
        )
        return cross_entropy(logits(hidden & (torch.rand(len(images)) > 1 / 6)[:, None, None]), labels)

    return loss


def worst(drawn: Bool[Tensor, "draws b h w"], losses: Callable[[Tensor], Tensor]) -> Bool[Tensor, "b h w"]:
    """For each image that of its drawn masks under which the loss is largest."""
    if len(drawn) == 1:
        return drawn[0]
    with torch.no_grad():
        largest = torch.stack([losses(hidden) for hidden in drawn]).argmax(0)
    return drawn[largest, torch.arange(drawn.shape[1])]


def jittered(images: Tensor, strength: float) -> Tensor:
    """Each image rotated, sheared, scaled and shifted a little."""
    turn, shear, scale, right, down = (torch.rand(5, len(images)) * 2 - 1) * strength
    matrix = torch.stack(
        [
            torch.stack([(1 + 0.6 * scale) * turn.cos(), shear - turn.sin(), 1.2 * right], 1),
            torch.stack([turn.sin(), (1 + 0.6 * scale) * turn.cos(), 1.2 * down], 1),
        ],
        1,
    )
    grid = affine_grid(matrix, list(images.shape), align_corners=False)
    return grid_sample(images, grid, align_corners=False).clamp(0, 1)


def measure(network: Any, images: Tensor, labels: Tensor) -> dict[str, dict[str, float]]:
    """Clean and certified accuracy of every contestant."""
    results = {}
    for name, model in digits_vit.contestants(network).items():
        if isinstance(model, Defense):
            right = model.predict(images).labels == labels
            certified = model.certify(images, labels).certified
            results[name] = {"clean": share(right), "certified": share(certified)}
        else:
            results[name] = {"clean": share(model(images).argmax(1) == labels)}
        print(name, results[name], flush=True)
    return results


def share(flags: Tensor) -> float:
    return round(flags.double().mean().item(), 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--validate", action="store_true", help="hold out 250 training images and write nothing")
    parser.add_argument("--threads", type=int, default=1, help="more than one is slower on a busy machine")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    recipe = Recipe()
    images, labels = digits_vit.digits("train")
    if options.validate:
        measure(train(images[250:], labels[250:], recipe), images[:250], labels[:250])
        return
    network = train(images, labels, recipe)
    state = {key: value.half().contiguous() for key, value in network.state_dict().items()}
    network.load_state_dict({key: value.float() for key, value in state.items()})
    with torch.no_grad():
        results = measure(network, *digits_vit.digits("test"))
    file = HERE / "digits_vit.safetensors"
    file.write_bytes(data := save(state))
    card = {
        "file": file.name,
        "sha256": hashlib.sha256(data).hexdigest(),
        "made_by": "tests/lib/train_digits_vit.py",
        "license": "Apache-2.0",
        "data": {
            "name": "Optical Recognition of Handwritten Digits (UCI), as in sklearn.datasets.load_digits",
            "license": "CC BY 4.0",
            "train": len(images),
            "test": TEST_DIGITS,
            "split_seed": DIGITS_SEED,
        },
        "architecture": ARCHITECTURE,
        "mean": digits_vit.MEAN,
        "std": digits_vit.STD,
        "threat": digits_vit.THREAT.describe(),
        "recipe": asdict(recipe),
        "results": {"images": TEST_DIGITS, **results},
    }
    (HERE / "digits_vit.json").write_text(json.dumps(card, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
