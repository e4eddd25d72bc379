"""CrossCert: a label that is recovered, and an alarm beside it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from jaxtyping import Int
from torch import Tensor

from patchcure.certificate import Certificate, Prediction
from patchcure.masks import MaskSet
from patchcure.models.base import SplitModel
from patchcure.operations.base import (
    Detail,
    every_mask,
    largest_square,
    margins,
    masked_logits,
    safe_maps,
    tolerance,
)
from patchcure.operations.challenger import Challenger
from patchcure.operations.double_masking import DoubleMasking
from patchcure.threat import PatchThreat


@dataclass(frozen=True)
class CrossCert:
    """Recover a label by pairs of masks, and raise an alarm as well unless all one-mask predictions are that label.

    This is our construction of a defense that gives a label *and* an alarm: the label is never withheld, and the alarm
    says that it may be wrong. (CrossCert itself checks two recovery defenses against each other.)

    **Certificate.** Two levels, each proved for every image that a patch of the threat can make of x:

    * certified: the label is y, or there is an alarm; and the label of the clean image is y.
      Condition: all P(i) are y, or the recovery's own certificate holds (for every location some mask that hides it
      has only pairs of y).
    * strict: the label is y, alarm or not, and the clean image raises none. Condition: P(i, j) = y for all pairs.

    **Proof.** A location is safe if some mask i that hides it has P(i) = y, which no patch there can change: without an
    alarm every one-mask prediction is the label, P(i) among them, so the label is y. Either condition makes every
    location safe, because the masks cover the threat and P(i) is one of the pairs of i. On the clean image the recovery
    returns a unanimous first round, y; and its certificate gives y for a patch that changes nothing. If all pairs are
    y, the recovery's proof gives y on every attacked image, and the clean image's first round is unanimous. (Where the
    label itself is safe, location by location, is the certificate of `recovery`.)

    Args:
        recovery: which rule recovers the label; it must return a unanimous first round.
    """

    recovery: DoubleMasking | Challenger = field(default_factory=DoubleMasking)
    together: ClassVar[int] = 2
    detects: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.recovery not in (DoubleMasking(), Challenger()):
            raise ValueError(
                "recovery: expected DoubleMasking() or Challenger(), which decide by pairs and return a unanimous "
                f"first round, got {self.recovery!r}."
            )

    def worst_evaluations(self, model: SplitModel, masks: MaskSet) -> int:
        """Those of the recovery."""
        return self.recovery.worst_evaluations(model, masks)

    def predict(self, model: SplitModel, features: Tensor, masks: MaskSet) -> Prediction:
        """The recovered label of each image; the alarm beside it."""
        recovered = self.recovery.predict(model, features, masks)
        return replace(recovered, alarm=(recovered.votes != recovered.labels[:, None]).any(1))

    def certify(
        self,
        model: SplitModel,
        features: Tensor,
        masks: MaskSet,
        threat: PatchThreat,
        labels: Int[Tensor, " b"],
        detail: Detail = "locations",
    ) -> Certificate:
        """See the class. Equalities count only where the margin is above the tolerance."""
        images, index = every_mask(features, masks)
        parts = [
            margins(logits, labels[images[part]]) > tolerance(logits)
            for part, logits in masked_logits(model, features, masks, images, index, index)
        ]
        single = torch.cat(parts).view(len(features), len(masks))
        unanimous = single.all(1)
        recovered = self.recovery.certify(model, features, masks, threat, labels, detail)
        detected = largest_square(single & unanimous[:, None], model, masks, threat)
        return replace(
            recovered,
            certified=unanimous | recovered.certified,
            safe=safe_maps(single, masks),
            largest_patch=torch.maximum(detected, recovered.largest_patch),
        )
