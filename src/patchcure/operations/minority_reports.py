"""Minority Reports: one round of masks; a label, or an alarm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from patchcure.certificate import ALARM, Certificate, Prediction
from patchcure.masks import MaskSet
from patchcure.models.base import SplitModel
from patchcure.operations.base import Detail, check_tau, confidence, majority, suspicion, tolerance
from patchcure.operations.one_round import certify_round, clear, one_mask_margins, one_mask_votes
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
    ablation: ClassVar[None] = None

    def __post_init__(self) -> None:
        check_tau(self.tau)

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

        def heard(logits: Float[Tensor, "j classes"], margin: Float[Tensor, " j"]) -> Bool[Tensor, " j"]:
            return clear(logits, margin) & (confidence(logits, -2 * tolerance(logits)) > self.tau)

        def silent(logits: Float[Tensor, "j classes"], margin: Float[Tensor, " j"]) -> Bool[Tensor, " j"]:
            return confidence(logits, 2 * tolerance(logits)) < self.tau

        margin, right, unheard = one_mask_margins(model, features, masks, labels, heard, silent)
        return certify_round(model, masks, threat, margin, right, (right | unheard).all(1) & right.any(1))
