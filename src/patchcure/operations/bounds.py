"""Interval bounds (Chiang et al.): no masks; a bound over everything that a patch may contain."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from patchcure.certificate import Certificate, Prediction
from patchcure.geometry import Box
from patchcure.masks import MaskSet
from patchcure.models.base import SplitModel
from patchcure.models.classifier import AnyClassifier
from patchcure.operations.base import Detail, bisect_sides, finite, unmasked_prediction
from patchcure.operations.intervals import margins_below, sums_of_products
from patchcure.threat import FeatureThreat, PatchThreat

TOO_MANY = 1_000_000
"""More placements of the patches than this are refused: each needs its own bounds."""

Places = tuple[Box, ...]
"""The boxes of pixels of all patches together."""

PART = 64
"""How many placements are bounded before an image that is already lost is left out."""


@dataclass(frozen=True)
class IntervalBounds:
    """The label is the network's own prediction; the certificate bounds what any patch can do to its logits.

    **Certificate.** For every location: pixels inside the patch range over [0, 1], the others are those of x. Interval
    arithmetic gives a lower bound of the true logit minus each other logit (`margins_below`). Certified: all of them
    are above zero, at every location.

    **Proof.** An image with a patch at l lies between the bounds of that location. Normalisation rounds monotonically,
    so its pixels lie between the normalised 0 and 1 in floating point too; every later layer's bounds contain what the
    layer computes. So the computed logit of y is the largest, strictly, and y is returned.

    It needs a classifier with masks on the pixels (`AnyClassifier`) whose network is a sequence of simple layers.
    `strict` is the same as `certified`, and there is no mask that could fail.
    """

    together: ClassVar[int] = 0
    ablation: ClassVar[None] = None

    def worst_evaluations(self, model: SplitModel, masks: MaskSet) -> int:
        """The network, once."""
        return 1

    def predict(self, model: SplitModel, features: Tensor, masks: MaskSet) -> Prediction:
        """The network's own labels."""
        with sums_of_products():
            labels = finite(model.unmasked(features)).argmax(1)
        return unmasked_prediction(labels, self.worst_evaluations(model, masks))

    def certify(
        self,
        model: SplitModel,
        features: Tensor,
        masks: MaskSet,
        threat: PatchThreat,
        labels: Int[Tensor, " b"],
        detail: Detail = "locations",
    ) -> Certificate:
        """See the class. Without locations asked for, an image that fails is left at its first open location."""
        pixels = _pixel_model(model)
        placed = _placements(masks.threat)
        with sums_of_products():
            finite(pixels.unmasked(features))
            margin = _margins(pixels, features, labels, placed, every=detail != "verdict")
            safe = margin > 0
            certified = safe.all(1)
            largest = torch.where(certified, max(min(shape) for shape in threat.shapes), 0)
            if detail == "verdict":
                safe &= certified[:, None]
            else:
                largest = _largest(pixels, features, labels, threat, largest)
        return Certificate(
            certified=certified,
            strict=certified,
            margin=margin.amin(1).to(features.dtype),
            failed=labels.new_full((len(labels), 2), -1),
            safe=_maps(safe, placed, masks.threat),
            largest_patch=largest,
        )


def _pixel_model(model: SplitModel) -> AnyClassifier:
    if type(model) is not AnyClassifier:
        raise ValueError(
            f"Interval bounds need a classifier with masks on the pixels (AnyClassifier), got {type(model).__name__}."
        )
    return model


def _placements(threat: FeatureThreat) -> list[Places]:
    """All boxes of pixels that the attacker may own together."""
    boxes = list(dict.fromkeys(threat.locations()))
    count = min(threat.count, len(boxes))
    if (needed := math.comb(len(boxes), count)) > TOO_MANY:
        raise ValueError(
            f"{count} patches at {len(boxes)} locations each would need {needed:,} bounds for each image: use fewer "
            "patches or a smaller image."
        )
    return list(itertools.combinations(boxes, count))


def _margins(
    model: AnyClassifier,
    features: Float[Tensor, "b c h w"],
    labels: Int[Tensor, " b"],
    placed: list[Places],
    every: bool,
) -> Float[Tensor, "b places"]:
    """For each image and each placement, a lower bound of the label's logit above all others.

    Unless `every` placement is asked for, an image is left out (infinity) after the part in which it fails.
    """
    margin = torch.full((len(features), len(placed)), torch.inf, dtype=torch.double, device=features.device)
    left = torch.arange(len(features), device=features.device)
    for start in range(0, len(placed), PART):
        part = _bounds(model, features[left], labels[left], placed[start : start + PART])
        margin[left, start : start + PART] = part
        left = left if every else left[(part > 0).all(1)]
    return margin


def _bounds(
    model: AnyClassifier, features: Float[Tensor, "b c h w"], labels: Int[Tensor, " b"], placed: list[Places]
) -> Float[Tensor, "b places"]:
    """The same for a few placements, in jobs of bounded memory."""
    free = torch.zeros(len(placed), 1, model.grid.height, model.grid.width, dtype=torch.bool, device=features.device)
    for index, boxes in enumerate(placed):
        for box in boxes:
            free[index, :, box.top : box.bottom, box.left : box.right] = True
    ends = [model.normalize(torch.full_like(model.mean[None], value).to(features)) for value in (0.0, 1.0)]
    low, high = torch.minimum(*ends), torch.maximum(*ends)
    jobs = torch.cartesian_prod(torch.arange(len(features)), torch.arange(len(placed))).to(features.device)
    rows = [labels.new_empty(0, dtype=torch.double)]
    for images, index in (part.T for part in jobs.split(model.max_jobs)):
        x, patch = features[images], free[index]
        lower, upper = torch.where(patch, low, x), torch.where(patch, high, x)
        rows.append(margins_below(model.backbone, lower, upper, labels[images], features.dtype).amin(1))
    return torch.cat(rows).view(len(features), len(placed))


def _largest(
    model: AnyClassifier,
    features: Float[Tensor, "b c h w"],
    labels: Int[Tensor, " b"],
    threat: PatchThreat,
    low: Int[Tensor, " b"],
) -> Int[Tensor, " b"]:
    """The side of the largest square that is certified, by bisection from `low`, which is (smaller is easier)."""
    high = torch.full_like(low, min(threat.image.height, threat.image.width))
    if all(height == width for height, width in threat.shapes):
        high = torch.where(low > 0, high, threat.shapes[0][0] - 1)

    def certified(side: int, asked: Bool[Tensor, " b"]) -> Bool[Tensor, " asked"]:
        squares = _placements(threat.with_squares(side).on_features(model.grid, model.corrupted))
        return (_margins(model, features[asked], labels[asked], squares, every=False) > 0).all(1)

    return bisect_sides(certified, low, high)


def _maps(
    safe: Bool[Tensor, "b places"], placed: list[Places], threat: FeatureThreat
) -> tuple[Bool[Tensor, "b _ _"], ...]:
    """For each shape, the locations that are safe (with K patches: wherever the other patches are)."""
    number = {box: index for index, box in enumerate(dict.fromkeys(threat.locations()))}
    single = torch.ones(len(safe), len(number), dtype=torch.bool, device=safe.device)
    for index, boxes in enumerate(placed):
        for box in boxes:
            single[:, number[box]] &= safe[:, index]
    maps = []
    for footprint in threat.footprints:
        where = torch.tensor([[number[Box.of(rows, cols)] for cols in footprint.cols] for rows in footprint.rows])
        maps.append(single[:, where.to(safe.device)])
    return tuple(maps)
