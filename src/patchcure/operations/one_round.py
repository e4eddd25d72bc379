"""What the detectors share: one round of masks, their confidence, and the certificate."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from patchcure.certificate import ALARM, Certificate, Prediction
from patchcure.masks import MaskSet
from patchcure.models.base import SplitModel
from patchcure.operations.base import (
    confidence,
    every_mask,
    largest_square,
    margins,
    masked_logits,
    safe_groups,
    safe_maps,
    suspicion,
    tolerance,
)
from patchcure.threat import PatchThreat

Judge = Callable[[Float[Tensor, "j classes"], Float[Tensor, " j"]], Bool[Tensor, " j"]]
"""From logits under masks, and the margins of the label, to a verdict on each."""


def one_mask_votes(
    model: SplitModel, features: Tensor, masks: MaskSet
) -> tuple[Int[Tensor, "b m"], Float[Tensor, "b m"]]:
    """P(i): the label under each mask, and its confidence."""
    images, index = every_mask(features, masks)
    parts = [
        (logits.argmax(1), confidence(logits))
        for _, logits in masked_logits(model, features, masks, images, index, index)
    ]
    shape = len(features), len(masks)
    return torch.cat([votes for votes, _ in parts]).view(shape), torch.cat([sure for _, sure in parts]).view(shape)


def one_mask_margins(
    model: SplitModel, features: Tensor, masks: MaskSet, labels: Int[Tensor, " b"], *judges: Judge
) -> tuple[Tensor, ...]:
    """The margin of each image's label under each mask, (b, m), and what each judge says of it."""
    images, index = every_mask(features, masks)
    columns: list[list[Tensor]] = [[] for _ in range(1 + len(judges))]
    for part, logits in masked_logits(model, features, masks, images, index, index):
        margin = margins(logits, labels[images[part]])
        for column, value in zip(columns, (margin, *(judge(logits, margin) for judge in judges)), strict=True):
            column.append(value)
    return tuple(torch.cat(column).view(len(features), len(masks)) for column in columns)


def clear(logits: Float[Tensor, "j classes"], margin: Float[Tensor, " j"]) -> Bool[Tensor, " j"]:
    """The judge who asks for a margin above the tolerance: the prediction is the label, however it is rounded."""
    return margin > tolerance(logits)


def agreement(
    model: SplitModel,
    masks: MaskSet,
    reference: Int[Tensor, " b"],
    votes: Int[Tensor, "b m"],
    doubt: Bool[Tensor, "b m"] | None = None,
) -> Prediction:
    """The reference, if all masks vote for it and none is in doubt; else an alarm. The reference is one evaluation."""
    disagreeing = votes != reference[:, None]
    refused = disagreeing if doubt is None else disagreeing | doubt
    alarm = refused.any(1)
    return Prediction(
        labels=torch.where(alarm, ALARM, reference),
        unanimous=~disagreeing.any(1),
        votes=votes,
        disagreeing=disagreeing,
        suspicion=tuple(suspicion(model, masks, row) for row in refused),
        evaluations=torch.full_like(reference, len(masks) + 1),
        alarm=alarm,
    )


def certify_round(
    model: SplitModel,
    masks: MaskSet,
    threat: PatchThreat,
    margin: Float[Tensor, "b n"],
    trusted: Bool[Tensor, "b m"],
    clean: Bool[Tensor, " b"],
) -> Certificate:
    """Certify a detector that never gives a wrong label while some trusted mask hides the patches.

    * safe: at these locations every patch leads to y or to an alarm: some trusted mask hides them.
    * certified: all locations are safe, and the detector keeps what it promises for the clean image.
    * strict: all masks are trusted, and the same.

    Args:
        margin: the margins of the label under each mask, then under whatever else the rule looks at.
        trusted: the masks whose vote, unchanged, forbids every other label.
        clean: does the clean image get what the detector promises for it?
    """
    every = trusted.all(1)
    worst = torch.where(trusted, torch.inf, margin[:, : len(masks)]).argmin(1)
    return Certificate(
        certified=safe_groups(trusted, masks.coverage.covers).all(1) & clean,
        strict=every & clean,
        margin=margin.amin(1),
        failed=torch.where(every, -1, worst)[:, None].expand(-1, 2),
        safe=safe_maps(trusted, masks),
        largest_patch=largest_square(trusted & clean[:, None], model, masks, threat),
    )
