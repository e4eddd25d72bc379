"""Names of defenses, such as PCURE-ViT14x2-k9: one grammar, and the paper's instances."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, Unpack, cast

from torch import nn

from patchcure._torchvision import ensure_torchvision
from patchcure.ablations import Ablation
from patchcure.defense import Defense
from patchcure.geometry import Grid, pair
from patchcure.masks import MaskSet
from patchcure.models import (
    AnyClassifier,
    BagResNet,
    DroppingViT,
    SplitModel,
    SplitResNet,
    SplitViT,
    TwoSignClassifier,
)
from patchcure.models.bagnet import DESIGNS
from patchcure.models.base import IMAGENET_MEAN, IMAGENET_STD
from patchcure.models.vit import Flavour, NormOrder
from patchcure.operations import OPERATIONS, SecureOperation, Voting
from patchcure.operations.base import masks_for
from patchcure.preprocess import Resize
from patchcure.threat import FeatureThreat, PatchThreat, Size

VIT_SIZES = {
    "Ti": "vit_tiny_patch16_224",
    "S": "vit_small_patch16_224",
    "B": "vit_base_patch16_224",
    "L": "vit_large_patch16_224",
}
MANY_MASKS = 1024
"""Where a mask at every cell would need more masks than this, six on each axis are the default (PatchCleanser's)."""


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
        pretrained: start from timm's weights, which timm downloads (no).
        mean, std: of the channels (ImageNet's; timm's own with `pretrained`).
        max_jobs: how many (image, mask) jobs are computed at once; bounds the memory.
    """

    num_classes: int
    image_size: int | tuple[int, int]
    in_chans: int
    patch_size: int
    flavour: Flavour
    norm_order: NormOrder
    pretrained: bool
    mean: Sequence[float]
    std: Sequence[float]
    max_jobs: int


@dataclass(frozen=True)
class ViTName:
    """PCURE-ViT14x2-k9, PCURE-ViT-Ti-14x2-k9: windows of 14x2 tokens, k blocks inside them."""

    size: str
    window: tuple[int, int]
    k: int

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

    def __str__(self) -> str:
        depth = "" if self.depth == 50 else f"-R{self.depth}"
        return f"PCURE-BagNet{self.field}{depth}-k{self.k}"

    def model(self, **options: Unpack[ModelOptions]) -> SplitModel:
        if self.depth not in DESIGNS or self.field not in DESIGNS[self.depth].kernels:
            known = ", ".join(f"BagNet{r}-R{depth}" for depth, design in DESIGNS.items() for r in design.kernels)
            raise ValueError(f"{self}: there is no such BagNet; known are {known}.")
        if self.k == 0:
            return CleanserName(f"ResNet{self.depth}").model(**options)
        design = DESIGNS[self.depth]
        _refuse(options, "pretrained", "patch_size")
        mean, std = _colours(options)
        network = BagResNet(
            design,
            design.kernels[self.field],
            design.blocks_before(self.k),
            options.get("num_classes", 1000),
            options.get("in_chans", 3),
        )
        return SplitResNet(
            network,
            options.get("image_size", 224),
            self.k,
            flavour=options.get("flavour", "ours"),
            mean=mean,
            std=std,
            **_jobs(options),
        )


@dataclass(frozen=True)
class CleanserName:
    """PatchCleanser-ViT-B, PatchCleanser-ResNet50, PatchCleanser-<timm name>: masks on the pixels."""

    network: str

    def __str__(self) -> str:
        return f"PatchCleanser-{self.network}"

    def model(self, **options: Unpack[ModelOptions]) -> SplitModel:
        if vit := re.fullmatch(r"ViT-(\w+)", self.network):
            network, mean, std = _timm(VIT_SIZES[vit[1]], options, global_pool="avg")
        else:
            resnet = re.fullmatch(r"ResNet(\d+)", self.network)
            network, mean, std = _timm(f"resnet{resnet[1]}" if resnet else self.network, options)
        size, classes = options.get("image_size", 224), options.get("num_classes", 1000)
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


Name = ViTName | BagName | CleanserName | BandName


def parse(name: str) -> Name:
    """Read a name; `str` writes it back.

    >>> parse("PCURE-ViT-L-14x2-k24")
    ViTName(size='L', window=(14, 2), k=24)
    """
    if vit := re.fullmatch(r"PCURE-ViT-?(?:(Ti|S|B|L)-)?(\d+)x(\d+)-k(\d+)", name):
        return ViTName(vit[1] or "B", (int(vit[2]), int(vit[3])), int(vit[4]))
    if bag := re.fullmatch(r"PCURE-BagNet(\d+)(?:-R(\d+))?-k(\d+)", name):
        return BagName(int(bag[1]), int(bag[2] or 50), int(bag[3]))
    if cleanser := re.fullmatch(r"PatchCleanser-(ViT-(?:Ti|S|B|L)|ResNet\d+|[a-z].*)", name):
        return CleanserName(cleanser[1])
    if band := re.fullmatch(r"(S-ViT|ECViT|ViP)(?:-(Ti|S|B|L))?-(b|block)(\d+)(?:-s(\d+))?", name):
        return BandName(band[1], band[2] or "B", band[3], int(band[4]), int(band[5] or 1))
    if band := re.fullmatch(r"(DRS)-(ResNet\d+)-(b|block)(\d+)(?:-s(\d+))?", name):
        return BandName(band[1], band[2], band[3], int(band[4]), int(band[5] or 1))
    near = difflib.get_close_matches(name, known(), n=3, cutoff=0.4) or known()[:3]
    raise ValueError(f"Unknown defense {name!r}. Did you mean {' or '.join(near)}? `patchcure names` lists all.")


def known() -> list[str]:
    """The names of the paper's instances, and of the small ones for small machines."""
    windows = ("14x2", "14x1", "2x2")
    names = [f"PCURE-ViT{window}-k{k}" for window in windows for k in range(13)]
    names += [f"PCURE-BagNet{field}-k50" for field in (17, 33, 45)]
    names += ["PCURE-ViT-L-14x2-k24", "PatchCleanser-ViT-B", "PatchCleanser-ResNet50"]
    names += ["DRS-ResNet50-b25", "DRS-ResNet18-b4", "DRS-ResNet18-block12", "S-ViT-b19-s10", "S-ViT-b37-s1"]
    names += ["S-ViT-b19-s1", "S-ViT-b19-s5", "ECViT-b37", "ViP-b19-s10", "ViP-b19-s1", "S-ViT-Ti-b19-s10"]
    names += [f"PCURE-ViT-Ti-{window}-k{k}" for window in windows for k in range(13)]
    return [*names, "PCURE-BagNet9-k50", "PCURE-BagNet9-R18-k18", "PatchCleanser-ViT-Ti", "PatchCleanser-ResNet18"]


def build(
    name: str,
    *,
    patch: Size | PatchThreat = "2%",
    patches: int = 1,
    resize_from: int | tuple[int, int] | None = None,
    mask_stride: int | tuple[int, int] | None = None,
    masks_per_axis: int | tuple[int, int] | None = None,
    operation: str | SecureOperation | None = None,
    **model: Unpack[ModelOptions],
) -> Defense:
    """Build a defense by name, with new weights (`patchcure.load` is for trained ones).

    Args:
        name: such as PCURE-ViT14x2-k9; see `known`.
        patch: a square's side in pixels (32), a share of the image ("2%"), (height, width), or a `PatchThreat`.
        patches: how many patches at once.
        resize_from: the size of the images before the preprocessing resizes them, if the patch is put on those.
        mask_stride: cells between masks; by default 1 (or six masks on each axis where that would be very many).
        masks_per_axis: instead of a stride, how many masks on each axis.
        operation: one of `patchcure.operations.OPERATIONS` by name, or an operation; by default the name's own.
        **model: see `ModelOptions`.

    >>> defense = build("PCURE-ViT-Ti-6x1-k3", image_size=96, num_classes=10, patch=16)
    >>> len(defense.masks), defense.model.grid
    (5, Grid(height=1, width=6))
    """
    recipe = {
        "name": name,
        "patch": patch,
        "patches": patches,
        "resize_from": resize_from,
        "mask_stride": mask_stride,
        "masks_per_axis": masks_per_axis,
        "operation": operation,
    }
    instance = parse(name)
    if mask_stride is not None and masks_per_axis is not None:
        raise ValueError("Give mask_stride or masks_per_axis, not both.")
    network = instance.model(**model)
    threat = _threat(patch, patches, resize_from, network.image)
    rule = _operation(getattr(instance, "operation", "double-masking") if operation is None else operation)
    reach = threat.on_features(network.grid, network.corrupted)
    masks = _masks(rule, reach, mask_stride, masks_per_axis)
    defense = Defense(network, threat, masks, rule)
    model |= {"mean": network.mean.flatten().tolist(), "std": network.std.flatten().tolist()}
    defense.recipe = {**recipe, **{key: value for key, value in model.items() if key != "pretrained"}}
    return defense


def _threat(
    patch: Size | PatchThreat, patches: int, resize_from: int | tuple[int, int] | None, image: Grid
) -> PatchThreat:
    if resize_from is None:
        return PatchThreat.of(patch, image, patches)
    source = Grid.of(resize_from)
    return PatchThreat.of(patch, source, patches).before(Resize(source, image))


def _operation(operation: str | SecureOperation) -> SecureOperation:
    if not isinstance(operation, str):
        return operation
    if operation not in OPERATIONS:
        raise ValueError(f"operation: expected one of {', '.join(OPERATIONS)}, got {operation!r}.")
    return OPERATIONS[operation]


def _masks(
    rule: SecureOperation,
    reach: FeatureThreat,
    stride: int | tuple[int, int] | None,
    per_axis: int | tuple[int, int] | None,
) -> MaskSet:
    """The operation's own masks, or the ones that are asked for."""
    votes = getattr(rule, "ablation", None) is not None
    if stride is None and per_axis is None:
        if votes or not _every_cell(reach.grid, reach.footprints[0].extent):
            return masks_for(rule, reach)
        per_axis = 6
    if votes:
        raise ValueError(
            "mask_stride, masks_per_axis: a vote keeps bands or blocks, which have their own stride: give it in the "
            "name (S-ViT-b19-s10) or in the operation, Voting(Ablation(width=19, stride=10))."
        )
    return MaskSet.covering(reach, 1 if stride is None else stride, per_axis, rule.together)


def _every_cell(grid: Grid, extent: tuple[int, int]) -> bool:
    """Would masks at every cell be very many?"""
    return (grid.height - extent[0] + 1) * (grid.width - extent[1] + 1) > MANY_MASKS


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
