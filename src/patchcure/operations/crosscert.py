"""CrossCert: a label that is recovered, and an alarm beside it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

from jaxtyping import Int
from torch import Tensor

from patchcure.certificate import Certificate, Prediction
from patchcure.masks import MaskSet
from patchcure.models.base import SplitModel
from patchcure.operations.base import largest_square, safe_groups, safe_maps
from patchcure.operations.challenger import Challenger
from patchcure.operations.double_masking import DoubleMasking
from patchcure.operations.pairs import right_pairs, worst_pair
from patchcure.threat import PatchThreat


@dataclass(frozen=True)
class CrossCert:
    """Recover a label by pairs of masks, and raise an alarm as well unless all one-mask predictions are that label.

    This is our construction of a defense that gives a label *and* an alarm: the label is never withheld, and the alarm
    says that it may be wrong. (CrossCert itself checks two recovery defenses against each other.)

    **Certificate.** Two levels, each proved for every image that a patch of the threat can make of x:

    * certified: the label is y, or there is an alarm; and the label of the clean image is y.
      Condition: for every location l some mask i that hides it has P(i) = y; and all P(i) are y, or some mask j has
      P(j, k) = y for all k.
    * strict: the label is y, alarm or not, and the clean image raises none. Condition: P(i, j) = y for all pairs.

    **Proof.** Let the patches lie at l, hidden by mask i with P(i) = y, which no patch at l can change. Without an
    alarm every one-mask prediction is the label, P(i) among them: it is y. On the clean image the recovery returns a
    unanimous first round, y; and a row of y's decides it by the recovery's proof, for a patch that changes nothing. If
    all pairs are y, that proof gives y on every attacked image, and the clean image's first round is unanimous. All
    pairs right makes every P(i) right, so strict implies certified. (Where the label itself is safe, location by
    location, is the certificate of `recovery`.)

    Args:
        recovery: which rule recovers the label; it must return a unanimous first round.
    """

    recovery: DoubleMasking | Challenger = field(default_factory=DoubleMasking)
    together: ClassVar[int] = 2

    def __post_init__(self) -> None:
        if self.recovery not in (DoubleMasking(), Challenger()):
            raise ValueError(
                "recovery: expected DoubleMasking() or Challenger(), which decide by pairs and return a unanimous "
                f"first round, got {self.recovery!r}."
            )

    def predict(self, model: SplitModel, features: Tensor, masks: MaskSet) -> Prediction:
        """The recovered label of each image; the alarm beside it."""
        recovered = self.recovery.predict(model, features, masks)
        return replace(recovered, alarm=(recovered.votes != recovered.labels[:, None]).any(1))

    def certify(
        self, model: SplitModel, features: Tensor, masks: MaskSet, threat: PatchThreat, labels: Int[Tensor, " b"]
    ) -> Certificate:
        """See the class. Equalities count only where the margin is above the tolerance."""
        margin, right = right_pairs(model, features, masks, labels)
        single, rows = right.diagonal(dim1=1, dim2=2), right.all(2)
        clean = single.all(1) | rows.any(1)
        return Certificate(
            certified=safe_groups(single, masks.coverage.covers).all(1) & clean,
            strict=rows.all(1),
            margin=margin.flatten(1).amin(1),
            failed=worst_pair(margin, right),
            safe=safe_maps(single, masks),
            largest_patch=largest_square(single & clean[:, None], model, masks, threat),
        )
