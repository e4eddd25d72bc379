"""Parts of a timm transformer block, for the exact speed-ups of the LRF part.

Everything here computes what ``block(x)`` computes, up to rounding. It holds in evaluation mode only: dropout and
stochastic depth are left out.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

ACTIVATIONS = 1 << 22
"""So many numbers between the two layers of an MLP are computed at once on a CPU: they stay near the cache, and their
memory is used again. Larger pieces come from the system anew each time."""

ROWS = 256
"""The activation function is applied to so many tokens at a time, in place."""


class Heads(NamedTuple):
    """Queries, keys and values of tokens, with the heads apart."""

    q: Float[Tensor, "... n heads d"]
    k: Float[Tensor, "... n heads d"]
    v: Float[Tensor, "... n heads d"]


def is_plain(block: nn.Module) -> bool:
    """Is this timm's ordinary pre-norm block, whose parts we know?"""
    from timm.layers.attention import Attention
    from timm.layers.mlp import Mlp
    from timm.models.vision_transformer import Block

    if type(block) is not Block or type(block.attn) is not Attention or type(block.mlp) is not Mlp:
        return False
    return getattr(block.attn, "gate", None) is None


def heads(block: Any, x: Float[Tensor, "... n dim"]) -> Heads:
    """The block's queries, keys and values, each token on its own."""
    attention = block.attn
    q, k, v = attention.qkv(block.norm1(x)).unflatten(-1, (3, attention.num_heads, -1)).unbind(-3)
    return Heads(attention.q_norm(q), attention.k_norm(k), v)


def attend(
    block: Any, x: Float[Tensor, "b n dim"], own: Heads, bias: Float[Tensor, "1 1 1 n"] | None = None
) -> Float[Tensor, "b n dim"]:
    """The first half of the block: tokens that attend to one another; `bias` is added to the attention logits."""
    attention = block.attn
    q, k, v = (part.transpose(1, 2) for part in own)
    if bias is not None:
        bias = bias.expand(len(x), 1, q.shape[2], k.shape[2])
    mixed = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=attention.scale)
    result: Tensor = x + block.ls1(attention.proj(attention.norm(mixed.transpose(1, 2).flatten(2))))
    return result


def feed(block: Any, x: Float[Tensor, "b n dim"]) -> Float[Tensor, "b n dim"]:
    """The second half of the block: each token on its own."""
    result: Tensor = x + block.ls2(block.mlp.fc2(_inner(block, x)))
    return result


def feed_pooled(block: Any, x: Float[Tensor, "b n dim"]) -> Float[Tensor, "b dim"]:
    """The mean over tokens of `feed`; the second layer of the MLP is linear, so it is applied to the mean alone."""
    result: Tensor = x.mean(1) + block.ls2(block.mlp.fc2(_inner(block, x).mean(1)))
    return result


def _inner(block: Any, x: Float[Tensor, "b n dim"]) -> Float[Tensor, "b n hidden"]:
    """What stands between the two layers of the MLP."""
    mlp = block.mlp
    inner: Tensor = mlp.fc1(block.norm2(x))
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or not inner.is_cpu:
        inner = mlp.act(inner)
    else:
        for rows in inner.flatten(0, 1).split(ROWS):
            rows.copy_(mlp.act(rows))
    normed: Tensor = mlp.norm(inner)
    return normed


def whole(
    block: Any, x: Float[Tensor, "b n dim"], bias: Float[Tensor, "1 1 1 n"] | None = None
) -> Float[Tensor, "b n dim"]:
    """The block, with a bias on the attention logits."""
    return feed(block, attend(block, x, heads(block, x), bias))


def repeated(count: int, tokens: int, like: Tensor) -> Float[Tensor, "1 1 1 n"]:
    """The bias that makes the last of some tokens count as `count` equal ones: each would add exp(logit) to the sum."""
    bias = like.new_zeros(1, 1, 1, tokens)
    bias[..., -1] = torch.log(torch.tensor(float(count)))
    return bias
