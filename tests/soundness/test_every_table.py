"""All tables of predictions, and for each all tables that an attacker can make of it: proof by exhaustion."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from patchcure.operations import Challenger, DoubleMasking, MinorityReports, SecureOperation

if TYPE_CHECKING:
    from tests.soundness.conftest import Attackers

PAIRS: dict[str, SecureOperation] = {
    "majority": DoubleMasking(),
    "unmasked": DoubleMasking("unmasked"),
    "challenger": Challenger(),
}

COVERS = {
    "one mask each, 3": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "one mask each, 4": [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]],
    "two masks each": [[1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1], [1, 0, 0, 1]],
    "each mask needed": [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1], [0, 0, 0, 1]],
    "one mask too many": [[1, 0, 0, 1], [0, 1, 0, 1], [0, 0, 1, 0]],
    "one location": [[1, 0, 1, 0]],
    "one mask": [[1]],
    "two masks": [[1, 0], [0, 1]],
}
MINIMAL = ["one mask each, 3", "one mask each, 4", "each mask needed", "one mask", "two masks"]


def covers_of(name: str) -> Tensor:
    return torch.tensor(COVERS[name], dtype=torch.bool)


@pytest.mark.parametrize("operation", PAIRS)
@pytest.mark.parametrize("name", COVERS)
def test_no_table_breaks_a_pair_certificate(
    name: str, operation: str, attackers: Attackers, record_property: Callable[[str, object], None]
) -> None:
    covers = covers_of(name)
    labels = 3 if covers.shape[1] < 4 else 2
    model = attackers.table(covers, 5 * torch.eye(labels))
    found = attackers.falsify(model.rule(PAIRS[operation]), model.claim(PAIRS[operation]), covers, labels)
    record_property("attacks", found.tried)
    assert not found.broken, found.example
    assert found.tried > 0


@pytest.mark.parametrize("labels", [(0, 1), (0, 2), (1, 2)])
def test_every_label_is_alike(labels: tuple[int, int], attackers: Attackers) -> None:
    """Ties are broken by the label's number, so label 0 may not stand for the others: give symbol 0 the other ones."""
    covers = covers_of("two masks each")
    model = attackers.table(covers, 5 * torch.eye(3)[[labels[1], labels[0]]])
    for operation in PAIRS.values():

        def rule(tables: Tensor, operation: SecureOperation = operation) -> Tensor:
            return (operation.predict(model, tables, model.masks).labels != labels[1]).long()

        def claim(tables: Tensor, operation: SecureOperation = operation) -> Tensor:
            wanted = torch.full((len(tables),), labels[1])
            return operation.certify(model, tables, model.masks, model.threat, wanted).safe[0][:, 0]

        found = attackers.falsify(rule, claim, covers, 2)
        assert found.tried and not found.broken, found.example


@pytest.mark.parametrize("name", COVERS)
@pytest.mark.parametrize("tau", [0.0, 0.5, 0.8])
def test_no_table_breaks_minority_reports(name: str, tau: float, attackers: Attackers) -> None:
    """Symbols: sure of 0, unsure of 0 (a tie with label 1), sure of 1, rather sure of 1."""
    covers = covers_of(name)
    alphabet = torch.tensor([[5.0, 0.0], [0.0, 0.0], [0.0, 5.0], [0.0, 1.0]])
    model = attackers.table(covers, alphabet, together=1)
    operation = MinorityReports(tau)
    rule, claim = model.rule(operation), model.claim(operation)
    found = attackers.falsify(rule, claim, covers, 4, pairs=False)
    assert found.tried and not found.broken, found.example
    tables, _, _ = attackers.every_table(covers.shape[1], 4, pairs=False)
    labels = torch.zeros(len(tables), dtype=torch.long)
    certified = operation.certify(model, tables, model.masks, model.threat, labels).certified
    assert bool((rule(tables)[certified] == 0).all()), "certified, yet there is an alarm without any patch"
    assert not bool((certified & ~claim(tables).all(1)).any())


@pytest.mark.parametrize("name", COVERS)
def test_strict_against_location_aware(name: str, attackers: Attackers) -> None:
    """All pairs right implies all locations safe; where every mask is some location's only one, the two are equal."""
    covers = covers_of(name)
    count = covers.shape[1]
    entries = list(itertools.combinations_with_replacement(range(count), 2))
    tables = torch.zeros(2 ** len(entries), count + 1, count + 1)
    for table, code in zip(tables, itertools.product((0, 1), repeat=len(entries)), strict=True):
        for (i, j), symbol in zip(entries, code, strict=True):
            table[i, j] = table[j, i] = symbol
    model = attackers.table(covers, 5 * torch.eye(2))
    proof = DoubleMasking().certify(
        model, tables, model.masks, model.threat, torch.zeros(len(tables), dtype=torch.long)
    )
    assert torch.equal(proof.strict, (tables[:, :count, :count] == 0).flatten(1).all(1))
    rows = (tables[:, :count, :count] == 0).all(2)
    by_hand = torch.stack([(rows & where).any(1) for where in covers], 1)
    assert torch.equal(proof.safe[0][:, 0], by_hand)
    assert torch.equal(proof.certified, by_hand.all(1))
    assert not bool((proof.strict & ~proof.certified).any())
    assert torch.equal(proof.strict, proof.certified) == (name in MINIMAL)
    assert torch.equal((proof.failed >= 0).any(1), ~proof.strict)
    failed = proof.failed[~proof.strict]
    assert bool((tables[~proof.strict, failed[:, 0], failed[:, 1]] != 0).all())
    assert torch.equal(proof.margin > 0, proof.strict)


@pytest.mark.slow
@pytest.mark.parametrize("operation", ["majority", "challenger"])
def test_four_masks_and_three_labels(
    operation: str, attackers: Attackers, record_property: Callable[[str, object], None]
) -> None:
    """3^10 tables."""
    covers = covers_of("one mask too many")
    model = attackers.table(covers, 5 * torch.eye(3))
    rule, claim = model.rule(PAIRS[operation]), model.claim(PAIRS[operation])
    found = attackers.falsify(rule, claim, covers, 3, unmasked=False)
    record_property("attacks", found.tried)
    assert found.tried > 600_000 and not found.broken, found.example
