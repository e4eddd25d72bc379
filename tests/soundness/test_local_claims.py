"""Published certificates for local logits that are wrong, each with an attack; ours refuse them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from patchcure import Defense, Grid, PatchThreat
from patchcure.operations import ClippedMean, LocalDetection, RegionVotes, RobustMasking, SecureOperation

if TYPE_CHECKING:
    from tests.soundness.conftest import Attackers


def cells(attackers: Attackers, operation: SecureOperation, side: int, patch: int, classes: int) -> Defense:
    """One cell for each pixel; tests write the local logits."""
    model = attackers.letters(Grid(side, side), classes=classes)
    return Defense(model, PatchThreat.square(patch, side), operation=operation)


def certify(defense: Defense, local: Tensor, label: int) -> bool:
    proof = defense.operation.certify(defense.model, local[None], defense.masks, defense.threat, torch.tensor([label]))
    return bool(proof.certified)


def predict(defense: Defense, local: Tensor) -> int:
    return int(defense.operation.predict(defense.model, local[None], defense.masks).labels)


def logits_for(squashed: Tensor) -> Tensor:
    """u with tanh(0.05 u - 1) = v."""
    return (torch.atanh(squashed) + 1) / 0.05


def published_clipping(defense: Defense, local: Tensor, label: int) -> bool:
    """The public certificate: only the clean runner-up is compared."""
    clipped = torch.tanh(0.05 * local - 1).double()
    second = int(clipped.mean(0).index_fill(0, torch.tensor(label), -torch.inf).argmax())
    shown = ~defense.masks.hidden.flatten(1)
    ahead = shown.double() @ (clipped[:, label] - clipped[:, second])
    return bool((ahead > 2 * (~shown).sum(1)).all())


def the_runner_up_trap() -> tuple[Tensor, Tensor]:
    """24x24 cells, W = 8x8 at (0, 0): the clean local logits, and the attacked ones."""
    inside = torch.zeros(24, 24, dtype=torch.bool)
    inside[:8, :8] = True
    inside = inside.flatten()
    squashed = torch.tensor([0.0, -0.4867, -0.24]).repeat(576, 1)
    squashed[inside] = torch.tensor([0.999, 0.999, -0.999])
    attacked = squashed.clone()
    attacked[inside, 0] = -0.9999
    attacked[inside, 2] = 0.9999
    return logits_for(squashed), logits_for(attacked)


def test_the_runner_up_is_not_enough(attackers: Attackers) -> None:
    """The third label has most to gain under the patch: certified by the published rule, and broken."""
    defense = cells(attackers, ClippedMean(), 24, 8, 3)
    clean, attacked = the_runner_up_trap()
    assert predict(defense, clean) == 0
    assert published_clipping(defense, clean, 0)
    assert predict(defense, attacked) == 2, "the attack succeeds"
    assert not certify(defense, clean, 0), "ours refuses"


def test_detection_needs_more_than_tau(attackers: Attackers) -> None:
    """A window with a confidence of exactly tau is not heard: with >= in the certificate, a patch gets through."""
    defense = cells(attackers, LocalDetection(tau=0.5), 3, 1, 2)
    clean = torch.zeros(9, 2)
    clean[4, 0] = 0.3  # only the middle speaks for label 0; without it the confidence is exactly 0.5
    left = (~defense.masks.hidden.flatten(1)).float() @ clean / 9
    assert bool((left.argmax(1) == 0).all()) and bool((left.softmax(1).amax(1) >= 0.5).all()), "claimed with >="
    assert predict(defense, clean) == 0
    attacked = clean.clone()
    attacked[4] = torch.tensor([0.0, 9.0])
    found = defense.operation.predict(defense.model, attacked[None], defense.masks)
    assert int(found.votes[0, 4]) == 0, "the window over the patch still says 0, but unheard"
    assert int(found.labels) == 1 and not bool(found.alarm), "a wrong label, without an alarm"
    assert not certify(defense, clean, 0)


def subtracting(local: Tensor, windows: Tensor) -> Tensor:
    """Public code for robust masking: the total minus the best window, per label."""
    evidence = local.clamp(min=0)
    return (evidence.sum(0) - (windows.float() @ evidence)).amin(0)


def published_leads(local: Tensor, windows: Tensor) -> Tensor:
    """The paper's certificate for label 0 against label 1, with public arithmetic: all of these must be above zero."""
    evidence = local.clamp(min=0)
    rest = torch.where(windows, 0, evidence[:, 0])
    least = (rest.sum(1, keepdim=True) - rest @ windows.float().T).amin(1)
    return least - (evidence[:, 1].sum() - windows.float() @ evidence[:, 1])


def test_total_minus_window_breaks_robust_masking(attackers: Attackers) -> None:
    """In float32 a score keeps a rest of the large numbers that were taken away: a published certificate falls."""
    defense = cells(attackers, RobustMasking(), 12, 4, 2)
    windows = defense.masks.hidden.flatten(1)
    claimed = broken = 0
    for seed in range(20):
        random = torch.Generator().manual_seed(seed)
        local = torch.rand(144, 1, generator=random).repeat(1, 2)
        while not bool((published_leads(local, windows) > 0).all()):  # raise label 0 until it is just certified
            local[:, 0] += 0.01
        weakest = windows[published_leads(local, windows).argmin()]
        for _ in range(8):
            attacked = local.clone()
            attacked[weakest, 0] = 0
            attacked[weakest, 1] = 3e7 * torch.rand(16, generator=random)
            claimed += 1
            broken += int(subtracting(attacked, windows).argmax()) != 0
            assert predict(defense, attacked) == 0, "ours never adds what it then takes away"
    assert broken > 10, (claimed, broken)


@pytest.mark.parametrize("label", [0, 1])
def test_region_votes_use_the_tie_rule(label: int, attackers: Attackers) -> None:
    """Three cells, one owned, two votes to one: with a tie at worst, the lower label is certified and the other not."""
    defense = Defense(attackers.letters(Grid(1, 3), classes=2), PatchThreat.square(1, (1, 3)), operation=RegionVotes())
    local = torch.full((3, 2), -1.0)
    local[:, label] = 1.0
    local[2, 1 - label] = 1.0
    assert certify(defense, local, label) == (label == 0)
    worst = local.clone()
    worst[0, label], worst[0, 1 - label] = -1.0, 1.0
    assert predict(defense, worst) == 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LocalDetection(tau=1.0), r"tau: expected a confidence in \[0, 1\), got 1.0"),
        (lambda: LocalDetection(tau=-0.1), "tau: expected a confidence"),
        (lambda: ClippedMean(scale=0.0), "expected a positive scale and a finite shift"),
        (lambda: ClippedMean(shift=float("nan")), "expected a positive scale and a finite shift"),
    ],
)
def test_senseless_rules_do_not_construct(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
