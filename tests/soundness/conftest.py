"""The falsifier, and models so small that it can try everything: every patch, every table of labels, every ballot."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from patchcure import Box, Defense, Grid, MaskSet, PatchThreat, SplitModel
from patchcure.operations import SecureOperation

Place = tuple[tuple[int, int, int], ...]
"""The shape, row and column of every patch."""

FEW = 1024
"""So many contents of a patch are all tried; among more, the attacker searches."""


@dataclass(frozen=True)
class Game:
    """What an attacker of a rule and of a claim needs to know.

    A state is a row of symbols, one for each site: a pixel, the prediction under a pair of masks, a ballot. A patch at
    placement l rewrites the sites ``owned[l]``, and no others.

    Args:
        answer: states (n, sites) to labels (n), -1 for an alarm.
        safe: clean states to booleans (n, placements): "no patch there makes the answer another label than `label`".
        owned: (placements, sites).
        symbols: how many there are at each site.
        label: the true one.
        guide: the lower, the nearer is a state to a wrong answer; only for searches.
    """

    answer: Callable[[Tensor], Tensor]
    safe: Callable[[Tensor], Tensor]
    owned: Tensor
    symbols: int
    label: int = 0
    guide: Callable[[Tensor], Tensor] | None = None

    def wrong(self, states: Tensor) -> Tensor:
        """Where the answer is a wrong label (an alarm is none)."""
        answers = self.answer(states)
        return (answers != self.label) & (answers != -1)

    def states(self) -> Tensor:
        """All of them."""
        return every_state(self.symbols, self.owned.shape[1])

    def claims(self, safe: Callable[[Tensor], Tensor]) -> Game:
        """The same rule with another claim, of (n) or (n, placements)."""

        def everywhere(states: Tensor) -> Tensor:
            claim = safe(states)
            return (claim[:, None] if claim.ndim == 1 else claim).expand(-1, len(self.owned))

        return replace(self, safe=everywhere)

    def unclaimed(self) -> Game:
        """The same rule with the opposite claims: an attacker who cannot break some of these is weak."""
        return replace(self, safe=lambda states: ~self.safe(states))


@dataclass(frozen=True)
class Falsified:
    """What the falsifier found.

    Args:
        tried: attacks on placements that were claimed to be safe.
        broken: such claims (a clean state and a placement) that an attack refutes.
        example: a refuted claim: the clean state, the attacked state, the placement.
    """

    tried: int = 0
    broken: int = 0
    example: tuple[Tensor, Tensor, int] | None = None

    def __add__(self, other: Falsified) -> Falsified:
        return Falsified(self.tried + other.tried, self.broken + other.broken, self.example or other.example)


def every_state(symbols: int, sites: int) -> Tensor:
    """All rows of so many symbols."""
    return torch.cartesian_prod(*[torch.arange(symbols)] * sites).view(symbols**sites, sites)


def falsify(game: Game, clean: Tensor | None = None, seed: int = 0) -> Falsified:
    """Look for clean states with a claim that a patch can break: all clean states unless some are given, against all
    contents of a patch where those are few, else against those that a search comes across."""
    states = game.states() if clean is None else clean
    holds = game.safe(states)
    attack = _exhaust(game, states, holds) if clean is None else _attack(game, states, holds, seed)
    total = Falsified()
    for at, (lost, attacked, tried) in enumerate(attack):
        example = (states[holds[:, at]][lost][0], attacked[lost][0], at) if bool(lost.any()) else None
        total += Falsified(tried, int(lost.sum()), example)
    return total


def breakable(game: Game) -> Tensor:
    """For all states: at which placements can some patch break them? Claims play no part."""
    states = game.states()
    every = torch.ones(len(states), len(game.owned), dtype=torch.bool)
    return torch.stack([lost for lost, _, _ in _exhaust(game, states, every)], 1)


Attack = tuple[Tensor, Tensor, int]
"""At one placement, of the states with a claim: which were broken, into what each was turned, how many were tried."""


def _exhaust(game: Game, states: Tensor, holds: Tensor) -> Iterator[Attack]:
    """States that agree outside the patch can be turned into each other: one is broken if one of them is wrong."""
    wrong, powers = game.wrong(states), game.symbols ** torch.arange(states.shape[1])
    for owned, claimed in zip(game.owned, holds.T, strict=True):
        world = (states * ~owned * powers).sum(1)
        into = torch.full((len(states),), -1).scatter_reduce(0, world[wrong], wrong.nonzero()[:, 0], "amax")[world]
        into = into[claimed]
        yield into >= 0, states[into], len(into) * game.symbols ** int(owned.sum())


def _attack(game: Game, states: Tensor, holds: Tensor, seed: int) -> Iterator[Attack]:
    """Every content of a patch, or a search."""
    random = torch.Generator().manual_seed(seed)
    for owned, claimed in zip(game.owned, holds.T, strict=True):
        sites, number, count = owned.nonzero()[:, 0], game.symbols ** int(owned.sum()), int(claimed.sum())
        contents = every_state(game.symbols, len(sites)) if number <= FEW else _guesses(game, len(sites), random)
        attacked = states[claimed].repeat_interleave(len(contents), 0)
        attacked[:, sites] = contents.repeat(count, 1)
        wrong = game.wrong(attacked).view(count, -1) if count else torch.zeros(0, 1, dtype=torch.bool)
        lost, attacked = wrong.any(1), attacked.view(count, len(contents), len(owned))
        best = attacked[torch.arange(count), wrong.long().argmax(1)]
        if number > FEW and game.guide is not None and not bool(lost.all()):
            best[~lost] = _climb(game, attacked[~lost], sites, random)
            lost = game.wrong(best)
        yield lost, best, count * len(contents)


def _guesses(game: Game, sites: int, random: torch.Generator) -> Tensor:
    """Contents of a patch: one symbol everywhere, two of them mixed, noise."""
    pairs = torch.tensor(list(itertools.product(range(game.symbols), repeat=2)))
    share = torch.rand(8, 1, 1, generator=random)
    mixed = torch.where(torch.rand(8, len(pairs), sites, generator=random) < share, pairs[:, :1], pairs[:, 1:])
    noise = torch.randint(game.symbols, (64, sites), generator=random)
    return torch.cat([torch.arange(game.symbols)[:, None].expand(-1, sites), mixed.flatten(0, 1), noise])


def _climb(game: Game, attacked: Tensor, sites: Tensor, random: torch.Generator) -> Tensor:
    """From the most promising of the attacked states (n, contents, sites), change one site at a time, greedily."""
    assert game.guide is not None
    count = len(attacked)
    height = game.guide(attacked.flatten(0, 1)).view(count, -1)
    best = attacked[torch.arange(count), height.argmin(1)]
    for site in sites[torch.randperm(len(sites), generator=random)].repeat(2).tolist():
        choices = best.repeat_interleave(game.symbols, 0)
        choices[:, site] = torch.arange(game.symbols).repeat(count)
        score = game.guide(choices) - 1e6 * game.wrong(choices)
        best = choices.view(count, game.symbols, -1)[torch.arange(count), score.view(count, -1).argmin(1)]
    return best


class TinyModel(SplitModel):
    """Cells hold one of 0, 1, 2; the logits are an arbitrary (hashed) function of what is visible and where.

    Args:
        image: the pixels, of value 0, 1/2 or 1.
        size, jump: cell i reads the pixels from i * jump to i * jump + size, on both axes where the image has room.
        bias: how often the label is 0.
        seed: which arbitrary function.
        ranked: add a fraction of one to the features, which tells the cell, so that no two have the same size.
    """

    values = 3

    def __init__(
        self, image: Grid, size: int = 1, jump: int = 1, bias: float = 0.9, seed: int = 0, ranked: bool = False
    ) -> None:
        self.sizes = [min(size, image.height), min(size, image.width)]
        self.jump, self.ranked = jump, ranked
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

    def images(self, number: int, random: torch.Generator) -> Tensor:
        """Clean images, as states."""
        return torch.randint(0, self.values, (number, self.image.cells), generator=random)

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

    def symbols(self, images: Tensor) -> Tensor:
        """What each cell holds."""
        pixels = (images[:, 0] * (self.values - 1)).round().long()
        fields = pixels.unfold(1, self.sizes[0], self.jump).unfold(2, self.sizes[1], self.jump)
        return ((fields * self.weights).sum((-1, -2)) % self.values).flatten(1)

    def features(self, images: Tensor) -> Tensor:
        cells = self.grid.cells
        return self.symbols(images) + self.ranked * torch.arange(cells) / (2 * cells)

    def masked(self, features: Tensor, images: Tensor, hidden: Tensor) -> Tensor:
        content = torch.where(hidden, self.values, features[images].long())
        key = _mix(self.table[torch.arange(self.grid.cells), content].sum(1))
        chance = (key & 0xFFFF) / 65536
        label = torch.where(chance < self.bias, 0, 1 + ((key >> 16) & 1))
        strength = 0.2 + ((key >> 20) & 0xFF) / 60
        return torch.nn.functional.one_hot(label, 3) * strength[:, None].float()


def _mix(key: Tensor) -> Tensor:
    for shift, factor in ((31, 0x7FB5D329728EA185 - (1 << 63)), (27, 0x1B873593CC9E2D51), (33, 1)):
        key = (key ^ ((key >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return key


class LetterModel(TinyModel):
    """A cell holds one of four letters. Each letter has its logits; those of several cells are averaged. Its features
    are the local logits, so tests may also write those."""

    values = 4

    def __init__(self, image: Grid, size: int = 1, jump: int = 1, classes: int = 3) -> None:
        super().__init__(image, size, jump)
        self.num_classes = classes
        self.draw(0)

    def draw(self, seed: int) -> None:
        """Another alphabet: in the first two letters label 0 is strong; the others say anything."""
        super().draw(seed)
        random = torch.Generator().manual_seed(seed)
        values = torch.tensor([-200.0, -30.0, -2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0, 30.0, 200.0])
        self.alphabet = values[torch.randint(len(values), (self.values, self.num_classes), generator=random)]
        self.alphabet[:2, 0] = values[torch.randint(8, len(values), (2,), generator=random)]
        self.alphabet[:2, 1:] = values[torch.randint(0, 5, (2, self.num_classes - 1), generator=random)]

    def images(self, number: int, random: torch.Generator) -> Tensor:
        noise = super().images(number, random)
        share = 0.8 * torch.rand(number, 1, generator=random)
        return torch.where(torch.rand(noise.shape, generator=random) < share, noise, noise % 2)

    def features(self, images: Tensor) -> Tensor:
        return self.alphabet[self.symbols(images)]

    def masked(self, features: Tensor, images: Tensor, hidden: Tensor) -> Tensor:
        seen = torch.where(hidden[..., None], 0, features[images])
        return seen.sum(1) / (~hidden).sum(1, keepdim=True)


def placements(threat: PatchThreat) -> list[Place]:
    """Every choice of (shape, row, column) for all patches of the threat."""
    singles = [
        (index, row, col)
        for index, (h, w) in enumerate(threat.shapes)
        for row in range(threat.image.height - h + 1)
        for col in range(threat.image.width - w + 1)
    ]
    return list(itertools.combinations_with_replacement(singles, threat.count))


def boxes(threat: PatchThreat, place: Place) -> list[Box]:
    """The pixels of all patches."""
    corners = [(row, col, *threat.shapes[shape]) for shape, row, col in place]
    return [Box(row, col, row + h, col + w) for row, col, h, w in corners]


def patches(defense: Defense, values: int = 3, label: int = 0, threat: PatchThreat | None = None) -> Game:
    """Patches on the pixels of a defense (of grey images with so many values), at every placement of the threat."""
    threat = defense.threat if threat is None else threat
    where = placements(threat)
    owned = torch.zeros(len(where), threat.image.height, threat.image.width, dtype=torch.bool)
    for pixels, place in zip(owned, where, strict=True):
        for box in boxes(threat, place):
            pixels[box.top : box.bottom, box.left : box.right] = True

    def images(states: Tensor) -> Tensor:
        return (states / (values - 1)).view(-1, 1, threat.image.height, threat.image.width)

    def answer(states: Tensor) -> Tensor:
        prediction = defense.predict(images(states))
        return torch.where(prediction.alarm, -1, prediction.labels)

    def safe(states: Tensor) -> Tensor:
        """With K patches: a location is safe wherever the others are, so one that is safe is enough."""
        maps = defense.certify(images(states), torch.full((len(states),), label)).safe
        return torch.stack(
            [torch.stack([maps[shape][:, row, col] for shape, row, col in place]).any(0) for place in where], 1
        )

    def guide(states: Tensor) -> Tensor:
        """The certificate's own margin, and the share of votes that are still right."""
        labels = torch.full((len(states),), label)
        votes = defense.predict(images(states)).votes == label
        return defense.certify(images(states), labels).margin + votes.float().mean(1).nan_to_num()

    return Game(answer, safe, owned.flatten(1), values, label, guide)


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

    def entries(self, unmasked: bool = True) -> list[tuple[int, int]]:
        """The sites of a game: each mask alone, then the pairs (for operations with two rounds), then no mask."""
        pairs = itertools.combinations(range(self.count), 2) if self.masks.together == 2 else ()
        return [*((i, i) for i in range(self.count)), *pairs, *[(self.count, self.count)] * unmasked]

    def tables(self, states: Tensor, unmasked: bool = True) -> Tensor:
        """States as the tables that `masked` reads."""
        tables = torch.zeros(len(states), self.count + 1, self.count + 1)
        rows, cols = torch.tensor(self.entries(unmasked)).T
        tables[:, rows, cols] = tables[:, cols, rows] = states.float()
        return tables

    def game(self, operation: SecureOperation, label: int = 0, unmasked: bool = True) -> Game:
        """A patch at a location rewrites every entry, unless one of its masks hides that location."""
        rows, cols = torch.tensor(self.entries(unmasked)).T
        hides = torch.nn.functional.pad(self.covers, (0, 1))

        def answer(states: Tensor) -> Tensor:
            prediction = operation.predict(self, self.tables(states, unmasked), self.masks)
            return torch.where(prediction.alarm, -1, prediction.labels)

        def safe(states: Tensor) -> Tensor:
            labels = torch.full((len(states),), label)
            tables = self.tables(states, unmasked)
            return operation.certify(self, tables, self.masks, self.threat, labels).safe[0][:, 0]

        def guide(states: Tensor) -> Tensor:
            return (states == label).sum(1).float()

        return Game(answer, safe, ~(hides[:, rows] | hides[:, cols]), len(self.alphabet), label, guide)


@dataclass(frozen=True)
class Attackers:
    """Everything above, for tests (which cannot import each other)."""

    tiny: type[TinyModel] = TinyModel
    letters: type[LetterModel] = LetterModel
    table: type[TableModel] = TableModel
    game: type[Game] = Game
    falsified: type[Falsified] = Falsified
    patches: Callable[..., Game] = patches
    placements: Callable[[PatchThreat], list[Place]] = placements
    boxes: Callable[[PatchThreat, Place], list[Box]] = boxes
    falsify: Callable[..., Falsified] = falsify
    breakable: Callable[[Game], Tensor] = breakable


@pytest.fixture
def attackers() -> Attackers:
    """Models to attack and the attackers."""
    return Attackers()
