"""The certificate is that of the plain all-pairs loop on trained weights; at k = L nothing loops over masks."""

from __future__ import annotations

from typing import Any

import digits_vit
import pytest
import torch
from torch import Tensor

from patchcure import Defense, PatchThreat, SplitResNet, reference
from patchcure.models.bagnet import DESIGNS, BagResNet


@pytest.mark.parametrize("k", digits_vit.SPLITS)
def test_verdicts_of_the_plain_loop(k: int) -> None:
    images, labels = (part[:30] for part in digits_vit.digits("test"))
    defense = Defense(digits_vit.split_vit(digits_vit.network(), digits_vit.WINDOW, k), digits_vit.THREAT)
    plain = [reference.certify(defense.model, x, defense.masks, int(y)) for x, y in zip(images, labels, strict=True)]
    assert 0 < sum(plain) < len(plain)
    assert defense.certify(images, labels, detail="verdict").strict.tolist() == plain


def test_pairs_of_a_bagnet_take_fewer_calls_than_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """441 masks, 97,461 pairs, of a BagNet17 with few channels at 224 pixels."""
    design = DESIGNS[50]
    network = BagResNet(design, design.kernels[17], sum(design.blocks), num_classes=5, width=2)
    model = SplitResNet(network, 224, 50)
    defense = Defense(model, PatchThreat.square("2%", 224))
    assert defense.masks.pairs == 97_461
    calls: list[int] = []
    masked = model.masked

    def counted(prepared: Any, images: Tensor, hidden: Tensor) -> Tensor:
        calls.append(len(images))
        return masked(prepared, images, hidden)

    monkeypatch.setattr(model, "masked", counted)
    image = torch.rand(1, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    defense.certify(image, defense.predict(image).labels, detail="margins")
    assert sum(calls) == 97_461 + 441
    assert len(calls) < len(defense.masks)
