"""The paper's algorithms, line by line, one image and one mask at a time: slow, the oracle for all that is faster."""

from __future__ import annotations

from collections import Counter
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from patchcure.masks import MaskSet
from patchcure.models import AnyClassifier, DroppingViT, SplitModel, SplitResNet, SplitViT, TwoSignClassifier

Hidden = Bool[Tensor, "h w"]


@torch.no_grad()
def logits(model: SplitModel, image: Float[Tensor, "c h w"], hidden: Hidden) -> Float[Tensor, " classes"]:
    """The logits of one image with these cells hidden, computed from the pixels."""
    x = (image - model.mean) / model.std
    if isinstance(model, SplitViT):
        return _vit(model, x, hidden)
    if isinstance(model, SplitResNet):
        return _resnet(model, x, hidden)
    if isinstance(model, DroppingViT):
        return _dropping(model, x, hidden)
    if isinstance(model, AnyClassifier):
        x = torch.cat([image, 1 - image]) if isinstance(model, TwoSignClassifier) else x.clone()
        x[:, hidden] = 0
        rows: Tensor = model.backbone(x[None])
        return rows[0]
    raise TypeError(f"There is no reference for {type(model).__name__}.")


def label(model: SplitModel, image: Float[Tensor, "c h w"], hidden: Hidden) -> int:
    """The label of one image with these cells hidden."""
    return int(logits(model, image, hidden).argmax())


def infer(
    model: SplitModel,
    image: Float[Tensor, "c h w"],
    masks: MaskSet,
    reference: Literal["majority", "unmasked"] = "majority",
) -> int:
    """The paper's SO: double masking."""
    nothing = torch.zeros_like(masks.hidden[0])
    majority, disagreers = _mask_pred(model, image, masks, nothing)
    if reference == "unmasked":
        majority = label(model, image, nothing)
        disagreers = [(m, label(model, image, m)) for m in masks.hidden if label(model, image, m) != majority]
    if not disagreers:
        return majority  # Case I: agreed prediction
    for mask, disagreed in disagreers:
        second, others = _mask_pred(model, image, masks, mask)
        if not others and second == disagreed:
            return disagreed  # Case II: disagreer prediction
    return majority  # Case III: majority prediction


def certify(model: SplitModel, image: Float[Tensor, "c h w"], masks: MaskSet, y: int) -> bool:
    """The paper's Cert-SO: every pair of masks gives the true label."""
    if not masks.covers(masks.threat):
        return False
    for first in masks.hidden:
        for second in masks.hidden:
            if label(model, image, first | second) != y:
                return False
    return True


def vote(model: SplitModel, image: Float[Tensor, "c h w"], masks: MaskSet, threshold: float | None = None) -> int:
    """Smoothing: the label with the most votes, the lowest on ties."""
    ballots = [_ballot(model, image, hidden, threshold) for hidden in masks.hidden]
    return max(range(model.num_classes), key=lambda c: (sum(c in ballot for ballot in ballots), -c))


def certify_vote(
    model: SplitModel, image: Float[Tensor, "c h w"], masks: MaskSet, y: int, threshold: float | None = None
) -> bool:
    """Can no placement of one patch give another label as many votes (or more, where it loses ties)?"""
    ballots = [_ballot(model, image, hidden, threshold) for hidden in masks.hidden]
    for box in set(masks.threat.locations()):
        touched = [bool((~hidden)[box.top : box.bottom, box.left : box.right].any()) for hidden in masks.hidden]
        rest = [ballot for ballot, hit in zip(ballots, touched, strict=True) if not hit]
        for c in range(model.num_classes):
            if c != y and sum(y in b for b in rest) + (y < c) <= sum(c in b for b in rest) + sum(touched):
                return False
    return True


def _ballot(model: SplitModel, image: Tensor, hidden: Hidden, threshold: float | None) -> set[int]:
    row = logits(model, image, hidden)
    if threshold is None:
        return {int(row.argmax())}
    return {c for c, chance in enumerate(row.double().softmax(0).tolist()) if chance >= threshold}


def _mask_pred(
    model: SplitModel, image: Float[Tensor, "c h w"], masks: MaskSet, already: Hidden
) -> tuple[int, list[tuple[Hidden, int]]]:
    """The paper's MaskPred: the majority label and the masks that disagree with it."""
    predictions = [(mask, label(model, image, mask | already)) for mask in masks.hidden]
    votes = Counter(predicted for _, predicted in predictions)
    majority = min(votes, key=lambda candidate: (-votes[candidate], candidate))
    return majority, [(mask, predicted) for mask, predicted in predictions if predicted != majority]


def _vit(model: SplitViT, x: Float[Tensor, "c h w"], hidden: Hidden) -> Float[Tensor, " classes"]:
    vit: Any = model.backbone
    published = model.flavour == "published"
    embedded: Tensor = vit.patch_embed(x[None]).reshape(model.tokens.height, model.tokens.width, -1)
    if vit.pos_embed is not None:
        positions = vit.pos_embed[0, 0 if vit.no_embed_class else vit.num_prefix_tokens :]
        embedded = embedded + positions.reshape(embedded.shape)
    height, width = model.window
    windows: list[Tensor] = []
    for row in range(model.grid.height):
        for col in range(model.grid.width):
            tokens = embedded[row * height : (row + 1) * height, col * width : (col + 1) * width].reshape(
                1, height * width, -1
            )
            if published:
                tokens = torch.cat([vit.cls_token, tokens], dim=1)
            tokens = vit.norm_pre(tokens)
            for block in vit.blocks[: model.k]:
                tokens = block(tokens)
            windows.append(tokens[0])
    gone = hidden.flatten().tolist()
    seen = [window for window, away in zip(windows, gone, strict=True) if not away]
    if published and model.k == model.depth:
        return torch.stack([vit.head(vit.fc_norm(vit.norm(window)[1:])).mean(0) for window in seen]).sum(0)
    if published:
        cls = torch.stack([window[0] for window in seen]).mean(0, keepdim=True)
        rest = [window[1:] * 0 if away else window[1:] for window, away in zip(windows, gone, strict=True)]
        sequence = torch.cat([cls, *rest])[None]
    else:
        sequence = torch.cat(seen)[None]
    for block in vit.blocks[model.k :]:
        sequence = block(sequence)
    tokens = sequence[0, 1:] if published else sequence[0]
    if published and model.norm_order == "before-pool":
        result: Tensor = vit.head(vit.fc_norm(vit.norm(tokens)).mean(0))
    else:
        result = vit.head(vit.fc_norm(vit.norm(tokens.mean(0))))
    return result


def _dropping(model: DroppingViT, x: Float[Tensor, "c h w"], hidden: Hidden) -> Float[Tensor, " classes"]:
    vit: Any = model.backbone
    x = x.clone()
    x[:, hidden] = 0
    tokens = vit._pos_embed(vit.patch_embed(x[None]))
    height, width = vit.patch_embed.patch_size
    kept = list(range(vit.num_prefix_tokens))
    for row in range(model.image.height // height):
        for col in range(model.image.width // width):
            if not hidden[row * height : (row + 1) * height, col * width : (col + 1) * width].all():
                kept.append(vit.num_prefix_tokens + row * (model.image.width // width) + col)
    tokens = vit.norm_pre(tokens[:, kept])
    for block in vit.blocks:
        tokens = block(tokens)
    rows: Tensor = vit.forward_head(vit.norm(tokens))
    return rows[0]


def _resnet(model: SplitResNet, x: Float[Tensor, "c h w"], hidden: Hidden) -> Float[Tensor, " classes"]:
    network: Any = model.backbone
    features: Tensor = network.srf(x[None], model.blocks)
    if not model.whole:
        features[:, :, hidden] = 0
        rows: Tensor = network.lrf(features, model.blocks)
        return rows[0]
    cells: list[Tensor] = []
    for row in range(model.grid.height):
        for col in range(model.grid.width):
            if not hidden[row, col]:
                cells.append(network.fc(features[0, :, row, col]))
    total = torch.stack(cells).sum(0)
    return total if model.flavour == "published" else total / len(cells)
