"""Double masking (PatchCleanser, and the paper's secure operation): recover a label in two rounds of masks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Int
from torch import Tensor

from patchcure.certificate import Certificate, Prediction
from patchcure.masks import MaskSet
from patchcure.models.base import SplitModel
from patchcure.operations.base import Detail, every_mask, finite, majority, masked_labels, suspicion
from patchcure.operations.pairs import certify_pairs
from patchcure.threat import PatchThreat


@dataclass(frozen=True)
class DoubleMasking:
    """If all one-mask labels P(i) equal the reference, return it. Else the first disagreer i whose second round is
    unanimous, P(i, j) = P(i) for all j, decides; if there is none, the reference does.

    The reference is the majority of the P(i), lowest label on ties (the paper), or the unmasked prediction (the
    released code).

    **Proof.** Let the patches lie at l, and let mask i hide them with P(i, j) = y for all j on the clean image. Mask i
    takes every corrupted cell away, so row i is the same on the attacked image. Then

    1. if all P agree with the reference, P(i) = y does, so the reference is y;
    2. a disagreer i' with a label other than y never wins: its row contains P(i', i) = P(i, i') = y;
    3. if no disagreer wins, the reference is returned; were it not y, mask i would be a disagreer with a unanimous
       second round and would have won.

    In each case the answer is y. So it is enough that every placement has such a mask: `certify_pairs`.
    """

    reference: Literal["majority", "unmasked"] = "majority"
    together: ClassVar[int] = 2
    ablation: ClassVar[None] = None

    def __post_init__(self) -> None:
        if self.reference not in ("majority", "unmasked"):
            raise ValueError(f"reference: expected 'majority' or 'unmasked', got {self.reference!r}.")

    def worst_evaluations(self, model: SplitModel, masks: MaskSet) -> int:
        """Every pair once."""
        return masks.pairs + (self.reference == "unmasked")

    def predict(self, model: SplitModel, features: Tensor, masks: MaskSet) -> Prediction:
        """The label of each image, with the evidence."""
        batch, count, device = len(features), len(masks), features.device
        images, index = every_mask(features, masks)
        votes = masked_labels(model, features, masks, images, index, index).view(batch, count)
        evaluations = torch.full((batch,), count, device=device)
        if self.reference == "majority":
            reference = majority(votes, model.num_classes)
        else:
            reference = finite(model.unmasked(features)).argmax(1)
            evaluations += 1
        disagreeing = votes != reference[:, None]
        labels, decided = reference.clone(), disagreeing.clone()
        known = torch.full((batch, count, count), -1, device=device)
        waiting = {b: row.nonzero()[:, 0].tolist() for b, row in enumerate(disagreeing) if bool(row.any())}
        while waiting:
            turn = torch.tensor([[b, disagreers.pop(0)] for b, disagreers in waiting.items()], device=device)
            evaluations += _second_round(model, features, masks, turn, votes, known)
            image, mask = turn.T
            won = (known[image, mask] == votes[image, mask, None]).all(1)
            labels[image[won]] = votes[image[won], mask[won]]
            decided[image[won]] = torch.nn.functional.one_hot(mask[won], count).bool()
            waiting = {
                b: waiting[b] for b, done in zip(image.tolist(), won.tolist(), strict=True) if not done and waiting[b]
            }
        return Prediction(
            labels=labels,
            unanimous=~disagreeing.any(1),
            votes=votes,
            disagreeing=disagreeing,
            suspicion=tuple(suspicion(model, masks, row) for row in decided),
            evaluations=evaluations,
            alarm=torch.zeros_like(labels, dtype=torch.bool),
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


def _second_round(
    model: SplitModel,
    features: Tensor,
    masks: MaskSet,
    turn: Int[Tensor, "n 2"],
    votes: Int[Tensor, "b m"],
    known: Int[Tensor, "b m m"],
) -> Int[Tensor, " b"]:
    """Fill the rows of `known` (pairs seen so far, -1 for unseen) of these (image, mask); count the evaluations.

    A row that a known pair already contradicts needs no more pairs.
    """
    image, mask = turn.T
    known[image, mask, mask] = votes[image, mask]
    rows = known[image, mask]
    refuted = ((rows >= 0) & (rows != votes[image, mask, None])).any(1)
    row, other = ((rows < 0) & ~refuted[:, None]).nonzero().T
    image, mask = image[row], mask[row]
    found = masked_labels(model, features, masks, image, mask, other)
    known[image, mask, other] = found
    known[image, other, mask] = found
    return torch.bincount(image, minlength=len(features))
