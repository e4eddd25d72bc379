"""Claims that look right and are wrong: the attackers that never break our certificates must break these."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor, nn

from patchcure import AnyClassifier, Box, Defense, Grid, MaskSet, PatchThreat
from patchcure.models.base import visible_sum
from patchcure.operations import (
    Challenger,
    ClippedMean,
    DoubleMasking,
    HiCert,
    IntervalBounds,
    LocalDetection,
    MinorityReports,
    RegionVotes,
    SecureOperation,
)
from patchcure.operations.base import majority
from patchcure.operations.intervals import margins_below

if TYPE_CHECKING:
    from tests.soundness.conftest import Attackers, Game

ONE_EACH = torch.eye(4, dtype=torch.bool)
TWO_EACH = torch.eye(5, dtype=torch.bool) | torch.eye(5, dtype=torch.bool).roll(1, 1)
LABELS = 5 * torch.eye(2)
HALF = torch.tensor([[5.0, 0.0, -99.0], [0.0, 0.0, -99.0], [0.0, 5.0, -99.0], [-99.0, 0.0, 0.0]])
"""Label 0, label 0 with a confidence of exactly one half, label 1, label 1 with a confidence of one half."""


def one_round(covers: Tensor, alphabet: Tensor, attackers: Attackers, rule: SecureOperation | None = None) -> Game:
    """One-mask predictions, and a rule that sees only those."""
    return attackers.table(covers, alphabet, together=1).game(rule or MinorityReports(), unmasked=rule is not None)


def all_zero(states: Tensor) -> Tensor:
    return (states == 0).all(1)


def single_round(covers: Tensor, attackers: Attackers) -> Game:
    """All masks say y, so the majority stays y."""
    game = one_round(covers, LABELS, attackers)
    return replace(game, answer=lambda votes: majority(votes, 2)).claims(all_zero)


def certmask(attackers: Attackers) -> Game:
    """CertMask: every location is hidden by two masks, so of two labels the rarer one with two votes is clean."""

    def rarer(votes: Tensor) -> Tensor:
        ones = votes.sum(1)
        zeros = votes.shape[1] - ones
        return torch.where((ones >= 2) & ((ones < zeros) | (zeros < 2)), 1, 0)

    return replace(one_round(TWO_EACH, LABELS, attackers), answer=rarer).claims(all_zero)


def one_mask_labels(rule: SecureOperation, attackers: Attackers) -> Game:
    """Two rounds, of which the certificate looks only at the first."""
    return attackers.table(ONE_EACH, LABELS).game(rule).claims(lambda states: (states[:, :4] == 0).all(1))


def one_pair_short(rule: SecureOperation, attackers: Attackers) -> Game:
    return attackers.table(ONE_EACH, LABELS).game(rule).claims(lambda states: (states[:, :-1] != 0).sum(1) <= 1)


def heard_at_tau(attackers: Attackers) -> Game:
    """Minority Reports with >= for >: a vote with a confidence of exactly tau is not heard."""
    game = one_round(ONE_EACH, HALF, attackers, MinorityReports(tau=0.5))
    return game.claims(lambda states: (states[:, :-1] <= 1).all(1))


def unheard_masks(attackers: Attackers) -> Game:
    """Minority Reports: the clean answer is right without an alarm, so it is certified; but who is not heard?"""
    game = one_round(ONE_EACH, HALF, attackers, MinorityReports(tau=0.5))
    return game.claims(lambda states: game.answer(states) == 0)


def doubt_at_tau(attackers: Attackers) -> Game:
    """HiCert with <= for <: a vote with a confidence of exactly tau raises no alarm."""
    game = one_round(ONE_EACH, HALF, attackers, HiCert(tau=0.5))
    return game.claims(lambda states: (states[:, :-1] != 2).all(1))


def voting_cells(attackers: Attackers) -> Game:
    """Minority Reports as published: three neighbours that agree make a voting cell; at the border one mask hides."""
    covers = torch.tensor([[mask <= at < mask + 3 for mask in range(5)] for at in range(7)])

    def answer(votes: Tensor) -> Tensor:
        cells = votes.unfold(1, 3, 1)
        unanimous = (cells == cells[..., :1]).all(2)
        labels = torch.where(unanimous, cells[..., 0], -1)
        top = labels.amax(1)
        return torch.where(((labels == top[:, None]) | ~unanimous).all(1), top, -1)

    return replace(one_round(covers, LABELS, attackers), answer=answer).claims(all_zero)


def local(operation: SecureOperation, cells: int, alphabet: Tensor, attackers: Attackers, label: int = 0) -> Game:
    """A row of cells of letters, each with its local logits; a patch owns one cell."""
    model = attackers.letters(Grid(1, cells), classes=alphabet.shape[1])
    model.values, model.alphabet, model.weights = len(alphabet), alphabet, torch.ones(1, 1, dtype=torch.long)
    defense = Defense(model, PatchThreat.square(1, (1, cells)), operation=operation)
    return attackers.patches(defense, len(alphabet), label)


def runner_up(attackers: Attackers) -> Game:
    """CBN as published: only the clean runner-up is compared, though a third label may have most to gain."""
    squashed = torch.tensor([[0.0, -0.4867, -0.24], [0.999, 0.999, -0.999], [-0.9999, 0.999, 0.9999]])
    game = local(ClippedMean(), 9, (torch.atanh(squashed) + 1) / 0.05, attackers)

    def published(states: Tensor) -> Tensor:
        v = squashed.double()[states]
        second = 1 + v.mean(1)[:, 1:].argmax(1)
        ahead = v[..., 0] - v.gather(2, second[:, None, None].expand(-1, 9, 1))[..., 0]
        return ((ahead.sum(1, keepdim=True) - ahead) > 2).all(1)

    return game.claims(published)


def window_at_tau(attackers: Attackers) -> Game:
    """PatchGuard++ with >= for >: a window with a confidence of exactly tau is not heard."""
    alphabet = torch.tensor([[0.0, 0.0], [0.3, 0.0], [0.0, 9.0]])
    game = local(LocalDetection(tau=0.5), 5, alphabet, attackers)

    def at_least(states: Tensor) -> Tensor:
        u = alphabet[states]
        left = u.sum(1, keepdim=True) - u
        return (left[..., 0] >= left[..., 1]).all(1) & (game.answer(states) == 0)

    return game.claims(at_least)


def any_tie(attackers: Attackers) -> Game:
    """BagCert with >= for every label, though label 1 loses a tie with label 0."""
    alphabet = torch.tensor([[-1.0, 1.0], [1.0, 1.0], [1.0, -1.0], [-1.0, -1.0]])
    game = local(RegionVotes(), 4, alphabet, attackers, label=1)

    def with_ties(states: Tensor) -> Tensor:
        votes = (alphabet[states] > 0).long()
        ahead = votes[..., 1] - votes[..., 0]
        return (ahead.sum(1, keepdim=True) - ahead) >= 1

    return game.claims(with_ties)


def patch_sized_masks(attackers: Attackers) -> Game:
    """Masks of p cells at stride 2, which certify a pixel, claimed for p = 2: the size must be p + s - 1."""
    image = Grid(1, 8)
    model = attackers.tiny(image, bias=0.8, seed=3)
    pixel = PatchThreat.square(1, image)
    trap = tuple((Box(0, start, 1, start + 2),) for start in (0, 2, 4, 6))
    defense = Defense(model, pixel, MaskSet(trap, pixel.on_features(model.grid, model.corrupted)))
    weaker = attackers.patches(defense)
    game = attackers.patches(defense, threat=PatchThreat.rectangles([(1, 2)], image))
    return game.claims(lambda states: weaker.safe(states).all(1))


def bounds_of_zero(attackers: Attackers) -> Game:
    """Interval bounds with >= 0: a network that says nothing certifies every label."""
    layer = nn.Linear(4, 2).requires_grad_(False)
    layer.weight.zero_()
    layer.bias.zero_()
    model = AnyClassifier(nn.Sequential(nn.Flatten(), layer), (1, 4), 2, (0.0,), (1.0,))
    defense = Defense(model, PatchThreat.square(1, (1, 4)), operation=IntervalBounds())
    images = torch.zeros(1, 1, 1, 4)

    def at_least_zero(states: Tensor) -> Tensor:
        low = margins_below(model.backbone, images, images + 1, torch.tensor([1]), torch.float64)[0, 0]
        return (low > -1e-9).expand(len(states))

    return attackers.patches(defense, label=1).claims(at_least_zero)


PAIRS: dict[str, SecureOperation] = {
    "majority": DoubleMasking(),
    "unmasked": DoubleMasking("unmasked"),
    "challenger": Challenger(),
}
WRONG: dict[str, Callable[[Attackers], Game]] = {
    "a single round, one mask each": partial(single_round, ONE_EACH),
    "a single round, two masks each": partial(single_round, TWO_EACH),
    "CertMask": certmask,
    **{f"one-mask labels, {name}": partial(one_mask_labels, rule) for name, rule in PAIRS.items()},
    **{f"all pairs but one, {name}": partial(one_pair_short, rule) for name, rule in PAIRS.items()},
    "Minority Reports, heard at tau": heard_at_tau,
    "Minority Reports, unheard masks": unheard_masks,
    "Minority Reports, 3x3 voting cells": voting_cells,
    "HiCert, in doubt at tau": doubt_at_tau,
    "CBN, the runner-up": runner_up,
    "PatchGuard++, heard at tau": window_at_tau,
    "BagCert, any tie": any_tie,
    "masks of the patch's size at stride 2": patch_sized_masks,
    "interval bounds of zero": bounds_of_zero,
}
"""Claims about our rules, or about others' rules. (Those about votes and about ScaleCert are beside their models.)"""


@pytest.mark.parametrize("name", WRONG)
def test_the_falsifier_catches_it(name: str, attackers: Attackers) -> None:
    game = WRONG[name](attackers)
    found = attackers.falsify(game)
    assert found.tried and found.broken and found.example is not None
    clean, attacked, at = found.example
    assert bool(game.safe(clean[None])[0, at]) and bool(game.wrong(attacked[None]))
    assert torch.equal(clean[~game.owned[at]], attacked[~game.owned[at]]), "only the patch differs"


def test_voting_cells_hold_inside_the_border(attackers: Attackers) -> None:
    game = voting_cells(attackers)
    inside = torch.tensor([False, False, True, True, True, False, False])
    assert not attackers.falsify(game.claims(lambda states: all_zero(states)[:, None] & inside)).broken


def test_masks_of_the_patch_size_at_stride_two_are_refused(attackers: Attackers) -> None:
    image = Grid(1, 8)
    model = attackers.tiny(image)
    threat = PatchThreat.rectangles([(1, 2)], image)
    trap = tuple((Box(0, start, 1, start + 2),) for start in (0, 2, 4, 6))
    with pytest.raises(ValueError, match=r"do not cover the threat.*Box\(top=0, left=1, bottom=1, right=3\)"):
        MaskSet(trap, threat.on_features(model.grid, model.corrupted))


def window_sums(values: Tensor, hidden: Tensor) -> Tensor:
    """The public code: everything, minus what is under the mask."""
    return values.sum(1) - torch.where(hidden[..., None], values, 0).sum(1)


@pytest.mark.parametrize("size", [200.0, 1e5])
def test_subtracting_the_window_leaks_the_attacker(size: float) -> None:
    """A margin of 4e-5 falls to rounding when hidden values are added and then taken away; never with visible_sum."""
    random = torch.Generator().manual_seed(0)
    cells, classes, trials = 24 * 24, 2, 40
    hidden = torch.zeros(24, 24, dtype=torch.bool)
    hidden[4:12, 4:12] = True
    hidden = hidden.flatten()[None].expand(trials, -1)
    values = torch.randn(trials, cells, classes, generator=random)
    values[..., 0] = values[..., 1]
    values[:, 0, 0] += 4e-5  # the true label leads by this much
    attacked = torch.where(hidden[..., None], size * torch.rand(values.shape, generator=random), values)
    each = torch.arange(trials)

    def leads(sums: Tensor) -> Tensor:
        return sums[:, 0] > sums[:, 1]

    ours, ours_attacked = (visible_sum(v, each, hidden.view(-1, 24, 24)) for v in (values, attacked))
    assert int(leads(ours).sum()) > trials // 2
    assert torch.equal(ours, ours_attacked)
    swayed = leads(window_sums(values, hidden)) != leads(window_sums(attacked, hidden))
    assert int(swayed.sum()) > trials // 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("content", ["random", "huge", "largest", "inf", "nan"])
@pytest.mark.parametrize("jobs", [3, 6, 60])
@pytest.mark.parametrize("style", ["random", "boxes", "same boxes for all"])
def test_hidden_values_never_reach_a_sum(content: str, jobs: int, style: str, dtype: torch.dtype) -> None:
    """Identical bits, whatever is hidden; and a visible value that is not finite is never hushed up."""
    random = torch.Generator().manual_seed(jobs)
    values = torch.randn(3, 35, 6, generator=random).to(dtype)
    images = torch.randint(3, (jobs,), generator=random)
    hidden = torch.rand(jobs, 35, generator=random) < 0.4
    if style != "random":  # few different rows, so that sums come from a table
        hidden = torch.zeros(jobs, 7, 5, dtype=torch.bool)
        hidden[:, 1:3, 2:4] = True
        hidden[1::2, 4:6, :2] = True
        hidden = hidden.flatten(1)
    if style == "same boxes for all":  # so that one product serves all images
        images = torch.arange(3).repeat_interleave(jobs // 3)
        hidden = hidden[: jobs // 3].repeat(3, 1)
    hidden[:, 7] = True
    cells = hidden.view(jobs, 7, 5)
    before = visible_sum(values, images, cells)
    everywhere = torch.stack([hidden[images == i].all(0) for i in range(3)])
    largest = torch.finfo(dtype).max
    noise = torch.randn(values.shape, generator=random)
    filled = {
        "random": noise.to(dtype),
        "huge": (noise.sign() * largest / 2).to(dtype),
        "largest": (noise.sign() * largest).to(dtype),
        "inf": (noise.sign() * torch.inf).to(dtype),
        "nan": torch.full_like(values, torch.nan),
    }[content]
    after = visible_sum(torch.where(everywhere[..., None], filled, values), images, cells)
    assert torch.equal(before, after)
    if content in ("inf", "nan"):
        values[:, 3] = filled[:, 3]
        poisoned = visible_sum(values, images, cells)
        assert torch.equal(poisoned.isnan().all(1), ~hidden[:, 3])
