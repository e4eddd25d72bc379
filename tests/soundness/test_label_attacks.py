"""Attackers who choose labels: a patch at l may turn every prediction into any label, unless a mask hides l."""

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
ALPHABET = 10 * torch.eye(CLASSES)


def random_tables(number: int, count: int, random: torch.Generator) -> Tensor:
    """Symmetric tables (number, count + 1, count + 1), mostly of label 0; each with its own share of other labels."""
    share = torch.rand(number, 1, 1, generator=random) ** 2
    shape = (number, count + 1, count + 1)
    other = torch.randint(1, CLASSES, shape, generator=random)
    upper = torch.where(torch.rand(shape, generator=random) < 0.3 * share, other, 0).triu()
    return (upper + upper.triu(1).transpose(1, 2)).float()


def random_covers(locations: int, count: int, random: torch.Generator) -> Tensor:
    """Every location has one mask at least, and on average two."""
    covers = torch.rand(locations, count, generator=random) < 1 / count
    covers[torch.arange(locations), torch.randint(count, (locations,), generator=random)] = True
    return covers


def attacked(tables: Tensor, covers: Tensor, random: torch.Generator) -> Tensor:
    """What an attacker at a location with these masks, `covers` (n, masks), may show instead of the tables.

    Some write noise, some push one wrong label everywhere, and some push two labels in blocks.
    """
    number, size = tables.shape[:2]
    target = torch.randint(0, CLASSES, (number, 1, 1), generator=random)
    second = torch.randint(0, CLASSES, (number, 1, 1), generator=random)
    noise = torch.randint(0, CLASSES, tables.shape, generator=random)
    sided = torch.rand(number, size, generator=random) < 0.5
    blocks = torch.where(sided[:, :, None] & sided[:, None, :], second, target)
    strength = torch.rand(number, 1, 1, generator=random) * torch.randint(0, 2, (number, 1, 1), generator=random)
    content = torch.where(torch.rand(tables.shape, generator=random) < strength, noise, blocks).triu()
    content = content + content.triu(1).transpose(1, 2)
    hides = torch.nn.functional.pad(covers, (0, 1))
    return torch.where(hides[:, :, None] | hides[:, None, :], tables, content.float())


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(("count", "locations"), [(3, 3), (5, 4), (7, 9)])
def test_no_choice_of_labels_breaks_a_certificate(
    count: int,
    locations: int,
    operation: str,
    attackers: Attackers,
    record_property: Callable[[str, object], None],
) -> None:
    random = torch.Generator().manual_seed(count)
    tried = certified = unsafe_broken = 0
    for _ in range(8):
        covers = random_covers(locations, count, random)
        model = attackers.table(covers, ALPHABET)
        tables = random_tables(300, count, random)
        labels = torch.zeros(len(tables), dtype=torch.long)
        proof = OPERATIONS[operation].certify(model, tables, model.masks, model.threat, labels)
        safe = proof.safe[0][:, 0]
        assert torch.equal(proof.certified, safe.all(1))
        assert not bool((proof.strict & ~proof.certified).any())
        for wanted in (safe, ~safe):
            table, at = wanted.nonzero().T
            chosen = torch.randint(len(table), (4000,), generator=random)
            patched = attacked(tables[table[chosen]], covers[at[chosen]], random)
            answers = OPERATIONS[operation].predict(model, patched, model.masks).labels
            if wanted is safe:
                assert not bool((answers != 0).any())
                tried += len(answers)
            else:
                unsafe_broken += int((answers != 0).sum())
        certified += int(proof.certified.sum())
    record_property("attacks", tried)
    assert certified > 200
    assert unsafe_broken > 200, "the attackers are too weak: they break nothing that is not certified either"
