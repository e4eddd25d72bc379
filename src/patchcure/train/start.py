"""The network before the first step: new, from timm, or from a file."""

from __future__ import annotations

import hashlib
import json
import warnings
from pathlib import Path
from typing import Any

from torch import nn

from patchcure._torchvision import ensure_torchvision
from patchcure.names import parse
from patchcure.train.recipe import Recipe
from patchcure.zoo import released
from patchcure.zoo.checkpoint import Tensors, fit, read
from patchcure.zoo.files import find, parted


def network(recipe: Recipe, new: bool = False) -> nn.Module:
    """The network that a recipe starts from; a classifier of another size is left new.

    Args:
        new: do not look for the weights: a checkpoint has others.
    """
    start = recipe.start
    model = parse(start.instance).model(**{**start.options, "pretrained": start.weights == "timm" and not new})
    backbone: Any = model.backbone
    if not new and (tensors := _tensors(start.weights)) is not None:
        own = backbone.state_dict()
        for key in ("head.weight", "head.bias", "fc.weight", "fc.bias"):
            if key in tensors and key in own and tensors[key].shape != own[key].shape:
                del tensors[key]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fit(model, tensors, start.weights, need_head=False)
    if start.drop_path:
        _drop_paths(backbone, start.drop_path)
    found: nn.Module = backbone
    return found


def origin(recipe: Recipe, backbone: Any) -> dict[str, Any]:
    """Where the first weights came from, for the card: name, sha256, and the runs that their own card tells of."""
    weights = recipe.start.weights
    if weights == "scratch" or (file := _file(weights)) is None:
        config = backbone.pretrained_cfg if weights == "timm" else _timms(weights)
        told = weights if config is None else f"{config['architecture']}.{config['tag']}"
        return {"weights": told, "sha256": None, "runs": []}
    card = file.with_suffix(".json")
    known = json.loads(card.read_text()) if card.is_file() else {}
    runs = known.get("runs", []) if isinstance(known, dict) else []
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    return {"weights": Path(weights).name, "sha256": sha256, "runs": runs}


def _tensors(weights: str) -> Tensors | None:
    """The tensors of a file, or of timm's weights of that name; None for new ones and for the network's own of timm."""
    if weights in ("scratch", "timm"):
        return None
    if (file := _file(weights)) is not None:
        return released.timm_layout(read(file))
    import timm

    return dict(timm.create_model(weights, pretrained=True).state_dict())


def _file(weights: str) -> Path | None:
    """The file of the first weights; None where timm has them."""
    timms = weights == "timm" or (not Path(weights).is_file() and _timms(weights) is not None)
    return None if timms else find(parted(weights)[0])


def _timms(weights: str) -> Any:
    """What timm knows about its weights of that name, if it has them."""
    ensure_torchvision()
    import timm

    known = timm.get_pretrained_cfg(weights) if timm.is_model_pretrained(weights) else None
    return None if known is None else known.to_dict()


def _drop_paths(backbone: Any, rate: float) -> None:
    """Stochastic depth, from 0 at the first block to `rate` at the last."""
    from timm.layers.drop import DropPath

    blocks = getattr(backbone, "blocks", None)
    if not blocks or not hasattr(blocks[0], "drop_path1"):
        raise ValueError("start.drop_path: this network has no stochastic depth; leave it out.")
    for number, block in enumerate(blocks):
        share = rate * number / max(1, len(blocks) - 1)
        block.drop_path1 = DropPath(share) if share else nn.Identity()
        block.drop_path2 = DropPath(share) if share else nn.Identity()
