"""The certificate of every operation that looks at pairs of masks."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from patchcure.certificate import Certificate
from patchcure.masks import MaskSet
from patchcure.models.base import SplitModel
from patchcure.operations.base import Detail, largest_square, margins, masked_logits, safe_groups, safe_maps, tolerance
from patchcure.threat import PatchThreat


def certify_pairs(
    model: SplitModel,
    features: Tensor,
    masks: MaskSet,
    threat: PatchThreat,
    labels: Int[Tensor, " b"],
    detail: Detail = "locations",
) -> Certificate:
    """Certify an operation that returns y whenever some mask's row of pairs is untouched and all y.

    P(i, j) is the label under masks i and j. It is symmetric, and P(i, i) is the label under mask i alone.

    * strict: P(i, j) = y for all pairs (the paper's condition).
    * location-aware: for every placement l of the patches some mask i that hides l has P(i, j) = y for all j.

    Strict implies location-aware, because the masks cover the threat. Each operation's docstring proves that
    location-aware is enough for its rule. Equalities count only where the margin is above `tolerance`.

    The masks alone come first, then the pairs, those of the smallest margins first; a pair is left out where it can
    no longer change what `detail` asks for.
    """
    search = _Search(model, features, masks, labels, detail)
    search.run()
    trusted = ~search.dead
    certified = safe_groups(trusted, masks.coverage.covers).all(1)
    if detail == "verdict":
        trusted &= certified[:, None]  # the rows of failed images were not searched to their ends
    return Certificate(
        certified=certified,
        strict=~search.dead.any(1),
        margin=search.margin,
        failed=search.failed,
        safe=safe_maps(trusted, masks),
        largest_patch=largest_square(trusted, model, masks, threat),
    )


class _Search:
    """The pairs of some images, evaluated from the likeliest to fail to the least likely."""

    def __init__(
        self, model: SplitModel, features: Tensor, masks: MaskSet, labels: Int[Tensor, " b"], detail: Detail
    ) -> None:
        batch, count, device = len(features), len(masks), features.device
        self.model, self.features, self.masks, self.labels, self.detail = model, features, masks, labels, detail
        self.dead = torch.zeros(batch, count, dtype=torch.bool, device=device)
        """Rows in which some pair is not y."""
        self.margin = torch.full((batch,), torch.inf, dtype=features.dtype, device=device)
        self.worst = self.margin.clone()
        """The smallest margin among those that are not above the tolerance, and its pair:"""
        self.failed = torch.full((batch, 2), -1, device=device)

    def run(self) -> None:
        """Fill `dead`, `margin` and `failed`."""
        batch, count = self.dead.shape
        device = self.dead.device
        every = torch.arange(batch, device=device)
        alone = torch.arange(count, device=device)
        single = self._evaluate(every.repeat_interleave(count), alone.repeat(batch), alone.repeat(batch))
        first, second = torch.triu_indices(count, count, 1, device=device)
        single = single.view(batch, count)
        order = (single[:, first] + single[:, second]).argsort(1)
        done, step = 0, count
        while done < len(first):
            part = order[:, done : done + step]
            image = every[:, None].expand_as(part)
            useful = self._useful(image, first[part], second[part])
            self._evaluate(image[useful], first[part][useful], second[part][useful])
            done, step = done + step, 2 * step

    def _useful(
        self, image: Int[Tensor, "b n"], first: Int[Tensor, "b n"], second: Int[Tensor, "b n"]
    ) -> Bool[Tensor, "b n"]:
        """Pairs that may still change the answer: nothing changes a row that is dead already."""
        if self.detail == "margins":
            return torch.ones_like(image, dtype=torch.bool)
        live = ~(self.dead[image, first] & self.dead[image, second])
        if self.detail == "verdict":
            live &= safe_groups(~self.dead, self.masks.coverage.covers).all(1)[:, None]
        return live

    def _evaluate(
        self, images: Int[Tensor, " j"], first: Int[Tensor, " j"], second: Int[Tensor, " j"]
    ) -> Float[Tensor, " j"]:
        """The margins of these jobs; note what they show."""
        margin = torch.empty(len(images), dtype=self.features.dtype, device=images.device)
        right = torch.empty(len(images), dtype=torch.bool, device=images.device)
        for part, logits in masked_logits(self.model, self.features, self.masks, images, first, second):
            margin[part] = margins(logits, self.labels[images[part]])
            right[part] = margin[part] > tolerance(logits)
        wrong = ~right
        self.dead[images[wrong], first[wrong]] = True
        self.dead[images[wrong], second[wrong]] = True
        self.margin = self.margin.scatter_reduce(0, images, margin, "amin")
        before = self.worst
        self.worst = before.scatter_reduce(0, images[wrong], margin[wrong], "amin")
        worst = wrong & (margin == self.worst[images]) & (margin < before[images])
        self.failed[images[worst]] = torch.stack([first[worst], second[worst]], 1)
        return margin
