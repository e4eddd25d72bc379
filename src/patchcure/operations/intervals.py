"""Interval arithmetic through a network, with room for rounding."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from patchcure.geometry import pair

MONOTONE = (nn.ReLU, nn.MaxPool2d, nn.Flatten, nn.Identity, nn.Dropout)
"""Layers that round nothing and map larger inputs to larger outputs (dropout: in evaluation)."""

Bounds = tuple[Float[Tensor, "j ..."], Float[Tensor, "j ..."]]


def layers_of(network: nn.Module) -> Iterator[nn.Module]:
    """The layers of a sequence, and of sequences in it; others than we can bound are refused."""
    if isinstance(network, nn.Sequential):
        for part in network:
            yield from layers_of(part)
    elif isinstance(network, nn.Conv2d) and network.padding_mode != "zeros":
        raise ValueError(f"Interval bounds need convolutions with zero padding, got {network.padding_mode!r}.")
    elif isinstance(network, nn.BatchNorm2d) and network.running_mean is None:
        raise ValueError("Interval bounds need batch norms with running statistics: the batch may not matter.")
    elif isinstance(network, (nn.Conv2d, nn.Linear, nn.BatchNorm2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, *MONOTONE)):
        yield network
    else:
        raise ValueError(
            f"Interval bounds do not go through {type(network).__name__}: use an nn.Sequential of Conv2d, Linear, "
            "BatchNorm2d, ReLU, average or max pooling and Flatten (see patchcure.models.ibp.small_cnn)."
        )


@contextmanager
def sums_of_products() -> Iterator[None]:
    """Convolutions inside add products: libraries that may choose Winograd or Fourier transforms are switched off."""
    if torch.get_float32_matmul_precision() != "highest":
        raise ValueError(
            "Products may be rounded to TF32 or bfloat16, for which interval bounds are not proved: call "
            'torch.set_float32_matmul_precision("highest") first.'
        )
    backends: Any = torch.backends
    before = backends.mkldnn.enabled
    with backends.cudnn.flags(enabled=False, allow_tf32=False), backends.nnpack.flags(enabled=False):
        backends.mkldnn.enabled = False
        try:
            yield
        finally:
            backends.mkldnn.enabled = before


def margins_below(
    network: nn.Module,
    lower: Float[Tensor, "j c h w"],
    upper: Float[Tensor, "j c h w"],
    labels: Int[Tensor, " j"],
    dtype: torch.dtype,
) -> Float[Tensor, "j classes"]:
    """Lower bounds of the label's logit minus each other logit, for all inputs between the bounds (own: infinity).

    The last layer is merged with the difference: the bound of (W_y - W_c) h is tighter than the difference of two
    bounds. Differentiable, so that networks can be trained with it.

    **Rounding.** The bounds hold for the real network and for the one that a machine computes in `dtype`, if it adds
    products (in any order, fused or not). Let eps be the spacing of `dtype` at 1. A computed sum of n products and a
    bias is off by at most (n+1) eps/2 (|W| |x| + |b|) to first order; our own arithmetic in float64, on midpoints c and
    radii r with |c| + r = m = max(|l|, |u|), by at most (n+4) eps (|W| m + |b|), as float64 is at least as fine as
    `dtype`. Each layer's bounds are moved outward by 2 (n+4) eps (|W| m + |b|), more than both together, and by n times
    the smallest normal number for underflow. By induction the computed values of every layer lie between its bounds.
    Algorithms that are no sums of products (Winograd, TF32) are not covered: see `sums_of_products`.

    >>> network = nn.Sequential(nn.Flatten(), nn.Linear(1, 2, bias=False))
    >>> _ = nn.init.ones_(network[1].weight[:1].data), nn.init.zeros_(network[1].weight[1:].data)
    >>> low, high = torch.full((1, 1, 1, 1), 0.25), torch.full((1, 1, 1, 1), 0.75)
    >>> margins_below(network, low, high, torch.tensor([0]), torch.float32).detach().round(decimals=3)
    tensor([[   inf, 0.2500]], dtype=torch.float64)
    """
    *layers, last = layers_of(network)
    if not isinstance(last, nn.Linear):
        raise ValueError(f"Interval bounds need a linear layer at the end, got {type(last).__name__}.")
    bounds = lower.double(), upper.double()
    for layer in layers:
        bounds = _through(layer, *bounds, dtype)
    center, radius, largest = _middle(*bounds)
    weight, bias = last.weight.double(), _bias(last)
    difference = weight[labels][:, None] - weight
    sizes = weight.abs()[labels][:, None] + weight.abs()
    middle = (difference @ center[:, :, None])[..., 0] + bias[labels][:, None] - bias
    spread = (difference.abs() @ radius[:, :, None])[..., 0]
    size = (sizes @ largest[:, :, None])[..., 0] + bias.abs()[labels][:, None] + bias.abs()
    below = middle - spread - _slack(weight.shape[1], size, dtype)
    return below.scatter(1, labels[:, None], torch.inf)


def _through(layer: nn.Module, lower: Tensor, upper: Tensor, dtype: torch.dtype) -> Bounds:
    """The bounds after one layer."""
    if isinstance(layer, MONOTONE):
        return layer(lower), layer(upper)
    center, radius, largest = _middle(lower, upper)
    if isinstance(layer, nn.Conv2d | nn.Linear):
        weight, bias = layer.weight.double(), _bias(layer)
        bias = bias.view(-1, 1, 1) if isinstance(layer, nn.Conv2d) else bias
        middle = _product(layer, center, weight) + bias
        spread, size = _product(layer, torch.cat([radius, largest]), weight.abs()).chunk(2)
        size, terms = size + bias.abs(), weight[0].numel()
    elif isinstance(layer, nn.BatchNorm2d):
        mean, scale, shift = (value.view(-1, 1, 1) for value in _norm(layer))
        middle, spread = (center - mean) * scale + shift, radius * scale.abs()
        size, terms = (largest + mean.abs()) * scale.abs() + shift.abs(), 8  # for the roundings of the scale
    else:
        middle, spread, size = layer(center), layer(radius), layer(largest)
        terms = math.prod(pair(layer.kernel_size, "pool") if isinstance(layer, nn.AvgPool2d) else lower.shape[-2:])
    slack = _slack(terms, size, dtype)
    return middle - spread - slack, middle + spread + slack


def _middle(lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Midpoint, radius, and the largest absolute value."""
    return (lower + upper) / 2, (upper - lower) / 2, torch.maximum(lower.abs(), upper.abs())


def _slack(terms: int, size: Tensor, dtype: torch.dtype) -> Tensor:
    kind = torch.finfo(dtype)
    return 2 * (terms + 4) * (kind.eps * size + kind.tiny)


def _product(layer: nn.Conv2d | nn.Linear, x: Tensor, weight: Tensor) -> Tensor:
    if isinstance(layer, nn.Linear):
        return F.linear(x, weight)
    return F.conv2d(x, weight, None, layer.stride, layer.padding, layer.dilation, layer.groups)


def _bias(layer: nn.Conv2d | nn.Linear) -> Tensor:
    return layer.weight.new_zeros(len(layer.weight)).double() if layer.bias is None else layer.bias.double()


def _norm(layer: nn.BatchNorm2d) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, scale and shift of a batch norm in evaluation."""
    mean, variance = layer.running_mean, layer.running_var
    if mean is None or variance is None:
        raise ValueError("Interval bounds need batch norms with running statistics: the batch may not matter.")
    scale = (variance.double() + layer.eps).rsqrt()
    if layer.affine:
        return mean.double(), scale * layer.weight.double(), layer.bias.double()
    return mean.double(), scale, torch.zeros_like(scale)
