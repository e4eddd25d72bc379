"""Networks made for small parts of an image: one reads both signs of the colours, one drops hidden tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from patchcure.geometry import Grid
from patchcure.models.base import IMAGENET_MEAN, IMAGENET_STD
from patchcure.models.classifier import AnyClassifier
from patchcure.models.vit import check_backbone

if TYPE_CHECKING:
    from timm.models.vision_transformer import VisionTransformer


class TwoSignClassifier(AnyClassifier):
    """A network that reads the colours x and 1 - x beside each other; a hidden pixel is zero in both.

    So the network can tell a hidden pixel from any colour: x and 1 - x are never both zero. There is no other
    normalisation.

    Args:
        network: maps images with twice the channels to logits.
        image: the size of the images.
        num_classes: how many logits it gives.
        channels: of the images.

    >>> model = TwoSignClassifier(nn.Sequential(nn.Flatten(), nn.Linear(96, 2)), image=4, num_classes=2)
    >>> model.features(torch.zeros(1, 3, 4, 4))[0, :, 0, 0]
    tensor([0., 0., 0., 1., 1., 1.])
    """

    def __init__(
        self,
        network: nn.Module,
        image: int | tuple[int, int] | Grid,
        num_classes: int,
        channels: int = 3,
        max_jobs: int = 32,
    ) -> None:
        super().__init__(network, image, num_classes, (0.0,) * channels, (1.0,) * channels, max_jobs)

    def features(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b 2c h w"]:
        return torch.cat([images, 1 - images], dim=1)

    def plain(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b classes"]:
        logits: Tensor = self.backbone(self.features(images))
        return logits


class DroppingViT(AnyClassifier):
    """Any timm VisionTransformer, of which only the tokens with a visible pixel are computed.

    A cell is a pixel. A token whose pixels are all hidden is dropped; in the others the hidden pixels have the mean
    colour. The kept tokens and the class token attend to each other and to nothing else, so each ablation is an
    isolated unit of attention, and its cost is that of its own tokens.

    Args:
        backbone: a timm VisionTransformer; its parameters keep their names, and its pooling is used as it is.
    """

    backbone: VisionTransformer

    def __init__(
        self,
        backbone: VisionTransformer,
        mean: Sequence[float] = IMAGENET_MEAN,
        std: Sequence[float] = IMAGENET_STD,
        max_jobs: int = 64,
    ) -> None:
        check_backbone(backbone, "ours")
        if not isinstance(backbone.patch_embed.proj, nn.Conv2d):
            raise ValueError("A ViT that drops tokens needs the usual patch embedding, one convolution.")
        image = Grid.of(tuple(backbone.patch_embed.img_size))
        height, width = backbone.patch_embed.patch_size
        if image.height % height or image.width % width:
            raise ValueError(
                f"An image of {image.height}x{image.width} pixels is not cut into whole tokens of {height}x{width}: "
                "use a multiple of the token, or another patch_size."
            )
        super().__init__(backbone, image, backbone.num_classes, mean, std, max_jobs)
        self.token: tuple[int, int] = (height, width)

    def lengths(self, hidden: Bool[Tensor, "j cells"]) -> Int[Tensor, " j"]:
        return self._seen(hidden).sum(1)

    def masked(
        self, prepared: Float[Tensor, "b c h w"], images: Int[Tensor, " j"], hidden: Bool[Tensor, "j cells"]
    ) -> Float[Tensor, "j classes"]:
        vit: Any = self.backbone
        seen = self._seen(hidden)
        width = self.grid.width // self.token[1]
        tokens = seen.nonzero()[:, 1].view(len(hidden), -1)
        pixels: Tensor = self._cut(prepared)[images[:, None], :, tokens // width, :, tokens % width]
        jobs = torch.arange(len(hidden), device=hidden.device)[:, None]
        gone: Tensor = self._cut(hidden.view(-1, 1, self.grid.height, self.grid.width))[
            jobs, :, tokens // width, :, tokens % width
        ]
        visible = torch.where(gone.to(pixels.device), 0, pixels).flatten(2)
        proj = vit.patch_embed.proj
        x: Tensor = vit.patch_embed.norm(nn.functional.linear(visible, proj.weight.flatten(1), proj.bias))
        x = torch.cat([self._prefix().expand(len(x), -1, -1), x + self._positions()[tokens]], dim=1)
        x = vit.norm_pre(vit.pos_drop(x))
        for block in vit.blocks:
            x = block(x)
        logits: Tensor = vit.forward_head(vit.norm(x))
        return logits

    def _cut(self, images: Tensor) -> Tensor:
        """Images (b, c, h, w) as a view (b, c, rows, token height, columns, token width)."""
        cut: Tensor = images.unflatten(3, (-1, self.token[1])).unflatten(2, (-1, self.token[0]))
        return cut

    def _seen(self, hidden: Bool[Tensor, "j cells"]) -> Bool[Tensor, "j tokens"]:
        """Which tokens have a visible pixel."""
        pixels = self._cut(~hidden.view(-1, 1, self.grid.height, self.grid.width))
        return pixels.any(5).any(3).flatten(1)

    def _prefix(self) -> Float[Tensor, "1 p d"]:
        """The class and register tokens, with their positions if they have any."""
        vit: Any = self.backbone
        tokens = [token for token in (vit.cls_token, vit.reg_token) if token is not None]
        prefix = torch.cat(tokens, dim=1) if tokens else vit.patch_embed.proj.weight.new_zeros(1, 0, vit.embed_dim)
        placed: Tensor = prefix
        if vit.pos_embed is not None and not vit.no_embed_class:
            placed = prefix + vit.pos_embed[:, : vit.num_prefix_tokens]
        return placed

    def _positions(self) -> Float[Tensor, "tokens d"]:
        """The position embeddings of the image's tokens."""
        vit: Any = self.backbone
        if vit.pos_embed is None:
            count = self.grid.cells // (self.token[0] * self.token[1])
            none: Tensor = vit.patch_embed.proj.weight.new_zeros(count, vit.embed_dim)
            return none
        places: Tensor = vit.pos_embed[0, 0 if vit.no_embed_class else vit.num_prefix_tokens :]
        return places
