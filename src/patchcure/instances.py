"""What the names of defenses stand for: one class a family, each with its network and its operation."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypedDict, Unpack, cast

from torch import nn

from patchcure._torchvision import ensure_torchvision
from patchcure.ablations import Ablation
from patchcure.geometry import pair
from patchcure.models import (
    AnyClassifier,
    BagResNet,
    DroppingViT,
    SplitModel,
    SplitResNet,
    SplitViT,
    TwoSignClassifier,
    small_cnn,
)
from patchcure.models.bagnet import DESIGNS
from patchcure.models.base import IMAGENET_MEAN, IMAGENET_STD
from patchcure.models.vit import Flavour, NormOrder
from patchcure.operations import Voting

VIT_SIZES = {
    "Ti": "vit_tiny_patch16_224",
    "S": "vit_small_patch16_224",
    "B": "vit_base_patch16_224",
    "L": "vit_large_patch16_224",
}
PIXEL_RULES = {
    "PatchCleanser": "double-masking",
    "CrossCert": "crosscert",
    "HiCert": "hicert",
    "MR": "minority-reports",
}
"""Defenses with masks on the pixels, and their operations."""
SMALL_IMAGE = 64
"""Below this side a ResNet starts with a 3x3 convolution and no pooling, so that something is left to look at."""


class ModelOptions(TypedDict, total=False):
    """What the model is made of, beyond its name.

    Args:
        num_classes: how many labels (1000).
        image_size: the images' side, or (height, width), in pixels (224).
        in_chans: the images' channels (3).
        patch_size: the pixels' side of a ViT's token (16).
        flavour: ``"ours"`` or ``"published"``, see `SplitViT` and `SplitResNet` (ours).
        norm_order: see `SplitViT` (before-pool).
        width: the channels of a BagNet's or a ResNet's first stage (64).
        bag_k: the layer up to which a hybrid is a BagNet, if that is after the split (k). One such network can be split
            at every layer before it, and at k = 0 with masks on the pixels.
        pretrained: start from timm's weights, which timm downloads (no).
        mean, std: of the channels (ImageNet's; timm's own with `pretrained`).
        crop_pct: the share of a resized photograph's side that is kept (0.875; timm's own with `pretrained`).
        max_jobs: how many (image, mask) jobs are computed at once; bounds the memory.
    """

    num_classes: int
    image_size: int | tuple[int, int]
    in_chans: int
    patch_size: int
    flavour: Flavour
    norm_order: NormOrder
    width: int
    bag_k: int
    pretrained: bool
    mean: Sequence[float]
    std: Sequence[float]
    crop_pct: float
    max_jobs: int


@dataclass(frozen=True)
class ViTName:
    """PCURE-ViT14x2-k9, PCURE-ViT-Ti-14x2-k9: windows of 14x2 tokens, k blocks inside them."""

    size: str
    window: tuple[int, int]
    k: int
    operation: ClassVar[str] = "double-masking"

    @property
    def layers(self) -> int:
        """L, the largest k."""
        return 24 if self.size == "L" else 12

    def __str__(self) -> str:
        size = "" if self.size == "B" else f"-{self.size}-"
        return f"PCURE-ViT{size}{self.window[0]}x{self.window[1]}-k{self.k}"

    def model(self, **options: Unpack[ModelOptions]) -> SplitModel:
        backbone, mean, std = _timm(VIT_SIZES[self.size], options, global_pool="avg")
        return SplitViT(
            backbone,
            self.window,
            self.k,
            flavour=options.get("flavour", "ours"),
            norm_order=options.get("norm_order", "before-pool"),
            mean=mean,
            std=std,
            **_jobs(options),
        )


@dataclass(frozen=True)
class BagName:
    """PCURE-BagNet33-k50, PCURE-BagNet9-R18-k18: a BagNet with this receptive field, on ResNet-50 or ResNet-18."""

    field: int
    depth: int
    k: int
    operation: ClassVar[str] = "double-masking"

    @property
    def layers(self) -> int:
        """L, the largest k (0 if there is no such network)."""
        return DESIGNS[self.depth].layers if self.depth in DESIGNS else 0

    def splits(self, last: int) -> list[int]:
        """Every k at which a network that is a BagNet up to layer `last` can be split."""
        return [0, *(k for k in DESIGNS[self.depth].splits if k <= last)]

    def __str__(self) -> str:
        depth = "" if self.depth == 50 else f"-R{self.depth}"
        return f"PCURE-BagNet{self.field}{depth}-k{self.k}"

    def model(self, **options: Unpack[ModelOptions]) -> SplitModel:
        if self.depth not in DESIGNS or self.field not in DESIGNS[self.depth].kernels:
            known = ", ".join(f"BagNet{r}-R{depth}" for depth, design in DESIGNS.items() for r in design.kernels)
            raise ValueError(f"{self}: there is no such BagNet; known are {known}.")
        bag_k = options.get("bag_k", self.k)
        if bag_k == 0:
            return CleanserName(f"ResNet{self.depth}").model(**options)
        design = DESIGNS[self.depth]
        _refuse(options, "pretrained", "patch_size")
        mean, std = _colours(options)
        size, classes = options.get("image_size", 224), options.get("num_classes", 1000)
        network = BagResNet(
            design,
            design.kernels[self.field],
            design.blocks_before(bag_k),
            classes,
            options.get("in_chans", 3),
            options.get("width", 64),
        )
        if self.k == 0:
            return AnyClassifier(network, size, classes, mean, std, **_jobs(options))
        return SplitResNet(
            network,
            size,
            self.k,
            flavour=options.get("flavour", "ours"),
            mean=mean,
            std=std,
            **_jobs(options),
        )


@dataclass(frozen=True)
class CleanserName:
    """PatchCleanser-ViT-B, MR-ResNet50, HiCert-<timm name>: masks on the pixels, see `PIXEL_RULES`."""

    network: str
    method: str = "PatchCleanser"

    def __str__(self) -> str:
        return f"{self.method}-{self.network}"

    @property
    def operation(self) -> str:
        return PIXEL_RULES[self.method]

    def model(self, **options: Unpack[ModelOptions]) -> SplitModel:
        if vit := re.fullmatch(r"ViT-(\w+)", self.network):
            network, mean, std = _timm(VIT_SIZES[vit[1]], options, global_pool="avg")
        else:
            resnet = re.fullmatch(r"ResNet(\d+)", self.network)
            network, mean, std = _timm(f"resnet{resnet[1]}" if resnet else self.network, options)
        size, classes = options.get("image_size", 224), options.get("num_classes", 1000)
        return AnyClassifier(network, size, classes, mean, std, **_jobs(options))


LOCAL_RULES = {
    "BagCert": "region-votes",
    "CBN": "clipped-mean",
    "PatchGuard": "robust-masking",
    "PatchGuard++": "local-detection",
}
"""Defenses that aggregate what single cells say, and their operations."""


@dataclass(frozen=True)
class LocalName:
    """PatchGuard-BagNet33, CBN-BagNet17, BagCert-ViT14x2-k9: local logits of a network, by default at k = L."""

    defense: str
    network: ViTName | BagName

    def __str__(self) -> str:
        name = str(self.network).replace("PCURE", self.defense, 1)
        return name.removesuffix(f"-k{self.network.k}") if self.network.k == self.network.layers else name

    @property
    def operation(self) -> str:
        return LOCAL_RULES[self.defense]

    def model(self, **options: Unpack[ModelOptions]) -> SplitModel:
        return self.network.model(**options)


@dataclass(frozen=True)
class TokenName:
    """ViP-detect, PatchCensor-ViT-Ti: windows of single tokens are dropped before the first block."""

    method: str
    size: str
    operation: ClassVar[str] = "agreement"

    def __str__(self) -> str:
        return self.method if self.size == "B" else f"{self.method}-ViT-{self.size}"

    def model(self, **options: Unpack[ModelOptions]) -> SplitModel:
        return ViTName(self.size, (1, 1), 0).model(**options)


@dataclass(frozen=True)
class ScaleName:
    """ScaleCert-ResNet50: split after the first stage, with the BagNet of the smallest receptive field there."""

    depth: int
    operation: ClassVar[str] = "scalecert"

    def __str__(self) -> str:
        return f"ScaleCert-ResNet{self.depth}"

    def model(self, **options: Unpack[ModelOptions]) -> SplitModel:
        return BagName(*{50: (9, 50, 10), 18: (5, 18, 5)}[self.depth]).model(**options)


@dataclass(frozen=True)
class IntervalName:
    """IBP-CNN: a small network for images of 32 pixels and ten labels (or what the options say)."""

    operation: ClassVar[str] = "interval-bounds"

    def __str__(self) -> str:
        return "IBP-CNN"

    def model(self, **options: Unpack[ModelOptions]) -> SplitModel:
        _refuse(options, "pretrained", "patch_size")
        size, classes = options.get("image_size", 32), options.get("num_classes", 10)
        mean, std = _colours(options)
        network = small_cnn(size, classes, options.get("in_chans", 3))
        return AnyClassifier(network, size, classes, mean, std, **_jobs(options))


@dataclass(frozen=True)
class BandName:
    """S-ViT-b19-s10, ECViT-b37, ViP-b19-s10, DRS-ResNet50-b25, DRS-ResNet18-block12: votes of bands or blocks.

    The ViTs drop hidden tokens; S-ViT reads its class token, the others average their tokens (as MAE's weights want).
    DRS reads both signs of the colours and votes for every class above 0.2; ResNet18 is for images of 32 pixels.
    """

    family: str
    network: str
    keep: str
    size: int
    stride: int

    def __str__(self) -> str:
        network = "" if self.network == "B" else f"-{self.network}"
        stride = f"-s{self.stride}" if self.stride > 1 or self.family in ("S-ViT", "ViP") else ""
        return f"{self.family}{network}-{self.keep}{self.size}{stride}"

    @property
    def operation(self) -> Voting:
        height = self.size if self.keep == "block" else None
        return Voting(Ablation(height, self.size, self.stride), 0.2 if self.family == "DRS" else None)

    def model(self, **options: Unpack[ModelOptions]) -> SplitModel:
        _refuse(options, "flavour", "norm_order")
        if self.network in VIT_SIZES:
            pool = "token" if self.family == "S-ViT" else "avg"
            backbone, mean, std = _timm(VIT_SIZES[self.network], options, global_pool=pool)
            return DroppingViT(backbone, mean, std, **_jobs(options))
        if any(options.get("mean", ())) or set(options.get("std", ())) - {1.0}:
            raise ValueError(f"{self}: mean, std: this model reads the colours as they are, in [0, 1]; leave both out.")
        default = (32, 10) if self.network == "ResNet18" else (224, 1000)
        size, classes = options.get("image_size", default[0]), options.get("num_classes", default[1])
        channels = options.get("in_chans", 3)
        small = max(pair(size, "image_size")) < SMALL_IMAGE
        if small:
            _refuse(options, "pretrained")
        both = {"num_classes": classes, "in_chans": 2 * channels, "mean": (), "std": ()}
        network, _, _ = _timm(self.network.lower(), cast(ModelOptions, {**options, **both}))
        if small:
            network.conv1 = nn.Conv2d(2 * channels, network.conv1.out_channels, 3, padding=1, bias=False)
            network.maxpool = nn.Identity()
        return TwoSignClassifier(network, size, classes, channels, **_jobs(options))


Name = ViTName | BagName | CleanserName | LocalName | TokenName | ScaleName | IntervalName | BandName


def _timm(name: str, options: ModelOptions, **extra: Any) -> tuple[Any, Sequence[float], Sequence[float]]:
    """A timm network for these options, and its colours' mean and deviation."""
    ensure_torchvision()
    import timm

    if not timm.is_model(name):
        near = difflib.get_close_matches(name, timm.list_models(), n=3)
        raise ValueError(f"timm has no model {name!r}. {'Did you mean ' + ' or '.join(near) + '?' if near else ''}")
    if name.startswith("vit_"):
        extra["img_size"] = pair(options.get("image_size", 224), "image_size")
        if "patch_size" in options:
            extra["patch_size"] = options["patch_size"]
    else:
        _refuse(options, "patch_size")
    if re.fullmatch(r"resnet\d+", name) and "width" in options:
        _refuse(options, "pretrained")
        extra["channels"] = tuple(options["width"] << stage for stage in range(4))
    else:
        _refuse(options, "width")
    _refuse(options, "bag_k")
    pretrained = options.get("pretrained", False)
    network: nn.Module = timm.create_model(
        name,
        pretrained=pretrained,
        num_classes=options.get("num_classes", 1000),
        in_chans=options.get("in_chans", 3),
        **extra,
    )
    config: Any = network.pretrained_cfg if pretrained else None
    return network, *_colours(options, config)


def _colours(options: ModelOptions, config: Any = None) -> tuple[Sequence[float], Sequence[float]]:
    """The channels' mean and deviation: as asked, else as the weights were trained, else ImageNet's."""
    if options.get("in_chans", 3) != 3 and not {"mean", "std"} <= set(options):
        raise ValueError(f"Images with {options['in_chans']} channels need their own mean and std: give both.")
    default = (config["mean"], config["std"]) if config else (IMAGENET_MEAN, IMAGENET_STD)
    return options.get("mean", default[0]), options.get("std", default[1])


def _refuse(options: ModelOptions, *names: str) -> None:
    for name in names:
        if options.get(name):
            raise ValueError(f"{name}: this model has no such option.")


def _jobs(options: ModelOptions) -> dict[str, int]:
    return {"max_jobs": options["max_jobs"]} if "max_jobs" in options else {}
