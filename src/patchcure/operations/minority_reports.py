"""Minority Reports: one round of masks; a label, or an alarm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from patchcure.certificate import ALARM, Certificate, Prediction
from patchcure.masks import MaskSet
from patchcure.models.base import SplitModel
from patchcure.operations.base import (
    Detail,
    every_mask,
    largest_square,
    majority,
    margins,
    masked_logits,
    safe_groups,
    safe_maps,
    suspicion,
    tolerance,
)
from patchcure.threat import PatchThreat


@dataclass(frozen=True)
class MinorityReports:
    """If all one-mask predictions with a confidence above tau agree (and there is one), return their label; else alarm.

    **Certificate.** On the clean image the answer is y, and for every placement l some mask i that hides l has
    P(i) = y with confidence above tau. **Proof.** Under an attack at l mask i sees the same cells, so it still votes
    for y with confidence above tau; the answer is a label only if all confident votes agree with it, that is y.
    Otherwise there is an alarm. No attack gives a wrong label.

    Args:
        tau: the confidence (softmax probability) that a prediction needs to be heard; at 0 every prediction is.
    """

    tau: float = 0.0
    together: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if not 0 <= self.tau < 1:
            raise ValueError(f"tau: expected a confidence in [0, 1), got {self.tau}.")

    def worst_evaluations(self, masks: int) -> int:
        """Each mask alone."""
        return masks

    def predict(self, model: SplitModel, features: Tensor, masks: MaskSet) -> Prediction:
        """The label of each image, -1 for an alarm."""
        batch, count = len(features), len(masks)
        images, index = every_mask(features, masks)
        parts = [logits for _, logits in masked_logits(model, features, masks, images, index, index)]
        votes = torch.cat([logits.argmax(1) for logits in parts]).view(batch, count)
        confidence = torch.cat([_confidence(logits) for logits in parts]).view(batch, count)
        heard = confidence > self.tau
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
            evaluations=torch.full((batch,), count, device=features.device),
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
        batch, count = len(features), len(masks)
        images, index = every_mask(features, masks)
        margin, trusted, silent = [], [], []
        for part, logits in masked_logits(model, features, masks, images, index, index):
            slack = tolerance(logits)
            margin.append(margins(logits, labels[images[part]]))
            trusted.append((margin[-1] > slack) & (_confidence(logits, -2 * slack) > self.tau))
            silent.append(_confidence(logits, 2 * slack) < self.tau)
        margins_ = torch.cat(margin).view(batch, count)
        heard_right = torch.cat(trusted).view(batch, count)
        unheard = torch.cat(silent).view(batch, count)
        clean = (heard_right | unheard).all(1)
        trust = heard_right & clean[:, None]
        strict = heard_right.all(1)
        wrong = torch.where(heard_right, torch.inf, margins_).argmin(1)
        return Certificate(
            certified=safe_groups(trust, masks.coverage.covers).all(1),
            strict=strict,
            margin=margins_.amin(1),
            failed=torch.where(strict, -1, wrong)[:, None].expand(-1, 2),
            safe=safe_maps(trust, masks),
            largest_patch=largest_square(trust, model, masks, threat),
        )


def _confidence(logits: Float[Tensor, "j classes"], shift: Float[Tensor, " j"] | float = 0.0) -> Float[Tensor, " j"]:
    """The largest softmax probability, if its logit were higher by `shift` beside all the others."""
    top, best = logits.double().max(1, keepdim=True)
    others = logits.double().scatter(1, best, -torch.inf).logsumexp(1)
    return torch.sigmoid(top[:, 0] - others + shift)
