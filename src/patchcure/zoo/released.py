"""The checkpoints that the paper's authors released: what a file name means, and how its tensors are laid out."""

from __future__ import annotations

import re
from typing import Any

from patchcure.zoo.checkpoint import Tensors

BLOCK = re.compile(r"(?P<part>[01])\.\w+\.(?P<index>\d+)\.(?P<rest>(?:norm1|attn|norm2|mlp|ls1|ls2)\..+)")
LAYER = re.compile(r"(?P<part>[01])\.\w+\.(?P<index>\d+)\.(?P<rest>weight|bias)")


def instance(file: str, tensors: Tensors) -> tuple[str, dict[str, Any]]:
    """The instance that a released file holds, with the options that it implies.

    Names: ``{vitsrf14x2|vitsrf14x1|vitsrf2x2|vitlsrf14x2}[_split{k}]_*``, ``mae_*``, ``bagnet{17|33|45}_*``,
    ``resnet50_*``.

    >>> instance("vitsrf2x2_split3_masked.pth.tar", {})[0]
    'PCURE-ViT2x2-k3'
    """
    options: dict[str, Any] = {"flavour": "published"}
    heads = [t for key, t in tensors.items() if key.endswith("weight") and t.ndim == 2]
    if heads:
        options["num_classes"] = heads[-1].shape[0]
    if vit := re.match(r"vit(l?)srf(\d+x\d+)(?:_split(\d+))?(?=[_.]|$)", file):
        size, depth = ("-L-", 24) if vit[1] else ("", 12)
        k = int(vit[3]) if vit[3] else depth
        _check_split(file, k, tensors)
        return f"PCURE-ViT{size}{vit[2]}-k{k}", options
    if bag := re.match(r"bagnet(\d+)(?=[_.]|$)", file):
        return f"PCURE-BagNet{bag[1]}-k50", options
    if file.startswith("resnet50"):
        return "PatchCleanser-ResNet50", options
    if file.startswith("mae_"):
        width = tensors["cls_token"].shape[-1] if "cls_token" in tensors else 768
        return f"PatchCleanser-ViT-{ {192: 'Ti', 384: 'S', 1024: 'L'}.get(width, 'B') }", options
    raise ValueError(
        f"The name {file!r} does not say which model it holds. Released checkpoints are called like "
        "vitsrf14x2_split9_masked.pth.tar, vitlsrf14x2_masked.pth.tar, bagnet33_masked.pth.tar, mae_masked.pth.tar or "
        "resnet50_masked.pth.tar; for other files name the instance: patchcure.load('PCURE-ViT14x2-k9', weights=file)."
    )


def timm_layout(tensors: Tensors) -> Tensors:
    """Tensors under timm's names.

    A hybrid was released as a pair (SRF part, LRF part) of layer lists, in which a layer's number depends on the
    release of timm. So layers are told apart by what they hold and keep their order: blocks, the patch embedding (a
    convolution), the last norm (vectors) and the head (a matrix).
    """
    if not all(key.startswith(("0.", "1.")) for key in tensors):
        return tensors
    order = sorted({(m["part"], int(m["index"])) for m in map(BLOCK.match, tensors) if m})
    renamed: Tensors = {}
    for key, value in tensors.items():
        if block := BLOCK.fullmatch(key):
            number = order.index((block["part"], int(block["index"])))
            renamed[f"blocks.{number}.{block['rest']}"] = value
        elif layer := LAYER.fullmatch(key):
            matrix = tensors[key.rsplit(".", 1)[0] + ".weight"].ndim == 2
            renamed[f"{'head' if matrix else 'fc_norm'}.{layer['rest']}"] = value
        elif (end := re.search(r"(?:^|\.)(proj\.weight|proj\.bias|pos_embed|cls_token)$", key)) is not None:
            renamed[("patch_embed." if end[1].startswith("proj") else "") + end[1]] = value
        else:
            renamed[key] = value
    return renamed


def _check_split(file: str, k: int, tensors: Tensors) -> None:
    """A hybrid's first part must hold k blocks."""
    blocks = {(m["part"], m["index"]) for m in map(BLOCK.match, tensors) if m}
    first = sum(part == "0" for part, _ in blocks)
    if blocks and first != k:
        raise ValueError(f"{file} is named for a split at k = {k} but its first part holds {first} blocks.")
