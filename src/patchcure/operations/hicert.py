"""HiCert: agreement, in which an unsure prediction raises the alarm too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from patchcure.certificate import Certificate, Prediction
from patchcure.masks import MaskSet
from patchcure.models.base import SplitModel
from patchcure.operations.base import Detail, check_tau, confidence, finite, tolerance
from patchcure.operations.one_round import agreement, certify_round, clear, one_mask_margins, one_mask_votes
from patchcure.threat import PatchThreat


@dataclass(frozen=True)
class HiCert:
    """Return the unmasked prediction f(x); alarm if some P(i) is another label or has a confidence below tau.

    **What is certified.** Whatever a patch of the threat does, the output is y or an alarm. This says nothing about the
    clean image, which may raise a (false) alarm itself: a rule that always alarms is certified everywhere and useless.
    Report ``Prediction.alarm`` on clean images beside it.

    **Certificate.** For every location l some mask i that hides it has P(i) = y or a confidence below tau on the clean
    image; `strict` is the published condition, the same for all masks.

    **Proof.** Let the patches lie at l and let i be that mask. It takes every corrupted cell away, so P(i) and its
    confidence are the same on the attacked image x'. If the confidence is below tau, there is an alarm. If P(i) = y,
    then f(x') = y or they differ and there is an alarm.

    Args:
        tau: the confidence (softmax probability) that every prediction under a mask must reach. More of it certifies
            more and alarms more often; at 0 the rule is `Agreement`. The default is ours.
    """

    tau: float = 0.5
    together: ClassVar[int] = 1
    detects: ClassVar[bool] = True
    ablation: ClassVar[None] = None

    def __post_init__(self) -> None:
        check_tau(self.tau)

    def worst_evaluations(self, model: SplitModel, masks: MaskSet) -> int:
        """Each mask alone, and none."""
        return len(masks) + 1

    def predict(self, model: SplitModel, features: Tensor, masks: MaskSet) -> Prediction:
        """The label of each image, -1 for an alarm."""
        votes, sure = one_mask_votes(model, features, masks)
        return agreement(model, masks, finite(model.unmasked(features)).argmax(1), votes, doubt=sure < self.tau)

    def certify(
        self,
        model: SplitModel,
        features: Tensor,
        masks: MaskSet,
        threat: PatchThreat,
        labels: Int[Tensor, " b"],
        detail: Detail = "locations",
    ) -> Certificate:
        """See the class. Each condition counts only where it is clear of rounding."""

        def forbids(logits: Float[Tensor, "j classes"], margin: Float[Tensor, " j"]) -> Bool[Tensor, " j"]:
            return clear(logits, margin) | (confidence(logits, 2 * tolerance(logits)) < self.tau)

        margin, trusted = one_mask_margins(model, features, masks, labels, forbids)
        return certify_round(model, masks, threat, margin, trusted, torch.ones_like(labels, dtype=torch.bool))
