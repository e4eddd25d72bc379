"""Read anybody's checkpoint safely, and fit its tensors to a model."""

from __future__ import annotations

import argparse
import hashlib
import json
import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from patchcure.models.base import SplitModel

Tensors = dict[str, Tensor]

WRAPPERS = ("state_dict_ema", "model_ema", "state_dict", "model")
"""Keys under which training programs keep the tensors, the averaged ones first."""


def read(file: Path) -> Tensors:
    """The tensors of a safetensors file or of a PyTorch checkpoint (never running code from it); see `check`."""
    if not file.is_file():
        raise FileNotFoundError(f"There is no file {file}.")
    check(file)
    if file.suffix == ".safetensors":
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            return load_file(file)
        except SafetensorError as error:
            raise ValueError(f"{file} is not a complete safetensors file: {error}.") from error
    content = unpickled(file)
    for wrapper in WRAPPERS:
        if isinstance(content, Mapping) and isinstance(content.get(wrapper), Mapping):
            content = content[wrapper]
            break
    if not isinstance(content, Mapping) or not content or not all(isinstance(v, Tensor) for v in content.values()):
        raise ValueError(f"{file} does not hold a dictionary of named tensors, which a checkpoint must.")
    return {str(key).removeprefix("module."): value for key, value in content.items()}


def check(file: Path) -> None:
    """Compare a file with the card beside it, if there is one; weights that were changed are refused."""
    card = file.with_suffix(".json")
    if file.suffix != ".safetensors" or not card.is_file():
        return
    told = json.loads(card.read_text())
    wanted = told.get("sha256") if isinstance(told, dict) else None
    found = hashlib.sha256(file.read_bytes()).hexdigest()
    if wanted not in (None, found):
        raise ValueError(
            f"{file} has the sha256 {found}, but its card {card.name} says {wanted}: get the weights again, or delete "
            "the card if they are your own."
        )


def unpickled(file: Path) -> Any:
    """What a PyTorch file holds, if that is plain data and tensors."""
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(file, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError, ValueError) as error:
        reason = str(error).strip().splitlines()
        raise ValueError(
            f"{file} cannot be read as a PyTorch checkpoint of plain tensors: {reason[0] if reason else error!r}"
        ) from error


def fit(model: SplitModel, tensors: Tensors, source: str, need_head: bool = True) -> None:
    """Load tensors in timm's layout into a model's backbone.

    Decoder weights of MAE are left out, the last norm goes where this model has it, position embeddings are resampled
    to the image size. Everything else must fit exactly. A model on the meta device gets the tensors themselves.

    Args:
        source: the file, for messages.
        need_head: is a file without a classifier an error? Otherwise the head stays new, with a warning.
    """
    backbone = model.backbone
    own = backbone.state_dict()
    tensors = {k: v for k, v in tensors.items() if not k.startswith(("decoder_", "mask_token"))}
    if "blocks.0.norm1.weight" in own:
        tensors = _fit_vit(backbone, own, tensors)
    new = sorted(set(own) - set(tensors))
    if not need_head and new and all(key.startswith(("head.", "fc.", "fc_norm.")) for key in new):
        warnings.warn(f"{source} has no classifier: {', '.join(new)} are new and need training.", stacklevel=3)
        tensors |= {key: own[key] for key in new}
    extra = sorted(set(tensors) - set(own))
    lacking = sorted(set(own) - set(tensors))
    shaped = [
        f"{k} {tuple(v.shape)} for {tuple(own[k].shape)}"
        for k, v in tensors.items()
        if k in own and v.shape != own[k].shape
    ]
    if extra or lacking or shaped:
        parts = [("it lacks", lacking), ("it also has", extra), ("other shapes:", shaped)]
        detail = "; ".join(f"{what} {_some(keys)}" for what, keys in parts if keys)
        raise ValueError(f"The weights in {source} do not fit {type(model).__name__}: {detail}.")
    tensors = {key: value.to(own[key].dtype, copy=True) for key, value in tensors.items()}
    backbone.load_state_dict(tensors, assign=next(iter(own.values())).is_meta)


def _fit_vit(backbone: Any, own: Mapping[str, Tensor], tensors: Tensors) -> Tensors:
    from timm.layers.pos_embed import resample_abs_pos_embed

    here, there = ("fc_norm", "norm") if "fc_norm.weight" in own else ("norm", "fc_norm")
    if f"{here}.weight" not in tensors:
        tensors = {
            key.replace(f"{there}.", f"{here}.", 1) if key.startswith(f"{there}.") else key: value
            for key, value in tensors.items()
        }
    embed = tensors.get("pos_embed")
    if (
        embed is not None
        and "pos_embed" in own
        and embed.shape != own["pos_embed"].shape
        and embed.shape[-1] == own["pos_embed"].shape[-1]
    ):
        prefix = 0 if backbone.no_embed_class else backbone.num_prefix_tokens
        grid = list(backbone.patch_embed.grid_size)
        tensors = {**tensors, "pos_embed": resample_abs_pos_embed(embed, grid, num_prefix_tokens=prefix)}
    return tensors


def _some(keys: list[str]) -> str:
    return ", ".join(keys[:3]) + (f" and {len(keys) - 3} more" if len(keys) > 3 else "")
