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
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from patchcure import reference
from patchcure.defense import Defense
from patchcure.geometry import Box
from patchcure.models import SplitModel
from patchcure.operations.base import every_mask, masked_labels
from patchcure.zoo import named


@dataclass(frozen=True)
class Row:
    """What one instance does at one batch size.

    Args:
        throughput: images per second on images whose masks agree (the median over rounds).
        relative: throughput over that of the undefended network, the median of the rounds' ratios.
        relative_low, relative_high: the smallest and the largest of those ratios.
        attacked: images per second when every image needs a second round in which one mask's pairs are evaluated.
            An attacker can ask for more, up to `worst_evaluations`.
        worst_evaluations: how often an attacker can make the LRF part run for one image.
        latency_ms: milliseconds for one image alone.
        gmacs, undefended_gmacs: 10^9 multiply-adds per image, counted on the meta device.
        peak_mb: the largest memory of a process that predicts one batch, all included.
        of_attainable: relative over what it would be if all multiply-adds took the same time.
        over_reference: if asked for, the speed over that of the plain reference, one image and one mask at a time.
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
    over_reference: float | None = None


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
    return _speed(len(images), *_alternate(rounds, *_turns(defense, images)[:2]))


def _speed(batch: int, defended: list[float], undefended: list[float]) -> Speed:
    ratios = [u / d for u, d in zip(undefended, defended, strict=True)]
    return Speed(
        batch / statistics.median(defended),
        batch / statistics.median(undefended),
        statistics.median(ratios),
        min(ratios),
        max(ratios),
    )


def bench(
    names: Sequence[str],
    batches: Sequence[int] = (4,),
    rounds: int = 7,
    against_reference: bool = False,
    **options: Any,
) -> Iterator[Row]:
    """Measure defenses by name; one row for each batch size as it is ready.

    The speed does not depend on the weights: every image is made one whose masks agree.

    Args:
        names: instances (see `patchcure.names.known`), weights that come with the package, or files.
        batches: batch sizes.
        rounds: how often defended and undefended take turns, after one round to warm up.
        against_reference: let `patchcure.reference` take turns too.
        **options: as for `patchcure.build`.
    """
    if rounds < 1 or min(batches, default=0) < 1:
        raise ValueError(f"Expected positive batch sizes and rounds, got {list(batches)} and {rounds}.")
    for name in names:
        defense = named(name, **options)
        _agree(defense)
        work, plain_work = gmacs(name, **options)
        (latency,) = _alternate(rounds, _turns(defense, _images(defense, 1))[0])
        for batch in batches:
            images = _images(defense, batch)
            plain = [partial(_reference_round, defense, images)] if against_reference else []
            defended, undefended, second, *slow = _alternate(rounds, *_turns(defense, images), *plain)
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
                peak_mb=peak_mb(name, batch, **options),
                of_attainable=measured.relative * work / plain_work,
                over_reference=_speed(batch, defended, slow[0]).relative if slow else None,
            )


def gmacs(name: str, **options: Any) -> tuple[float, float]:
    """10^9 multiply-adds for one image: of the defense when its masks agree, and of the undefended network.

    >>> defended, undefended = gmacs("PCURE-ViT14x2-k12", flavour="published")
    >>> round(defended, 1), round(undefended, 1)
    (17.6, 17.6)
    """
    with torch.device("meta"):
        defense = named(name, **options).to("meta")
        image = torch.empty(1, len(defense.model.mean), defense.model.image.height, defense.model.image.width)

    shadow = Shadow(defense.model)

    def predict() -> None:
        defense.operation.predict(shadow, shadow.features(image), defense.masks)

    return _count(predict), _count(lambda: defense.model.plain(image))


def _count(run: Callable[[], object]) -> float:
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        run()
    return counter.get_total_flops() / 2e9


class Shadow(SplitModel):
    """A model on the meta device, of which an operation sees real logits, the same for every job.

    So any operation runs to its answer, and the counter sees all that it asks of the model.
    """

    def __init__(self, model: SplitModel) -> None:
        super().__init__(model.image, model.grid, model.num_classes, max_jobs=model.max_jobs)
        self.model = model
        self.row = torch.linspace(1, 0, model.num_classes)

    def features(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b ..."]:
        return torch.zeros_like(self.model.features(images), device="cpu")

    def masked(
        self, prepared: Any, images: Int[Tensor, " j"], hidden: Bool[Tensor, "j cells"]
    ) -> Float[Tensor, "j classes"]:
        return self.row.expand(len(images), -1)

    def logits(
        self, features: Float[Tensor, "b ..."], images: Int[Tensor, " j"], hidden: Bool[Tensor, "j h w"]
    ) -> Float[Tensor, "j classes"]:
        self.model.logits(features.to("meta"), images, hidden)
        return self.row.expand(len(images), -1)

    def local_logits(self, features: Float[Tensor, "b ..."]) -> Float[Tensor, "b cells classes"]:
        self.model.local_logits(features.to("meta"))
        return self.row.expand(len(features), self.grid.cells, -1)

    def by_cell(self, features: Float[Tensor, "b ..."]) -> Float[Tensor, "b cells d"]:
        return self.model.by_cell(features)

    def corrupted(self, box: Box) -> Box:
        return self.model.corrupted(box)

    def receptive(self, cells: Box) -> Box:
        return self.model.receptive(cells)


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


Turn = Callable[[], object]


def _turns(defense: Defense, images: Tensor) -> tuple[Turn, Turn, Turn]:
    """The defense, the undefended network, and the defense with a second round."""
    return (
        partial(defense.predict, images),
        partial(defense.model.plain, images),
        partial(_two_rounds, defense, images),
    )


@torch.no_grad()
def _alternate(rounds: int, *turns: Turn) -> list[list[float]]:
    """The seconds of each, turn by turn, after one round to warm up."""
    seconds: list[list[float]] = [[] for _ in turns]
    for number in range(rounds + 1):
        for turn, times in zip(turns, seconds, strict=True):
            start = time.perf_counter()
            turn()
            if number:
                times.append(time.perf_counter() - start)
    return seconds


def _reference_round(defense: Defense, images: Tensor) -> None:
    """The first round as the plain reference does it; one plain pass for a rule without masks."""
    nothing = torch.zeros(1, defense.model.grid.height, defense.model.grid.width, dtype=torch.bool)
    for image in images:
        for hidden in defense.masks.hidden if len(defense.masks) else nothing:
            reference.label(defense.model, image, hidden)


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


def peak_mb(name: str, batch: int, **options: Any) -> float:
    """The peak memory of a new process that builds the instance and predicts one batch."""
    plain = {key: value for key, value in options.items() if isinstance(value, int | float | str)}
    command = [sys.executable, "-m", "patchcure.benchmark", name, str(batch), json.dumps(plain)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout)


def own_peak_mb() -> float:
    """The largest memory of this process so far.

    Where Linux tells it: `getrusage` would count what the parent held when it started this process.
    """
    status = Path("/proc/self/status")
    if status.exists():
        (peak,) = (line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(peak.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20 if sys.platform == "darwin" else 1 << 10)


def _main() -> None:
    name, batch, options = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
    defense = named(name, **options)
    _agree(defense)
    defense.predict(_images(defense, batch))
    print(own_peak_mb())


if __name__ == "__main__":
    _main()
