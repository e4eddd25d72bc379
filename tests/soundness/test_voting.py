"""Votes against every attacker: all ballots, all patches on tiny images, and the published counting mistake."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from patchcure import Box, Defense, Grid, MaskSet, PatchThreat, SplitModel
from patchcure.ablations import Ablation
from patchcure.operations import Voting
from patchcure.operations.base import tolerance


class BallotModel(SplitModel):
    """Its features *are* the ballots: one symbol for each ablation of a row of pixels; `alphabet` has its logits.

    A placement of the patch may rewrite the symbols of the ablations that it touches, and no other.
    """

    def __init__(
        self, cells: int, ablation: Ablation, shape: tuple[int, int], alphabet: Tensor, count: int = 1
    ) -> None:
        grid = Grid(1, cells)
        super().__init__(grid, grid, alphabet.shape[1], mean=(0.0,), std=(1.0,), max_jobs=1 << 22)
        self.alphabet = alphabet
        self.threat = PatchThreat.rectangles([shape], grid, count)
        self.masks = ablation.masks(self.threat.on_features(grid, self.corrupted))
        self.rows = self.masks.hidden.flatten(1)
        self.noise: Callable[[Tensor], Tensor] = lambda logits: logits
        self.eval()

    def corrupted(self, box: Box) -> Box:
        return box

    def receptive(self, cells: Box) -> Box:
        return cells

    def features(self, images: Tensor) -> Tensor:
        raise NotImplementedError("the attacker writes the ballots")

    def masked(self, features: Tensor, images: Tensor, hidden: Tensor) -> Tensor:
        ablation = (hidden[:, None] == self.rows).all(2).long().argmax(1)
        return self.noise(self.alphabet[features[images, ablation].long()])

    def touched(self, starts: tuple[int, ...]) -> Tensor:
        """The ablations that see a pixel of the patches at these columns, straight from the definition."""
        width = self.threat.shapes[0][1]
        return torch.stack([~self.rows[:, start : start + width].all(1) for start in starts]).any(0)


def ballots(symbols: int, ablations: int) -> Tensor:
    """Every table of symbols."""
    return torch.cartesian_prod(*[torch.arange(symbols)] * ablations).view(-1, ablations).float()


def subsets(classes: int, most: int, strength: float = 5.0) -> Tensor:
    """Logits with which a class gets a vote at threshold 0.4, for every set of at most `most` classes."""
    chosen = [c for size in range(most + 1) for c in itertools.combinations(range(classes), size)]
    return torch.stack(
        [torch.zeros(classes).index_fill(0, torch.tensor(c, dtype=torch.long), strength) for c in chosen]
    )


@dataclass(frozen=True)
class Election:
    """An operation, ablations, the patch, and what a ballot can say."""

    voting: Voting
    cells: int
    shape: tuple[int, int]
    alphabet: Tensor
    count: int = 1

    def model(self) -> BallotModel:
        return BallotModel(self.cells, self.voting.ablation, self.shape, self.alphabet, self.count)


BAND, TWO, WIDE = Ablation(width=1), Ablation(width=2), Ablation(width=3, stride=2)
ONE_HOT = 5 * torch.eye(3)
ELECTIONS = {
    "one vote": Election(Voting(TWO), 7, (1, 1), ONE_HOT),
    "wrap, stride 2 of 13": Election(Voting(WIDE), 13, (1, 2), ONE_HOT),
    "stride 2 of 14": Election(Voting(WIDE), 14, (1, 1), ONE_HOT),
    "no wrap": Election(Voting(Ablation(width=2, wrap=False)), 8, (1, 1), ONE_HOT),
    "two patches": Election(Voting(BAND), 7, (1, 1), ONE_HOT, 2),
    "threshold": Election(Voting(BAND, threshold=0.4), 4, (1, 1), subsets(3, 2)),
    "threshold, bands of two": Election(Voting(TWO, threshold=0.4), 5, (1, 1), subsets(3, 2)),
    "top 2": Election(Voting(TWO, top=2), 6, (1, 1), 5 * torch.eye(4)),
    "top 3": Election(Voting(BAND, top=3), 6, (1, 2), 5 * torch.eye(4)),
    "top 2, threshold": Election(Voting(BAND, threshold=0.4, top=2), 4, (1, 1), subsets(4, 2)),
    "top 2, threshold, two votes touched": Election(Voting(BAND, threshold=0.4, top=2), 4, (1, 2), subsets(4, 2)),
}


@pytest.mark.parametrize("name", ELECTIONS)
def test_every_ballot(name: str, record_property: Callable[[str, object], None]) -> None:
    """Exhaustive, and exact: a placement is called safe if and only if no rewriting of its ballots succeeds."""
    election = ELECTIONS[name]
    model, voting = election.model(), election.voting
    tables = ballots(len(election.alphabet), len(model.masks))
    first = voting.ranking(model, tables, model.masks)[:, : voting.top]
    starts = range(election.cells - election.shape[1] + 1)
    powers = len(election.alphabet) ** torch.arange(tables.shape[1])
    attacks = certified = 0
    for y in range(model.num_classes):
        proof = voting.certify(model, tables, model.masks, model.threat, torch.full((len(tables),), y))
        right = (first == y).any(1)
        unsafe = torch.zeros(len(tables), len(starts), dtype=torch.bool)
        for places in itertools.combinations_with_replacement(starts, election.count):
            world = ((tables * ~model.touched(places)).long() * powers).sum(1)
            size = torch.bincount(world)
            broken = torch.bincount(world, weights=(~right).double()) > 0
            for place in places:
                unsafe[:, place] |= broken[world]
            attacks += int(size[world][~broken[world]].sum())
        assert torch.equal(proof.safe[0][:, 0], ~unsafe)
        assert torch.equal(proof.certified, ~unsafe.any(1))
        assert torch.equal(proof.certified, proof.margin > 0)
        assert not bool((proof.strict & ~proof.certified).any())
        assert bool(right[proof.certified].all())
        certified += int(proof.certified.sum())
    record_property("attacks", attacks)
    assert certified > 20 and attacks > 10_000, (certified, attacks)


def test_a_location_aware_count_certifies_more_than_twice_delta() -> None:
    election = ELECTIONS["wrap, stride 2 of 13"]
    model = election.model()
    tables = ballots(3, len(model.masks))
    proof = election.voting.certify(
        model, tables, model.masks, model.threat, torch.zeros(len(tables), dtype=torch.long)
    )
    assert int(proof.certified.sum()) > int(proof.strict.sum()) > 0


# The published count of touched bands: ceil((p + b - 1) / s).


def published(votes: Tensor, y: int, patch: int, band: int, stride: int) -> bool:
    """The published certificate: y leads by more than twice the formula's count (ties go to the lower label)."""
    delta = math.ceil((patch + band - 1) / stride)
    return all(votes[y] + (y < c) > votes[c] + 2 * delta for c in range(len(votes)) if c != y)


@pytest.mark.parametrize(("stride", "formula", "real"), [(10, 5, 6), (5, 10, 11), (1, 50, 50), (7, 8, 8)])
def test_the_formula_misses_a_band_that_wraps(stride: int, formula: int, real: int) -> None:
    assert math.ceil((32 + 19 - 1) / stride) == formula
    model = BallotModel(224, Ablation(width=19, stride=stride), (1, 32), torch.eye(2))
    by_hand = [int(model.touched((start,)).sum()) for start in range(224 - 32 + 1)]
    touched = (~model.masks.coverage.covers).sum(1)[model.masks.coverage.maps[0]][0]
    assert touched.tolist() == by_hand
    assert max(by_hand) == real


def test_a_patch_at_column_zero_breaks_the_published_certificate() -> None:
    """23 votes, 17:6, "certified" by the formula; six bands see a patch at column 0, and it becomes 11:12."""
    voting = Voting(Ablation(width=19, stride=10))
    model = BallotModel(224, voting.ablation, (1, 32), 5 * torch.eye(2))
    touched = model.touched((0,))
    assert touched.nonzero()[:, 0].tolist() == [0, 1, 2, 3, 21, 22]
    clean = torch.zeros(1, 23)
    clean[0, (~touched).nonzero()[:6, 0]] = 1
    votes = torch.bincount(clean[0].long(), minlength=2)
    assert votes.tolist() == [17, 6]
    assert published(votes, 0, 32, 19, 10)
    patched = torch.where(touched, 1, clean)
    assert torch.bincount(patched[0].long()).tolist() == [11, 12]
    assert voting.predict(model, clean, model.masks).labels.tolist() == [0]
    assert voting.predict(model, patched, model.masks).labels.tolist() == [1]
    proof = voting.certify(model, clean, model.masks, model.threat, torch.tensor([0]))
    assert not bool(proof.certified) and not bool(proof.strict) and not bool(proof.safe[0][0, 0, 0])
    assert bool(proof.safe[0][0, 0, 40:100].all()), "in the middle five bands are touched, and 17:6 holds"


def test_the_attackers_break_the_published_rule_and_a_short_budget() -> None:
    """The exhaustive attacker catches both: the formula's count where bands wrap, and 2 delta less one vote."""
    election = ELECTIONS["wrap, stride 2 of 13"]
    model, broken = election.model(), {"published": 0, "short": 0, "ours": 0}
    tables = ballots(3, len(model.masks))
    labels = torch.zeros(len(tables), dtype=torch.long)
    right = election.voting.predict(model, tables, model.masks).labels == 0
    votes = torch.nn.functional.one_hot(tables.long(), 3).sum(1)
    proof = election.voting.certify(model, tables, model.masks, model.threat, labels)
    delta = int((~model.masks.coverage.covers).sum(1).max())
    claims = {
        "published": torch.tensor([published(row, 0, 2, 3, 2) for row in votes]),
        "short": votes[:, 0] + 1 > votes[:, 1:].amax(1) + 2 * delta - 1,
        "ours": proof.certified,
    }
    for start in range(12):
        world = ((tables * ~model.touched((start,))).long() * 3 ** torch.arange(tables.shape[1])).sum(1)
        lost = (torch.bincount(world, weights=(~right).double()) > 0)[world]
        for name, claim in claims.items():
            broken[name] += int((claim & lost).sum())
    assert math.ceil((2 + 3 - 1) / 2) == 2 < delta
    assert broken["published"] and broken["short"] and not broken["ours"]


def test_one_vote_a_ballot_is_not_enough_for_thresholded_top_k() -> None:
    """With a threshold an ablation votes for several classes, so the budget of one vote each is no certificate."""
    election = ELECTIONS["top 2, threshold"]
    model = election.model()
    tables = ballots(len(election.alphabet), len(model.masks))
    labels = torch.zeros(len(tables), dtype=torch.long)
    proof = election.voting.certify(model, tables, model.masks, model.threat, labels)
    wrong = (election.voting.ranking(model, tables, model.masks)[:, :2] != 0).all(1)
    fixed = ((tables[:, 1:]).long() * len(election.alphabet) ** torch.arange(3)).sum(1)
    lost = (torch.bincount(fixed, weights=wrong.double()) > 0)[fixed]  # a patch at column 0
    counts = (election.alphabet[tables[:, 1:].long()] > 0).sum(1)
    needs = (counts[:, :1] - counts[:, 1:] + 1).clamp(min=0).sort(1).values[:, :2].sum(1)
    assert bool(((needs > 1) & lost).any()), "CostCert's sum, as it is for one vote each"
    assert not bool((proof.certified & lost).any())


# Rounding.


@pytest.mark.parametrize("threshold", [None, 0.4])
def test_a_vote_that_is_not_clear_of_rounding_belongs_to_the_attacker(threshold: float | None) -> None:
    """Logits move by less than the tolerance from call to call; no certificate may depend on which way."""
    if threshold is None:
        alphabet = torch.tensor([[5.0, 0.0, 0.0], [0.0, 5.0, 0.0], [5.0, 5.0, 0.0], [5.00001, 5.0, 0.0]])
    else:
        edge = math.log(0.4 / 0.6)  # the softmax probability of the first class is 0.4, to rounding
        alphabet = torch.tensor([[5.0, 0.0, 0.0], [-5.0, 5.0, 0.0], [edge, 0.0, -50.0], [edge + 1e-6, 0.0, -50.0]])
    voting = Voting(BAND, threshold)
    model = BallotModel(6, BAND, (1, 1), alphabet)
    tables = ballots(4, 6)
    labels = torch.zeros(len(tables), dtype=torch.long)
    proof = voting.certify(model, tables, model.masks, model.threat, labels)
    random = torch.Generator().manual_seed(0)
    rounded: list[Callable[[Tensor], Tensor]] = [lambda x: x]
    rounded.append(lambda x: x + 0.49 * tolerance(x)[:, None] * torch.tensor([-1.0, 1.0, 0.0]))
    rounded.append(lambda x: x + 0.49 * tolerance(x)[:, None] * torch.tensor([1.0, -1.0, 0.0]))
    rounded.append(lambda x: x + 0.49 * tolerance(x)[:, None] * (2 * torch.rand(x.shape, generator=random) - 1))
    swayed = 0
    answers = []
    for noise in rounded:
        model.noise = noise
        for start, content in itertools.product(range(6), range(4)):
            patched = tables.clone()
            patched[:, start] = content
            answers.append(voting.ranking(model, patched, model.masks)[:, 0])
            assert not bool((answers[-1][proof.certified] != 0).any())
    for plain, moved in zip(answers[:24], answers[24:48], strict=True):
        swayed += int((plain != moved).sum())
    assert swayed > 100, "the noise should change some answers"
    assert int(proof.certified.sum()) > 20


# Patches on pixels, through a whole defense.


class HashModel(SplitModel):
    """Logits are an arbitrary (hashed) function of the visible cells, each of 0, 1, 2, and of where they are."""

    def __init__(self, image: Grid, size: int) -> None:
        self.sizes = min(size, image.height), min(size, image.width)
        grid = Grid(image.height - self.sizes[0] + 1, image.width - self.sizes[1] + 1)
        super().__init__(image, grid, 3, mean=(0.0,), std=(1.0,), max_jobs=1 << 20)
        self.eval()

    def draw(self, seed: int) -> None:
        """Become another function, with another share of votes for label 0."""
        self.bias = 0.4 + 0.1 * (seed % 6)
        random = torch.Generator().manual_seed(seed)
        self.table = torch.randint(-(1 << 40), 1 << 40, (self.grid.cells, 4), generator=random)

    def corrupted(self, box: Box) -> Box:
        top, left = max(0, box.top - self.sizes[0] + 1), max(0, box.left - self.sizes[1] + 1)
        return Box(top, left, min(box.bottom, self.grid.height), min(box.right, self.grid.width))

    def receptive(self, cells: Box) -> Box:
        return Box(cells.top, cells.left, cells.bottom + self.sizes[0] - 1, cells.right + self.sizes[1] - 1)

    def features(self, images: Tensor) -> Tensor:
        pixels = (2 * images[:, 0]).round().long()
        fields = pixels.unfold(1, self.sizes[0], 1).unfold(2, self.sizes[1], 1)
        return (fields.sum((-1, -2)) % 3).flatten(1).float()

    def masked(self, features: Tensor, images: Tensor, hidden: Tensor) -> Tensor:
        content = torch.where(hidden, 3, features[images].long())
        key = self.table[torch.arange(self.grid.cells), content].sum(1)
        key = (key * 0x1B873593CC9E2D51) ^ (key >> 17)
        chance = ((key * 0x1B873593) >> 20 & 0xFFFF) / 65536
        label = torch.where(chance < self.bias, 0, 1 + ((key >> 9) & 1))
        return torch.nn.functional.one_hot(label, 3) * (0.2 + ((key >> 11) & 0xFF)[:, None].float() / 60)


@dataclass(frozen=True)
class Case:
    """An image, the attacker, and the vote."""

    image: tuple[int, int]
    shape: tuple[int, int]
    voting: Voting
    size: int = 1
    count: int = 1


CASES = {
    "bands": Case((1, 9), (1, 1), Voting(TWO)),
    "bands that wrap at stride 2": Case((1, 13), (1, 2), Voting(WIDE)),
    "bands in 2-D": Case((3, 7), (2, 1), Voting(BAND)),
    "rows": Case((7, 3), (1, 2), Voting(Ablation(height=2))),
    "blocks": Case((4, 4), (1, 1), Voting(Ablation(2, 2))),
    "blocks that stop at the edge": Case((4, 4), (1, 2), Voting(Ablation(1, 2, wrap=False))),
    "overlapping fields": Case((1, 10), (1, 1), Voting(BAND), size=2),
    "two patches": Case((1, 8), (1, 1), Voting(BAND), count=2),
    "threshold": Case((1, 8), (1, 2), Voting(BAND, threshold=0.4)),
    "low threshold": Case((1, 9), (1, 1), Voting(TWO, threshold=0.25)),
}


@pytest.mark.parametrize("name", CASES)
def test_no_patch_breaks_a_certificate(name: str, record_property: Callable[[str, object], None]) -> None:
    """Every content at every placement, for arbitrary models; and the largest certified square, attacked too."""
    case = CASES[name]
    model = HashModel(Grid(*case.image), case.size)
    defense = Defense(model, PatchThreat.rectangles([case.shape], case.image, case.count), operation=case.voting)
    attacks = certified = broken = 0
    for seed in range(30):
        model.draw(seed)
        image = torch.randint(0, 3, (1, 1, *case.image), generator=torch.Generator().manual_seed(seed)) / 2
        proof = defense.certify(image, torch.tensor([0]))
        certified += int(proof.certified)
        assert bool(proof.certified) == bool(proof.safe[0].all())
        tried = [
            (contents(image[0], places), places, safe) for places, safe in placements(defense.threat, proof.safe[0][0])
        ]
        answers = defense.predict(torch.cat([batch for batch, _, _ in tried])).labels
        for (batch, places, safe), part in zip(tried, answers.split([len(t[0]) for t in tried]), strict=True):
            assert not (safe and bool(part.any())), f"a patch at {places} succeeds (model {seed})"
            attacks += len(batch) * safe
            broken += bool(part.any())
        side = int(proof.largest_patch)
        if 0 < side <= 2:
            squares = [contents(image[0], places) for places, _ in placements(defense.threat.with_squares(side), None)]
            assert not bool(defense.predict(torch.cat(squares)).labels.any())
    record_property("attacks", attacks)
    assert certified >= 3 and attacks > 300 and broken > 10, (certified, attacks, broken)


def placements(threat: PatchThreat, safe: Tensor | None) -> list[tuple[list[Box], bool]]:
    """Every choice of boxes, and whether all of them are called safe."""
    ((height, width),) = threat.shapes
    rows, cols = range(threat.image.height - height + 1), range(threat.image.width - width + 1)
    found = []
    for corners in itertools.combinations_with_replacement(itertools.product(rows, cols), threat.count):
        boxes = [Box(row, col, row + height, col + width) for row, col in corners]
        found.append((boxes, safe is None or any(bool(safe[corner]) for corner in corners)))
    return found


def contents(image: Tensor, boxes: list[Box]) -> Tensor:
    """The image with everything that can be written into these boxes."""
    pixels = sorted({(r, c) for box in boxes for r in range(*box.rows) for c in range(*box.cols)})
    values = torch.cartesian_prod(*[torch.arange(3)] * len(pixels)).view(-1, len(pixels)) / 2
    images = image.expand(len(values), *image.shape).clone()
    rows, cols = torch.tensor(pixels).T
    images[:, 0, rows, cols] = values
    return images


def test_more_patches_touch_the_union_of_their_ablations() -> None:
    """Every placement that is looked at is real, and every real one is looked at or is easier than one that is."""
    model = BallotModel(12, WIDE, (1, 2), torch.eye(2), count=2)
    coverage = model.masks.coverage
    real = {pair: model.touched(pair) for pair in itertools.product(range(11), repeat=2)}
    rows = ~coverage.covers
    assert {tuple(row) for row in rows.tolist()} <= {tuple(row.tolist()) for row in real.values()}
    for (first, _), touched in real.items():
        looked_at = rows[coverage.location == coverage.maps[0][0, first]]
        assert bool((touched <= looked_at).all(1).any())


def test_an_ablation_set_that_every_patch_touches_is_refused() -> None:
    threat = PatchThreat.square(2, 8)
    reach = threat.on_features(Grid(8, 8), lambda box: box)
    with pytest.raises(ValueError, match=r"do not cover the threat.*a narrower band"):
        Ablation(width=8).masks(reach)
    with pytest.raises(ValueError, match="do not cover the threat"):
        Ablation(width=5, stride=4).masks(reach)
    assert isinstance(Ablation(width=3).masks(reach), MaskSet)
