"""What a training run is made of: a recipe in YAML, checked before anything is computed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

RECIPES = Path(__file__).parent / "recipes"
"""The recipes that come with the package; each is known by its file's name."""


class Part(BaseModel):
    """A mapping of a recipe, with these keys and no others."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _known(cls, content: Any) -> Any:
        if isinstance(content, dict) and (unknown := [str(key) for key in content if key not in cls.model_fields]):
            raise ValueError(f"there is no {', '.join(unknown)}; expected {', '.join(cls.model_fields)}")
        return content


class Augment(Part):
    """What happens to an image before the network sees it, all by timm and torchvision.

    Args:
        scale, ratio: of the random crop, as shares of the image's area and of width to height.
        flip: how often an image is mirrored.
        auto: timm's RandAugment (``rand-m9-mstd0.5``) or AutoAugment string.
        erase: how often a part is erased.
        mixup, cutmix: their alphas; 0 is off.
    """

    scale: tuple[float, float] = (0.7, 1.0)
    ratio: tuple[float, float] = (0.85, 1.18)
    flip: float = Field(default=0.5, ge=0, le=1)
    auto: str | None = None
    erase: float = Field(default=0.0, ge=0, le=1)
    mixup: float = Field(default=0.0, ge=0)
    cutmix: float = Field(default=0.0, ge=0)


class Data(Part):
    """The images.

    Args:
        train: as for `patchcure.data.open_data`.
        validation: how many training images are held out to choose the weights (see `Select`); never the test set.
    """

    train: str
    validation: int = Field(default=0, ge=0)
    augment: Augment = Augment()


class Start(Part):
    """The network before the first step.

    Args:
        instance: the name of the first point, which says what the network is.
        options: as for `patchcure.build`, such as image_size, num_classes, mean and std.
        weights: ``scratch``; ``timm`` (the network's own, downloaded by timm) or a name that timm has weights for
            (``vit_base_patch16_224.mae``); weights that come with the package by their name; or a file: ours, timm's,
            MAE's or a released one.
        drop_path: stochastic depth.
    """

    instance: str
    options: dict[str, Any] = {}
    weights: str = "scratch"
    drop_path: float = Field(default=0.0, ge=0, lt=1)


class PointChoice(Part):
    """One of the operating points that the same weights shall serve.

    Args:
        name: an instance, or what `patchcure.load` takes after the colon: ``14x2-k9``.
        weight: how often it is drawn.
        patch: the patch that its masks must cover.
        masks_per_axis: as for `patchcure.build`.
        greedy: instead of `loss.greedy`; at k = L it costs little. A point may be listed twice, once with it.
    """

    name: str
    weight: float = Field(default=1.0, gt=0)
    patch: int | str = "2%"
    masks_per_axis: int | None = None
    greedy: int | None = Field(default=None, ge=0)


class Optimiser(Part):
    """timm's optimisers and its cosine schedule with warm-up.

    Args:
        name: adamw, lamb, sgd or any other of timm's.
        lr: the peak, for one batch of `batch` images.
        layer_decay: the factor from each layer to the one before it.
        batch: images in a step, over all processes.
        micro: images that are computed at once; each such part draws its own operating point.
        samples, epochs: how long, in images or in rounds over the data; one of the two.
        warmup: the share of the steps with a rising rate.
        clip: the largest norm of the gradient.
    """

    name: str = "adamw"
    lr: float = Field(gt=0)
    final_lr: float = Field(default=0.0, ge=0)
    weight_decay: float = Field(default=0.05, ge=0)
    layer_decay: float | None = Field(default=None, gt=0, le=1)
    batch: int = Field(default=64, ge=1)
    micro: int | None = Field(default=None, ge=1)
    samples: int | None = Field(default=None, ge=1)
    epochs: float | None = Field(default=None, gt=0)
    warmup: float = Field(default=0.05, ge=0, lt=1)
    clip: float | None = 1.0

    @property
    def parts(self) -> int:
        """The images that are computed at once."""
        return min(self.micro or self.batch, self.batch)

    def steps(self, images: int) -> int:
        """How many steps the run has, with so many images to learn from."""
        return max(1, round((self.samples or (self.epochs or 0) * images) / self.batch))

    @model_validator(mode="after")
    def _consistent(self) -> Optimiser:
        if (self.samples is None) == (self.epochs is None):
            raise ValueError("give either samples or epochs")
        if self.batch % self.parts:
            raise ValueError(f"micro: parts of {self.micro} do not divide a batch of {self.batch}")
        return self


class Loss(Part):
    """What is minimised.

    Args:
        kind: ``softmax`` (cross-entropy), ``bce`` (each class on its own, as in ResNet strikes back), ``votes``
            (BagCert: the cells' votes must win by a margin) or ``interval`` (IBP: the worst case over all patches).
        smoothing: of the labels, for ``softmax`` and ``bce``.
        masks: how many masks are drawn for each image: 0, 1 or 2; ``votes`` and ``interval`` draw none.
        greedy: among how many masks the worst first one, and then the worst second one, is looked for; 0 is random.
        consistency: the weight of the divergence from the teacher's prediction without masks.
        teacher: the point that teaches.
        margin: for ``votes``: by which share of the cells the label must win.
        worst_share: for ``interval``: the weight of the worst case; the rest is the clean loss.
        ramp: for ``interval``: over which share of the run that weight rises from 0; without it the bounds of new
            weights are so loose that nothing is learned.
    """

    kind: Literal["softmax", "bce", "votes", "interval"] = "softmax"
    smoothing: float = Field(default=0.1, ge=0, lt=1)
    masks: Literal[0, 1, 2] = 2
    greedy: int = Field(default=0, ge=0)
    consistency: float = Field(default=0.0, ge=0)
    teacher: str | None = None
    margin: float = Field(default=0.2, gt=0, le=1)
    worst_share: float = Field(default=0.7, ge=0, le=1)
    ramp: float = Field(default=0.5, ge=0, le=1)


class Select(Part):
    """How the weights are chosen: by certified accuracy on the held-out images.

    Args:
        every: steps between two looks.
        points: the points that count; their certified accuracies are averaged. Without any, the last weights are kept.
        images: how many held-out images are looked at.
    """

    every: int = Field(default=500, ge=1)
    points: tuple[str, ...] = ()
    images: int = Field(default=200, ge=1)


class Recipe(Part):
    """A training run, completely.

    >>> recipe = Recipe.load("elastic-vit-ti-cifar10")
    >>> recipe.optimiser.name
    'adamw'
    """

    name: str
    seed: int = 0
    data: Data
    start: Start
    points: tuple[PointChoice, ...] = Field(min_length=1)
    optimiser: Optimiser
    loss: Loss = Loss()
    select: Select = Select()
    ema: float = Field(default=0.0, ge=0, lt=1)

    @model_validator(mode="after")
    def _consistent(self) -> Recipe:
        names = [point.name for point in self.points]
        if wrong := [name for name in (*self.select.points, self.loss.teacher) if name and name not in names]:
            raise ValueError(f"{', '.join(wrong)}: not among the points {', '.join(names)}")
        if self.loss.consistency and not self.loss.teacher:
            raise ValueError("loss.consistency needs loss.teacher, the point that teaches")
        if self.loss.kind in ("votes", "interval") and (self.data.augment.mixup or self.data.augment.cutmix):
            raise ValueError(f"loss.kind {self.loss.kind} needs whole labels: switch mixup and cutmix off")
        if (self.data.augment.mixup or self.data.augment.cutmix) and self.optimiser.parts % 2:
            raise ValueError("mixup and cutmix need an even number of images in optimiser.micro (or batch)")
        if self.loss.kind in ("votes", "interval") and (self.loss.masks or self.loss.consistency):
            raise ValueError(
                f"loss.kind {self.loss.kind} hides nothing and has no teacher: set masks and consistency to 0"
            )
        if not self.loss.masks and (self.loss.greedy or any(point.greedy for point in self.points)):
            raise ValueError("loss.greedy looks for the worst masks, but loss.masks is 0")
        if self.select.points and self.data.validation < 1:
            raise ValueError("select.points needs held-out images: set data.validation, such as 500")
        return self

    @classmethod
    def load(cls, file: str | Path, **changes: Any) -> Recipe:
        """Read a recipe from a YAML file, or one that comes with the package by its name.

        Args:
            file: where it is.
            **changes: values to put in place of the file's; ``optimiser__samples=1000`` reaches inside, and
                ``points__0__weight=2`` into a list. Of samples and epochs one takes the other's place.
        """
        path = Path(file)
        if not path.is_file():
            path = RECIPES / f"{file}.yaml"
        if not path.is_file():
            known = ", ".join(sorted(recipe.stem for recipe in RECIPES.glob("*.yaml")))
            raise FileNotFoundError(f"There is no recipe {file}. Give a YAML file, or one of {known}.")
        try:
            content = yaml.safe_load(path.read_text())
        except yaml.YAMLError as error:
            raise ValueError(f"{path} is no YAML: {error}") from error
        if not isinstance(content, dict):
            raise ValueError(f"{path}: expected a mapping with name, data, start, points and optimiser.")
        for key, value in changes.items():
            content = _changed(content, key.split("__"), value)
        for length, other in (("samples", "epochs"), ("epochs", "samples")):
            if changes.get(f"optimiser__{length}") is not None and f"optimiser__{other}" not in changes:
                content["optimiser"].pop(other, None)
        try:
            return cls(**content)
        except ValidationError as error:
            wrong = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'recipe'}: {e['msg']}" for e in error.errors())
            wrong = wrong.replace(": Value error, ", ": ")
            raise ValueError(f"{path} is no recipe: {wrong}.") from error

    def told(self, data: str, weights: str) -> dict[str, Any]:
        """The recipe as JSON, with other words for its data and its first weights: without this machine's folders."""
        plain = self.model_dump(mode="json")
        plain["data"]["train"], plain["start"]["weights"] = data, weights
        return plain


def _changed(content: Any, path: Sequence[str], value: Any) -> Any:
    """What was read, with another value; the path has keys, and numbers where there are lists."""
    if not path:
        return value
    first, *rest = path
    if isinstance(content, dict):
        return {**content, first: _changed(content.get(first, {}), rest, value)}
    if isinstance(content, list) and first.isdecimal() and int(first) < len(content):
        place = int(first)
        return [*content[:place], _changed(content[place], rest, value), *content[place + 1 :]]
    raise ValueError(f"{'.'.join(path)}: there is nothing to set; expected a key of the recipe, such as optimiser.lr.")
