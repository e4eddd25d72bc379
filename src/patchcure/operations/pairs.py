"""The certificate of every operation that looks at pairs of masks."""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor

from patchcure.certificate import Certificate
from patchcure.masks import MaskSet
from patchcure.models.base import SplitModel
from patchcure.operations.base import largest_square, margins, masked_logits, safe_groups, safe_maps, tolerance
from patchcure.threat import PatchThreat


def certify_pairs(
    model: SplitModel, features: Tensor, masks: MaskSet, threat: PatchThreat, labels: Int[Tensor, " b"]
) -> Certificate:
    """Certify an operation that returns y whenever some mask's row of pairs is untouched and all y.

    P(i, j) is the label under masks i and j. It is symmetric, and P(i, i) is the label under mask i alone.

    * strict: P(i, j) = y for all pairs (the paper's condition).
    * location-aware: for every placement l of the patches some mask i that hides l has P(i, j) = y for all j.

    Strict implies location-aware, because the masks cover the threat. Each operation's docstring proves that
    location-aware is enough for its rule. Equalities count only where the margin is above `tolerance`.
    """
    batch, count, device = len(features), len(masks), features.device
    first, second = torch.triu_indices(count, count, device=device)
    images = torch.arange(batch, device=device).repeat_interleave(len(first))
    margin = torch.empty(batch * len(first), dtype=features.dtype, device=device)
    right = torch.empty(batch * len(first), dtype=torch.bool, device=device)
    for part, logits in masked_logits(model, features, masks, images, first.repeat(batch), second.repeat(batch)):
        margin[part] = margins(logits, labels[images[part]])
        right[part] = margin[part] > tolerance(logits)
    margin, right = margin.view(batch, -1), right.view(batch, -1)
    table = torch.zeros(batch, count, count, dtype=torch.bool, device=device)
    table[:, first, second] = right
    table[:, second, first] = right
    trusted = table.all(2)
    strict = right.all(1)
    wrong = torch.where(right, torch.inf, margin).argmin(1)
    failed = torch.where(strict[:, None], -1, torch.stack([first[wrong], second[wrong]], 1))
    return Certificate(
        certified=safe_groups(trusted, masks.coverage.covers).all(1),
        strict=strict,
        margin=margin.amin(1),
        failed=failed,
        safe=safe_maps(trusted, masks),
        largest_patch=largest_square(trusted, model, masks, threat),
    )
