"""What detectors must not do: choose important cells before they hide, count near ties, use too small windows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import pytest
import torch
from torch import Tensor

from patchcure import Box, Certificate, Defense, Grid, MaskSet, PatchThreat, Prediction, SplitModel
from patchcure.operations import Agreement, ScaleCert
from patchcure.operations.base import Detail, margins, tolerance
from patchcure.operations.one_round import agreement, certify_round

if TYPE_CHECKING:
    from tests.soundness.conftest import Attackers


@dataclass(frozen=True)
class GlobalScaleCert:
    """The wrong rule: the most important cells are chosen on the whole image, then the windows are hidden."""

    share: float = 0.4
    together: ClassVar[int] = 1
    ablation: ClassVar[None] = None

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


def test_scalecert_must_choose_among_the_visible_cells(attackers: Attackers) -> None:
    """A patch that makes its own cells important pushes others out, and changes predictions in which it is hidden."""
    threat = PatchThreat.rectangles([(1, 2)], (1, 4))
    model = attackers.tiny(Grid(1, 4), bias=0.6, ranked=True)
    found = {}
    for rule in (GlobalScaleCert(), ScaleCert(share=0.4)):
        game = attackers.patches(Defense(model, threat, operation=rule))
        total = attackers.falsified()
        for seed in range(12):
            model.draw(seed)
            total += attackers.falsify(game)
        assert total.tried > 1000
        found[type(rule)] = total.broken
    assert found[GlobalScaleCert] > 0 and found[ScaleCert] == 0


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
