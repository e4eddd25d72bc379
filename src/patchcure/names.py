"""Names of defenses, such as PCURE-ViT14x2-k9: one grammar, and the paper's instances."""

from __future__ import annotations

import contextlib
import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, TypedDict, Unpack

from patchcure._torchvision import ensure_torchvision
from patchcure.defense import Defense
from patchcure.geometry import Grid, pair
from patchcure.masks import MaskSet
from patchcure.models import AnyClassifier, BagResNet, SplitModel, SplitResNet, SplitViT, small_cnn
from patchcure.models.bagnet import DESIGNS
from patchcure.models.base import IMAGENET_MEAN, IMAGENET_STD
from patchcure.models.vit import Flavour, NormOrder
from patchcure.operations import OPERATIONS, SecureOperation
from patchcure.preprocess import Resize
from patchcure.threat import PatchThreat, Size

if TYPE_CHECKING:
    from torch import nn

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
MANY_MASKS = 1024
"""Where a mask at every cell would need more masks than this, six on each axis are the default (PatchCleanser's)."""


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


Name = ViTName | BagName | CleanserName | LocalName | TokenName | ScaleName | IntervalName


def parse(name: str) -> Name:
    """Read a name; `str` writes it back.

    >>> parse("PCURE-ViT-L-14x2-k24")
    ViTName(size='L', window=(14, 2), k=24)
    """
    if vit := re.fullmatch(r"PCURE-ViT-?(?:(Ti|S|B|L)-)?(\d+)x(\d+)-k(\d+)", name):
        return ViTName(vit[1] or "B", (int(vit[2]), int(vit[3])), int(vit[4]))
    if bag := re.fullmatch(r"PCURE-BagNet(\d+)(?:-R(\d+))?-k(\d+)", name):
        return BagName(int(bag[1]), int(bag[2] or 50), int(bag[3]))
    if pixels := re.fullmatch(rf"({'|'.join(PIXEL_RULES)})-(ViT-(?:Ti|S|B|L)|ResNet\d+|[a-z].*)", name):
        return CleanserName(pixels[2], pixels[1])
    if token := re.fullmatch(r"(ViP-detect|PatchCensor)(?:-ViT-(Ti|S|B|L))?", name):
        return TokenName(token[1], token[2] or "B")
    if scale := re.fullmatch(r"ScaleCert-ResNet(50|18)", name):
        return ScaleName(int(scale[1]))
    if name == "IBP-CNN":
        return IntervalName()
    if local := re.fullmatch(r"(PatchGuard(?:\+\+)?|CBN|BagCert)-((?:ViT|BagNet).+?)(-k\d+)?", name):
        with contextlib.suppress(ValueError):
            network = parse(f"PCURE-{local[2]}{local[3] or '-k0'}")
            if isinstance(network, ViTName | BagName):
                return LocalName(local[1], network if local[3] else replace(network, k=network.layers))
    near = difflib.get_close_matches(name, known(), n=3, cutoff=0.4) or known()[:3]
    raise ValueError(f"Unknown defense {name!r}. Did you mean {' or '.join(near)}? `patchcure names` lists all.")


def known() -> list[str]:
    """The names of the paper's instances, and of the small ones for small machines."""
    windows = ("14x2", "14x1", "2x2")
    names = [f"PCURE-ViT{window}-k{k}" for window in windows for k in range(13)]
    names += [f"PCURE-BagNet{field}-k50" for field in (17, 33, 45)]
    names += ["PCURE-ViT-L-14x2-k24", "PatchCleanser-ViT-B", "PatchCleanser-ResNet50"]
    names += [f"PatchGuard-BagNet{field}" for field in (17, 33, 45)]
    names += [f"PatchGuard-ViT{window}" for window in windows]
    names += ["PatchGuard++-BagNet33", "CBN-BagNet17", "BagCert-BagNet17"]
    names += ["MR-ViT-B", "HiCert-ViT-B", "CrossCert-ViT-B", "ViP-detect", "PatchCensor"]
    names += ["ScaleCert-ResNet50", "IBP-CNN"]
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
    instance = parse(name)
    operation = instance.operation if operation is None else operation
    recipe = {
        "name": name,
        "patch": patch,
        "patches": patches,
        "resize_from": resize_from,
        "mask_stride": mask_stride,
        "masks_per_axis": masks_per_axis,
        "operation": operation,
    }
    if mask_stride is not None and masks_per_axis is not None:
        raise ValueError("Give mask_stride or masks_per_axis, not both.")
    network = instance.model(**model)
    threat = _threat(patch, patches, resize_from, network.image)
    rule = _operation(operation)
    reach = threat.on_features(network.grid, network.corrupted)
    few = mask_stride is None and masks_per_axis is None and rule.together > 0
    if few and _every_cell(network.grid, reach.footprints[0].extent):
        masks_per_axis = 6
    masks = MaskSet.covering(reach, 1 if mask_stride is None else mask_stride, masks_per_axis, rule.together)
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
