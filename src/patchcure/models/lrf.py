"""The global blocks of a split ViT under masks, for both flavours; exact speed-ups, and the plain way for training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from patchcure.models.blocks import Heads, attend, feed, feed_pooled, heads, repeated, whole


class Shared(NamedTuple):
    """What all jobs of an image share: its tokens, and what the first global block makes of each of them alone."""

    tokens: Float[Tensor, "b windows n d"]
    heads: Heads | None
    """None where the plain way is taken: in training, or for blocks whose parts we do not know."""


def pooled_blocks(blocks: Sequence[nn.Module], x: Float[Tensor, "b n d"]) -> Float[Tensor, "b d"]:
    """The mean token after some blocks whose parts we know (at least one)."""
    for block in blocks[:-1]:
        x = whole(block, x)
    return feed_pooled(blocks[-1], attend(blocks[-1], x, heads(blocks[-1], x)))


def drop_hidden(
    blocks: Sequence[nn.Module], shared: Shared, images: Int[Tensor, " j"], hidden: Bool[Tensor, "j windows"]
) -> Float[Tensor, "j d"]:
    """Our flavour: the mean token after the blocks, over the visible tokens only."""
    windows = visible_windows(hidden)
    x = gather(shared.tokens, images, windows)
    if shared.heads is None:
        for block in blocks:
            x = block(x)
        return x.mean(1)
    x = attend(blocks[0], x, Heads(*(gather(part, images, windows) for part in shared.heads)))
    if len(blocks) == 1:
        return feed_pooled(blocks[0], x)
    return pooled_blocks(blocks[1:], feed(blocks[0], x))


def zero_hidden(
    blocks: Sequence[nn.Module], shared: Shared, images: Int[Tensor, " j"], hidden: Bool[Tensor, "j windows"]
) -> tuple[Float[Tensor, "j tokens d"], Float[Tensor, " tokens"]]:
    """Published flavour: the tokens after the blocks, and how often each counts; the class token is left out.

    Hidden tokens are all zero, and nothing later tells them apart, so they stay equal: one token stands for all of
    them, its attention logits raised by the logarithm of their number.
    """
    windows = visible_windows(hidden)
    tokens = shared.tokens
    cls = gather(tokens[:, :, :1], images, windows).mean(1, keepdim=True)
    if shared.heads is None:
        shown = torch.where(hidden[:, :, None, None], 0, tokens[images])[:, :, 1:].flatten(1, 2)
        x = torch.cat([cls, shown], dim=1)
        for block in blocks:
            x = block(x)
        return x[:, 1:], x.new_ones(x.shape[1] - 1)
    x = torch.cat([cls, gather(tokens[:, :, 1:], images, windows)], dim=1)
    own = [
        torch.cat([mine, gather(part[:, :, 1:], images, windows)], dim=1)
        for mine, part in zip(heads(blocks[0], cls), shared.heads, strict=True)
    ]
    gone = (tokens.shape[1] - windows.shape[1]) * (tokens.shape[2] - 1)
    bias = None
    if gone:
        zero = x.new_zeros(1, 1, x.shape[2])
        x = torch.cat([x, zero.expand(len(x), 1, -1)], dim=1)
        nothing = heads(blocks[0], zero)
        own = [torch.cat([a, b.expand(len(x), -1, -1, -1)], 1) for a, b in zip(own, nothing, strict=True)]
        bias = repeated(gone, x.shape[1], x)
    x = feed(blocks[0], attend(blocks[0], x, Heads(*own), bias))
    for block in blocks[1:]:
        x = whole(block, x, bias)
    counts = x.new_ones(x.shape[1] - 1)
    if gone:
        counts[-1] = gone
    return x[:, 1:], counts


def visible_windows(hidden: Bool[Tensor, "j windows"]) -> Int[Tensor, "j v"]:
    """The indices of the visible windows; every job leaves the same number of them."""
    return (~hidden).nonzero()[:, 1].view(len(hidden), -1)


def gather(values: Float[Tensor, "b windows n ..."], images: Int[Tensor, " j"], windows: Int[Tensor, "j v"]) -> Tensor:
    """For each job the tokens of these windows of its image, one after the other."""
    return values[images[:, None], windows].flatten(1, 2)
