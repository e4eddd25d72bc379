"""The operating points that one set of weights serves, and the masks that training draws for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from patchcure.defense import Defense
from patchcure.masks import MaskSet
from patchcure.names import at_point, build
from patchcure.train.recipe import Recipe


@dataclass(frozen=True)
class Point:
    """One operating point: its defense, how often it is drawn, and its pairs of masks by how much they hide."""

    name: str
    weight: float
    defense: Defense
    groups: tuple[Bool[Tensor, "p h w"], ...]
    """What the pairs of masks hide; in each group all hide equally many cells, so that a batch stays rectangular."""
    greedy: int = 0
    """Among how many masks the worst ones are looked for; 0 is random."""

    def draw(self, count: int, random: torch.Generator) -> Bool[Tensor, "count h w"]:
        """For each image what a random pair of masks hides; equally many cells for all of them."""
        sizes = torch.tensor([float(len(group)) for group in self.groups])
        group = self.groups[int(torch.multinomial(sizes, 1, generator=random))]
        return group[torch.randint(len(group), (count,), generator=random)]


def elastic(recipe: Recipe, backbone: torch.nn.Module | None = None) -> list[Point]:
    """The points of a recipe around one network; the first one's network, unless another is given."""
    points: list[Point] = []
    if wrong := sorted({"name", "patch", "masks_per_axis"} & set(recipe.start.options)):
        raise ValueError(f"start.options: {', '.join(wrong)} belongs to each of the points, not to the network.")
    for choice in recipe.points:
        with torch.device("meta" if backbone is not None else "cpu"):
            defense = build(
                at_point(recipe.start.instance, choice.name),
                patch=choice.patch,
                masks_per_axis=choice.masks_per_axis,
                **recipe.start.options,
            )
        if backbone is None:
            backbone = defense.model.backbone
        _same(choice.name, defense.model.backbone, recipe.start.instance, backbone)
        defense.model.backbone = backbone
        groups = pair_groups(defense.masks, recipe.loss.masks)
        greedy = recipe.loss.greedy if choice.greedy is None else choice.greedy
        points.append(Point(choice.name, choice.weight, defense, groups, greedy))
    return points


def _same(point: str, network: torch.nn.Module, instance: str, shared: torch.nn.Module) -> None:
    """Refuse a point of another network: the geometry that its masks rely on would not be that of the weights."""
    needs, has = ({key: value.shape for key, value in each.state_dict().items()} for each in (network, shared))
    if other := sorted(key for key in needs.keys() | has.keys() if needs.get(key) != has.get(key)):
        raise ValueError(
            f"points: {point} is no point of the network of {instance} ({other[0]} differs). A hybrid that is split at "
            "several layers needs start.options.bag_k, the last of them."
        )


def pair_groups(masks: MaskSet, together: int) -> tuple[Bool[Tensor, "p h w"], ...]:
    """What one mask or two hide, all pairs, grouped by how much."""
    if not together:
        return (torch.zeros(1, masks.grid.height, masks.grid.width, dtype=torch.bool),)
    if not len(masks):
        raise ValueError("This rule uses no masks, so training cannot draw any: set loss.masks to 0.")
    hidden = masks.hidden
    if together == 2:
        first, second = torch.triu_indices(len(masks), len(masks))
        hidden = hidden[first] | hidden[second]
    sizes = hidden.sum((1, 2))
    if bool((sizes == masks.grid.cells).any()):
        raise ValueError(
            "Some pairs of masks hide every cell: this rule applies one mask at a time, set loss.masks: 1."
        )
    return tuple(hidden[sizes == size] for size in sizes.unique())


def worst_pairs(
    defense: Defense,
    features: Float[Tensor, "b ..."],
    labels: Int[Tensor, " b"],
    together: int,
    candidates: int,
    random: torch.Generator,
) -> Bool[Tensor, "b h w"]:
    """Greedy cutout: for each image the mask with the largest loss, then the second one given the first.

    Args:
        features: of the images, before any mask; nothing flows back to them.
        candidates: how many masks are tried in each of the two searches, drawn anew for each batch.
    """
    model, device = defense.model, features.device
    table = defense.masks.hidden.to(device)
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            hidden = torch.zeros(len(labels), *table.shape[1:], dtype=torch.bool, device=device)
            for _ in range(together):
                tried = table[torch.randperm(len(table), generator=random)[:candidates].to(device)]
                each = hidden[:, None] | tried
                jobs = torch.arange(len(labels), device=device).repeat_interleave(len(tried))
                logits = model.logits(features, jobs, each.flatten(0, 1))
                loss = torch.nn.functional.cross_entropy(logits, labels[jobs], reduction="none")
                worst = loss.view(len(labels), -1).argmax(1)
                hidden = each[torch.arange(len(labels), device=device), worst]
    finally:
        model.train(training)
        torch.clear_autocast_cache()  # of weights that were rounded without a graph: no gradient would reach them
    return hidden


def choose(points: Sequence[Point], random: torch.Generator) -> Point:
    """A random point, by the weights."""
    weights = torch.tensor([point.weight for point in points])
    return points[int(torch.multinomial(weights, 1, generator=random))]
