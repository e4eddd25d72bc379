"""Agreement (ViP detection, PatchCensor): the unmasked prediction and one round of masks; a label, or an alarm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Int
from torch import Tensor

from patchcure.certificate import Certificate, Prediction
from patchcure.masks import MaskSet
from patchcure.models.base import SplitModel
from patchcure.operations.base import Detail, every_mask, finite, margins, masked_logits, tolerance
from patchcure.operations.one_round import agreement, certify_round, one_mask_votes
from patchcure.threat import PatchThreat


@dataclass(frozen=True)
class Agreement:
    """If the unmasked prediction f(x) and all one-mask predictions P(i) are one label, return it; else alarm.

    **Certificate.** A location l is safe if some mask i that hides it has P(i) = y on the clean image. The image is
    certified if every location is safe and the clean image itself gets y: f(x) = y and P(i) = y for all i, the
    published condition. Because the masks cover the threat, that makes every location safe; so `safe` says more than
    `certified` only for the other images, and `largest_patch` what the masks cover beyond the threat.

    **Proof.** Let the patches lie at l, and let mask i hide them with P(i) = y. Mask i takes every corrupted cell away,
    so on the attacked image x' it still says P(i) = y. A label is returned only if all predictions under one mask are
    that label, P(i) among them: it is y. Otherwise there is an alarm. The unmasked prediction is not needed for this,
    only for the answer on the clean image.

    >>> from patchcure import build
    >>> defense = build("ViP-detect-ViT-Ti", image_size=64, num_classes=10, patch=16)
    >>> defense.predict(torch.rand(1, 3, 64, 64)).evaluations  # 3x3 windows of 2x2 tokens, and the whole image
    tensor([10])
    """

    together: ClassVar[int] = 1
    detects: ClassVar[bool] = True

    def worst_evaluations(self, model: SplitModel, masks: MaskSet) -> int:
        """Each mask alone, and none."""
        return len(masks) + 1

    def predict(self, model: SplitModel, features: Tensor, masks: MaskSet) -> Prediction:
        """The label of each image, -1 for an alarm."""
        votes, _ = one_mask_votes(model, features, masks)
        return agreement(model, masks, finite(model.unmasked(features)).argmax(1), votes)

    def certify(
        self,
        model: SplitModel,
        features: Tensor,
        masks: MaskSet,
        threat: PatchThreat,
        labels: Int[Tensor, " b"],
        detail: Detail = "locations",
    ) -> Certificate:
        """See the class. A prediction counts as y only where its margin is above the tolerance."""
        images, index = every_mask(features, masks)
        margin, right = [], []
        for part, logits in masked_logits(model, features, masks, images, index, index):
            margin.append(margins(logits, labels[images[part]]))
            right.append(margin[-1] > tolerance(logits))
        shape = len(features), len(masks)
        trusted = torch.cat(right).view(shape)
        whole = finite(model.unmasked(features))
        own = margins(whole, labels)
        clean = trusted.all(1) & (own > tolerance(whole))
        every = torch.cat([torch.cat(margin).view(shape), own[:, None]], 1)
        return certify_round(model, masks, threat, every, trusted, clean)
