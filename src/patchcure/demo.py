"""The demo: one trained ViT on photographs of CIFAR-10, undefended and at several operating points, under attack."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor

from patchcure.attack import PatchAttack
from patchcure.data import open_data
from patchcure.defense import Defense
from patchcure.evaluate import pixels
from patchcure.models import SplitModel
from patchcure.picture import picture
from patchcure.zoo import load

WEIGHTS, DATA = "elastic-vit-ti-cifar10", "sample:cifar10"
POINTS = ("14x2-k12", "14x2-k9", "14x2-k0")
"""The operating points that are shown, all with the same weights."""
SHOWN = "14x2-k9"
"""The one in the picture."""
ATTACK = PatchAttack(steps=6, trials=2, candidates=8, masks=1)
ROUNDS, TIMED_IMAGES = 5, 8
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


def run(out: Path, limit: int = 20, say: Callable[[str], None] = lambda text: None) -> Result:
    """Attack and certify every contestant on the first `limit` images; write a picture to the folder `out`.

    Args:
        say: hears what is being done, for a progress line.
    """
    data = open_data(DATA)
    if not 1 <= limit <= len(data):
        raise ValueError(f"limit: expected 1 to {len(data)} images, got {limit}.")
    out.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    models = contestants()
    shown = models[SHOWN]
    assert isinstance(shown, Defense)
    images, items = pixels(shown, data, range(limit))
    labels = torch.tensor([item.label for item in items])
    say("Measuring speed")
    speeds = relative_speeds(list(models.values()), images[:TIMED_IMAGES])
    rows = []
    for (name, model), speed in zip(models.items(), speeds, strict=True):
        say(f"Attacking and certifying {name}")
        attacked = ATTACK.attack(model, images, labels, shown.threat)
        rows.append(_row(name, model, images, attacked, labels, speed))
    say("Drawing how one image was decided")
    file = out / "decision.png"
    attacked, best = _most_telling(shown, images, labels)
    picture(shown, attacked, file, clean=images[best], label=int(labels[best]), names=data.classes)
    return Result(shown.threat.describe(), limit, tuple(rows), str(file), round(time.perf_counter() - start, 1))


def contestants() -> dict[str, SplitModel | Defense]:
    """Everything in the demo's table, all with the same weights."""
    defenses = {point: load(f"{WEIGHTS}:{point}") for point in POINTS}
    return {"undefended": defenses["14x2-k0"].model.eval(), **defenses}


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


def _most_telling(defense: Defense, images: Tensor, truth: Int[Tensor, " n"]) -> tuple[Tensor, int]:
    """An attacked image for the picture, and its number: certified, and fooled without masks and in the first round.

    The patch is made against the network without masks.
    """
    attacked = ATTACK.attack(defense.model, images, truth, defense.threat)
    certified = defense.certify(images, truth, detail="verdict").certified
    fooled = answers(defense.model, attacked) != truth
    outvoted = (defense.predict(attacked).votes != truth[:, None]).sum(1)
    best = int((100 * certified + 50 * fooled + outvoted).argmax())
    return attacked[best], best


def _share(flags: Tensor) -> float:
    return flags.double().mean().item()
