"""Claims that look right and are wrong: the attackers that never break our certificates must break these."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from patchcure import Box, Defense, Grid, MaskSet, PatchThreat
from patchcure.models.base import visible_sum
from patchcure.operations import Challenger, DoubleMasking, MinorityReports
from patchcure.operations.base import majority

if TYPE_CHECKING:
    from tests.soundness.conftest import Attackers

ONE_EACH = torch.eye(4, dtype=torch.bool)
TWO_EACH = torch.eye(5, dtype=torch.bool) | torch.eye(5, dtype=torch.bool).roll(1, 1)


def one_mask_labels(tables: Tensor) -> Tensor:
    return tables[:, :-1, :-1].diagonal(dim1=1, dim2=2)


@pytest.mark.parametrize("covers", [ONE_EACH, TWO_EACH], ids=["one mask each", "two masks each"])
def test_one_round_unanimity_is_no_certificate(covers: Tensor, attackers: Attackers) -> None:
    """The same votes arise from either class, so no rule that sees only them can be right for both."""

    def vote(tables: Tensor) -> Tensor:
        return majority(one_mask_labels(tables).long(), 2)

    def unanimous(tables: Tensor) -> Tensor:
        return (one_mask_labels(tables) == 0).all(1, keepdim=True).expand(-1, len(covers))

    found = attackers.falsify(vote, unanimous, covers, 2, pairs=False)
    assert found.broken
    assert found.example is not None
    clean, patched, at = found.example
    seen = covers[at]
    assert bool((clean.diagonal()[:-1] == 0).all()), "unanimous on the clean image"
    assert torch.equal(clean.diagonal()[:-1][seen], patched.diagonal()[:-1][seen]), "the covering masks saw no patch"


@pytest.mark.parametrize("operation", [DoubleMasking(), DoubleMasking("unmasked"), Challenger()], ids=str)
def test_two_rounds_need_the_whole_row(operation: DoubleMasking | Challenger, attackers: Attackers) -> None:
    """Right one-mask labels alone certify nothing for double masking either; nor do the pairs of other masks."""
    model = attackers.table(ONE_EACH, 5 * torch.eye(2))

    def diagonal(tables: Tensor) -> Tensor:
        return (one_mask_labels(tables) == 0).all(1, keepdim=True).expand(-1, 4)

    def all_but_one(tables: Tensor) -> Tensor:
        wrong = (tables[:, :4, :4] != 0).triu().flatten(1).sum(1, keepdim=True)
        return (wrong <= 1).expand(-1, 4)

    assert attackers.falsify(model.rule(operation), diagonal, ONE_EACH, 2).broken
    assert attackers.falsify(model.rule(operation), all_but_one, ONE_EACH, 2).broken


def test_minority_reports_needs_more_than_tau(attackers: Attackers) -> None:
    """A vote with confidence of exactly tau is not heard, so it protects nobody."""
    alphabet = torch.tensor([[5.0, 0.0], [0.0, 0.0], [0.0, 5.0]])
    operation = MinorityReports(tau=0.5)
    model = attackers.table(ONE_EACH, alphabet, together=1)

    def at_least_tau(tables: Tensor) -> Tensor:
        logits = alphabet[one_mask_labels(tables).long()]
        sure = (logits.argmax(-1) == 0) & (logits.softmax(-1).amax(-1) >= 0.5)
        return sure.all(1, keepdim=True).expand(-1, 4)

    assert attackers.falsify(model.rule(operation), at_least_tau, ONE_EACH, 3, pairs=False).broken
    ours = attackers.falsify(model.rule(operation), model.claim(operation), ONE_EACH, 3, pairs=False)
    assert ours.tried and not ours.broken


def test_masks_of_the_patch_size_at_stride_two(attackers: Attackers) -> None:
    """Size must be p + s - 1. Masks of p cells at stride 2 are refused; were they not, a patch would get through."""
    image = Grid(1, 8)
    model = attackers.tiny(image, bias=0.75)
    threat = PatchThreat.rectangles([(1, 2)], image)
    trap = tuple((Box(0, start, 1, start + 2),) for start in (0, 2, 4, 6))
    with pytest.raises(ValueError, match=r"do not cover the threat.*Box\(top=0, left=1, bottom=1, right=3\)"):
        MaskSet(trap, threat.on_features(model.grid, model.corrupted))

    weaker = PatchThreat.square(1, image)
    unguarded = Defense(model, weaker, MaskSet(trap, weaker.on_features(model.grid, model.corrupted)))
    certified = broken = 0
    for seed in range(400):
        model.draw(seed)
        proof = unguarded.certify(torch.zeros(1, 1, 1, 8), torch.tensor([0]))
        if bool(proof.strict):
            certified += 1
            places, _ = attackers.broken_placements(unguarded, threat, torch.zeros(1, 1, 8), 0)
            assert all(col % 2 for ((_, _, col),) in places), "only locations between the masks are open"
            broken += bool(places)
    assert certified > 10 and broken > 3


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
