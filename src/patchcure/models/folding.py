"""A BagNet as it is fastest in inference: the same function with fewer operations."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from patchcure.models.bagnet import BagResNet


def fold(network: BagResNet) -> BagResNet:
    """A copy in evaluation mode in which

    * every batch norm is folded into the convolution before it;
    * the stem's 1x1 and 3x3 convolutions, with nothing between them, are one 3x3 convolution;
    * weights are laid out channels last.

    Equal to the network up to rounding.
    """
    folded = copy.deepcopy(network).eval().requires_grad_(False)
    stem = nn.Conv2d(folded.conv1.in_channels, folded.conv2.out_channels, 3, bias=False)
    stem.weight = nn.Parameter(
        torch.einsum("oihw,ic->ochw", folded.conv2.weight, folded.conv1.weight[:, :, 0, 0]), requires_grad=False
    )
    folded.conv1, folded.conv2 = nn.Identity(), fuse_conv_bn_eval(stem.eval(), folded.bn1)  # type: ignore[assignment]
    folded.bn1 = nn.Identity()  # type: ignore[assignment]
    for block in folded.blocks:
        for index in range(1, block.count + 1):
            conv, norm = getattr(block, f"conv{index}"), getattr(block, f"bn{index}")
            setattr(block, f"conv{index}", fuse_conv_bn_eval(conv, norm))
            setattr(block, f"bn{index}", nn.Identity())
        if block.downsample is not None:
            block.downsample = nn.Sequential(fuse_conv_bn_eval(*block.downsample))
    folded.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return folded


def state(network: nn.Module) -> tuple[object, ...]:
    """Changes whenever a tensor of the network is replaced, moved or written to."""
    tensors = (*network.parameters(), *network.buffers())
    return tuple((id(tensor), tensor._version, tensor.device, tensor.dtype) for tensor in tensors)
