"""BagNets (ResNets with a small receptive field), and hybrids: first layers from a BagNet, the rest from a ResNet."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor, nn


@dataclass(frozen=True)
class Design:
    """A residual network and its BagNet.

    Args:
        blocks: residual blocks in each of the four stages.
        bottleneck: 1x1, 3x3, 1x1 convolutions (ResNet-50) or 3x3, 3x3 (ResNet-18).
        bag_strides: the stages' strides in the BagNet.
        strides: the stages' strides in the rest of a hybrid.
        kernels: for each receptive field, how many blocks of each stage keep a 3x3 convolution.
    """

    blocks: tuple[int, int, int, int]
    bottleneck: bool
    bag_strides: tuple[int, int, int, int]
    strides: tuple[int, int, int, int]
    kernels: dict[int, tuple[int, int, int, int]]

    @property
    def layers(self) -> int:
        """The name's number: convolutions on the main path and the classifier."""
        return 2 + sum(self.blocks) * (3 if self.bottleneck else 2)

    @property
    def splits(self) -> list[int]:
        """Where the network can be split: after its stem, after each residual block, and after everything."""
        each = 3 if self.bottleneck else 2
        return [*(1 + each * n for n in range(sum(self.blocks))), self.layers]

    def blocks_before(self, k: int) -> int:
        """How many residual blocks lie before layer k; k = all layers is the whole backbone."""
        if k not in self.splits:
            raise ValueError(
                f"k: this network can be split after its stem and after each residual block, at k in {self.splits} (0 "
                f"is any classifier with masks on the pixels); got {k}."
            )
        return self.splits.index(k)


DESIGNS = {
    50: Design(
        (3, 4, 6, 3),
        True,
        (2, 2, 2, 1),
        (1, 2, 2, 2),
        {9: (1, 1, 0, 0), 17: (1, 1, 1, 0), 33: (1, 1, 1, 1), 45: (2, 2, 1, 1)},
    ),
    18: Design((2, 2, 2, 2), False, (2, 1, 1, 1), (2, 1, 2, 2), {5: (1, 0, 0, 0), 9: (1, 1, 0, 0), 13: (1, 1, 1, 0)}),
}
"""ResNet-50 as in the paper, and ResNet-18 with the strides that suit images of 32 pixels."""


class Block(nn.Module):
    """A residual block; the main path may be smaller than its input, and the residual is cropped to it."""

    def __init__(self, inside: int, planes: int, bottleneck: bool, kernel: int, stride: int, padding: int) -> None:
        super().__init__()
        outside = planes * (4 if bottleneck else 1)
        if bottleneck:
            shapes = [(inside, planes, 1, 1, 0), (planes, planes, kernel, stride, padding), (planes, outside, 1, 1, 0)]
        else:
            second = kernel if padding else 1
            shapes = [(inside, planes, kernel, stride, padding), (planes, planes, second, 1, padding)]
        for index, (a, b, size, step, pad) in enumerate(shapes, start=1):
            setattr(self, f"conv{index}", nn.Conv2d(a, b, size, step, pad, bias=False))
            setattr(self, f"bn{index}", nn.BatchNorm2d(b))
        self.count = len(shapes)
        self.downsample: nn.Sequential | None = None
        if stride != 1 or inside != outside:
            self.downsample = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b d h2 w2"]:
        residual = x if self.downsample is None else self.downsample(x)
        for index in range(1, self.count + 1):
            x = getattr(self, f"bn{index}")(getattr(self, f"conv{index}")(x))
            if index < self.count:
                x = x.relu()
        return (x + residual[..., : x.shape[-2], : x.shape[-1]]).relu()


class BagResNet(nn.Module):
    """A BagNet up to some block, a ResNet after it; the parameters have the names of the released BagNets.

    Args:
        design: the base network.
        kernels: how many blocks of each stage keep a 3x3 convolution in the BagNet part.
        bag_blocks: how many residual blocks belong to the BagNet part.
    """

    def __init__(
        self,
        design: Design,
        kernels: Sequence[int],
        bag_blocks: int,
        num_classes: int,
        in_chans: int = 3,
        width: int = 64,
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_chans, width, 1, bias=False)
        self.conv2 = nn.Conv2d(width, width, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        channels, done = width, 0
        for stage, count in enumerate(design.blocks):
            blocks = []
            planes = width << stage
            for position in range(count):
                bag = done < bag_blocks
                strides = design.bag_strides if bag else design.strides
                kernel = 3 if not bag or position < kernels[stage] else 1
                stride = strides[stage] if position == 0 else 1
                blocks.append(Block(channels, planes, design.bottleneck, kernel, stride, 0 if bag else 1))
                channels, done = planes * (4 if design.bottleneck else 1), done + 1
            setattr(self, f"layer{stage + 1}", nn.Sequential(*blocks))
        self.fc = nn.Linear(channels, num_classes)
        self.design, self.bag_blocks = design, bag_blocks

    @property
    def blocks(self) -> list[Block]:
        """All residual blocks, first to last."""
        return [block for stage in range(1, 5) for block in getattr(self, f"layer{stage}")]

    def srf_convolutions(self, blocks: int) -> Iterator[nn.Conv2d]:
        """The convolutions on the main path of the stem and the first blocks, in order."""
        yield self.conv1
        yield self.conv2
        for block in self.blocks[:blocks]:
            for index in range(1, block.count + 1):
                yield getattr(block, f"conv{index}")

    def srf(self, x: Float[Tensor, "b c h w"], blocks: int) -> Float[Tensor, "b d h2 w2"]:
        """The stem and the first blocks."""
        x = self.bn1(self.conv2(self.conv1(x))).relu()
        for block in self.blocks[:blocks]:
            x = block(x)
        return x

    def lrf(self, x: Float[Tensor, "b d h w"], blocks: int) -> Float[Tensor, "b classes"]:
        """All but the first blocks, pooling and the classifier."""
        for block in self.blocks[blocks:]:
            x = block(x)
        logits: Tensor = self.fc(x.mean((2, 3)))
        return logits

    def forward(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b classes"]:
        """The undefended network."""
        return self.lrf(self.srf(x, self.bag_blocks), self.bag_blocks)
