"""All tables of predictions, and for each all tables that an attacker can make of it: proof by exhaustion."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from patchcure.operations import (
    Agreement,
    Challenger,
    CrossCert,
    DoubleMasking,
    HiCert,
    MinorityReports,
    SecureOperation,
)

if TYPE_CHECKING:
    from tests.soundness.conftest import Attackers

PAIRS: dict[str, SecureOperation] = {
    "majority": DoubleMasking(),
    "unmasked": DoubleMasking("unmasked"),
    "challenger": Challenger(),
    "crosscert": CrossCert(),
    "crosscert, challenger": CrossCert(Challenger()),
}
ROUND_RULES: list[SecureOperation] = [
    *(MinorityReports(tau) for tau in (0.0, 0.5, 0.8)),
    *(HiCert(tau) for tau in (0.0, 0.5, 0.9)),
    Agreement(),
]

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

ALPHABET = torch.tensor([[9.0, 0.0, 0.0], [0.6, 0.0, 0.0], [0.0, 9.0, 0.0], [-99.0, 5.0, 5.0]])
"""Label 0, label 0 with a confidence of 0.48, label 1, and label 1 with a confidence of exactly one half."""


def covers_of(name: str) -> Tensor:
    return torch.tensor(COVERS[name], dtype=torch.bool)


@pytest.mark.parametrize("operation", PAIRS)
@pytest.mark.parametrize("name", COVERS)
def test_no_table_breaks_a_pair_certificate(
    name: str, operation: str, attackers: Attackers, record_property: Callable[[str, object], None]
) -> None:
    covers = covers_of(name)
    labels = 3 if covers.shape[1] < 4 else 2
    model = attackers.table(covers, 5 * torch.eye(3)[:labels])
    found = attackers.falsify(model.game(PAIRS[operation]))
    record_property("attacks", found.tried)
    assert found.tried and not found.broken, found.example


@pytest.mark.parametrize("recovery", [DoubleMasking(), Challenger()], ids=["double masking", "challenger"])
@pytest.mark.parametrize("name", ["one mask each, 3", "two masks each", "one mask too many"])
def test_the_two_levels_of_crosscert(name: str, recovery: DoubleMasking | Challenger, attackers: Attackers) -> None:
    """Certified: right or alarmed. Strict: right. And without its alarm the weaker level promises no label."""
    covers, rule = covers_of(name), CrossCert(recovery)
    model = attackers.table(covers, 5 * torch.eye(3)[: 3 if covers.shape[1] < 4 else 2])
    alarmed, label = model.game(rule, unmasked=False), model.game(recovery, unmasked=False)

    def level(which: str) -> Callable[[Tensor], Tensor]:
        def claim(states: Tensor) -> Tensor:
            labels, tables = torch.zeros(len(states), dtype=torch.long), model.tables(states, unmasked=False)
            proved: Tensor = getattr(rule.certify(model, tables, model.masks, model.threat, labels), which)
            return proved

        return claim

    for game in (alarmed, alarmed.claims(level("certified")), label.claims(level("strict"))):
        found = attackers.falsify(game)
        assert found.tried and not found.broken, found.example
    assert attackers.falsify(label.claims(level("certified"))).broken


@pytest.mark.parametrize("labels", [(0, 1), (0, 2), (1, 2)])
def test_every_label_is_alike(labels: tuple[int, int], attackers: Attackers) -> None:
    """Ties are broken by the label's number, so label 0 may not stand for the others."""
    model = attackers.table(covers_of("two masks each"), 5 * torch.eye(3)[[labels[1], labels[0]]])
    for operation in PAIRS.values():
        found = attackers.falsify(model.game(operation, label=labels[1]))
        assert found.tried and not found.broken, found.example


@pytest.mark.parametrize("rule", ROUND_RULES, ids=str)
@pytest.mark.parametrize("name", COVERS)
def test_no_table_breaks_a_round(name: str, rule: SecureOperation, attackers: Attackers) -> None:
    """With the unmasked prediction, which the attacker writes at will; and the claims are what the rule's page says."""
    covers = covers_of(name)
    model = attackers.table(covers, ALPHABET, together=1)
    game = model.game(rule)
    found = attackers.falsify(game)
    assert found.tried and not found.broken, found.example
    states = game.states()
    votes = states[:, :-1]
    proof = rule.certify(
        model, model.tables(states), model.masks, model.threat, torch.zeros(len(states), dtype=torch.long)
    )
    if not isinstance(rule, HiCert):
        assert not bool(game.answer(states)[proof.certified].any()), "certified, yet an alarm without any patch"
    trusted = {
        MinorityReports(0.5): votes == 0,
        MinorityReports(0.8): votes == 0,
        HiCert(0.9): votes != 2,
    }.get(rule, votes <= 1)
    by_hand = torch.stack([(trusted & where).any(1) for where in covers], 1)
    assert torch.equal(proof.safe[0][:, 0], by_hand)
    if isinstance(rule, HiCert):
        assert torch.equal(proof.certified, by_hand.all(1)) and torch.equal(proof.strict, trusted.all(1))
    if isinstance(rule, Agreement):
        assert torch.equal(proof.certified, (states <= 1).all(1)) and torch.equal(proof.certified, proof.strict)


@pytest.mark.parametrize("name", COVERS)
def test_strict_against_location_aware(name: str, attackers: Attackers) -> None:
    """All pairs right implies all locations safe; where every mask is some location's only one, the two are equal."""
    covers = covers_of(name)
    count = covers.shape[1]
    model = attackers.table(covers, 5 * torch.eye(2))
    tables = model.tables(model.game(DoubleMasking(), unmasked=False).states(), unmasked=False)
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
    model = attackers.table(covers_of("one mask too many"), 5 * torch.eye(3))
    found = attackers.falsify(model.game(PAIRS[operation], unmasked=False))
    record_property("attacks", found.tried)
    assert found.tried > 600_000 and not found.broken, found.example
