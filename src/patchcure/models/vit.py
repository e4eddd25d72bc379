"""Vision transformers whose first k blocks attend inside windows of tokens (the paper's ViT-SRF)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from patchcure._torchvision import ensure_torchvision
from patchcure.geometry import Box, Grid, pair
from patchcure.models.base import IMAGENET_MEAN, IMAGENET_STD, LINEAR_JOBS, SplitModel, visible_sum
from patchcure.models.blocks import ACTIVATIONS, heads, is_plain, whole
from patchcure.models.lrf import Shared, drop_hidden, pooled_blocks, visible_windows, zero_hidden

if TYPE_CHECKING:
    from timm.models.vision_transformer import VisionTransformer

Flavour = Literal["ours", "published"]
NormOrder = Literal["before-pool", "after-pool"]


class SplitViT(SplitModel):
    """Any timm VisionTransformer; the first `k` blocks see one window, the others see everything that is not hidden.

    A cell of the grid is a window of tokens. Two flavours share the contract:

    * ``"ours"``: no class token anywhere; hidden tokens are dropped; pool, then norm, then head.
    * ``"published"``: the class token (without position) stands in every window; hidden tokens are zero, and the
      class token of the later blocks is the mean over the visible windows; at k = L the logits are the sum over the
      visible windows of the mean logits of their tokens.

    Args:
        backbone: a timm VisionTransformer; its parameters keep their names.
        window: tokens (height, width) in a window; must divide the token grid.
        k: how many blocks attend inside the windows, from 0 to all.
        flavour: see above.
        norm_order: published flavour with k < L only: is the last norm applied to each token ``"before-pool"`` (the
            released models under timm >= 0.9) or to the pooled token ``"after-pool"`` (under older timm)?
    """

    backbone: VisionTransformer

    def __init__(
        self,
        backbone: VisionTransformer,
        window: int | tuple[int, int],
        k: int,
        flavour: Flavour = "ours",
        norm_order: NormOrder = "before-pool",
        mean: Sequence[float] = IMAGENET_MEAN,
        std: Sequence[float] = IMAGENET_STD,
        max_jobs: int = 64,
    ) -> None:
        check_backbone(backbone, flavour)
        if flavour not in ("ours", "published"):
            raise ValueError(f"flavour: expected 'ours' or 'published', got {flavour!r}.")
        if norm_order not in ("before-pool", "after-pool"):
            raise ValueError(f"norm_order: expected 'before-pool' or 'after-pool', got {norm_order!r}.")
        height, width = pair(window, "window")
        tokens = Grid.of(tuple(backbone.patch_embed.grid_size))
        if tokens.height % height or tokens.width % width:
            raise ValueError(
                f"A window of {height}x{width} tokens does not divide the {tokens.height}x{tokens.width} tokens: "
                f"the height must be one of {_divisors(tokens.height)} and the width one of {_divisors(tokens.width)}."
            )
        depth = len(backbone.blocks)
        if not 0 <= k <= depth:
            raise ValueError(f"k: this ViT has {depth} blocks, so k goes from 0 to {depth}; got {k}.")
        super().__init__(
            image=Grid.of(tuple(backbone.patch_embed.img_size)),
            grid=Grid(tokens.height // height, tokens.width // width),
            num_classes=backbone.num_classes,
            mean=mean,
            std=std,
            max_jobs=max_jobs if k < depth else LINEAR_JOBS,
        )
        self.backbone = backbone
        self.tokens, self.window, self.k = tokens, (height, width), k
        self.flavour: Flavour = flavour
        self.norm_order: NormOrder = norm_order

    @property
    def depth(self) -> int:
        """L, the number of blocks."""
        return len(self.backbone.blocks)

    @property
    def pixels(self) -> tuple[int, int]:
        """The pixels (height, width) under one window."""
        token = self.backbone.patch_embed.patch_size
        return self.window[0] * token[0], self.window[1] * token[1]

    def corrupted(self, box: Box) -> Box:
        height, width = self.pixels
        cells = Box(box.top // height, box.left // width, -(-box.bottom // height), -(-box.right // width))
        return cells.intersect(self.grid.box)

    def receptive(self, cells: Box) -> Box:
        height, width = self.pixels
        return Box(cells.top * height, cells.left * width, cells.bottom * height, cells.right * width)

    def features(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b windows ..."]:
        """Tokens of each window after k blocks; at k = L their mean (ours) or their mean logits (published)."""
        vit: Any = self.backbone
        tokens = self._windows(self._embed(images))
        batch, windows = tokens.shape[:2]
        x: Tensor = tokens.flatten(0, 1)
        if self.flavour == "published":
            x = torch.cat([vit.cls_token.expand(len(x), -1, -1), x], dim=1)
        x = vit.norm_pre(x)
        fast = self._fast
        if self.k < self.depth or self.flavour == "published" or not fast:
            for block in vit.blocks[: self.k]:
                x = whole(block, x) if fast else block(x)
            if self.k == self.depth and self.flavour == "published":
                x = vit.head(vit.head_drop(vit.fc_norm(vit.norm(x)[:, 1:])))
            if self.k == self.depth:
                x = x.mean(1)
        else:
            x = pooled_blocks(list(vit.blocks), x)
        return x.view(batch, windows, *x.shape[1:])

    @property
    def _fast(self) -> bool:
        """May the exact speed-ups be taken?"""
        return not self.training and all(is_plain(block) for block in self.backbone.blocks)

    def prepare(self, features: Float[Tensor, "b windows ..."], jobs: int) -> Float[Tensor, "b windows d"] | Shared:
        """Below k = L: the features, and the queries, keys and values that the first global block makes of them."""
        if self.k == self.depth:
            return features
        return Shared(features, heads(self.backbone.blocks[self.k], features) if self._fast else None)

    def at_once(self, length: int) -> int:
        if self.k == self.depth or not self.mean.is_cpu:
            return self.max_jobs
        hidden = length * self.window[0] * self.window[1] * 4 * self.backbone.embed_dim
        return max(1, min(self.max_jobs, ACTIVATIONS // hidden))

    def masked(
        self, prepared: Any, images: Int[Tensor, " j"], hidden: Bool[Tensor, "j windows"]
    ) -> Float[Tensor, "j classes"]:
        vit: Any = self.backbone
        if self.k == self.depth:
            total = visible_sum(prepared, images, hidden.view(-1, self.grid.height, self.grid.width))
            return (
                total if self.flavour == "published" else self._head(total / (~hidden).sum(1, keepdim=True).to(total))
            )
        if self.flavour == "ours":
            return self._head(drop_hidden(list(vit.blocks)[self.k :], prepared, images, hidden))
        tokens, counts = zero_hidden(list(vit.blocks)[self.k :], prepared, images, hidden)
        share = counts / counts.sum()
        if self.norm_order == "after-pool":
            return self._head(share @ tokens)
        logits: Tensor = vit.head(vit.head_drop(share @ vit.fc_norm(vit.norm(tokens))))
        return logits

    def under(self, images: Float[Tensor, "b c h w"], hidden: Bool[Tensor, "b h2 w2"]) -> Float[Tensor, "b classes"]:
        """See `SplitModel`. In our flavour no window needs another before the split, so hidden ones are never made."""
        if self.flavour == "published":
            return super().under(images, hidden)
        tokens = self._windows(self._embed(images))
        visible = self.lengths(hidden.flatten(1))
        groups = [(visible == count).nonzero()[:, 0] for count in visible.unique()]
        logits = torch.cat([self._seen(tokens[group], hidden[group]) for group in groups])
        return logits[torch.cat(groups).argsort()]

    def _seen(
        self, tokens: Float[Tensor, "b windows n d"], hidden: Bool[Tensor, "b h2 w2"]
    ) -> Float[Tensor, "b classes"]:
        """The logits of images that show equally many windows."""
        vit: Any = self.backbone
        kept = visible_windows(hidden.flatten(1))
        x = tokens[torch.arange(len(tokens), device=tokens.device)[:, None], kept]
        x = vit.norm_pre(x).flatten(0, 1)
        for block in vit.blocks[: self.k]:
            x = block(x)
        x = x.reshape(len(tokens), -1, x.shape[-1])
        for block in vit.blocks[self.k :]:
            x = block(x)
        return self._head(x.mean(1))

    def local_logits(self, features: Float[Tensor, "b windows ..."]) -> Float[Tensor, "b windows classes"]:
        if self.k < self.depth:
            return super().local_logits(features)
        return features if self.flavour == "published" else self._head(features)

    def _embed(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b rows cols d"]:
        vit: Any = self.backbone
        tokens: Tensor = vit.patch_embed.norm(vit.patch_embed.proj(self.normalize(images)).flatten(2).transpose(1, 2))
        if vit.pos_embed is not None:
            tokens = tokens + vit.pos_embed[:, 0 if vit.no_embed_class else vit.num_prefix_tokens :]
        placed: Tensor = vit.pos_drop(tokens).unflatten(1, (self.tokens.height, self.tokens.width))
        return placed

    def _windows(self, tokens: Float[Tensor, "b rows cols d"]) -> Float[Tensor, "b windows n d"]:
        height, width = self.window
        cut: Tensor = tokens.unflatten(2, (self.grid.width, width)).unflatten(1, (self.grid.height, height))
        return cut.transpose(2, 3).flatten(3, 4).flatten(1, 2)

    def _head(self, pooled: Float[Tensor, "*j d"]) -> Float[Tensor, "*j classes"]:
        vit: Any = self.backbone
        logits: Tensor = vit.head(vit.head_drop(vit.fc_norm(vit.norm(pooled))))
        return logits


def check_backbone(backbone: nn.Module, flavour: str) -> None:
    """Refuse a network that is no ViT, or one that cannot be split."""
    ensure_torchvision()
    from timm.models.vision_transformer import VisionTransformer

    if not isinstance(backbone, VisionTransformer):
        raise ValueError(
            f"Expected a timm VisionTransformer, got {type(backbone).__name__}: any other network can be used at "
            "k = 0 with AnyClassifier."
        )
    if backbone.attn_pool is not None:
        raise ValueError("A ViT with attention pooling is not supported: create it with global_pool='avg'.")
    if flavour == "published" and (backbone.cls_token is None or backbone.num_prefix_tokens != 1):
        raise ValueError("The published flavour needs exactly one class token: use flavour='ours'.")


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]
