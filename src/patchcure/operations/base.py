"""What all secure operations share: the contract, labels under masks, margins, and locations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import ClassVar, Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from patchcure.ablations import Ablation
from patchcure.certificate import Certificate, Prediction
from patchcure.geometry import Box
from patchcure.masks import Coverage, MaskSet
from patchcure.models.base import SplitModel, job_device
from patchcure.threat import FeatureThreat, PatchThreat

HIDDEN_BYTES = 1 << 26
"""How much memory the masks of the jobs in flight may take."""

ROUNDING = 1024
"""A margin counts when it is above this many units of rounding of the largest logit (see `tolerance`)."""


Detail = Literal["verdict", "locations", "margins"]
"""How much a certificate tells of images that fail: only that they do, at which locations, or every margin."""


@runtime_checkable
class SecureOperation(Protocol):
    """Turns predictions under masks into a label that no patch can change, or into a proof of that."""

    together: ClassVar[int]
    """How many masks are applied at once: 2 for two rounds, 1 for one round, 0 for a rule that uses no masks."""

    @property
    def ablation(self) -> Ablation | None:
        """What each mask keeps, for a rule that votes over ablations; None for masks that cover the threat."""
        ...

    def worst_evaluations(self, model: SplitModel, masks: MaskSet) -> int:
        """How often an attacker can make the LRF part run for one image."""
        ...

    def predict(self, model: SplitModel, features: Tensor, masks: MaskSet) -> Prediction:
        """Labels with their evidence, from features that may be attacked."""
        ...

    def certify(
        self,
        model: SplitModel,
        features: Tensor,
        masks: MaskSet,
        threat: PatchThreat,
        labels: Int[Tensor, " b"],
        detail: Detail = "locations",
    ) -> Certificate:
        """Proofs, from clean features and true labels."""
        ...


def masks_for(operation: SecureOperation, threat: FeatureThreat) -> MaskSet:
    """The masks that an operation uses unless told otherwise: its own ablations, or masks that cover the threat."""
    if operation.ablation is None:
        return MaskSet.covering(threat, together=operation.together)
    return operation.ablation.masks(threat)


def detects(operation: SecureOperation) -> bool:
    """May this operation raise an alarm? One that does says so with a class variable `detects`."""
    return bool(getattr(operation, "detects", False))


def tolerance(logits: Float[Tensor, "j classes"]) -> Float[Tensor, " j"]:
    """How far the difference of two logits may be from itself when it is computed in another batch.

    Proofs are in real numbers; a matrix product rounds differently for other batch sizes and companions. Certificates
    therefore need margins above 1024 units of rounding of the largest logit of the row (1.2e-4 of it in float32). The
    tests measure the real difference over batch sizes and compositions; the largest seen, with trained weights, was a
    ninth of that. It goes by the dtype of the logits: a network that computes in bfloat16 must not return float32.
    """
    return ROUNDING * torch.finfo(logits.dtype).eps * logits.abs().amax(1)


def margins(logits: Float[Tensor, "j classes"], labels: Int[Tensor, " j"]) -> Float[Tensor, " j"]:
    """The logit of the label minus the largest other logit."""
    own = logits.gather(1, labels[:, None])
    return (own[:, 0] - logits.scatter(1, labels[:, None], -torch.inf).amax(1)).to(logits.dtype)


def confidence(logits: Float[Tensor, "j classes"], shift: Float[Tensor, "..."] | float = 0.0) -> Float[Tensor, " j"]:
    """The largest softmax probability, if its logit were higher by `shift` beside all the others."""
    top, best = logits.double().max(1, keepdim=True)
    others = logits.double().scatter(1, best, -torch.inf).logsumexp(1)
    return torch.sigmoid(top[:, 0] - others + shift)


def check_tau(tau: float) -> None:
    """Refuse what is no threshold of a confidence."""
    if not 0 <= tau < 1:
        raise ValueError(f"tau: expected a confidence in [0, 1), got {tau}.")


def finite(logits: Float[Tensor, "j classes"]) -> Float[Tensor, "j classes"]:
    """The same logits, which must be finite."""
    if not logits.is_meta and not bool(logits.isfinite().all()):
        raise FloatingPointError(
            "A logit is NaN or infinite, so there is no label to trust: check the weights and the input's range."
        )
    return logits


def masked_logits(
    model: SplitModel,
    features: Tensor,
    masks: MaskSet,
    images: Int[Tensor, " j"],
    first: Int[Tensor, " j"],
    second: Int[Tensor, " j"],
) -> Iterator[tuple[slice, Float[Tensor, "part classes"]]]:
    """The logits of image ``images[j]`` under masks ``first[j]`` and ``second[j]``, in parts of bounded memory."""
    table = masks.hidden.to(job_device(features))
    size = max(1, HIDDEN_BYTES // masks.grid.cells)
    for start in range(0, len(images), size):
        part = slice(start, min(start + size, len(images)))
        yield part, finite(model.logits(features, images[part], table[first[part]] | table[second[part]]))


def masked_labels(
    model: SplitModel,
    features: Tensor,
    masks: MaskSet,
    images: Int[Tensor, " j"],
    first: Int[Tensor, " j"],
    second: Int[Tensor, " j"],
) -> Int[Tensor, " j"]:
    """The labels under these masks; the lowest index wins a tie."""
    parts = masked_logits(model, features, masks, images, first, second)
    rows = [logits.argmax(1) for _, logits in parts]
    return torch.cat(rows) if rows else images.new_empty(0)


def every_mask(features: Tensor, masks: MaskSet) -> tuple[Int[Tensor, " j"], Int[Tensor, " j"]]:
    """The jobs of the first round: every image with every mask."""
    device = job_device(features)
    images = torch.arange(len(features), device=device).repeat_interleave(len(masks))
    return images, torch.arange(len(masks), device=device).repeat(len(features))


def majority(votes: Int[Tensor, "b m"], num_classes: int) -> Int[Tensor, " b"]:
    """The most frequent label of each row; the lowest index wins a tie.

    >>> majority(torch.tensor([[2, 1, 1, 2]]), 3)
    tensor([1])
    """
    counts = torch.zeros(len(votes), num_classes, dtype=torch.long, device=votes.device)
    return counts.scatter_add(1, votes, torch.ones_like(votes)).argmax(1)


def unmasked_prediction(labels: Int[Tensor, " b"], evaluations: int) -> Prediction:
    """The answer of a rule that uses no masks: no votes and no suspicion."""
    votes = labels.new_empty(len(labels), 0)
    return Prediction(
        labels=labels,
        unanimous=torch.ones_like(labels, dtype=torch.bool),
        votes=votes,
        disagreeing=votes.bool(),
        suspicion=(None,) * len(labels),
        evaluations=torch.full_like(labels, evaluations),
        alarm=torch.zeros_like(labels, dtype=torch.bool),
    )


def suspicion(model: SplitModel, masks: MaskSet, chosen: Bool[Tensor, " m"]) -> Box | None:
    """The pixels under the chosen masks, or None if there are none."""
    boxes = [box for index in chosen.nonzero()[:, 0].tolist() for box in masks.masks[index]]
    if not boxes:
        return None
    hull = boxes[0]
    for box in boxes[1:]:
        hull = hull.hull(box)
    return model.receptive(hull)


def safe_groups(trusted: Bool[Tensor, "b m"], covers: Bool[Tensor, "g m"]) -> Bool[Tensor, "b g"]:
    """The groups of placements that some trusted mask hides."""
    return (trusted.double() @ covers.to(trusted.device).double().T) > 0


def safe_maps(trusted: Bool[Tensor, "b m"], masks: MaskSet) -> tuple[Bool[Tensor, "b _ _"], ...]:
    """For each shape, the locations that some trusted mask hides (with K patches: wherever the other patches are)."""
    return location_maps(safe_groups(trusted, masks.coverage.covers), masks.coverage)


def location_maps(safe: Bool[Tensor, "b g"], coverage: Coverage) -> tuple[Bool[Tensor, "b _ _"], ...]:
    """For each shape, the locations of which every placement is safe."""
    location = coverage.location.to(safe.device)
    failures = torch.zeros(len(safe), int(location.max()) + 1, dtype=torch.long, device=safe.device)
    good = failures.index_add(1, location, (~safe).long()) == 0
    return tuple(good[:, where.to(safe.device)] for where in coverage.maps)


def largest_square(
    trusted: Bool[Tensor, "b m"], model: SplitModel, masks: MaskSet, threat: PatchThreat
) -> Int[Tensor, " b"]:
    """The side of the largest square patch for which some trusted mask hides every location."""
    none = torch.zeros(len(trusted), dtype=torch.long, device=trusted.device)
    return largest_side(lambda covers: safe_groups(trusted, covers), none, model, masks, threat)


def largest_side(
    safe: Callable[[Bool[Tensor, "g m"]], Bool[Tensor, "b g"]],
    low: Int[Tensor, " b"],
    model: SplitModel,
    masks: MaskSet,
    threat: PatchThreat,
) -> Int[Tensor, " b"]:
    """The side of the largest square patch, at least `low`, for which every placement is safe.

    Args:
        safe: from the masks that hide each group of placements to the groups that are safe.
    """

    def certified(side: int, asked: Bool[Tensor, " b"]) -> Bool[Tensor, " asked"]:
        smaller = threat.with_squares(side).on_features(model.grid, model.corrupted)
        return safe(masks.coverage_of(smaller).covers).all(1)[asked]

    return bisect_sides(certified, low, torch.full_like(low, min(threat.image.height, threat.image.width)))


def bisect_sides(
    certified: Callable[[int, Bool[Tensor, " b"]], Bool[Tensor, " asked"]],
    low: Int[Tensor, " b"],
    high: Int[Tensor, " b"],
) -> Int[Tensor, " b"]:
    """The largest certified side of each image, from `low`, which is certified, to `high`.

    By bisection: what is safe from a square must be safe from a smaller one.

    Args:
        certified: for a side and the images that ask for it, whether each of those is certified.

    >>> sides = torch.tensor([3, 0, 7])
    >>> bisect_sides(lambda side, asked: sides[asked] >= side, torch.zeros_like(sides), torch.full_like(sides, 9))
    tensor([3, 0, 7])
    """
    while bool((low < high).any()):
        middle, open_ = (low + high + 1) // 2, low < high
        for side in middle[open_].unique().tolist():
            asked = open_ & (middle == side)
            good = torch.zeros_like(asked).masked_scatter(asked, certified(side, asked))
            low = torch.where(good, side, low)
            high = torch.where(asked & ~good, side - 1, high)
    return low
