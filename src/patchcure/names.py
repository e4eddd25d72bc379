"""Names of defenses, such as PCURE-ViT14x2-k9: one grammar, and the paper's instances."""

from __future__ import annotations

import contextlib
import difflib
import re
from dataclasses import replace
from typing import Unpack

from patchcure.defense import Defense
from patchcure.geometry import Grid
from patchcure.instances import (
    PIXEL_RULES,
    BagName,
    BandName,
    CleanserName,
    IntervalName,
    LocalName,
    ModelOptions,
    Name,
    ScaleName,
    TokenName,
    ViTName,
)
from patchcure.masks import MaskSet
from patchcure.operations import OPERATIONS, SecureOperation
from patchcure.operations.base import masks_for
from patchcure.preprocess import Resize
from patchcure.threat import FeatureThreat, PatchThreat, Size


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
    if band := re.fullmatch(r"(S-ViT|ECViT|ViP)(?:-(Ti|S|B|L))?-(b|block)(\d+)(?:-s(\d+))?", name):
        return BandName(band[1], band[2] or "B", band[3], int(band[4]), int(band[5] or 1))
    if band := re.fullmatch(r"(DRS)-(ResNet\d+)-(b|block)(\d+)(?:-s(\d+))?", name):
        return BandName(band[1], band[2], band[3], int(band[4]), int(band[5] or 1))
    near = difflib.get_close_matches(name, known(), n=3, cutoff=0.4) or known()[:3]
    raise ValueError(f"Unknown defense {name!r}. Did you mean {' or '.join(near)}? `patchcure names` lists all.")


def at_point(instance: str, point: str) -> str:
    """Another operating point of the same network: a window and a split, or only one of them, or a whole name.

    >>> at_point("PCURE-ViT-Ti-14x2-k12", "2x2-k3")
    'PCURE-ViT-Ti-2x2-k3'
    >>> at_point("PCURE-BagNet9-R18-k18", "k9")
    'PCURE-BagNet9-R18-k9'
    """
    base = parse(instance)
    found = re.fullmatch(r"(?:(\d+)x(\d+))?-?(?:k(\d+))?", point)
    if not point or found is None or not isinstance(base, ViTName | BagName):
        return str(parse(point))
    split = int(found[3]) if found[3] else base.k
    if isinstance(base, ViTName):
        return str(replace(base, k=split, window=(int(found[1]), int(found[2])) if found[1] else base.window))
    if found[1]:
        raise ValueError(f"{point}: {instance} has no windows; a point of it is a split such as k{base.k}.")
    return str(replace(base, k=split))


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
    if unknown := sorted(set(model) - set(ModelOptions.__annotations__)):
        expected = ", ".join(sorted(ModelOptions.__annotations__))
        raise ValueError(f"{', '.join(unknown)}: no option of a model; expected some of {expected}.")
    instance = parse(name)
    chosen = instance.operation if operation is None else operation
    rule = _operation(chosen)
    recipe = {
        "name": name,
        "patch": patch,
        "patches": patches,
        "resize_from": resize_from,
        "mask_stride": mask_stride,
        "masks_per_axis": masks_per_axis,
        "operation": chosen,
    }
    network = instance.model(**model)
    config = getattr(network.backbone, "pretrained_cfg", {}) if model.get("pretrained") else {}
    network.crop = model.get("crop_pct", config.get("crop_pct", network.crop))
    threat = _threat(patch, patches, resize_from, network.image)
    reach = threat.on_features(network.grid, network.corrupted)
    masks = _masks(rule, reach, mask_stride, masks_per_axis)
    defense = Defense(network, threat, masks, rule)
    model |= {"mean": network.mean.flatten().tolist(), "std": network.std.flatten().tolist()}
    model |= {"crop_pct": network.crop}
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
    if stride is None and per_axis is None:
        return masks_for(rule, reach)
    if rule.ablation is not None:
        raise ValueError(
            "mask_stride, masks_per_axis: a vote keeps bands or blocks, which have their own stride: give it in the "
            "name (S-ViT-b19-s10) or in the operation, Voting(Ablation(width=19, stride=10))."
        )
    return MaskSet.covering(reach, stride, per_axis, rule.together)
