"""Every operation against the falsifier: every patch, at every placement, with every content, on small images."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor, nn

from patchcure import AnyClassifier, Box, Defense, Grid, MaskSet, PatchThreat, SplitModel
from patchcure.ablations import Ablation
from patchcure.operations import (
    OPERATIONS,
    Agreement,
    Challenger,
    ClippedMean,
    CrossCert,
    DoubleMasking,
    HiCert,
    IntervalBounds,
    LocalDetection,
    MinorityReports,
    RegionVotes,
    RobustMasking,
    ScaleCert,
    SecureOperation,
    Voting,
)
from patchcure.operations.base import detects

if TYPE_CHECKING:
    from tests.soundness.conftest import Attackers, Falsified, TinyModel

MASKED: dict[str, dict[str, SecureOperation]] = {
    "double-masking": {"majority": DoubleMasking()},
    "double-masking-unmasked": {"unmasked": DoubleMasking("unmasked")},
    "challenger": {"challenger": Challenger()},
    "minority-reports": {"minority": MinorityReports(), "minority, tau": MinorityReports(tau=0.45)},
    "agreement": {"agreement": Agreement()},
    "crosscert": {"crosscert": CrossCert()},
    "hicert": {"hicert": HiCert(tau=0.7)},
    "scalecert": {"scalecert": ScaleCert(share=0.4)},
}
"""Rules that predict under masks, on models whose predictions are arbitrary; by their registered names."""

LOCAL: dict[str, dict[str, SecureOperation]] = {
    "robust-masking": {"robust masking": RobustMasking()},
    "clipped-mean": {"clipped mean": ClippedMean()},
    "region-votes": {"region votes": RegionVotes()},
    "local-detection": {"detection": LocalDetection(), "detection, tau": LocalDetection(tau=0.7)},
}
"""Rules that aggregate what cells say, on models whose cells say anything."""


@dataclass(frozen=True)
class Case:
    """The geometry: image, patches, the cells' fields, and masks other than the usual ones."""

    image: tuple[int, int]
    shapes: tuple[tuple[int, int], ...]
    size: int = 1
    jump: int = 1
    count: int = 1
    bias: float = 0.9
    masks: Callable[[SplitModel], MaskSet] | None = None

    def defense(self, operation: SecureOperation, model: SplitModel) -> Defense:
        threat = PatchThreat.rectangles(self.shapes, self.image, self.count)
        return Defense(model, threat, None if self.masks is None else self.masks(model), operation)


def designed_for(shape: tuple[int, int], stride: int = 1) -> Callable[[SplitModel], MaskSet]:
    """The masks for another patch than the one that attacks."""

    def masks(model: SplitModel) -> MaskSet:
        threat = PatchThreat.rectangles([shape], model.image)
        return MaskSet.covering(threat.on_features(model.grid, model.corrupted), stride)

    return masks


def redundant(model: SplitModel) -> MaskSet:
    """All boxes of one and of two cells: most locations have several masks."""
    threat = PatchThreat.square(1, model.image).on_features(model.grid, model.corrupted)
    boxes = [Box(0, a, 1, a + n) for n in (1, 2) for a in range(model.grid.width - n + 1)]
    return MaskSet(tuple((box,) for box in boxes), threat)


CASES = {
    "1x6, one pixel": Case((1, 6), ((1, 1),)),
    "1x6, two pixels": Case((1, 6), ((1, 2),)),
    "2x3, a column": Case((2, 3), ((2, 1),)),
    "3x4, a square": Case((3, 4), ((2, 2),)),
    "overlapping fields": Case((1, 13), ((1, 2),), size=3, jump=2),
    "overlapping fields in 2-D": Case((5, 5), ((1, 1),), size=2, bias=0.97),
    "fields with gaps": Case((1, 11), ((1, 3),), jump=2),
    "stride 2": Case((1, 7), ((1, 2),), masks=designed_for((1, 2), stride=2)),
    "two shapes": Case((3, 3), ((1, 2), (2, 1)), bias=0.98),
    "redundant masks": Case((1, 6), ((1, 1),), masks=redundant, bias=0.93),
    "smaller than designed for": Case((1, 7), ((1, 1),), masks=designed_for((1, 2))),
    "smaller than designed for in 2-D": Case((4, 4), ((1, 1),), masks=designed_for((2, 2)), bias=0.95),
    "two patches": Case((1, 7), ((1, 1),), count=2, bias=0.99),
    "two patches, overlapping fields": Case((1, 10), ((1, 1),), size=2, count=2, bias=0.999),
}

TWO, WIDE = Ablation(width=2), Ablation(width=3, stride=2)
VOTES = {
    "bands": (Case((1, 9), ((1, 1),)), Voting(TWO)),
    "bands that wrap at stride 2": (Case((1, 13), ((1, 2),)), Voting(WIDE)),
    "bands in 2-D": (Case((2, 7), ((2, 1),)), Voting()),
    "rows": (Case((7, 3), ((1, 2),)), Voting(Ablation(height=2))),
    "blocks": (Case((4, 4), ((1, 1),)), Voting(Ablation(2, 2))),
    "blocks that stop at the edge": (Case((4, 4), ((1, 2),)), Voting(Ablation(1, 2, wrap=False))),
    "overlapping fields": (Case((1, 10), ((1, 1),), size=2), Voting()),
    "two patches": (Case((1, 8), ((1, 1),), count=2), Voting()),
    "threshold": (Case((1, 8), ((1, 2),)), Voting(threshold=0.4)),
    "low threshold": (Case((1, 9), ((1, 1),)), Voting(TWO, threshold=0.25)),
}


def attack(attackers: Attackers, defense: Defense, clean: Tensor, values: int) -> tuple[Falsified, int]:
    """Attack every promise of the certificates of these clean states for label 0; how many are certified?"""
    game = attackers.patches(defense, values)
    images = (clean / (values - 1)).view(-1, 1, defense.threat.image.height, defense.threat.image.width)
    proof = defense.certify(images, torch.zeros(len(clean), dtype=torch.long))
    assert not bool((proof.strict & ~proof.certified).any())
    everywhere = torch.stack([safe.flatten(1).all(1) for safe in proof.safe]).all(0)
    assert bool(everywhere[proof.certified].all())
    if not detects(defense.operation):  # detectors also ask for the right answer on the clean image
        assert torch.equal(proof.certified, everywhere), "safe at every location, yet not certified"
    found = attackers.falsify(game, clean)
    if not isinstance(defense.operation, HiCert):  # which promises nothing about the clean image
        assert not bool(defense.predict(images).labels[proof.certified].any()), "certified, yet no right label"
    for side in {1, 2, 3} & set(proof.largest_patch.tolist()):
        if defense.threat.shapes != ((side, side),):
            squares = attackers.patches(defense, values, threat=defense.threat.with_squares(side))
            promised = squares.claims(lambda states: torch.ones(len(states), dtype=torch.bool))
            found += attackers.falsify(promised, clean[proof.largest_patch == side])
    return found, int(proof.certified.sum())


@pytest.mark.parametrize("rule", [rule for rules in MASKED.values() for rule in rules])
@pytest.mark.parametrize("name", CASES)
def test_rules_that_predict_under_masks(
    name: str, rule: str, attackers: Attackers, record_property: Callable[[str, object], None]
) -> None:
    case = CASES[name]
    operation = next(rules[rule] for rules in MASKED.values() if rule in rules)
    model = attackers.tiny(Grid(*case.image), case.size, case.jump, case.bias, ranked=True)
    check(case.defense(operation, model), model, attackers, record_property)


@pytest.mark.parametrize("rule", [rule for rules in LOCAL.values() for rule in rules])
@pytest.mark.parametrize("name", CASES)
def test_rules_on_local_logits(
    name: str, rule: str, attackers: Attackers, record_property: Callable[[str, object], None]
) -> None:
    case = CASES[name]
    operation = next(rules[rule] for rules in LOCAL.values() if rule in rules)
    model = attackers.letters(Grid(*case.image), case.size, case.jump)
    check(case.defense(operation, model), model, attackers, record_property)


def test_every_operation_is_attacked_here() -> None:
    """A new operation needs its place in a table above; an old one must not lose its own."""
    attacked: dict[str, dict[str, SecureOperation]] = {**MASKED, **LOCAL}
    attacked["voting"] = {name: vote for name, (_, vote) in VOTES.items()}
    attacked["interval-bounds"] = {"bounds": IntervalBounds()}
    assert set(attacked) == set(OPERATIONS)
    for name, rules in attacked.items():
        assert all(type(rule) is type(OPERATIONS[name]) for rule in rules.values())


@pytest.mark.parametrize("name", VOTES)
def test_votes(name: str, attackers: Attackers, record_property: Callable[[str, object], None]) -> None:
    case, operation = VOTES[name]
    model = attackers.tiny(Grid(*case.image), case.size, bias=0.7)
    check(case.defense(operation, model), model, attackers, record_property)


@pytest.mark.parametrize("case", [Case((3, 3), ((1, 2),)), Case((2, 4), ((1, 1),), count=2)], ids=["one", "two"])
def test_interval_bounds(case: Case, attackers: Attackers) -> None:
    """Small networks that lean to label 0."""
    total, certified = attackers.falsified(), 0
    for seed in range(8):
        torch.manual_seed(seed)
        cells = case.image[0] * case.image[1]
        last = nn.Linear(6, 3)
        network = nn.Sequential(nn.Flatten(), nn.Linear(cells, 6), nn.ReLU(), last).requires_grad_(False)
        last.bias[0] += 0.3
        defense = case.defense(IntervalBounds(), AnyClassifier(network, case.image, 3, (0.0,), (1.0,)))
        clean = torch.randint(3, (5, cells), generator=torch.Generator().manual_seed(seed))
        found, proved = attack(attackers, defense, clean, 3)
        total, certified = total + found, certified + proved
    assert not total.broken, total.example
    assert certified >= 2 and total.tried >= 250, f"{certified} certified, {total.tried} attacks: this shows little"


def check(
    defense: Defense, model: TinyModel, attackers: Attackers, record_property: Callable[[str, object], None]
) -> None:
    """Several models, several clean images each; more of them where few are certified."""
    total, certified = attackers.falsified(), 0
    for seed in range(60):
        if seed >= 5 and certified >= 2:
            break
        model.draw(seed)
        clean = model.images(6, torch.Generator().manual_seed(seed))
        found, proved = attack(attackers, defense, clean, model.values)
        total, certified = total + found, certified + proved
    assert not total.broken, total.example
    record_property("attacks", total.tried)
    assert certified >= 2 and total.tried >= 250, f"{certified} certified, {total.tried} attacks: this shows little"


def test_the_search_alone_catches_the_single_round_claim(attackers: Attackers) -> None:
    """Too many contents to try: six masks, pairs of which a patch may turn into four labels each."""
    model = attackers.table(torch.eye(6, dtype=torch.bool), 10 * torch.eye(4))
    game = model.game(DoubleMasking())
    assert 4 ** int(game.owned.sum(1).min()) > 1024
    random = torch.Generator().manual_seed(0)
    clean = torch.randint(1, 4, (20, game.owned.shape[1]), generator=random)
    clean = torch.where(torch.rand(clean.shape, generator=random) < 0.3, clean, 0)
    clean[:, :6] = 0
    one_round = game.claims(lambda states: (states[:, :6] == 0).all(1))
    assert attackers.falsify(one_round, clean).broken
    assert not attackers.falsify(game, clean).broken


@pytest.mark.parametrize("name", ["redundant masks", "smaller than designed for", "smaller than designed for in 2-D"])
def test_location_aware_certifies_more_than_all_pairs(name: str, attackers: Attackers) -> None:
    case = CASES[name]
    model = attackers.tiny(Grid(*case.image), bias=case.bias)
    defense, gained = case.defense(DoubleMasking(), model), 0
    for seed in range(10):
        model.draw(seed)
        proof = defense.certify(torch.rand(4, 1, *case.image), torch.zeros(4, dtype=torch.long))
        gained += int((proof.certified & ~proof.strict).sum())
    assert gained > 0


@pytest.mark.parametrize("name", ["1x6, one pixel", "3x4, a square", "two shapes", "two patches"])
def test_challenger_needs_at_most_twice_the_masks(name: str, attackers: Attackers) -> None:
    case = CASES[name]
    most = 0.0
    model = attackers.tiny(Grid(*case.image), bias=0.5)
    defense = case.defense(Challenger(), model)
    for seed in range(20):
        model.draw(seed)
        prediction = defense.predict(torch.randint(0, 3, (60, 1, *case.image)) / 2)
        bound = 2 * len(defense.masks) - 1
        assert int(prediction.evaluations.max()) <= bound
        assert bool((prediction.evaluations[prediction.unanimous] == len(defense.masks)).all())
        most = max(most, int(prediction.evaluations.max()) / bound)
    assert most > 0.6


@pytest.mark.parametrize("rule", [rule for rules in MASKED.values() for rule in rules])
def test_answers_do_not_depend_on_companions(rule: str, attackers: Attackers) -> None:
    """The second round works on ragged batches: each image alone must get the same answer."""
    case = CASES["two shapes"]
    operation = next(rules[rule] for rules in MASKED.values() if rule in rules)
    defense = case.defense(operation, attackers.tiny(Grid(*case.image), bias=0.6))
    images = torch.randint(0, 3, (40, 1, *case.image)) / 2
    together = defense.predict(images)
    alone = [defense.predict(image[None]) for image in images]
    assert together.labels.tolist() == [int(one.labels) for one in alone]
    assert together.evaluations.tolist() == [int(one.evaluations) for one in alone]
    assert together.suspicion == tuple(one.suspicion[0] for one in alone)
