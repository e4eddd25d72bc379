"""Patch attacks: to show the threat, and to try to break certificates."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from patchcure.certificate import ALARM
from patchcure.defense import Defense
from patchcure.geometry import Box, Grid
from patchcure.threat import PatchThreat


@dataclass(frozen=True)
class PatchAttack:
    """Find a place for the patches, then raise the loss by signed gradient steps on their content (PGD).

    A defense is attacked as a whole: the loss is the mean over its unmasked prediction and some one-mask predictions,
    drawn anew at each step, and an attack counts as successful only when the defense's final label is wrong (an alarm
    is no success). Any other module maps images to logits, and is attacked through those.

    Args:
        steps: gradient steps on each placement.
        trials: placements that are tried for each image, the most promising first, until one succeeds.
        candidates: placements that are compared to find those; all of them if there are not more.
        masks: how many one-mask predictions of a defense to look at in each step.
        step_size: how far each pixel moves in a step; pixels are in [0, 1].
        seed: two attacks with the same seed are the same.

    >>> from patchcure import AnyClassifier
    >>> model = AnyClassifier(nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 10)), image=8, num_classes=10)
    >>> images = torch.rand(4, 3, 8, 8)
    >>> labels = model(images).argmax(1)
    >>> attacked = PatchAttack(steps=2).attack(model, images, labels, PatchThreat.square(2, image=8))
    >>> int((attacked != images).any(1).sum(dim=(1, 2)).max())
    4
    """

    steps: int = 20
    trials: int = 4
    candidates: int = 64
    masks: int = 3
    step_size: float = 0.2
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "trials", "candidates", "masks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}.")
        if not 0 < self.step_size <= 1:
            raise ValueError(f"step_size: expected 0 < step_size <= 1, got {self.step_size}.")

    def attack(
        self,
        target: Defense | nn.Module,
        images: Float[Tensor, "b c h w"],
        labels: Int[Tensor, " b"],
        threat: PatchThreat,
    ) -> Float[Tensor, "b c h w"]:
        """Images with patches of the threat that give a wrong label where one was found; an image that is wrong
        already stays as it is. With a threat before a resize, images are those before the resize, and so is the answer.
        """
        _check(images, labels, threat)
        random = torch.Generator().manual_seed(self.seed)
        victim = _Victim(target, threat, self.masks, random)
        places = placements(threat, self.candidates, random).to(images.device)
        attacked, broken = images.clone(), victim.wrong(images, labels)
        ranking = self._rank(victim, images, labels, places)
        for order, choice in enumerate(ranking.T):
            left = (~broken).nonzero()[:, 0]
            if not len(left):
                break
            found = self._ascend(victim, images[left], labels[left], places[choice[left], None], random)
            success = victim.wrong(found, labels[left])
            if order == 0:
                attacked[left] = found
            attacked[left[success]] = found[success]
            broken[left[success]] = True
        return attacked

    def _rank(
        self, victim: _Victim, images: Tensor, labels: Tensor, places: Bool[Tensor, "n h w"]
    ) -> Int[Tensor, "b trials"]:
        """The most promising placements: where black and white pixels, as the gradient says, raise the loss most."""
        masks = victim.draw()
        content = (victim.gradient(images, labels, masks) > 0).to(images.dtype)
        with torch.no_grad():
            losses = [victim.loss(torch.where(place, content, images), labels, masks) for place in places]
        return torch.stack(losses, dim=1).topk(min(self.trials, len(places)), dim=1).indices

    def _ascend(
        self, victim: _Victim, images: Tensor, labels: Tensor, place: Bool[Tensor, "b 1 h w"], random: torch.Generator
    ) -> Float[Tensor, "b c h w"]:
        """Raise the loss from random content; pixels outside the patches are never touched."""
        content = torch.rand(images.shape, generator=random).to(images)
        for _ in range(self.steps):
            gradient = victim.gradient(torch.where(place, content, images), labels, victim.draw())
            content = (content + self.step_size * gradient.sign()).clamp(0, 1)
        return torch.where(place, content, images)


class _Victim:
    """What an attack needs to know of its target: a loss to raise, and whether the answer is wrong."""

    def __init__(self, target: Defense | nn.Module, threat: PatchThreat, masks: int, random: torch.Generator) -> None:
        self.target, self.resize, self.masks, self.random = target, threat.resize, masks, random

    def wrong(self, images: Tensor, labels: Tensor) -> Bool[Tensor, " b"]:
        with torch.no_grad():
            images = images if self.resize is None else self.resize(images)
            target = self.target
            said = target.predict(images).labels if isinstance(target, Defense) else target(images).argmax(1)
        return (said != labels) & (said != ALARM)

    def draw(self) -> Bool[Tensor, "m h w"] | None:
        """Nothing hidden, and some masks of a defense."""
        if not isinstance(self.target, Defense):
            return None
        hidden = self.target.masks.hidden
        drawn = torch.randperm(len(hidden), generator=self.random)[: self.masks]
        return torch.cat([torch.zeros_like(hidden[:1]), hidden[drawn]])

    def loss(self, images: Tensor, labels: Tensor, masks: Bool[Tensor, "m h w"] | None) -> Float[Tensor, " b"]:
        images = images if self.resize is None else self.resize(images)
        if masks is None or not isinstance(self.target, Defense):
            return cross_entropy(self.target(images), labels, reduction="none")
        model = self.target.model
        jobs = torch.arange(len(images), device=images.device).repeat(len(masks))
        hidden = masks.to(images.device).repeat_interleave(len(images), 0)
        logits = model.logits(model.features(images), jobs, hidden)
        return cross_entropy(logits, labels[jobs], reduction="none").view(len(masks), -1).mean(0)

    def gradient(self, images: Tensor, labels: Tensor, masks: Bool[Tensor, "m h w"] | None) -> Float[Tensor, "b c h w"]:
        with torch.enable_grad():
            images = images.detach().requires_grad_()
            return torch.autograd.grad(self.loss(images, labels, masks).sum(), images)[0]


def placements(threat: PatchThreat, most: int, random: torch.Generator) -> Bool[Tensor, "n h w"]:
    """The pixels of every placement of the threat's patches, or of a random choice of `most` of them.

    >>> placements(PatchThreat.square(2, image=8), 64, torch.Generator()).shape
    torch.Size([49, 8, 8])
    """
    image = threat.image
    sizes = [(image.height - height + 1) * (image.width - width + 1) for height, width in threat.shapes]
    if threat.count == 1 and sum(sizes) <= most:
        chosen = torch.arange(sum(sizes))[:, None]
    else:
        chosen = torch.randint(sum(sizes), (most, threat.count), generator=random)
    places = torch.zeros(len(chosen), image.height, image.width, dtype=torch.bool)
    for place, numbers in zip(places, chosen.tolist(), strict=True):
        for box in (_box(number, threat, sizes) for number in numbers):
            place[box.top : box.bottom, box.left : box.right] = True
    return places


def _box(number: int, threat: PatchThreat, sizes: list[int]) -> Box:
    """The patch with this number, counted over shapes, then rows, then columns."""
    for (height, width), size in zip(threat.shapes, sizes, strict=True):
        if number < size:
            top, left = divmod(number, threat.image.width - width + 1)
            return Box(top, left, top + height, left + width)
        number -= size
    raise IndexError(number)


def _check(images: Tensor, labels: Tensor, threat: PatchThreat) -> None:
    if images.ndim != 4 or Grid.of((images.shape[2], images.shape[3])) != threat.image:
        raise ValueError(
            f"The threat's image has {threat.image.height}x{threat.image.width} pixels: expected a batch of such "
            f"images, got shape {tuple(images.shape)}."
        )
    if labels.shape != images.shape[:1] or labels.is_floating_point():
        raise ValueError(f"Expected one whole-number label for each of the {len(images)} images, got {labels}.")
