"""Operations on local logits: no patch breaks a certificate, and no weaker certificate would be sound."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from patchcure import Box, Defense, Grid, MaskSet, PatchThreat, SplitModel
from patchcure.operations import ClippedMean, LocalDetection, RegionVotes, RobustMasking, SecureOperation
from patchcure.operations.local import ownership

if TYPE_CHECKING:
    from tests.soundness.conftest import Attackers

RULES: dict[str, SecureOperation] = {
    "robust masking": RobustMasking(),
    "clipped mean": ClippedMean(),
    "region votes": RegionVotes(),
    "detection": LocalDetection(),
    "detection, tau": LocalDetection(tau=0.7),
}
EXACT = ("robust masking", "clipped mean", "region votes")
"""Rules whose certificate is claimed to be the weakest one for an attacker who writes cells at will."""


@dataclass(frozen=True)
class Case:
    """The geometry: image, patches, the cells' fields, and the windows if they are not the usual ones."""

    image: tuple[int, int]
    shapes: tuple[tuple[int, int], ...]
    size: int = 1
    jump: int = 1
    count: int = 1
    designed_for: tuple[int, int] | None = None
    stride: int = 1

    def defense(self, operation: SecureOperation, attackers: Attackers, classes: int = 3) -> Defense:
        model = attackers.letters(Grid(*self.image), self.size, self.jump, classes)
        threat = PatchThreat.rectangles(self.shapes, self.image, self.count)
        design = threat if self.designed_for is None else PatchThreat.rectangles([self.designed_for], self.image)
        reach = design.on_features(model.grid, model.corrupted)
        return Defense(model, threat, MaskSet.covering(reach, self.stride, together=1), operation).eval()


CASES = {
    "1x6, one pixel": Case((1, 6), ((1, 1),)),
    "1x7, two pixels": Case((1, 7), ((1, 2),)),
    "3x4, a column": Case((3, 4), ((2, 1),)),
    "4x4, a square": Case((4, 4), ((2, 2),)),
    "overlapping fields": Case((1, 19), ((1, 2),), size=3, jump=2),
    "overlapping fields in 2-D": Case((6, 6), ((1, 1),), size=2),
    "fields with gaps": Case((1, 15), ((1, 3),), jump=2),
    "stride 2": Case((1, 8), ((1, 2),), stride=2),
    "two shapes": Case((3, 4), ((1, 2), (2, 1))),
    "smaller than designed for": Case((4, 4), ((1, 1),), designed_for=(2, 2)),
    "two patches": Case((1, 8), ((1, 1),), count=2),
    "two patches, overlapping fields": Case((1, 13), ((1, 1),), size=2, count=2),
}


def owned_cells(model: SplitModel, patches: list[Box]) -> Tensor:
    owned = torch.zeros(model.grid.height, model.grid.width, dtype=torch.bool)
    for box in patches:
        reach = model.corrupted(box)
        owned[reach.top : reach.bottom, reach.left : reach.right] = True
    return owned.flatten()


def pushed(local: Tensor, owned: Tensor, label: int) -> Tensor:
    """For each other label: the strongest attack of who owns these cells and writes any local logits."""
    attacked = local.repeat(local.shape[-1], 1, 1)
    attacked[:, owned] = -1e4
    for rival in range(local.shape[-1]):
        attacked[rival, owned, rival] = 1e4
    return attacked[[rival for rival in range(local.shape[-1]) if rival != label]]


def random_locals(seed: int, cells: int, classes: int, label: int, rule: str) -> Tensor:
    """The lead of the label grows with the seed, from none at 0; in double precision, so that nothing is a near tie."""
    random = torch.Generator().manual_seed(seed)
    local = torch.randn(cells, classes, generator=random, dtype=torch.float64)
    local[:, label] += 0.75 * seed - 1
    if rule == "robust masking":
        return local.abs()  # without evidence at all, labels would tie at zero
    if rule == "region votes":
        return local - 1.5 * torch.rand((), generator=random)
    if rule == "clipped mean":
        return 100 * (local - 0.3 * seed) + 20
    return local


@pytest.mark.parametrize("name", CASES)
def test_ownership_is_what_each_location_corrupts(name: str, attackers: Attackers) -> None:
    """Every group of placements owns exactly the cells that the model says, by real intersection."""
    defense = CASES[name].defense(RegionVotes(), attackers)
    model, threat = defense.model, defense.threat
    found = ownership(defense.masks.threat)
    assert len(found.covers.unique(dim=0)) == len(found.covers) or threat.count > 1
    for place in attackers.placements(threat):
        owned = owned_cells(model, attackers.boxes(threat, place))
        for shape, row, col in place:
            mine = ~found.covers[found.location == found.maps[shape][row, col]]
            assert (mine == owned).all(1).any()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("label", [0, 3])
@pytest.mark.parametrize("name", CASES)
def test_the_strongest_attack_succeeds_exactly_where_nothing_is_claimed(
    name: str, label: int, rule: str, attackers: Attackers
) -> None:
    """Soundness for every rule; and for the exact ones, a location that is not certified can really be broken."""
    defense = CASES[name].defense(RULES[rule], attackers, classes=4)
    model, threat, operation = defense.model, defense.threat, defense.operation
    where = list(attackers.placements(threat))
    owned = [owned_cells(model, attackers.boxes(threat, place)) for place in where]
    claimed = refused = 0
    for seed in range(12):
        local = random_locals(seed, model.grid.cells, 4, label, rule)
        proof = operation.certify(model, local[None], defense.masks, threat, torch.tensor([label]))
        attacks = torch.cat([pushed(local, cells, label) for cells in owned])
        prediction = operation.predict(model, attacks, defense.masks)
        wrong = ((prediction.labels != label) & ~prediction.alarm).view(len(where), -1).any(1)
        broken = [torch.zeros_like(safe[0]) for safe in proof.safe]
        for place, success in zip(where, wrong, strict=True):
            for shape, row, col in place:
                broken[shape][row, col] |= success
        for safe, lost in zip(proof.safe, broken, strict=True):
            assert not bool((safe[0] & lost).any())
            if rule in EXACT:
                assert torch.equal(safe[0], ~lost)
            claimed, refused = claimed + int(safe.sum()), refused + int((~safe).sum())
    assert claimed > 5 and refused > 5


@pytest.mark.parametrize("rule", RULES)
def test_the_largest_patch_is_safe_and_the_next_is_not(rule: str, attackers: Attackers) -> None:
    defense = Case((7, 9), ((3, 3),), size=2).defense(RULES[rule], attackers)
    model, operation = defense.model, defense.operation
    found = set()
    for seed in range(12):
        local = random_locals(seed, model.grid.cells, 3, 0, rule)
        proof = operation.certify(model, local[None], defense.masks, defense.threat, torch.tensor([0]))
        largest = int(proof.largest_patch)
        assert (largest >= 3) == bool(proof.certified)
        found.add(largest)
        for side in range(1, 8):
            threat = PatchThreat.square(side, model.image)
            owned = [owned_cells(model, attackers.boxes(threat, place)) for place in attackers.placements(threat)]
            prediction = operation.predict(model, torch.cat([pushed(local, c, 0) for c in owned]), defense.masks)
            wrong = bool(((prediction.labels != 0) & ~prediction.alarm).any())
            assert not (wrong and side <= largest)
            if rule in EXACT:
                assert wrong == (side > largest)
    assert len(found) > 1


@pytest.mark.parametrize("rule", ["robust masking", "detection"])
@pytest.mark.parametrize("size", [1e2, 1e3, 1e5])
def test_what_a_window_hides_never_enters_its_sum(size: float, rule: str, attackers: Attackers) -> None:
    """The votes of windows over the patch stay, and the score of robust masking is bounded by their bits."""
    defense = Case((8, 8), ((3, 3),)).defense(RULES[rule], attackers, classes=2)
    operation, model, masks = defense.operation, defense.model, defense.masks
    owned = owned_cells(model, [Box(2, 3, 5, 6)])
    covering = (masks.hidden.flatten(1) | ~owned).all(1)
    assert covering.any()
    swayed = 0
    for seed in range(40):
        local = torch.rand(64, 1, generator=torch.Generator().manual_seed(seed)).repeat(1, 2)
        local[0, 0] += 1e-6  # label 0 leads by this much, outside the patch
        attacked = local.clone()
        attacked[owned, 1] = size
        clean, dirty = (operation.predict(model, values[None], masks).votes[0] for values in (local, attacked))
        assert torch.equal(clean[covering], dirty[covering])
        subtracted = attacked.sum(0) - torch.where(masks.hidden.flatten(1)[..., None], attacked, 0).sum(1)
        swayed += bool((subtracted[covering].argmax(1) != clean[covering]).any())
    assert swayed > 10, "total minus window lets the attacker in"


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_gets_no_label(rule: str, bad: float, attackers: Attackers) -> None:
    defense = Case((4, 4), ((1, 1),)).defense(RULES[rule], attackers)
    local = torch.zeros(1, 16, 3)
    local[0, 5, 1] = bad
    with pytest.raises(FloatingPointError, match="NaN or infinite"):
        defense.operation.predict(defense.model, local, defense.masks)
    with pytest.raises(FloatingPointError, match="NaN or infinite"):
        defense.operation.certify(defense.model, local, defense.masks, defense.threat, torch.tensor([0]))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_leads_within_rounding_are_not_certified(rule: str, dtype: torch.dtype, attackers: Attackers) -> None:
    """Evidence that the smallest change of a logit could take away is none."""
    defense = Case((4, 4), ((1, 1),)).defense(RULES[rule], attackers)
    zero = 20.0 if rule == "clipped mean" else 0.0
    local = torch.full((1, 16, 3), zero, dtype=dtype)
    local[..., 2] = zero - 1.0
    local[..., 0] += 64 * torch.finfo(dtype).eps
    proof = defense.operation.certify(defense.model, local, defense.masks, defense.threat, torch.tensor([0]))
    assert not proof.certified.any() and not any(safe.any() for safe in proof.safe)
