"""What training minimises, for one operating point and some images."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, kl_div

from patchcure.defense import Defense
from patchcure.operations.intervals import margins_below
from patchcure.train.points import Point, worst_pairs
from patchcure.train.recipe import Loss


def masked_loss(
    point: Point,
    images: Float[Tensor, "b c h w"],
    labels: Float[Tensor, "b classes"],
    loss: Loss,
    teacher: Point | None,
    random: torch.Generator,
    progress: float = 1.0,
) -> Float[Tensor, ""]:
    """The loss of a point on images under masks of its own.

    Args:
        labels: as probabilities.
        teacher: the point that teaches, if there is one.
        progress: which share of the run is over.
    """
    if loss.kind == "interval":
        share = loss.worst_share * min(1.0, progress / loss.ramp if loss.ramp else 1.0)
        return interval_loss(point.defense, images, labels, share, random)
    if loss.kind == "votes":
        return votes_loss(point.defense, images, labels, loss.margin)
    logits = _under_masks(point, images, labels, loss.masks, random)
    soft = labels * (1 - loss.smoothing) + loss.smoothing / labels.shape[1]
    value = cross_entropy(logits, soft) if loss.kind == "softmax" else binary_cross_entropy_with_logits(logits, soft)
    if loss.consistency and teacher is not None:
        value = value + loss.consistency * kl_div(
            logits.log_softmax(1), taught(teacher, images), reduction="batchmean", log_target=True
        )
    return value


def _under_masks(
    point: Point,
    images: Float[Tensor, "b c h w"],
    labels: Float[Tensor, "b classes"],
    masks: int,
    random: torch.Generator,
) -> Float[Tensor, "b classes"]:
    """The logits under random masks, or under the worst ones; the same features serve the search and the gradient."""
    model = point.defense.model
    if not point.greedy:
        return model.under(images, point.draw(len(images), random).to(images.device))
    features = model.features(images)
    hidden = worst_pairs(point.defense, features, labels.argmax(1), masks, point.greedy, random)
    return model.logits(features, torch.arange(len(images), device=images.device), hidden)


@torch.no_grad()
def taught(teacher: Point, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b classes"]:
    """In-place distillation: what the same weights say at the teacher's point with nothing hidden, as log-softmax."""
    model = teacher.defense.model
    training = model.training
    model.eval()
    try:
        logits: Tensor = model(images)
        return logits.log_softmax(1)
    finally:
        model.train(training)


def votes_loss(
    defense: Defense, images: Float[Tensor, "b c h w"], labels: Float[Tensor, "b classes"], margin: float
) -> Float[Tensor, ""]:
    """BagCert's: in a vote of the cells, the label must be ahead of each other class by a share of them.

    A cell votes for every class whose logit is positive. The vote is a step; a sigmoid takes its place here, and
    what is missing from the margin is summed over the other classes.
    """
    model = defense.model
    votes = model.local_logits(model.features(images)).sigmoid().mean(1)
    own = (votes * labels).sum(1, keepdim=True)
    missing = (margin - (own - votes)).clamp_min(0) * (1 - labels)
    return missing.sum(1).mean()


def interval_loss(
    defense: Defense,
    images: Float[Tensor, "b c h w"],
    labels: Float[Tensor, "b classes"],
    share: float,
    random: torch.Generator,
) -> Float[Tensor, ""]:
    """IBP (Chiang et al.): cross-entropy of the worst that a patch at a random location could do to the logits.

    Args:
        share: the weight of that; the rest is the clean loss.
    """
    model, target = defense.model, labels.argmax(1)
    boxes = list(defense.masks.threat.locations())
    free = torch.zeros(len(images), 1, *images.shape[2:], dtype=torch.bool, device=images.device)
    for row, place in enumerate(torch.randint(len(boxes), (len(images),), generator=random).tolist()):
        box = boxes[place]
        free[row, :, box.top : box.bottom, box.left : box.right] = True
    lower = model.normalize(torch.where(free, 0.0, images))
    upper = model.normalize(torch.where(free, 1.0, images))
    behind = -margins_below(model.backbone, lower, upper, target, images.dtype)
    worst = behind.scatter(1, target[:, None], 0.0).to(images.dtype)
    clean = cross_entropy(model(images), labels)
    return (1 - share) * clean + share * cross_entropy(worst, target)
