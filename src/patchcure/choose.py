"""Choose an operating point: which k, window and masks of one set of weights suit a machine and its constraints."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

from patchcure.benchmark import speed
from patchcure.defense import Defense
from patchcure.evaluate import Progress, evaluate, pixels
from patchcure.images import Data
from patchcure.instances import BagName, ViTName
from patchcure.names import build, parse
from patchcure.result import Result, Share
from patchcure.zoo.files import save_config

ROUNDS = 3
"""How often the speed of each point is measured."""
WINDOWS = ((14, 2), (14, 1), (2, 2))
"""The paper's, tried beside the defense's own where they divide the tokens."""


@dataclass(frozen=True)
class Point:
    """One way to run the weights, and what it gives on this machine.

    Args:
        name: the instance.
        masks_per_axis: the budget of masks; None for the default.
        masks: in the first round.
        throughput: images per second.
    """

    name: str
    masks_per_axis: int | None
    masks: int
    clean: Share
    certified: Share
    throughput: float

    @property
    def worth(self) -> tuple[float, float, float]:
        """What more is better of: certified accuracy first."""
        return self.certified.value, self.clean.value, self.throughput

    def describe(self) -> str:
        """One line for people."""
        budget = "" if self.masks_per_axis is None else f" with {self.masks_per_axis} masks on each axis"
        return (
            f"{self.name}{budget} (certified {self.certified.value:.1%}, clean {self.clean.value:.1%}, "
            f"{self.throughput:.4g} images/s)"
        )


@dataclass(frozen=True)
class Choice:
    """The recommended point, or None, and the reason."""

    points: tuple[Point, ...]
    front: tuple[Point, ...]
    chosen: Point | None
    why: str


def choose(
    defense: Defense,
    data: Data,
    weights: str,
    out: str | Path | None = None,
    *,
    min_throughput: float = 0.0,
    min_clean: float = 0.0,
    splits: Sequence[int] = (),
    windows: Sequence[tuple[int, int]] = (),
    budgets: Sequence[int | None] = (None,),
    limit: int | None = None,
    seed: int = 0,
    batch: int = 16,
    progress: Callable[[str, Progress], None] = lambda name, state: None,
) -> Choice:
    """Measure the `variants` of a defense, `recommend` one, and write it as a config that `patchcure.load` takes.

    Args:
        weights: where the config says that the weights are: a file, or another argument of `load`.
        out: the config; nothing is written if no point satisfies the constraints.
    """
    if out is not None and Path(out).suffix != ".yaml":
        raise ValueError(f"out: expected a file with the ending .yaml, got {out}.")
    made = list(variants(defense, splits, windows, budgets))
    points = measure(made, data, limit=limit, seed=seed, batch=batch, progress=progress)
    choice = recommend(points, min_throughput, min_clean)
    if out is not None and choice.chosen is not None:
        save_config(made[points.index(choice.chosen)], weights, out, choice.why)
    return choice


def variants(
    defense: Defense,
    splits: Sequence[int] = (),
    windows: Sequence[tuple[int, int]] = (),
    budgets: Sequence[int | None] = (None,),
) -> Iterator[Defense]:
    """The same weights, run in other ways; what is impossible (masks that hide everything) is left out.

    Args:
        splits: the k of a ViT, by default its own, none, all and three between; or of a hybrid that was built with
            bag_k, by default its own and every one up to that.
        windows: of a ViT; by default its own and the paper's.
        budgets: how many masks on each axis, None being the defense's own.
    """
    recipe = defense.recipe
    if recipe is None:
        raise ValueError("This defense was not made by patchcure.build or load, so it cannot be built in other ways.")
    own = parse(recipe["name"])
    instances: list[Any] = [own]
    if isinstance(own, ViTName):
        ks = splits or sorted({own.k, *(own.layers * quarter // 4 for quarter in range(5))})
        shapes = windows or dict.fromkeys([own.window, *WINDOWS])
        instances = [replace(own, window=window, k=k) for window, k in product(shapes, ks)]
    elif isinstance(own, BagName) and "bag_k" in recipe and not windows:
        instances = [replace(own, k=k) for k in splits or sorted({own.k, *own.splits(recipe["bag_k"])})]
    elif splits or windows:
        raise ValueError(
            f"{own}: only the weights of a ViT serve several k and windows, and those of a hybrid with bag_k several "
            "k; vary the masks instead."
        )
    weights = defense.model.backbone.state_dict()
    problem = None
    made = 0
    for instance, budget in product(instances, budgets):
        options = {**recipe, "name": str(instance)}
        if budget is not None:
            options |= {"masks_per_axis": budget, "mask_stride": None}
        try:
            with torch.device("meta"):
                variant = build(**options)
        except ValueError as error:
            problem = error
            continue
        variant.model.backbone.load_state_dict(weights, assign=True)
        made += 1
        yield variant.to(defense.model.mean.device)
    if not made and problem is not None:
        raise problem


def measure(
    defenses: Sequence[Defense],
    data: Data,
    *,
    limit: int | None = None,
    seed: int = 0,
    batch: int = 32,
    progress: Callable[[str, Progress], None] = lambda name, state: None,
) -> list[Point]:
    """Evaluate and time each defense on the same images."""
    points = []
    for defense in defenses:
        recipe = defense.recipe or {"name": "defense"}

        def tell(state: Progress, name: str = recipe["name"]) -> None:
            progress(name, state)

        with tempfile.TemporaryDirectory() as folder:
            records = evaluate(
                defense,
                data,
                out=Path(folder) / "records.jsonl",
                limit=limit,
                seed=seed,
                batch=batch,
                undefended=False,
                detail="verdict",
                progress=tell,
            )
        if records is None:
            raise ValueError("Choose in one process: speeds that are measured beside each other mean nothing.")
        result = Result.of(records, recipe["name"])
        images, _ = pixels(defense, data, [row.index for row in records.rows[:batch]])
        throughput = speed(defense, images, ROUNDS).throughput
        budget = recipe.get("masks_per_axis")
        points.append(Point(recipe["name"], budget, len(defense.masks), result.clean, result.certified, throughput))
    return points


def recommend(points: Sequence[Point], min_throughput: float = 0.0, min_clean: float = 0.0) -> Choice:
    """The best certified accuracy among the points that satisfy the constraints; else what to relax.

    Args:
        min_throughput: images per second.
        min_clean: clean accuracy in [0, 1].
    """
    if not points:
        raise ValueError("There is no operating point to choose from.")
    front = tuple(point for point in points if not any(_dominates(other, point) for other in points))
    fast = [point for point in points if point.throughput >= min_throughput]
    right = [point for point in points if point.clean.value >= min_clean]
    good = [point for point in fast if point in right]
    if good:
        best = max(good, key=lambda point: point.worth)
        better = [point for point in points if point.certified.value > best.certified.value]
        why = f"{best.describe()} has the best certified accuracy of the {len(good)} of {len(points)} points that "
        why += f"reach {min_throughput:g} images/s and {min_clean:.1%} clean."
        if better:
            why += f" More would be certified by {max(better, key=lambda point: point.worth).describe()}."
        return Choice(tuple(points), front, best, why)
    advice = []
    if right:
        point = max(right, key=lambda point: point.throughput)
        advice.append(f"lower --min-throughput by {min_throughput - point.throughput:.4g} for {point.describe()}")
    if fast:
        point = max(fast, key=lambda point: point.clean.value)
        advice.append(f"lower --min-clean by {min_clean - point.clean.value:.2%} for {point.describe()}")
    if not advice:
        point = max(points, key=lambda p: min(p.throughput / min_throughput, p.clean.value / min_clean))
        advice.append(
            f"lower both, --min-throughput by {min_throughput - point.throughput:.4g} and --min-clean by "
            f"{min_clean - point.clean.value:.2%}, for {point.describe()}"
        )
    why = f"No point reaches {min_throughput:g} images/s and {min_clean:.1%} clean: {', or '.join(advice)}."
    return Choice(tuple(points), front, None, why)


def _dominates(other: Point, point: Point) -> bool:
    return other.worth != point.worth and all(a >= b for a, b in zip(other.worth, point.worth, strict=True))
