"""Voting of regions (BagCert): every cell says yes or no to every label."""

from __future__ import annotations

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
class RegionVotes:
    """Every cell votes for all labels with u > 0: s = Heaviside(u). Most votes win, the lowest label on ties.

    **Certificate.** With D = s_y - s_c, for every set R of cells that a placement of the patches owns, and every
    label c other than y: the sum outside R of D is above |R|, or equal to it where y < c.

    **Proof.** The attacker changes votes only in R, where D >= -1 whatever is written. So the sum of D over all cells
    stays above 0, and y has more votes than c; or it stays at least 0 and y wins the tie.

    **No condition is weaker.** Every cell of R can withhold its vote from y and give it to c.

    Votes are whole numbers, so sums are exact; where u is within rounding of 0, the certificate counts the vote that
    is worse for y.
    """

    together: ClassVar[int] = 1
    ablation: ClassVar[None] = None

    def worst_evaluations(self, model: SplitModel, masks: MaskSet) -> int:
        """Each cell once."""
        return model.grid.cells

    def predict(self, model: SplitModel, features: Tensor, masks: MaskSet) -> Prediction:
        """The label of each image."""
        labels = (local_logits(model, features) > 0).sum(1).argmax(1)
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
        """See the class; the margin is in votes, and a tie that y wins counts as a lead of one."""
        leads = [_lead(u, y) for u, y in zip(local_logits(model, features), labels, strict=True)]
        return certify_owned(leads, model, masks, threat, features.device)


def _lead(local: Float[Tensor, "cells classes"], label: Int[Tensor, ""]) -> Lead:
    near = rounding(local)[:, None]
    sure, possible = local > near, local >= -near
    ahead = sure[:, label, None].double() - possible.double()
    tie = (label < torch.arange(local.shape[1], device=local.device)).double()

    def lead(owned: Bool[Tensor, "g cells"]) -> Float[Tensor, " g"]:
        votes = (without_owned(ahead, owned) + tie).index_fill(1, label[None], torch.inf)
        return votes.amin(1) - owned.sum(1)

    return lead
