"""The challenger: double masking with a bounded number of evaluations, whatever the attacker does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Int
from torch import Tensor

from patchcure.certificate import Certificate, Prediction
from patchcure.masks import MaskSet
from patchcure.models.base import SplitModel
from patchcure.operations.base import Detail, every_mask, majority, masked_labels, suspicion
from patchcure.operations.pairs import certify_pairs
from patchcure.threat import PatchThreat


@dataclass(frozen=True)
class Challenger:
    """Keep a candidate mask; the next unused mask with another label challenges it; the pair's label decides who stays.

    The first candidate is the first mask with the majority label. If the pair P(c, u) has the challenger's label, the
    challenger becomes the candidate; otherwise the candidate stays. Either way the challenger is used up, so there are
    at most |M| - 1 second-round evaluations, 2|M| - 1 in all. When no unused mask has another label, the candidate's
    label is the answer.

    **Proof.** Let the patches lie at l, and let mask i hide them with P(i, j) = y for all j on the clean image; row i
    is the same on the attacked image. Suppose the answer is not y. Then mask i, whose label is y, was used: as the
    first candidate or as a challenger. As a challenger it met a candidate c with another label, the pair P(c, i) = y
    was its own label, and it became the candidate. As a candidate it met only challengers u with other labels, the pair
    P(i, u) = y was never theirs, and it stayed. So it is the candidate at the end and the answer is y: a contradiction.
    """

    together: ClassVar[int] = 2
    ablation: ClassVar[None] = None

    def worst_evaluations(self, model: SplitModel, masks: MaskSet) -> int:
        """Each mask alone, and each challenger once."""
        return 2 * len(masks) - 1

    def predict(self, model: SplitModel, features: Tensor, masks: MaskSet) -> Prediction:
        """The label of each image, with the evidence."""
        batch, count, device = len(features), len(masks), features.device
        images, index = every_mask(features, masks)
        votes = masked_labels(model, features, masks, images, index, index).view(batch, count)
        reference = majority(votes, model.num_classes)
        disagreeing = votes != reference[:, None]
        every = torch.arange(batch, device=device)
        candidate = (~disagreeing).long().argmax(1)
        unused = torch.ones_like(disagreeing)
        unused[every, candidate] = False
        evaluations = torch.full((batch,), count, device=device)
        while True:
            rivals = unused & (votes != votes[every, candidate, None])
            active = rivals.any(1).nonzero()[:, 0]
            if not len(active):
                break
            challenger = rivals[active].long().argmax(1)
            pair = masked_labels(model, features, masks, active, candidate[active], challenger)
            evaluations[active] += 1
            unused[active, challenger] = False
            wins = pair == votes[active, challenger]
            candidate[active] = torch.where(wins, challenger, candidate[active])
        labels = votes[every, candidate]
        overruled = labels != reference
        chosen = torch.where(overruled[:, None], torch.nn.functional.one_hot(candidate, count).bool(), disagreeing)
        return Prediction(
            labels=labels,
            unanimous=~disagreeing.any(1),
            votes=votes,
            disagreeing=disagreeing,
            suspicion=tuple(suspicion(model, masks, row) for row in chosen),
            evaluations=evaluations,
            alarm=torch.zeros_like(overruled),
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
        """See the proof above and `certify_pairs`."""
        return certify_pairs(model, features, masks, threat, labels, detail)
