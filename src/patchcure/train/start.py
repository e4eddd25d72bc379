"""The network before the first step: new, from timm, or from a file."""

from __future__ import annotations

import hashlib
import json
import warnings
from pathlib import Path
from typing import Any

from torch import nn

from patchcure.names import parse
from patchcure.train.recipe import Recipe
from patchcure.zoo import released
from patchcure.zoo.checkpoint import fit, read
from patchcure.zoo.files import find


def network(recipe: Recipe, new: bool = False) -> nn.Module:
    """The network that a recipe starts from; a classifier of another size is left new.

    Args:
        new: do not look for the weights: a checkpoint has others.
    """
    start = recipe.start
    model = parse(start.instance).model(**{**start.options, "pretrained": start.weights == "timm" and not new})
    backbone: Any = model.backbone
    if not new and (file := _file(recipe)) is not None:
        tensors = released.timm_layout(read(file))
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


def origin(recipe: Recipe) -> dict[str, Any]:
    """Where the first weights came from, for the card: their sha256, and the runs that their own card tells of."""
    file = _file(recipe)
    if file is None:
        return {"sha256": None, "runs": []}
    card = file.with_suffix(".json")
    told = json.loads(card.read_text()) if card.is_file() else {}
    runs = told.get("runs", []) if isinstance(told, dict) else []
    return {"sha256": hashlib.sha256(file.read_bytes()).hexdigest(), "runs": runs}


def _file(recipe: Recipe) -> Path | None:
    """The file of the first weights, where it is one."""
    return None if recipe.start.weights in ("scratch", "timm") else find(recipe.start.weights)


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
