"""Early stopping changes no verdict: `detail` only chooses what else a certificate tells."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from torch import nn

from patchcure import AnyClassifier, Defense, MaskSet, PatchThreat
from patchcure.operations import Challenger, DoubleMasking
from patchcure.operations.base import Detail


@pytest.mark.parametrize("operation", [DoubleMasking(), Challenger()])
@pytest.mark.parametrize("stride", [1, 2, 3])
def test_early_stopping_changes_no_verdict(operation: DoubleMasking | Challenger, stride: int) -> None:
    torch.manual_seed(stride)
    network = nn.Sequential(nn.Flatten(), nn.Linear(3 * 9 * 8, 24), nn.GELU(), nn.Linear(24, 4))
    model = AnyClassifier(network, image=(9, 8), num_classes=4)
    threat = PatchThreat.square(2, image=(9, 8))
    masks = MaskSet.covering(threat.on_features(model.grid, model.corrupted), stride)
    defense = Defense(model, threat, masks, operation)
    images = 0.45 + torch.linspace(0, 1, 48).view(-1, 1, 1, 1) * (torch.rand(48, 3, 9, 8) - 0.45)  # faint to strong
    labels = defense.predict(images).labels
    labels[::5] = (labels[::5] + 1) % 4
    all_margins, locations, verdict = (
        defense.certify(images, labels, detail=detail) for detail in reversed(get_args(Detail))
    )
    assert torch.equal(all_margins.certified, locations.certified)
    assert torch.equal(all_margins.certified, verdict.certified)
    assert torch.equal(all_margins.strict, locations.strict)
    assert torch.equal(all_margins.largest_patch, locations.largest_patch)
    for full, quick in zip(all_margins.safe, locations.safe, strict=True):
        assert torch.equal(full, quick)
    for full, quick in zip(all_margins.safe, verdict.safe, strict=True):
        assert not (quick & ~full).any()
    good = all_margins.strict
    assert 0 < int(good.sum()) < 48
    torch.testing.assert_close(all_margins.margin[good], locations.margin[good])
    assert (all_margins.margin <= locations.margin + 1e-6).all()
    for certificate in (all_margins, locations, verdict):
        assert (certificate.failed[good] == -1).all() and (certificate.failed[~good] >= 0).all()


def test_detail_must_be_known() -> None:
    model = AnyClassifier(nn.Sequential(nn.Flatten(), nn.Linear(192, 2)), image=8, num_classes=2)
    defense = Defense(model, PatchThreat.square(2, image=8))
    with pytest.raises(ValueError, match="expected one of verdict, locations, margins, got 'all'"):
        defense.certify(torch.rand(1, 3, 8, 8), torch.tensor([0]), detail="all")  # type: ignore[arg-type]
