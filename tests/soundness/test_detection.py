"""Detectors: every patch with every content, every table of predictions; and wrong certificates, which must break."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import pytest
import torch
from torch import Tensor

from patchcure import Box, Certificate, Defense, Grid, MaskSet, PatchThreat, Prediction, SplitModel
from patchcure.operations import Agreement, Challenger, CrossCert, HiCert, MinorityReports, ScaleCert, SecureOperation
from patchcure.operations.base import Detail, margins, tolerance
from patchcure.operations.one_round import agreement, certify_round

if TYPE_CHECKING:
    from tests.soundness.conftest import Attackers, TinyModel

RULES: dict[str, SecureOperation] = {
    "agreement": Agreement(),
    "crosscert": CrossCert(),
    "crosscert-challenger": CrossCert(Challenger()),
    "hicert": HiCert(tau=0.7),
    "hicert-0": HiCert(tau=0.0),
    "minority-tau": MinorityReports(tau=0.62),
    "scalecert": ScaleCert(share=0.4),
    "scalecert-1": ScaleCert(share=1.0),
}


@dataclass(frozen=True)
class Case:
    """A small model, its attacker, and what the masks are made for (by default the attacker)."""

    image: tuple[int, int]
    shapes: tuple[tuple[int, int], ...]
    size: int = 1
    count: int = 1
    bias: float = 0.9
    masks: tuple[int, int] | None = None
    models: int = 30


CASES = {
    "one pixel": Case((1, 6), ((1, 1),)),
    "a square": Case((3, 3), ((2, 2),), models=20),
    "overlapping fields": Case((1, 9), ((1, 2),), size=2),
    "two shapes": Case((3, 3), ((1, 2), (2, 1)), bias=0.96),
    "smaller than designed for": Case((1, 7), ((1, 1),), masks=(1, 2)),
    "two patches": Case((1, 6), ((1, 1),), count=2, bias=0.97, models=20),
}


def ranked(model: TinyModel) -> Callable[[Tensor], Tensor]:
    """The same features with a fraction of one that tells the cell, so that no two cells are of equal importance."""
    plain = model.features
    return lambda images: plain(images) + torch.arange(model.grid.cells) / (2 * model.grid.cells)


def defended(
    case: Case, operation: SecureOperation, attackers: Attackers, monkeypatch: pytest.MonkeyPatch
) -> tuple[Defense, TinyModel]:
    model = attackers.tiny(Grid(*case.image), case.size, bias=case.bias)
    monkeypatch.setattr(model, "features", ranked(model))
    threat = PatchThreat.rectangles(case.shapes, case.image, case.count)
    masks = None
    if case.masks is not None:
        designed = PatchThreat.rectangles([case.masks], case.image)
        masks = MaskSet.covering(designed.on_features(model.grid, model.corrupted))
    return Defense(model, threat, masks, operation), model


def clean_images(case: Case, seed: int) -> Tensor:
    return torch.randint(0, 3, (1, 1, *case.image), generator=torch.Generator().manual_seed(seed)) / 2


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", CASES)
def test_no_patch_breaks_a_certificate(
    name: str, rule: str, attackers: Attackers, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, operation = CASES[name], RULES[rule]
    defense, model = defended(case, operation, attackers, monkeypatch)
    tried = certified = 0
    for seed in range(case.models):
        model.draw(seed)
        image = clean_images(case, seed)
        proof = defense.certify(image, torch.tensor([0]))
        assert bool(proof.certified) or not bool(proof.strict)
        if not any(bool(safe.any()) for safe in proof.safe):
            assert not bool(proof.certified)
            continue
        broken, attacks = attackers.broken_placements(defense, defense.threat, image[0], 0)
        tried, certified = tried + attacks, certified + int(proof.certified)
        for shape, row, col in itertools.chain.from_iterable(broken):
            assert not bool(proof.safe[shape][0, row, col]), f"safe {row, col} is broken (model {seed})"
        if bool(proof.certified):
            assert not broken and all(bool(safe.all()) for safe in proof.safe)
            answer = defense.predict(image)
            assert isinstance(operation, HiCert) or int(answer.labels) == 0
        side = int(proof.largest_patch)
        if side and ((side, side),) != defense.threat.shapes and side < 4:
            broken, attacks = attackers.broken_placements(defense, defense.threat.with_squares(side), image[0], 0)
            assert not broken
            tried += attacks
    assert certified >= case.models // 10, f"only {certified} of {case.models} certified: this test shows little"
    assert tried >= 250


COVERS = {
    "one mask each": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "two masks each": [[1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1], [1, 0, 0, 1]],
    "one mask too many": [[1, 0, 1], [0, 1, 1]],
}
SURE, UNSURE, OTHER, DOUBTFUL = [9.0, 0.0, 0.0], [0.6, 0.0, 0.0], [0.0, 9.0, 0.0], [-99.0, 5.0, 5.0]
"""Label 0, label 0 with a confidence of 0.48, label 1, and label 1 with a confidence of exactly one half."""
ALPHABET = torch.tensor([SURE, UNSURE, OTHER, DOUBTFUL])


def every_table(count: int, symbols: int) -> tuple[Tensor, Tensor]:
    """All one-mask symbols with all unmasked ones, (n, m + 1), and as the tables that `TableModel` reads."""
    codes = torch.cartesian_prod(*[torch.arange(symbols)] * (count + 1))
    return codes, torch.diag_embed(codes.float())


def falsify_round(rule: Tensor, claim: Tensor, codes: Tensor, covers: Tensor) -> tuple[int, int]:
    """How many attacks on claimed locations there are, and how many of them give a wrong label.

    A patch at a location turns a row of symbols into any other that agrees where a mask hides that location.
    """
    wrong = (rule != 0) & (rule != -1)
    tried = broken = 0
    for at, fixed in enumerate(covers):
        _, world = codes[:, :-1][:, fixed].unique(dim=0, return_inverse=True)
        size = torch.bincount(world)
        claims = torch.bincount(world, claim[:, at].double())
        tried += int((size * claims).sum())
        broken += int((torch.bincount(world, wrong.double()) * claims).sum())
    return tried, broken


@pytest.mark.parametrize("operation", [Agreement(), HiCert(0.0), HiCert(0.5), HiCert(0.9)], ids=str)
@pytest.mark.parametrize("name", COVERS)
def test_no_table_breaks_a_round(name: str, operation: SecureOperation, attackers: Attackers) -> None:
    """With the unmasked prediction, which the attacker writes at will."""
    covers = torch.tensor(COVERS[name], dtype=torch.bool)
    model = attackers.table(covers, ALPHABET, together=1)
    codes, tables = every_table(covers.shape[1], len(ALPHABET))
    labels = torch.zeros(len(tables), dtype=torch.long)
    answers = operation.predict(model, tables, model.masks)
    proof = operation.certify(model, tables, model.masks, model.threat, labels)
    tried, broken = falsify_round(answers.labels, proof.safe[0][:, 0], codes, covers)
    assert tried > 5_000 and not broken
    if isinstance(operation, Agreement):
        assert torch.equal(proof.certified, (codes <= 1).all(1))
        assert torch.equal(proof.certified, proof.strict) and bool((answers.labels[proof.certified] == 0).all())
    else:
        trusted = codes[:, :-1] != 2 if str(operation) == str(HiCert(0.9)) else codes[:, :-1] <= 1
        assert torch.equal(proof.strict, trusted.all(1))
        by_hand = torch.stack([(trusted & where).any(1) for where in covers], 1)
        assert torch.equal(proof.certified, by_hand.all(1)) and torch.equal(proof.safe[0][:, 0], by_hand)


def test_hicert_needs_less_than_tau(attackers: Attackers) -> None:
    """A vote with a confidence of exactly tau raises no alarm, so a certificate with <= instead of < is broken."""
    covers = torch.tensor(COVERS["one mask each"], dtype=torch.bool)
    model = attackers.table(covers, ALPHABET, together=1)
    codes, tables = every_table(3, len(ALPHABET))
    operation = HiCert(tau=0.5)
    answers = operation.predict(model, tables, model.masks).labels
    sure = ALPHABET.double().softmax(1).amax(1)
    at_most = ((codes[:, :-1] <= 1) | (sure <= 0.5)[codes[:, :-1]]).all(1, keepdim=True).expand(-1, 3)
    assert falsify_round(answers, at_most, codes, covers)[1]
    less = ((codes[:, :-1] <= 1) | (sure < 0.5)[codes[:, :-1]]).all(1, keepdim=True).expand(-1, 3)
    assert not falsify_round(answers, less, codes, covers)[1]


@pytest.mark.parametrize("recovery", [CrossCert(), CrossCert(Challenger())], ids=["double masking", "challenger"])
@pytest.mark.parametrize("name", COVERS)
def test_no_table_breaks_the_two_levels_of_crosscert(name: str, recovery: CrossCert, attackers: Attackers) -> None:
    covers = torch.tensor(COVERS[name], dtype=torch.bool)
    symbols = 3 if covers.shape[1] < 4 else 2
    model = attackers.table(covers, 5 * torch.eye(3)[:symbols])

    def proof(tables: Tensor) -> Certificate:
        labels = torch.zeros(len(tables), dtype=torch.long)
        return recovery.certify(model, tables, model.masks, model.threat, labels)

    def alarmed(tables: Tensor) -> Tensor:
        answer = recovery.predict(model, tables, model.masks)
        return torch.where(answer.alarm, -1, answer.labels)

    def strict(tables: Tensor) -> Tensor:
        return proof(tables).strict[:, None].expand(-1, len(covers))

    def certified(tables: Tensor) -> Tensor:
        return proof(tables).certified[:, None].expand(-1, len(covers))

    for rule, claim in (
        (alarmed, model.claim(recovery)),
        (alarmed, certified),
        (model.rule(recovery), strict),
    ):
        found = attackers.falsify(rule, claim, covers, symbols, unmasked=False)
        assert found.tried and not found.broken, found.example
    assert attackers.falsify(model.rule(recovery), certified, covers, symbols, unmasked=False).broken, (
        "without the alarm the weaker level promises no label"
    )


def voting_cells(votes: Tensor, width: int = 3) -> Tensor:
    """The original Minority Reports on a row of masks: neighbours that agree make a voting cell; cells that agree give
    the label, cells that differ the alarm."""
    cells = votes.unfold(1, width, 1)
    unanimous = (cells == cells[..., :1]).all(2)
    labels = torch.where(unanimous, cells[..., 0], -1)
    top = labels.amax(1)
    return torch.where(((labels == top[:, None]) | ~unanimous).all(1), top, -1)


def test_voting_cells_of_minority_reports_break_at_the_borders(attackers: Attackers) -> None:
    """Masks of 3 pixels for a patch of one: inside three neighbouring masks hide it, at the border only one does."""
    covers = torch.tensor([[mask <= at < mask + 3 for mask in range(5)] for at in range(7)])
    model = attackers.table(covers, 5 * torch.eye(2), together=1)

    def published(tables: Tensor) -> Tensor:
        return voting_cells(tables[:, :-1, :-1].diagonal(dim1=1, dim2=2).long())

    def unanimous(tables: Tensor) -> Tensor:
        return (tables[:, :-1, :-1].diagonal(dim1=1, dim2=2) == 0).all(1, keepdim=True).expand(-1, 7)

    found = attackers.falsify(published, unanimous, covers, 2, pairs=False)
    assert found.broken
    assert found.example is not None and found.example[2] in (0, 1, 5, 6)
    inside = torch.tensor([False, False, True, True, True, False, False])
    assert not attackers.falsify(published, lambda t: unanimous(t) & inside, covers, 2, pairs=False).broken
    operation = MinorityReports()
    ours = attackers.falsify(model.rule(operation), model.claim(operation), covers, 2, pairs=False)
    assert ours.tried and not ours.broken


@dataclass(frozen=True)
class GlobalScaleCert:
    """The wrong rule: the most important cells are chosen on the whole image, then the windows are hidden."""

    share: float = 0.4
    together: ClassVar[int] = 1

    def _logits(self, model: SplitModel, features: Tensor, masks: MaskSet) -> Tensor:
        importance = model.by_cell(features).abs().sum(2)
        count = -int(-self.share * model.grid.cells // 1)
        kept = torch.zeros_like(importance, dtype=torch.bool).scatter(1, importance.topk(count).indices, True)
        table = torch.cat([masks.hidden, torch.zeros_like(masks.hidden[:1])]).flatten(1)
        jobs = torch.cartesian_prod(torch.arange(len(features)), torch.arange(len(table)))
        content = torch.where(~kept[jobs[:, 0]] | table[jobs[:, 1]], torch.nan, features[jobs[:, 0]])
        return model.masked(content.nan_to_num(0), torch.arange(len(jobs)), content.isnan())

    def worst_evaluations(self, model: SplitModel, masks: MaskSet) -> int:
        return len(masks) + 1

    def predict(self, model: SplitModel, features: Tensor, masks: MaskSet) -> Prediction:
        votes = self._logits(model, features, masks).argmax(1).view(len(features), -1)
        return agreement(model, masks, votes[:, -1], votes[:, :-1])

    def certify(
        self,
        model: SplitModel,
        features: Tensor,
        masks: MaskSet,
        threat: PatchThreat,
        labels: Tensor,
        detail: Detail = "locations",
    ) -> Certificate:
        logits = self._logits(model, features, masks)
        margin = margins(logits, labels.repeat_interleave(len(masks) + 1))
        right = (margin > tolerance(logits)).view(len(features), -1)
        return certify_round(model, masks, threat, margin.view_as(right), right[:, :-1], right.all(1))


def test_scalecert_must_choose_among_the_visible_cells(attackers: Attackers, monkeypatch: pytest.MonkeyPatch) -> None:
    """A patch that makes its own cells important pushes others out, and changes predictions in which it is hidden."""
    case = Case((1, 4), ((1, 2),), bias=0.6)
    found: dict[str, int] = {}
    for rule in (GlobalScaleCert(), ScaleCert(share=0.4)):
        defense, model = defended(case, rule, attackers, monkeypatch)
        certified = 0
        for seed in range(400):
            model.draw(seed)
            image = clean_images(case, seed)
            if bool(defense.certify(image, torch.tensor([0])).certified):
                certified += 1
                broken, _ = attackers.broken_placements(defense, defense.threat, image[0], 0)
                found[type(rule).__name__] = found.get(type(rule).__name__, 0) + bool(broken)
        assert certified > 8
    assert found["GlobalScaleCert"] > 0 and found["ScaleCert"] == 0


def test_nearly_equal_importance_certifies_nothing(attackers: Attackers) -> None:
    """Rounding could exchange the cells, so a choice that is not clear counts for nothing."""
    model = attackers.tiny(Grid(1, 6), bias=1.0)
    defense = Defense(model, PatchThreat.square(1, (1, 6)), operation=ScaleCert(share=0.4))
    image = torch.tensor([[[[0.0, 0.5, 1.0, 0.5, 0.5, 0.0]]]])  # the third of three equal cells is not kept
    assert int(defense.predict(image).labels) == 0
    assert not bool(defense.certify(image, torch.tensor([0])).certified)
    assert bool(Defense(model, defense.threat, operation=ScaleCert(share=1.0)).certify(image, torch.tensor([0])).strict)


def test_windows_of_the_patch_size_do_not_cover_a_patch_between_tokens(attackers: Attackers) -> None:
    """A patch of two tokens' size touches three tokens: windows of two are refused."""
    model = attackers.tiny(Grid(8, 8), size=2, jump=2)
    threat = PatchThreat.square(4, 8)
    boxes = tuple((Box(a, b, a + 2, b + 2),) for a in range(3) for b in range(3))
    with pytest.raises(ValueError, match="do not cover the threat"):
        Defense(model, threat, MaskSet(boxes, threat.on_features(model.grid, model.corrupted), 1), Agreement())
    assert len(Defense(model, threat, operation=Agreement()).masks) == 4
