"""Minority Reports: one round of masks; a label, or an alarm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Int
from torch import Tensor

from patchcure.certificate import ALARM, Certificate, Prediction
from patchcure.masks import MaskSet
from patchcure.models.base import SplitModel
from patchcure.operations.base import (
    Detail,
    confidence,
    every_mask,
    majority,
    margins,
    masked_logits,
    suspicion,
    tolerance,
)
from patchcure.operations.one_round import certify_round, one_mask_votes
from patchcure.threat import PatchThreat


@dataclass(frozen=True)
class MinorityReports:
    """If all one-mask predictions with a confidence above tau agree (and there is one), return their label; else alarm.

    **Certificate.** On the clean image the answer is y, and for every placement l some mask i that hides l has
    P(i) = y with confidence above tau. **Proof.** Under an attack at l mask i sees the same cells, so it still votes
    for y with confidence above tau; the answer is a label only if all confident votes agree with it, that is y.
    Otherwise there is an alarm. No attack gives a wrong label.

    The original looks for agreement inside 3x3 neighbouring masks; a patch at the border is hidden by fewer than
    that, and gets through (see docs/detection.md).

    Args:
        tau: the confidence (softmax probability) that a prediction needs to be heard; at 0 every prediction is.
    """

    tau: float = 0.0
    together: ClassVar[int] = 1
    detects: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 <= self.tau < 1:
            raise ValueError(f"tau: expected a confidence in [0, 1), got {self.tau}.")

    def worst_evaluations(self, model: SplitModel, masks: MaskSet) -> int:
        """Each mask alone."""
        return len(masks)

    def predict(self, model: SplitModel, features: Tensor, masks: MaskSet) -> Prediction:
        """The label of each image, -1 for an alarm."""
        votes, sure = one_mask_votes(model, features, masks)
        heard = sure > self.tau
        reference = majority(votes, model.num_classes)
        first = votes.gather(1, heard.long().argmax(1, keepdim=True))
        alarm = (heard & (votes != first)).any(1) | ~heard.any(1)
        disagreeing = votes != reference[:, None]
        return Prediction(
            labels=torch.where(alarm, ALARM, first[:, 0]),
            unanimous=~disagreeing.any(1),
            votes=votes,
            disagreeing=disagreeing,
            suspicion=tuple(suspicion(model, masks, row) for row in disagreeing),
            evaluations=torch.full((len(features),), len(masks), device=features.device),
            alarm=alarm,
        )

    def certify(
        self,
        model: SplitModel,
        features: Tensor,
        masks: MaskSet,
        threat: PatchThreat,
        labels: Int[Tensor, " b"],
        detail: Detail = "locations",
    ) -> Certificate:
        """See the class. A vote counts as y, or as unheard, only where that is clear of rounding."""
        images, index = every_mask(features, masks)
        margin, trusted, silent = [], [], []
        for part, logits in masked_logits(model, features, masks, images, index, index):
            slack = tolerance(logits)
            margin.append(margins(logits, labels[images[part]]))
            trusted.append((margin[-1] > slack) & (confidence(logits, -2 * slack) > self.tau))
            silent.append(confidence(logits, 2 * slack) < self.tau)
        shape = len(features), len(masks)
        heard_right = torch.cat(trusted).view(shape)
        clean = (heard_right | torch.cat(silent).view(shape)).all(1) & heard_right.any(1)
        return certify_round(model, masks, threat, torch.cat(margin).view(shape), heard_right, clean)
