"""Throughput, latency, work and memory of a defense beside its undefended network, measured alternately in one run."""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from patchcure.defense import Defense
from patchcure.names import build
from patchcure.operations.base import every_mask, masked_labels, masked_logits


@dataclass(frozen=True)
class Row:
    """What one instance does at one batch size.

    Args:
        throughput: images per second on images whose masks agree (the median over rounds).
        relative: throughput over that of the undefended network, the median of the rounds' ratios.
        relative_low, relative_high: the smallest and the largest of those ratios.
        attacked: images per second when every image needs a second round in which one mask's pairs are evaluated.
        worst_evaluations: how often an attacker can make the LRF part run for one image.
        latency_ms: milliseconds for one image alone.
        gmacs, undefended_gmacs: 10^9 multiply-adds per image, counted on the meta device.
        peak_mb: the largest memory of a process that predicts one batch, all included.
        of_attainable: relative over what it would be if all multiply-adds took the same time.
    """

    name: str
    batch: int
    throughput: float
    undefended: float
    relative: float
    relative_low: float
    relative_high: float
    attacked: float
    worst_evaluations: int
    latency_ms: float
    gmacs: float
    undefended_gmacs: float
    peak_mb: float
    of_attainable: float


@dataclass(frozen=True)
class Speed:
    """How fast a defense is beside its undefended network on the same images, turn by turn.

    Args:
        throughput, undefended: images per second of the defense and of the network alone (medians over rounds).
        relative: the median of the rounds' ratios of the two; above 1 the defense is the faster one.
        relative_low, relative_high: the smallest and the largest of those ratios.
    """

    throughput: float
    undefended: float
    relative: float
    relative_low: float
    relative_high: float


def speed(defense: Defense, images: Float[Tensor, "b c h w"], rounds: int = 5) -> Speed:
    """Measure a defense on these images beside its undefended network, after one round to warm up."""
    return _speed(len(images), *_alternate(rounds, defense, images)[:2])


def _speed(batch: int, defended: list[float], undefended: list[float]) -> Speed:
    ratios = [u / d for u, d in zip(undefended, defended, strict=True)]
    return Speed(
        batch / statistics.median(defended),
        batch / statistics.median(undefended),
        statistics.median(ratios),
        min(ratios),
        max(ratios),
    )


def bench(names: Sequence[str], batches: Sequence[int] = (4,), rounds: int = 7, **options: Any) -> Iterator[Row]:
    """Measure instances by name, with new weights; one row for each batch size as it is ready.

    Args:
        names: instances, see `patchcure.names.known`.
        batches: batch sizes.
        rounds: how often defended and undefended take turns, after one round to warm up.
        **options: as for `patchcure.build`.
    """
    if rounds < 1 or min(batches, default=0) < 1:
        raise ValueError(f"Expected positive batch sizes and rounds, got {list(batches)} and {rounds}.")
    for name in names:
        defense = build(name, **options)
        _agree(defense)
        work, plain_work = gmacs(name, **options)
        latency = _alternate(rounds, defense, _images(defense, 1))[0]
        for batch in batches:
            defended, undefended, second = _alternate(rounds, defense, _images(defense, batch))
            measured = _speed(batch, defended, undefended)
            yield Row(
                name=name,
                batch=batch,
                **asdict(measured),
                attacked=batch / statistics.median(second),
                worst_evaluations=defense.operation.worst_evaluations(defense.model, defense.masks),
                latency_ms=1000 * statistics.median(latency),
                gmacs=work,
                undefended_gmacs=plain_work,
                peak_mb=_peak_mb(name, batch, options),
                of_attainable=measured.relative * work / plain_work,
            )


def gmacs(name: str, **options: Any) -> tuple[float, float]:
    """10^9 multiply-adds for one image: of the defense when its masks agree, and of the undefended network.

    >>> defended, undefended = gmacs("PCURE-ViT14x2-k12", flavour="published")
    >>> round(defended, 1), round(undefended, 1)
    (17.6, 17.6)
    """
    with torch.device("meta"):
        defense = build(name, **options).to("meta")
        image = torch.empty(1, len(defense.model.mean), defense.model.image.height, defense.model.image.width)

    def first_round() -> None:
        features = defense.model.features(image)
        images, masks = every_mask(features, defense.masks)
        for _ in masked_logits(defense.model, features, defense.masks, images, masks, masks):
            pass

    return _count(first_round), _count(lambda: defense.model.plain(image))


def _count(run: Callable[[], object]) -> float:
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        run()
    return counter.get_total_flops() / 2e9


def _agree(defense: Defense) -> None:
    """Make the masks agree on every image, at the same cost: the classifier always gives the first label."""
    head = [module for module in defense.model.backbone.modules() if isinstance(module, nn.Linear)][-1]
    nn.init.zeros_(head.weight)
    with torch.no_grad():
        head.bias.copy_(torch.linspace(1, 0, len(head.bias)))


def _images(defense: Defense, batch: int) -> Tensor:
    size = defense.model.image
    return torch.rand(
        batch, len(defense.model.mean), size.height, size.width, generator=torch.Generator().manual_seed(0)
    )


@torch.no_grad()
def _alternate(rounds: int, defense: Defense, images: Tensor) -> tuple[list[float], list[float], list[float]]:
    """Seconds of the defense, of the undefended network, and of the defense with a second round, turn by turn."""
    turns: list[Callable[[], object]] = [
        lambda: defense.predict(images),
        lambda: defense.model.plain(images),
        lambda: _two_rounds(defense, images),
    ]
    seconds: list[list[float]] = [[], [], []]
    for number in range(rounds + 1):
        for turn, times in zip(turns, seconds, strict=True):
            start = time.perf_counter()
            turn()
            if number:
                times.append(time.perf_counter() - start)
    return seconds[0], seconds[1], seconds[2]


def _two_rounds(defense: Defense, images: Tensor) -> None:
    """What an attacked image costs: the first round, and all pairs of one mask (if there are pairs)."""
    if defense.operation.together == 1:
        defense.predict(images)
        return
    model, masks = defense.model, defense.masks
    features = model.features(images)
    image, mask = every_mask(features, masks)
    masked_labels(model, features, masks, image, mask, mask)
    others = mask > 0
    masked_labels(model, features, masks, image[others], torch.zeros_like(mask[others]), mask[others])


def _peak_mb(name: str, batch: int, options: dict[str, Any]) -> float:
    """The peak memory of a new process that builds the instance and predicts one batch."""
    plain = {key: value for key, value in options.items() if isinstance(value, int | float | str)}
    command = [sys.executable, "-m", "patchcure.benchmark", name, str(batch), json.dumps(plain)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout)


def _main() -> None:
    name, batch, options = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
    defense = build(name, **options)
    _agree(defense)
    defense.predict(_images(defense, batch))
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


if __name__ == "__main__":
    _main()
