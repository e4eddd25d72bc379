"""Attackers that try everything: models so small that every patch, or every table of labels, can be tried."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from patchcure import Box, Defense, Grid, MaskSet, PatchThreat, SplitModel
from patchcure.operations import SecureOperation

Rule = Callable[[Tensor], Tensor]
"""Tables of symbols (n, m + 1, m + 1) to labels (n), -1 for an alarm."""

Claim = Callable[[Tensor], Tensor]
"""Tables of symbols to booleans (n, locations): "no patch at this location changes the label from 0"."""


class TinyModel(SplitModel):
    """Cells hold one of 0, 1, 2; the logits are an arbitrary (hashed) function of what is visible and where.

    Args:
        image: the pixels, of value 0, 1/2 or 1.
        size, jump: cell i reads the pixels from i * jump to i * jump + size, on both axes where the image has room.
        bias: how often the label is 0.
        seed: which arbitrary function.
    """

    values = 3

    def __init__(self, image: Grid, size: int = 1, jump: int = 1, bias: float = 0.9, seed: int = 0) -> None:
        self.sizes = [min(size, image.height), min(size, image.width)]
        self.jump = jump
        cells = [(n - s) // jump + 1 for n, s in zip((image.height, image.width), self.sizes, strict=True)]
        super().__init__(image, Grid(*cells), 3, mean=(0.0,), std=(1.0,), max_jobs=1 << 20)
        self.bias = bias
        self.draw(seed)
        self.eval()

    def draw(self, seed: int) -> None:
        """Become another arbitrary function."""
        random = torch.Generator().manual_seed(seed)
        self.weights = torch.randint(1, self.values, self.sizes, generator=random)
        self.table = torch.randint(-(1 << 62), 1 << 62, (self.grid.cells, self.values + 1), generator=random)

    def _axis(self, pixels: tuple[int, int], axis: int) -> tuple[int, int]:
        cells = self.grid.height if axis == 0 else self.grid.width
        hit = [i for i in range(cells) if i * self.jump < pixels[1] and pixels[0] < i * self.jump + self.sizes[axis]]
        return (hit[0], hit[-1] + 1) if hit else (0, 0)

    def corrupted(self, box: Box) -> Box:
        return Box.of(self._axis(box.rows, 0), self._axis(box.cols, 1))

    def receptive(self, cells: Box) -> Box:
        top, left = cells.top * self.jump, cells.left * self.jump
        bottom, right = (cells.bottom - 1) * self.jump, (cells.right - 1) * self.jump
        return Box(top, left, bottom + self.sizes[0], right + self.sizes[1]).intersect(self.image.box)

    def features(self, images: Tensor) -> Tensor:
        pixels = (images[:, 0] * (self.values - 1)).round().long()
        fields = pixels.unfold(1, self.sizes[0], self.jump).unfold(2, self.sizes[1], self.jump)
        return ((fields * self.weights).sum((-1, -2)) % self.values).flatten(1).float()

    def masked(self, features: Tensor, images: Tensor, hidden: Tensor) -> Tensor:
        content = torch.where(hidden, self.values, features[images].long())
        key = _mix(self.table[torch.arange(self.grid.cells), content].sum(1))
        chance = (key & 0xFFFF) / 65536
        label = torch.where(chance < self.bias, 0, 1 + ((key >> 16) & 1))
        strength = 1 + ((key >> 20) & 0xFF) / 85
        return torch.nn.functional.one_hot(label, 3) * strength[:, None].float()


def _mix(key: Tensor) -> Tensor:
    for shift, factor in ((31, 0x7FB5D329728EA185 - (1 << 63)), (27, 0x1B873593CC9E2D51), (33, 1)):
        key = (key ^ ((key >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return key


def every_content(image: Tensor, boxes: Sequence[Box], values: int = 3) -> Tensor:
    """The image with everything that an attacker may write into these boxes."""
    pixels = sorted({(r, c) for box in boxes for r in range(*box.rows) for c in range(*box.cols)})
    contents = torch.cartesian_prod(*[torch.arange(values)] * len(pixels)).view(-1, len(pixels)) / (values - 1)
    attacked = image.expand(len(contents), *image.shape).clone()
    rows, cols = torch.tensor(pixels).T
    attacked[:, 0, rows, cols] = contents
    return attacked


def placements(threat: PatchThreat) -> Iterator[tuple[tuple[int, int, int], ...]]:
    """Every choice of (shape, row, column) for all patches of the threat."""
    singles = [
        (index, row, col)
        for index, (h, w) in enumerate(threat.shapes)
        for row in range(threat.image.height - h + 1)
        for col in range(threat.image.width - w + 1)
    ]
    yield from itertools.combinations_with_replacement(singles, threat.count)


def broken_placements(
    defense: Defense, threat: PatchThreat, image: Tensor, label: int
) -> tuple[list[tuple[tuple[int, int, int], ...]], int]:
    """The placements of the threat at which some patch makes the defense give another label (an alarm is no other
    label), and how many attacks were tried."""
    where = list(placements(threat))
    batches = []
    for place in where:
        corners = [(row, col, *threat.shapes[shape]) for shape, row, col in place]
        batches.append(every_content(image, [Box(r, c, r + h, c + w) for r, c, h, w in corners]))
    prediction = defense.predict(torch.cat(batches))
    wrong = (prediction.labels != label) & ~prediction.alarm
    parts = wrong.split([len(batch) for batch in batches])
    return [place for place, part in zip(where, parts, strict=True) if bool(part.any())], len(wrong)


class TableModel(SplitModel):
    """Its features *are* the table of predictions: entry (i, j) is the symbol seen under masks i and j, (m, m) the one
    without a mask. The grid has a row of locations, which masks cover at will, and a row with one cell for each mask,
    which tells the pair. A patch is one pixel, and owns one location.

    Args:
        covers: (locations, masks), which masks hide which location.
        alphabet: (symbols, classes), the logits of each symbol.
    """

    def __init__(self, covers: Tensor, alphabet: Tensor, together: int = 2) -> None:
        locations, self.count = covers.shape
        grid = Grid(2, max(locations, self.count) + 1)
        super().__init__(Grid(1, locations), grid, alphabet.shape[1], mean=(0.0,), std=(1.0,), max_jobs=1 << 22)
        self.covers, self.alphabet = covers, alphabet
        self.threat = PatchThreat.square(1, Grid(1, locations))
        boxes = [
            (Box(1, mask, 2, mask + 1), *(Box(0, at, 1, at + 1) for at in covers[:, mask].nonzero()[:, 0].tolist()))
            for mask in range(self.count)
        ]
        self.masks = MaskSet(tuple(boxes), self.threat.on_features(grid, self.corrupted), together)
        self.eval()

    def corrupted(self, box: Box) -> Box:
        return Box(0, box.left, 1, box.right)

    def receptive(self, cells: Box) -> Box:
        return self.image.box

    def features(self, images: Tensor) -> Tensor:
        raise NotImplementedError("the attacker writes the table")

    def masked(self, features: Tensor, images: Tensor, hidden: Tensor) -> Tensor:
        names = hidden.view(len(hidden), 2, -1)[:, 1, : self.count]
        none = ~names.any(1)
        first = torch.where(none, self.count, names.long().argmax(1))
        second = torch.where(none, self.count, self.count - 1 - names.long().flip(1).argmax(1))
        return self.alphabet[features[images, first, second].long()]

    def rule(self, operation: SecureOperation) -> Rule:
        """The answers of an operation."""
        return lambda tables: operation.predict(self, tables, self.masks).labels

    def claim(self, operation: SecureOperation) -> Claim:
        """The locations that an operation certifies for label 0."""

        def safe(tables: Tensor) -> Tensor:
            labels = torch.zeros(len(tables), dtype=torch.long)
            return operation.certify(self, tables, self.masks, self.threat, labels).safe[0][:, 0]

        return safe


@dataclass(frozen=True)
class Falsified:
    """What the falsifier found: attacks in which a claim for label 0 holds and the label is another one."""

    tried: int
    broken: int
    example: tuple[Tensor, Tensor, int] | None  # the clean table, the attacked table, the location


def every_table(
    count: int, symbols: int, pairs: bool = True, unmasked: bool = True
) -> tuple[Tensor, Tensor, list[tuple[int, int]]]:
    """All symmetric tables for so many masks, their symbols as rows of a list, and the entry of each symbol.

    Without `pairs` only the diagonal is filled, without `unmasked` the last entry is not.
    """
    entries = [(i, j) for i in range(count) for j in range(i, count if pairs else i + 1)]
    entries += [(count, count)] * (pairs and unmasked)
    codes = torch.cartesian_prod(*[torch.arange(symbols)] * len(entries)).view(-1, len(entries))
    tables = torch.zeros(len(codes), count + 1, count + 1)
    for index, (i, j) in enumerate(entries):
        tables[:, i, j] = tables[:, j, i] = codes[:, index].float()
    return tables, codes, entries


def falsify(
    rule: Rule, claim: Claim, covers: Tensor, symbols: int, pairs: bool = True, unmasked: bool = True
) -> Falsified:
    """Try every table of symbols, and every table into which a patch at every location can turn it.

    A patch at location l changes entry (i, j) at will, unless mask i or mask j hides l. So tables that agree where l is
    hidden can be turned into each other: a claim for l must hold for all of them or for none.
    """
    count = covers.shape[1]
    tables, codes, entries = every_table(count, symbols, pairs, unmasked)
    wrong = ((labels := rule(tables)) != 0) & (labels != -1)
    holds = claim(tables)
    tried = broken = 0
    example = None
    for at in range(len(covers)):
        fixed = [k for k, (i, j) in enumerate(entries) if i < count and bool(covers[at, i] | covers[at, j])]
        world = (codes[:, fixed] * symbols ** torch.arange(len(fixed))).sum(1).numpy()
        size, claims = np.bincount(world), np.bincount(world, weights=holds[:, at].numpy())
        wrongs = np.bincount(world, weights=wrong.numpy())
        tried += int((size * claims).sum())
        broken += int((wrongs * claims).sum())
        if example is None and (claims * wrongs).any():
            chosen = torch.from_numpy(world == np.flatnonzero(claims * wrongs)[0])
            example = (tables[chosen & holds[:, at]][0], tables[chosen & wrong][0], at)
    return Falsified(tried, broken, example)


@dataclass(frozen=True)
class Attackers:
    """Everything above, for tests (which cannot import each other)."""

    tiny: type[TinyModel] = TinyModel
    table: type[TableModel] = TableModel
    broken_placements: Callable[..., tuple[list[tuple[tuple[int, int, int], ...]], int]] = broken_placements
    every_table: Callable[..., tuple[Tensor, Tensor, list[tuple[int, int]]]] = every_table
    falsify: Callable[..., Falsified] = falsify


@pytest.fixture
def attackers() -> Attackers:
    """Models to attack and the attackers."""
    return Attackers()
