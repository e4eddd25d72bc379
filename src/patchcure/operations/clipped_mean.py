"""Clipping (CBN): the evidence of every cell is squashed into (-1, 1), so that few cells cannot outweigh many."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from patchcure.certificate import Certificate, Prediction
from patchcure.masks import MaskSet
from patchcure.models.base import SplitModel
from patchcure.operations.base import Detail, unmasked_prediction
from patchcure.operations.local import Lead, certify_owned, local_logits, rounding, without_owned
from patchcure.threat import PatchThreat


@dataclass(frozen=True)
class ClippedMean:
    """v = tanh(scale * u + shift); the label with the highest mean of v over the cells, the lowest label on ties.

    **Certificate.** For every set R of cells that a placement of the patches owns, and *every* label c other than y:
    the sum outside R of (v_y - v_c) is above 2|R|.

    **Proof.** The attacker changes v only in R, where v_y - v_c >= -2 whatever is written. So the sum of v_y - v_c over
    all cells stays above 2|R| - 2|R| = 0, for every c: y keeps the highest mean.

    **No condition is weaker.** v_y and v_c can be brought as near to -1 and 1 as floating point can tell.

    It is not enough to look at the clean runner-up (public code does): a third label may have most to gain in R.

    Args:
        scale, shift: of the squashing; 0.05 and -1 in the paper.
    """

    scale: float = 0.05
    shift: float = -1.0
    together: ClassVar[int] = 1
    ablation: ClassVar[None] = None

    def __post_init__(self) -> None:
        if not (0 < self.scale < math.inf and math.isfinite(self.shift)):
            raise ValueError(
                f"tanh(scale * u + shift): expected a positive scale and a finite shift, got {self.scale} and "
                f"{self.shift}."
            )

    def squash(self, local: Float[Tensor, "*b cells classes"]) -> Float[Tensor, "*b cells classes"]:
        """v, of which the sums are taken."""
        return torch.tanh(self.scale * local + self.shift)

    def worst_evaluations(self, model: SplitModel, masks: MaskSet) -> int:
        """Each cell once."""
        return model.grid.cells

    def predict(self, model: SplitModel, features: Tensor, masks: MaskSet) -> Prediction:
        """The label of each image."""
        labels = self.squash(local_logits(model, features)).mean(1).argmax(1)
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
        """See the class; a lead counts where it is above the rounding of the sums, here and in `predict`."""
        leads = [self._lead(u, y) for u, y in zip(local_logits(model, features), labels, strict=True)]
        return certify_owned(leads, model, masks, threat, features.device)

    def _lead(self, local: Float[Tensor, "cells classes"], label: Int[Tensor, ""]) -> Lead:
        clipped = self.squash(local).double()
        ahead = clipped[:, label, None] - clipped
        slack = 4 * self._rounding(local)

        def lead(owned: Bool[Tensor, "g cells"]) -> Float[Tensor, " g"]:
            kept = without_owned(ahead, owned).index_fill(1, label[None], torch.inf)
            return kept.amin(1) - 2 * owned.sum(1) - slack

        return lead

    def _rounding(self, local: Float[Tensor, "cells classes"]) -> Float[Tensor, ""]:
        """How far a sum of v may be from itself: tanh has slope at most 1 and costs some rounding itself, and each of n
        additions of numbers in [-1, 1] costs at most n units."""
        cells, unit = len(local), torch.finfo(local.dtype).eps
        return (self.scale * rounding(local) + unit * (8 + abs(self.shift) + cells)).sum()
