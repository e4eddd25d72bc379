"""Every patch, at every location, with every content, against every operation: no certificate may break."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pytest
import torch

from patchcure import Box, Defense, Grid, MaskSet, PatchThreat, SplitModel
from patchcure.operations import Challenger, DoubleMasking, MinorityReports, SecureOperation

if TYPE_CHECKING:
    from tests.soundness.conftest import Attackers, TinyModel

OPERATIONS: dict[str, SecureOperation] = {
    "majority": DoubleMasking(),
    "unmasked": DoubleMasking("unmasked"),
    "challenger": Challenger(),
    "minority": MinorityReports(),
    "minority-tau": MinorityReports(tau=0.62),
}


@dataclass(frozen=True)
class Case:
    """A model, the attacker, and masks other than the usual ones."""

    image: tuple[int, int]
    shapes: tuple[tuple[int, int], ...]
    size: int = 1
    jump: int = 1
    count: int = 1
    bias: float = 0.9
    masks: Callable[[SplitModel], MaskSet] | None = None
    models: int = 40


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
    "1x5, one pixel": Case((1, 5), ((1, 1),)),
    "1x6, two pixels": Case((1, 6), ((1, 2),)),
    "2x3, a column": Case((2, 3), ((2, 1),), models=60),
    "3x3, a square": Case((3, 3), ((2, 2),), models=30),
    "overlapping fields": Case((1, 13), ((1, 2),), size=3, jump=2),
    "overlapping fields in 2-D": Case((5, 5), ((1, 1),), size=2, jump=1, bias=0.97),
    "fields with gaps": Case((1, 11), ((1, 3),), size=1, jump=2),
    "stride 2": Case((1, 7), ((1, 2),), masks=designed_for((1, 2), stride=2)),
    "two shapes": Case((3, 3), ((1, 2), (2, 1)), bias=0.985, models=40),
    "redundant masks": Case((1, 5), ((1, 1),), masks=redundant, bias=0.93),
    "smaller than designed for": Case((1, 7), ((1, 1),), masks=designed_for((1, 2))),
    "smaller than designed for in 2-D": Case((4, 4), ((1, 1),), masks=designed_for((2, 2)), bias=0.95),
    "two patches": Case((1, 6), ((1, 1),), count=2, bias=0.99, models=30),
    "two patches, overlapping fields": Case((1, 11), ((1, 1),), size=2, jump=1, count=2, bias=0.999, models=20),
}


def defended(case: Case, attackers: Attackers, operation: SecureOperation) -> tuple[Defense, TinyModel]:
    model = attackers.tiny(Grid(*case.image), case.size, case.jump, case.bias)
    threat = PatchThreat.rectangles(case.shapes, case.image, case.count)
    return Defense(model, threat, None if case.masks is None else case.masks(model), operation).eval(), model


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("name", CASES)
def test_no_patch_breaks_a_certificate(
    name: str, operation: str, attackers: Attackers, record_property: Callable[[str, object], None]
) -> None:
    case = CASES[name]
    tried, certified = 0, 0
    defense, model = defended(case, attackers, OPERATIONS[operation])
    for seed in range(case.models):
        model.draw(seed)
        random = torch.Generator().manual_seed(seed)
        image = torch.randint(0, 3, (1, 1, *case.image), generator=random) / 2
        certificate = defense.certify(image, torch.tensor([0]))
        assert bool(certificate.certified) or not bool(certificate.strict)
        if not any(bool(safe.any()) for safe in certificate.safe) and not bool(certificate.largest_patch):
            continue
        broken, attacks = attackers.broken_placements(defense, defense.threat, image[0], 0)
        tried += attacks
        certified += int(certificate.certified)
        if bool(certificate.certified):
            assert not broken, f"certified, yet patches at {broken} succeed (model {seed})"
            assert int(defense.predict(image).labels) == 0, "certified, yet wrong or an alarm without any patch"
            assert all(bool(safe.all()) for safe in certificate.safe)
        for patches in broken:
            for shape, row, col in patches:
                assert not bool(certificate.safe[shape][0, row, col]), f"safe {row, col} broken by {patches}"
        if (side := int(certificate.largest_patch)) and defense.threat.shapes != ((side, side),) and side < 4:
            squares = defense.threat.with_squares(side)
            broken, attacks = attackers.broken_placements(defense, squares, image[0], 0)
            assert not broken, f"certified for squares of {side}, yet patches at {broken} succeed"
            tried += attacks
    record_property("attacks", tried)
    assert certified >= case.models // 10, f"only {certified} of {case.models} certified: this test shows little"
    assert tried >= 250, f"only {tried} attacks"


@pytest.mark.parametrize("name", ["redundant masks", "smaller than designed for", "smaller than designed for in 2-D"])
def test_location_aware_certifies_more_than_all_pairs(name: str, attackers: Attackers) -> None:
    case = CASES[name]
    gained = 0
    defense, model = defended(case, attackers, DoubleMasking())
    for seed in range(case.models):
        model.draw(seed)
        certificate = defense.certify(torch.zeros(1, 1, *case.image), torch.tensor([0]))
        gained += int(certificate.certified & ~certificate.strict)
    assert gained > 0


@pytest.mark.parametrize("name", ["1x5, one pixel", "3x3, a square", "two shapes", "two patches"])
def test_challenger_needs_at_most_twice_the_masks(name: str, attackers: Attackers) -> None:
    case = CASES[name]
    most = 0.0
    defense, model = defended(replace(case, bias=0.5), attackers, Challenger())
    for seed in range(20):
        model.draw(seed)
        images = torch.randint(0, 3, (60, 1, *case.image)) / 2
        prediction = defense.predict(images)
        bound = 2 * len(defense.masks) - 1
        assert int(prediction.evaluations.max()) <= bound
        assert bool((prediction.evaluations[prediction.unanimous] == len(defense.masks)).all())
        most = max(most, int(prediction.evaluations.max()) / bound)
    assert most > 0.6


@pytest.mark.parametrize("operation", OPERATIONS)
def test_answers_do_not_depend_on_companions(operation: str, attackers: Attackers) -> None:
    """The second round works on ragged batches: each image alone must get the same answer."""
    case = CASES["two shapes"]
    defense, _ = defended(replace(case, bias=0.6), attackers, OPERATIONS[operation])
    images = torch.randint(0, 3, (40, 1, *case.image)) / 2
    together = defense.predict(images)
    alone = [defense.predict(image[None]) for image in images]
    assert together.labels.tolist() == [int(one.labels) for one in alone]
    assert together.evaluations.tolist() == [int(one.evaluations) for one in alone]
    assert together.suspicion == tuple(one.suspicion[0] for one in alone)
