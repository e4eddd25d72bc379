"""What comes back from a defense: a prediction with its evidence, a certificate with its reasons."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Bool, Float, Int
from torch import Tensor

from patchcure.geometry import Box

ALARM = -1
"""The label of an image for which a detector raises an alarm."""


@dataclass(frozen=True)
class Prediction:
    """Labels, and what the masks said.

    Args:
        labels: the label of each image; -1 where a detector raises an alarm instead of giving one.
        unanimous: did all masks of the first round agree?
        votes: the label under each mask of the first round.
        disagreeing: the masks of the first round that voted for another label than the reference (the majority, or
            the unmasked prediction).
        suspicion: where a patch may be: the pixels of the mask that overruled the others, else of all disagreeing
            masks; None where the masks agreed. Evidence, not proof.
        evaluations: how many times the LRF part was evaluated for each image.
        alarm: did a detector raise an alarm? On a clean image that is a false alarm.
    """

    labels: Int[Tensor, " b"]
    unanimous: Bool[Tensor, " b"]
    votes: Int[Tensor, "b m"]
    disagreeing: Bool[Tensor, "b m"]
    suspicion: tuple[Box | None, ...]
    evaluations: Int[Tensor, " b"]
    alarm: Bool[Tensor, " b"]


@dataclass(frozen=True)
class Certificate:
    """For each image: can any patch of the threat change the prediction from the true label?

    Args:
        certified: no patch can (for a detector: none can without an alarm). Location-aware: the weakest condition
            that is proved.
        strict: the condition of the paper, over all pairs of masks (for one-round detectors, over all masks).
            It implies `certified`.
        margin: the smallest margin of the true label's logit above all others, over everything that `strict` looks at.
            Where an image fails, the search may stop before the smallest (see `detail` in `Defense.certify`).
        failed: the masks where that margin is not above the tolerance, else (-1, -1).
        safe: for each patch shape, the locations (row, column of the patch's corner) at which no patch can succeed
            (for a detector: without an alarm, whatever it says of the clean image).
            None of a failed image's with ``detail="verdict"``, which does not look for them.
        largest_patch: the side of the largest square patch that is certified with these masks, 0 if none.
    """

    certified: Bool[Tensor, " b"]
    strict: Bool[Tensor, " b"]
    margin: Float[Tensor, " b"]
    failed: Int[Tensor, "b 2"]
    safe: tuple[Bool[Tensor, "b _ _"], ...]
    largest_patch: Int[Tensor, " b"]
