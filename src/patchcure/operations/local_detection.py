"""Detection on local logits (PatchGuard++): the label of all cells, or an alarm if some window's removal changes it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from patchcure.certificate import ALARM, Certificate, Prediction
from patchcure.masks import MaskSet
from patchcure.models.base import SplitModel
from patchcure.operations.base import Detail, check_tau, confidence, largest_square, margins, safe_groups, safe_maps
from patchcure.operations.local import local_logits, outside, sum_rounding, window_prediction, windows_of
from patchcure.threat import PatchThreat


@dataclass(frozen=True)
class LocalDetection:
    """The label is that of g, the mean of the local logits. A window W leaves g(W), the sum of the local logits outside
    W divided by the number of all cells. Alarm if some g(W) has another label with a confidence above tau.

    **Certificate.** On the clean image g has label y and no window alarms, and for every placement of the patches some
    window W that contains all cells they own has label y with a confidence above tau (strictly: at exactly tau it is
    not heard).

    **Proof.** Under an attack on cells inside W, g(W) is made of the same clean cells: label y, confidence above tau.
    If the attack turns the label of g into another one, then W disagrees with it and there is an alarm. So the answer
    is y or an alarm. The paper's condition asks the same of every window (`Certificate.strict`).

    Args:
        tau: the confidence (softmax probability) that a window needs to be heard; at 0, the default, every window is:
            then an image is certified exactly if the answer is right, without an alarm. A larger tau alarms less on
            clean images and certifies fewer.
    """

    tau: float = 0.0
    together: ClassVar[int] = 1
    detects: ClassVar[bool] = True
    ablation: ClassVar[None] = None

    def __post_init__(self) -> None:
        check_tau(self.tau)

    def worst_evaluations(self, model: SplitModel, masks: MaskSet) -> int:
        """Each cell once."""
        return model.grid.cells

    def predict(self, model: SplitModel, features: Tensor, masks: MaskSet) -> Prediction:
        """The label of each image, -1 for an alarm; a vote is the label without one window."""
        local = local_logits(model, features)
        labels = _finite(local.mean(1)).argmax(1)
        parts = [
            (left.argmax(2), confidence(left.flatten(0, 1)).view(left.shape[:2])) for left in _without(local, masks)
        ]
        votes, sure = (torch.cat(column) for column in zip(*parts, strict=True))
        heard = sure > self.tau
        alarm = (heard & (votes != labels[:, None])).any(1)
        return window_prediction(torch.where(alarm, ALARM, labels), votes, labels, alarm, model, masks)

    def certify(
        self,
        model: SplitModel,
        features: Tensor,
        masks: MaskSet,
        threat: PatchThreat,
        labels: Int[Tensor, " b"],
        detail: Detail = "locations",
    ) -> Certificate:
        """See the class. A label, or a window that is not heard, counts only where that is clear of rounding."""
        rows = [self._windows(u, y, masks) for u, y in zip(local_logits(model, features), labels, strict=True)]
        right, heard_right, harmless, margin = (torch.stack(column) for column in zip(*rows, strict=True))
        clean = right & harmless.all(1)
        trusted = heard_right & clean[:, None]
        strict = trusted.all(1)
        wrong = torch.where(trusted, torch.inf, margin).argmin(1)
        return Certificate(
            certified=safe_groups(trusted, masks.coverage.covers).all(1),
            strict=strict,
            margin=margin.amin(1),
            failed=torch.where(strict, -1, wrong)[:, None].expand(-1, 2),
            safe=safe_maps(trusted, masks),
            largest_patch=largest_square(trusted, model, masks, threat),
        )

    def _windows(
        self, local: Float[Tensor, "cells classes"], label: Int[Tensor, ""], masks: MaskSet
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Is the clean label right; and for each window: is it heard for y, does it not alarm, and its margin."""
        left, slack = next(_without(local[None], masks))[0], 2 * sum_rounding(local) / len(local)
        margin = margins(left, label.expand(len(left)))
        agrees = margin > slack
        right = margins(_finite(local.mean(0, keepdim=True)), label[None])[0] > slack
        return (
            right,
            agrees & (confidence(left, -slack) > self.tau),
            agrees | (confidence(left, slack) < self.tau),
            margin,
        )


def _without(local: Float[Tensor, "b cells classes"], masks: MaskSet) -> Iterator[Float[Tensor, "part m classes"]]:
    """g(W) for every window, a few images at a time."""
    for left in outside(local, windows_of(masks, local.device)):
        yield _finite(left / local.shape[1])


def _finite(logits: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    if not bool(logits.isfinite().all()):
        raise FloatingPointError("The sum of local logits overflows, so there is no label to trust: check the weights.")
    return logits
