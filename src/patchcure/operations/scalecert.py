"""ScaleCert: agreement on the few most important cells of a shallow layer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from patchcure.certificate import Certificate, Prediction
from patchcure.masks import MaskSet
from patchcure.models.base import SplitModel
from patchcure.operations.base import HIDDEN_BYTES, ROUNDING, Detail, finite, margins, tolerance
from patchcure.operations.one_round import agreement, certify_round
from patchcure.threat import PatchThreat


@dataclass(frozen=True)
class ScaleCert:
    """Keep only the q most important visible cells; if the prediction from them is one label under every mask and
    without a mask, return it; else alarm.

    This is our construction on ScaleCert's idea of superficial important neurons; its original has no code, and we
    claim none of its numbers. A neuron here is a cell of the feature map before the split, and its importance is the
    sum of its absolute activations: a function of that cell alone. Under mask i the q cells are chosen *among the
    visible ones*, never before masking: else a patch could raise its own importance, push other cells out of the q, and
    so change a prediction from which it is hidden (see docs/detection.md for the counterexample).

    **Certificate.** Let Q(i) be the label from the q most important cells outside mask i, and Q() the one without a
    mask. A location is safe if some mask i that hides it has Q(i) = y on the clean image; the image is certified if
    every location is safe and the clean image gets y: Q() = y and Q(i) = y for all i.

    **Proof.** Let the patches lie at l, and let mask i hide them with Q(i) = y. The cells outside mask i are the same
    on the attacked image, so is their importance, so are the q that are kept, and so is Q(i) = y. A label is returned
    only if all Q are that label: it is y, or there is an alarm. Rounding may exchange two cells of nearly the same
    importance, so Q(i) counts only where the last cell that is kept is clearly above the first that is not.

    Args:
        share: q as a share of all cells, rounded up; at 1 the rule is `Agreement`. The default is ours.
    """

    share: float = 0.25
    together: ClassVar[int] = 1
    detects: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(f"share: expected a share of the cells in (0, 1], got {self.share}.")

    def worst_evaluations(self, model: SplitModel, masks: MaskSet) -> int:
        """Each mask alone, and none."""
        return len(masks) + 1

    def predict(self, model: SplitModel, features: Tensor, masks: MaskSet) -> Prediction:
        """The label of each image, -1 for an alarm."""
        parts = [logits.argmax(1) for _, logits, _ in self._logits(model, features, masks)]
        votes = torch.cat(parts).view(len(features), len(masks) + 1)
        return agreement(model, masks, votes[:, -1], votes[:, :-1])

    def certify(
        self,
        model: SplitModel,
        features: Tensor,
        masks: MaskSet,
        threat: PatchThreat,
        labels: Int[Tensor, " b"],
        detail: Detail = "locations",
    ) -> Certificate:
        """See the class. A prediction counts as y only where its margin and its choice of cells are clear."""
        margin, right = [], []
        for images, logits, clear in self._logits(model, features, masks):
            margin.append(margins(logits, labels[images]))
            right.append(clear & (margin[-1] > tolerance(logits)))
        shape = len(features), len(masks) + 1
        every = torch.cat(right).view(shape)
        return certify_round(model, masks, threat, torch.cat(margin).view(shape), every[:, :-1], every.all(1))

    def _logits(
        self, model: SplitModel, features: Tensor, masks: MaskSet
    ) -> Iterator[tuple[Int[Tensor, " j"], Float[Tensor, "j classes"], Bool[Tensor, " j"]]]:
        """For every image under every mask and without one: the image, the logits, and was the choice clear?"""
        importance = model.by_cell(features).abs().sum(2)
        table = torch.cat([masks.hidden, torch.zeros_like(masks.hidden[:1])]).flatten(1).to(features.device)
        jobs = torch.cartesian_prod(torch.arange(len(features)), torch.arange(len(table))).to(features.device)
        count = math.ceil(self.share * model.grid.cells)
        for images, index in (part.T for part in jobs.split(max(1, HIDDEN_BYTES // model.grid.cells))):
            kept, clear = most_important(importance[images], table[index], count)
            hidden = ~kept.unflatten(1, (model.grid.height, model.grid.width))
            yield images, finite(model.logits(features, images, hidden)), clear


def most_important(
    importance: Float[Tensor, "j cells"], hidden: Bool[Tensor, "j cells"], count: int
) -> tuple[Bool[Tensor, "j cells"], Bool[Tensor, " j"]]:
    """The `count` most important cells that are not hidden (all of those if fewer), and is the choice clear?

    >>> importance = torch.tensor([[4.0, 3.0, 2.0, 1.0]])
    >>> most_important(importance, torch.tensor([[True, False, False, False]]), 2)
    (tensor([[False,  True,  True, False]]), tensor([True]))
    """
    visible = torch.where(hidden, -torch.inf, importance)
    values, order = visible.sort(dim=1, descending=True, stable=True)
    kept = torch.zeros_like(hidden).scatter(1, order[:, :count], True) & ~hidden
    if count >= importance.shape[1]:
        return kept, torch.ones_like(hidden[:, 0])
    rounding = ROUNDING * torch.finfo(importance.dtype).eps * values[:, 0]
    return kept, (values[:, count] == -torch.inf) | (values[:, count - 1] - values[:, count] > rounding)
