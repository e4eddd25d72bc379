"""Robust masking (PatchGuard): each class loses its best window of local evidence; the most that is left wins."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from patchcure.certificate import Certificate, Prediction
from patchcure.masks import MaskSet
from patchcure.models.base import SplitModel
from patchcure.operations.base import Detail
from patchcure.operations.local import (
    Lead,
    certify_owned,
    local_logits,
    outside,
    sum_rounding,
    window_prediction,
    windows_of,
)
from patchcure.threat import PatchThreat


@dataclass(frozen=True)
class RobustMasking:
    """Evidence v = max(u, 0). The score S_c is the sum of v_c over all cells but those of its best window, which is the
    least sum outside a window W of the mask set; the highest score wins, the lowest label on ties.

    **Certificate.** For every set R of cells that a placement of the patches owns, and every label c other than y:
    ``min over W of sum outside W and R of v_y  >  min over W containing R of sum outside W of v_c``.

    **Proof.** The attacker changes v in R only, and v >= 0. (1) Every sum outside a window is at least its part outside
    R, which is clean; so S_y is at least the left side. (2) For every window W that contains R, S_c is at most the sum
    outside W, which is clean; so S_c is at most the right side. Hence S_y > S_c, and y is the answer.

    **No condition is weaker.** v_y = 0 in R gives the left side exactly; v_c large in R makes every window that does
    not contain R worse than those that do, which gives the right side exactly; and both can be written at once.

    The papers' condition is the same with the windows themselves for R (`Certificate.strict`).
    """

    together: ClassVar[int] = 1
    ablation: ClassVar[None] = None

    def worst_evaluations(self, model: SplitModel, masks: MaskSet) -> int:
        """Each cell once."""
        return model.grid.cells

    def predict(self, model: SplitModel, features: Tensor, masks: MaskSet) -> Prediction:
        """The label of each image; a vote is the label without one window."""
        evidence = local_logits(model, features).clamp(min=0)
        parts = [
            (left.amin(1).argmax(1), left.argmax(2)) for left in outside(evidence, windows_of(masks, evidence.device))
        ]
        labels, votes = (torch.cat(column) for column in zip(*parts, strict=True))
        alarm = torch.zeros_like(labels, dtype=torch.bool)
        return window_prediction(labels, votes, labels, alarm, model, masks)

    def certify(
        self,
        model: SplitModel,
        features: Tensor,
        masks: MaskSet,
        threat: PatchThreat,
        labels: Int[Tensor, " b"],
        detail: Detail = "locations",
    ) -> Certificate:
        """See the class; a lead counts where it is above the rounding of both sums."""
        windows = windows_of(masks, features.device)
        leads = [_lead(u, y, windows) for u, y in zip(local_logits(model, features), labels, strict=True)]
        return certify_owned(leads, model, masks, threat, features.device)


def _lead(local: Float[Tensor, "cells classes"], label: Int[Tensor, ""], windows: Bool[Tensor, "m cells"]) -> Lead:
    evidence = local.double().clamp(min=0)
    own, shown = evidence[:, label], (~windows).double()
    rivals = (shown @ evidence).index_fill(1, label[None], -torch.inf)
    slack = 2 * sum_rounding(local)

    def lead(owned: Bool[Tensor, "g cells"]) -> Float[Tensor, " g"]:
        least = (torch.where(owned, 0, own) @ shown.T).amin(1)
        contains = (owned.float() @ (~windows).float().T) == 0
        most = _least_rows(rivals, contains).amax(1)
        return torch.where(contains.any(1), least - most - slack, -torch.inf)

    return lead


def _least_rows(table: Float[Tensor, "m classes"], chosen: Bool[Tensor, "g m"]) -> Float[Tensor, "g classes"]:
    """For each group the least entries over its chosen rows of the table (over row 0 where none is chosen)."""
    counts = chosen.sum(1)
    most = max(1, int(counts.max()))
    rows = chosen.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :most]
    least = table[rows[:, 0]]
    for column in range(1, most):
        torch.minimum(least, table[torch.where(column < counts, rows[:, column], rows[:, 0])], out=least)
    return least
