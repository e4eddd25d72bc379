"""Augmented batches that depend only on the seed and the step, so that a resumed run sees the same ones."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from patchcure._torchvision import ensure_torchvision
from patchcure.images import Data
from patchcure.models.base import SplitModel
from patchcure.train.recipe import Augment, Optimiser


def split(count: int, held_out: int) -> tuple[list[int], list[int]]:
    """Numbers of the images to learn from, and of those that are held out, in random order: the first of them are a
    fair sample, also where the data is sorted by class.

    The same for every recipe, so that weights that are trained on, with another seed, never learned from them.
    """
    if 2 * held_out > count:
        raise ValueError(
            f"data.validation: {held_out} of {count} training images would be held out, more than half: set it lower."
        )
    order = np.random.default_rng(0).permutation(count).tolist()
    return sorted(order[held_out:]), order[:held_out]


class Batches(Dataset[tuple[Tensor, Tensor]]):
    """The augmented images of each step.

    timm's augmentations see the model's colours: RandAugment fills with their mean, and what is erased is noise around
    it. The model normalises by itself, so its images are in [0, 1] again afterwards.

    Every random choice is made from the seed and the image's place in the run, never from what came before.

    Args:
        data: the dataset.
        chosen: the numbers of the images to learn from.
        model: says what it reads.
        optimiser: says how many images are in a step, over all processes, and in each part of it.
        own: which of a step's images are this process's.
    """

    def __init__(
        self,
        data: Data,
        chosen: Sequence[int],
        model: SplitModel,
        augment: Augment,
        optimiser: Optimiser,
        own: range,
        seed: int,
    ) -> None:
        ensure_torchvision()
        from timm.data.mixup import Mixup
        from timm.data.transforms_factory import transforms_imagenet_train

        self.data, self.chosen, self.own, self.seed = data, np.asarray(chosen), own, seed
        self.batch, self.micro = optimiser.batch, optimiser.parts
        self.classes, self.channels = model.num_classes, len(model.mean)
        size = model.image
        self.mean, self.std = (colour.detach().cpu() for colour in (model.mean, model.std))
        try:
            self.transform: Any = transforms_imagenet_train(
                img_size=(size.height, size.width),
                scale=augment.scale,
                ratio=augment.ratio,
                hflip=augment.flip,
                color_jitter=0.0,
                auto_augment=augment.auto,
                interpolation="bicubic",
                mean=tuple(self.mean.expand(3, 1, 1).flatten().tolist()),
                std=tuple(self.std.expand(3, 1, 1).flatten().tolist()),
                normalize=True,
                re_prob=augment.erase,
                re_mode="pixel",
            )
        except (AssertionError, KeyError, ValueError) as error:
            raise ValueError(
                f"data.augment.auto: timm cannot read {augment.auto!r}; expected such as rand-m9-mstd0.5."
            ) from error
        self.mixup: Any = (
            Mixup(augment.mixup, augment.cutmix, label_smoothing=0.0, num_classes=model.num_classes)
            if augment.mixup or augment.cutmix
            else None
        )
        if self.mixup is not None and len(own) % self.micro % 2:
            raise ValueError(
                f"mixup and cutmix take images in pairs, but {len(own)} images of each step are this process's: choose "
                "optimiser.batch and micro so that every part is even."
            )

    def numbers(self, step: int) -> list[int]:
        """The images of a step: one random order of all images after the other."""
        place = np.arange(step * self.batch, (step + 1) * self.batch)
        rounds = place // len(self.chosen)
        orders = {r: np.random.default_rng((self.seed, 1, r)).permutation(self.chosen) for r in np.unique(rounds)}
        return [int(orders[r][p % len(self.chosen)]) for r, p in zip(rounds, place, strict=True)]

    def __getitem__(self, step: int) -> tuple[Float[Tensor, "b c h w"], Float[Tensor, "b classes"]]:
        """This process's images of a step in [0, 1], and their labels as probabilities."""
        numbers = self.numbers(step)
        images, labels = [], []
        for place in self.own:
            item = self.data[numbers[place]]
            reseed(self.seed, 2, step, place)
            picture = item.image if self.channels == 3 else item.image.convert("L").convert("RGB")
            normal = self.transform(picture)[: self.channels]
            images.append((normal * self.std + self.mean).clamp(0, 1))
            labels.append(item.label)
        batch, target = torch.stack(images), torch.tensor(labels)
        if self.mixup is None:
            return batch, torch.nn.functional.one_hot(target, self.classes).float()
        mixed = []
        for start in range(0, len(batch), self.micro):
            reseed(self.seed, 3, step, self.own.start + start)
            mixed.append(self.mixup(batch[start : start + self.micro], target[start : start + self.micro]))
        return torch.cat([images for images, _ in mixed]), torch.cat([labels for _, labels in mixed])

    def steps(self, first: int, last: int, workers: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The steps from `first` to before `last`, in order; with workers, made ahead in other processes."""
        try:
            yield from DataLoader(self, batch_size=None, sampler=range(first, last), num_workers=workers)
        except (ValueError, OSError) as error:  # from a worker with its whole traceback, whose last line tells
            raise ValueError(str(error).strip().splitlines()[-1].removeprefix("ValueError: ")) from error


def reseed(*numbers: int) -> None:
    """Set the generators that timm's and torchvision's augmentations draw from."""
    state = np.random.SeedSequence(numbers).generate_state(3)
    random.seed(int(state[0]))
    np.random.seed(int(state[1]))
    torch.manual_seed(int(state[2]))


def generator(*numbers: int) -> torch.Generator:
    """Random numbers that depend on these numbers only."""
    return torch.Generator().manual_seed(int(np.random.SeedSequence(numbers).generate_state(1)[0]))
