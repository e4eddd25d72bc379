"""Voting over ablations (de-randomised smoothing, Smoothed ViT, ECViT, ViP), and certificates for the top k labels."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from patchcure.ablations import Ablation
from patchcure.certificate import Certificate, Prediction
from patchcure.geometry import Box
from patchcure.masks import Mask, MaskSet
from patchcure.models.base import SplitModel
from patchcure.operations.base import HIDDEN_BYTES, Detail, largest_side, location_maps, masked_logits, tolerance
from patchcure.threat import PatchThreat

COLUMN = Ablation(width=1)
"""One column of cells, at every column."""


@dataclass(frozen=True)
class Voting:
    """Each ablation votes; the most votes win, the lowest label on ties.

    An ablation votes for its label, or, with a threshold, for every class whose softmax probability reaches it. Labels
    are ranked by votes, the lower label first on ties; the answer is the first.

    **Certificate.** Let a placement l touch the ablations A(l), let v_c be the clean votes for c of all the others, and
    V how many classes one ablation can vote for (1, or 1 / threshold rounded down). Class c comes before y when it has
    d_c = max(0, v_y - v_c + [y < c]) votes more than on the untouched ablations alone. Label y stays among the first k
    (k = 1: stays the answer) if, of the k smallest d_c over c != y, the largest is above |A(l)| or the sum is above
    V |A(l)|. For k = 1 this says v_y > v_c + |A(l)| for all c, with >= where y < c.

    **Proof.** A patch at l shows itself only to A(l): the others see none of its cells and vote as before. So y gets at
    least v_y votes, and c gets v_c + x_c, where x_c <= |A(l)| because an ablation votes for a class once at most, and
    all x_c together are at most V |A(l)|. Were y not among the first k, k classes would come before it, each with
    v_c + x_c >= v_y + [y < c], that is x_c >= d_c: all these d_c would be at most |A(l)|, and their sum at most
    V |A(l)|. The k smallest are no larger. A touched ablation may vote for several classes or for none: the proof lets
    it. Nothing can be spared: the attacker can give any votes x that keep these two bounds.

    **Rounding.** An untouched ablation computes the same numbers up to `tolerance`. It counts for y only if its vote
    is clear of that, and for c unless its silence is.

    Args:
        ablation: what each vote sees; one column of cells by default.
        threshold: the softmax probability that wins a class a vote; None for one vote, for the largest.
        top: k; the certificate says that no patch takes y out of the first k labels.

    >>> Voting(Ablation(width=25), threshold=0.2)
    Voting(ablation=Ablation(height=None, width=25, stride=1, wrap=True), threshold=0.2, top=1)
    """

    ablation: Ablation = COLUMN
    threshold: float | None = None
    top: int = 1
    together: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if self.threshold is not None and not 0 < self.threshold <= 1:
            raise ValueError(f"threshold: expected a probability in (0, 1] or None, got {self.threshold}.")
        if self.top < 1:
            raise ValueError(f"top: expected at least 1, got {self.top}.")

    @property
    def votes_each(self) -> int:
        """V, the most classes that one ablation can vote for (probabilities are rounded, so with some room)."""
        return 1 if self.threshold is None else math.floor(1 / (self.threshold * (1 - 1e-4)))

    def worst_evaluations(self, model: SplitModel, masks: MaskSet) -> int:
        """Each ablation once, whatever the attacker does."""
        return len(masks)

    def ranking(self, model: SplitModel, features: Tensor, masks: MaskSet) -> Int[Tensor, "b classes"]:
        """All labels of each image, from the most votes to the fewest."""
        votes, _ = self._votes(model, features, masks)
        return _ranked(votes)

    def predict(self, model: SplitModel, features: Tensor, masks: MaskSet) -> Prediction:
        """The label with the most votes; the evidence is what each ablation finds most likely."""
        votes, favourites = self._votes(model, features, masks)
        labels = _ranked(votes)[:, 0]
        disagreeing = favourites != labels[:, None]
        return Prediction(
            labels=labels,
            unanimous=~disagreeing.any(1),
            votes=favourites,
            disagreeing=disagreeing,
            suspicion=tuple(_seen_most(model, masks, row) for row in disagreeing),
            evaluations=torch.full((len(features),), len(set(masks.masks)), device=features.device),
            alarm=torch.zeros_like(labels, dtype=torch.bool),
        )

    def certify(
        self,
        model: SplitModel,
        features: Tensor,
        masks: MaskSet,
        threat: PatchThreat,
        labels: Int[Tensor, " b"],
        detail: Detail = "locations",
    ) -> Certificate:
        """See the class. `strict` is the published condition with the largest |A(l)|, counted exactly: the top label
        leads by 2 |A|; `margin` counts the votes that an attacker at the worst placement lacks (certified if > 0)."""
        if self.top >= model.num_classes:
            raise ValueError(f"top: every label is among the first {self.top} of {model.num_classes} classes.")
        sure, perhaps = [], []
        images, ablations, again = _distinct(features, masks)
        for part, logits in masked_logits(model, features, masks, images, ablations, ablations):
            low, high = self._bounds(logits)
            sure.append(low.gather(1, labels[images[part], None])[:, 0])
            perhaps.append(high)
        for_y = torch.cat(sure).view(len(features), -1).float()
        for_any = torch.cat(perhaps).view(len(features), -1, model.num_classes)

        def lacking(covers: Bool[Tensor, "g m"]) -> Float[Tensor, "b g"]:
            """For each group of placements, how many votes its attacker lacks."""
            untouched = torch.zeros(len(covers), for_y.shape[1], device=features.device)
            untouched.index_add_(1, again, covers.to(features.device).float())
            budget = len(masks) - untouched.sum(1)
            size = max(1, HIDDEN_BYTES // (4 * model.num_classes * len(covers)))
            parts = zip(for_y.split(size), for_any.split(size), labels.split(size), strict=True)
            return torch.cat(
                [self._lacking(y @ untouched.T, untouched @ c.float(), budget, own) for y, c, own in parts]
            )

        spare = lacking(masks.coverage.covers)
        most = (~masks.coverage.covers).sum(1).max().to(spare)
        times = torch.bincount(again).float()
        paper = self._lacking((for_y @ times - most)[:, None], times[None] @ for_any.float(), most[None], labels)
        return Certificate(
            certified=(spare > 0).all(1),
            strict=paper[:, 0] > 0,
            margin=spare.amin(1).to(features.dtype),
            failed=torch.full((len(features), 2), -1, device=features.device),
            safe=location_maps(spare > 0, masks.coverage),
            largest_patch=largest_side(
                lambda covers: lacking(covers) > 0, torch.zeros_like(labels), model, masks, threat
            ),
        )

    def _lacking(
        self,
        own: Float[Tensor, "b g"],
        others: Float[Tensor, "b g classes"],
        budget: Float[Tensor, " g"],
        labels: Int[Tensor, " b"],
    ) -> Float[Tensor, "b g"]:
        """How many votes an attacker with `budget` ablations lacks to take the label out of the first k."""
        y = labels[:, None, None]
        classes = torch.arange(others.shape[2], device=others.device)
        needs = torch.where(classes == y, torch.inf, (own[..., None] - others + (y < classes)).clamp(min=0))
        least = needs.topk(self.top, dim=2, largest=False).values
        return torch.maximum(least.amax(2) - budget, least.sum(2) - self.votes_each * budget)

    def _votes(
        self, model: SplitModel, features: Tensor, masks: MaskSet
    ) -> tuple[Int[Tensor, "b classes"], Int[Tensor, "b m"]]:
        """The votes for each class, and the most likely label under each ablation."""
        batch = len(features)
        images, ablations, again = _distinct(features, masks)
        times = torch.bincount(again)
        counts = torch.zeros(batch, model.num_classes, dtype=torch.long, device=features.device)
        favourites = []
        for part, logits in masked_logits(model, features, masks, images, ablations, ablations):
            favourites.append(logits.argmax(1))
            given = self._given(logits).long() * times.repeat(batch)[part, None]
            counts.index_add_(0, images[part], given)
        return counts, torch.cat(favourites).view(batch, -1)[:, again]

    def _given(self, logits: Float[Tensor, "j classes"]) -> Bool[Tensor, "j classes"]:
        """The classes that get a vote."""
        if self.threshold is None:
            return torch.nn.functional.one_hot(logits.argmax(1), logits.shape[1]).bool()
        return logits.double().log_softmax(1) >= math.log(self.threshold)

    def _bounds(
        self, logits: Float[Tensor, "j classes"]
    ) -> tuple[Bool[Tensor, "j classes"], Bool[Tensor, "j classes"]]:
        """The classes that get a vote however the logits are rounded, and those that get one in some rounding."""
        slack = tolerance(logits)[:, None]
        if self.threshold is None:
            best, runner_up = logits.topk(2, dim=1).values.T
            leads = (best - runner_up)[:, None] > slack
            return self._given(logits) & leads, logits >= best[:, None] - slack
        chance = logits.double().log_softmax(1) - math.log(self.threshold)
        slack = 2 * slack.double() + 1e-9
        return chance > slack, chance >= -slack


def _distinct(features: Tensor, masks: MaskSet) -> tuple[Int[Tensor, " j"], Int[Tensor, " j"], Int[Tensor, " m"]]:
    """The jobs of every image with every distinct ablation, and which of the distinct ones each ablation is."""
    number: dict[Mask, int] = {}
    again = torch.tensor([number.setdefault(mask, len(number)) for mask in masks.masks], device=features.device)
    chosen = torch.empty(len(number), dtype=torch.long, device=features.device)
    chosen[again] = torch.arange(len(masks), device=features.device)
    images = torch.arange(len(features), device=features.device).repeat_interleave(len(chosen))
    return images, chosen.repeat(len(features)), again


def _ranked(votes: Int[Tensor, "b classes"]) -> Int[Tensor, "b classes"]:
    """Labels from the most votes to the fewest, the lower label first on ties."""
    return votes.sort(dim=1, descending=True, stable=True).indices


def _seen_most(model: SplitModel, masks: MaskSet, chosen: Bool[Tensor, " m"]) -> Box | None:
    """The pixels around the cells that the most of the chosen ablations see, or None if none is chosen."""
    if not bool(chosen.any()):
        return None
    seen = (~masks.hidden[chosen.cpu()]).sum(0)
    rows, cols = (seen == seen.max()).nonzero().T
    cells = Box(int(rows.min()), int(cols.min()), int(rows.max()) + 1, int(cols.max()) + 1)
    return model.receptive(cells)
