"""Votes against every attacker: all ballots of small elections, and the published counting mistakes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from patchcure import Box, Grid, MaskSet, PatchThreat, SplitModel
from patchcure.ablations import Ablation
from patchcure.operations import Voting
from patchcure.operations.base import tolerance

if TYPE_CHECKING:
    from tests.soundness.conftest import Attackers, Game


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

    def game(self, model: BallotModel, attackers: Attackers, label: int = 0) -> Game:
        """The attacker rewrites the ballots of the ablations that the patches touch; y must stay in the first k."""
        starts = range(self.cells - self.shape[1] + 1)
        where = list(itertools.combinations_with_replacement(starts, self.count))

        def answer(ballots: Tensor) -> Tensor:
            first = self.voting.ranking(model, ballots, model.masks)[:, : self.voting.top]
            return torch.where((first == label).any(1), label, (label + 1) % model.num_classes)

        def safe(ballots: Tensor) -> Tensor:
            labels = torch.full((len(ballots),), label)
            proof = self.voting.certify(model, ballots, model.masks, model.threat, labels)
            return torch.stack([proof.safe[0][:, 0, list(places)].any(1) for places in where], 1)

        owned = torch.stack([model.touched(places) for places in where])
        return attackers.game(answer, safe, owned, len(self.alphabet), label)


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
def test_every_ballot(name: str, attackers: Attackers, record_property: Callable[[str, object], None]) -> None:
    """Exhaustive, and exact: a placement is called safe if and only if no rewriting of its ballots succeeds."""
    election = ELECTIONS[name]
    model, voting = election.model(), election.voting
    starts = range(election.cells - election.shape[1] + 1)
    where = list(itertools.combinations_with_replacement(starts, election.count))
    attacks = certified = 0
    for y in range(model.num_classes):
        game = election.game(model, attackers, y)
        found = attackers.falsify(game)
        assert not found.broken, found.example
        tables, lost = game.states(), attackers.breakable(game)
        proof = voting.certify(model, tables, model.masks, model.threat, torch.full((len(tables),), y))
        unsafe = torch.stack([lost[:, [start in places for places in where]].any(1) for start in starts], 1)
        assert torch.equal(proof.safe[0][:, 0], ~unsafe)
        assert torch.equal(proof.certified, ~unsafe.any(1))
        assert torch.equal(proof.certified, proof.margin > 0)
        assert not bool((proof.strict & ~proof.certified).any())
        certified, attacks = certified + int(proof.certified.sum()), attacks + found.tried
    record_property("attacks", attacks)
    assert certified > 20 and attacks > 10_000, (certified, attacks)


def test_a_location_aware_count_certifies_more_than_twice_delta(attackers: Attackers) -> None:
    election = ELECTIONS["wrap, stride 2 of 13"]
    model = election.model()
    tables = election.game(model, attackers).states()
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


def test_the_falsifier_breaks_the_published_rule_and_a_short_budget(attackers: Attackers) -> None:
    """The formula's count where bands wrap, and 2 delta less one vote."""
    election = ELECTIONS["wrap, stride 2 of 13"]
    model = election.model()
    game = election.game(model, attackers)
    delta = int((~model.masks.coverage.covers).sum(1).max())

    def by_formula(ballots: Tensor) -> Tensor:
        return torch.tensor([published(row, 0, 2, 3, 2) for row in votes(ballots)])

    def short(ballots: Tensor) -> Tensor:
        return votes(ballots)[:, 0] + 1 > votes(ballots)[:, 1:].amax(1) + 2 * delta - 1

    def votes(ballots: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(ballots, 3).sum(1)

    assert math.ceil((2 + 3 - 1) / 2) == 2 < delta
    assert attackers.falsify(game.claims(by_formula)).broken
    assert attackers.falsify(game.claims(short)).broken
    assert not attackers.falsify(game).broken


def test_one_vote_a_ballot_is_not_enough_for_thresholded_top_k(attackers: Attackers) -> None:
    """With a threshold an ablation votes for several classes, so the budget of one vote each is no certificate."""
    election = ELECTIONS["top 2, threshold"]
    game = election.game(election.model(), attackers)

    def costcert(ballots: Tensor) -> Tensor:
        """CostCert's sum, as it is for one vote each, at every column."""
        given = (election.alphabet[ballots] > 0).long()
        counts = given.sum(1, keepdim=True) - given
        needs = (counts[..., :1] - counts[..., 1:] + 1).clamp(min=0).sort(2).values[..., :2].sum(2)
        return needs > 1

    assert attackers.falsify(game.claims(costcert)).broken
    assert not attackers.falsify(game).broken


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
    tables = torch.cartesian_prod(*[torch.arange(4)] * 6)
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
