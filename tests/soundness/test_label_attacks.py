"""Attackers who choose labels, with more masks than can be tried exhaustively: the falsifier searches."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from patchcure.operations import Challenger, DoubleMasking, SecureOperation

if TYPE_CHECKING:
    from tests.soundness.conftest import Attackers

OPERATIONS: dict[str, SecureOperation] = {
    "majority": DoubleMasking(),
    "unmasked": DoubleMasking("unmasked"),
    "challenger": Challenger(),
}
CLASSES = 4


def random_states(number: int, sites: int, random: torch.Generator) -> Tensor:
    """Mostly of label 0; each with its own share of other labels."""
    share = 0.3 * torch.rand(number, 1, generator=random) ** 2
    other = torch.randint(1, CLASSES, (number, sites), generator=random)
    return torch.where(torch.rand(number, sites, generator=random) < share, other, 0)


def random_covers(locations: int, count: int, random: torch.Generator) -> Tensor:
    """Every location has one mask at least, and on average two."""
    covers = torch.rand(locations, count, generator=random) < 1 / count
    covers[torch.arange(locations), torch.randint(count, (locations,), generator=random)] = True
    return covers


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(("count", "locations"), [(3, 3), (5, 4), (6, 6)])
def test_no_choice_of_labels_breaks_a_certificate(
    count: int,
    locations: int,
    operation: str,
    attackers: Attackers,
    record_property: Callable[[str, object], None],
) -> None:
    random = torch.Generator().manual_seed(count)
    total, opened = attackers.falsified(), 0
    for seed in range(2):
        model = attackers.table(random_covers(locations, count, random), 10 * torch.eye(CLASSES))
        game = model.game(OPERATIONS[operation])
        clean = random_states(6, game.owned.shape[1], random)
        total += attackers.falsify(game, clean, seed)
        opened += attackers.falsify(game.unclaimed(), clean, seed).broken
    record_property("attacks", total.tried)
    assert not total.broken, total.example
    assert total.tried > 500
    assert opened > 3, "the attacker is too weak: it breaks nothing that is not certified either"
