"""The same image under the same mask gives the same logits in any company, to within the tolerance of certificates."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from patchcure import SplitModel, SplitViT
from patchcure._torchvision import ensure_torchvision
from patchcure.operations import DoubleMasking, MinorityReports, SecureOperation
from patchcure.operations.base import tolerance

if TYPE_CHECKING:
    from tests.soundness.conftest import Attackers

SHARED = Path(os.environ.get("PATCHCURE_SHARED", Path(__file__).parents[3] / "shared")) / "data"
WEIGHTS = SHARED / "vit_tiny_patch16_224.safetensors"

SHARE = 0.5
"""A margin is the difference of two logits, so each may move by half the tolerance."""

Key = tuple[int, int, int]
"""An image and two masks."""


def masks_for(model: SplitModel) -> Tensor:
    """A few boxes of cells that leave something visible in every pair."""
    height, width = model.grid.height, model.grid.width
    masks = []
    for top, left in ((0, 0), (height // 2, width // 2), (0, width - 1), (height - 1, 0)):
        mask = torch.zeros(height, width, dtype=torch.bool)
        mask[top : top + max(1, height // 3), left : left + max(1, width // 3)] = True
        masks.append(mask)
    return torch.stack(masks)


def jobs(images: list[int], masks: int, style: str) -> list[Key]:
    """What an operation asks for: the first round of predict, its second round for one image, or all of certify."""
    if style == "first round":
        return [(b, i, i) for b in images for i in range(masks)]
    if style == "second round":
        return [(b, b % masks, j) for b in images for j in range(masks) if j != b % masks]
    return [(b, i, j) for b in images for i in range(masks) for j in range(i, masks)]


def companies(number: int) -> Iterator[list[int]]:
    """Batches: alone, in pairs, all of them, in other orders, and with an image twice."""
    random = torch.Generator().manual_seed(0)
    yield from ([b] for b in range(3))
    for size in range(2, number + 1):
        yield torch.randperm(number, generator=random)[:size].tolist()
    yield [0, 0, 1, 0]


@torch.no_grad()
def compare(model: SplitModel, images: Tensor) -> tuple[float, float]:
    """The largest difference of a logit, and of a margin between two logits, in units of the tolerance."""
    masks = masks_for(model).flatten(1)
    seen: dict[Key, list[Tensor]] = {}
    limit = model.max_jobs
    for company in companies(len(images)):
        features = model.features(images[company])
        for style, size in (("first round", limit), ("second round", 3), ("certify", limit), ("first round", 1)):
            if size == 1 and len(company) > 2:
                continue
            model.max_jobs = size
            keys = jobs(list(range(len(company))), len(masks), style)
            index, first, second = torch.tensor(keys).T
            hidden = (masks[first] | masks[second]).view(-1, model.grid.height, model.grid.width)
            for (b, i, j), row in zip(keys, model.logits(features, index, hidden), strict=True):
                seen.setdefault((company[b], min(i, j), max(i, j)), []).append(row)
    model.max_jobs = limit
    worst = [0.0, 0.0]
    for rows in seen.values():
        logits = torch.stack(rows)
        unit = tolerance(logits).amin()
        margins = logits[:, :, None] - logits[:, None, :]
        for slot, values in enumerate((logits, margins)):
            worst[slot] = max(worst[slot], float((values.amax(0) - values.amin(0)).max() / unit))
    return worst[0], worst[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["single", "double"])
def test_logits_agree_in_any_company(
    family: SplitModel, dtype: torch.dtype, record_property: Callable[[str, object], None]
) -> None:
    images = torch.rand(9, 3, family.image.height, family.image.width, dtype=dtype)
    logit, margin = compare(family.to(dtype), images)
    record_property("ratio", f"{logit:.4f} {margin:.4f}")
    assert logit < SHARE
    assert margin < SHARE


@torch.no_grad()
def test_logits_agree_with_more_threads(family: SplitModel) -> None:
    images = torch.rand(4, 3, family.image.height, family.image.width)
    each, hidden = torch.arange(4), masks_for(family)
    before = torch.get_num_threads()
    rows = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            rows.append(family.logits(family.features(images), each, hidden))
    finally:
        torch.set_num_threads(before)
    assert float(((rows[0] - rows[1]).abs().amax(1) / tolerance(rows[0])).max()) < SHARE


@pytest.mark.shared
@pytest.mark.slow
@pytest.mark.skipif(not WEIGHTS.exists(), reason=f"no {WEIGHTS}")
def test_logits_agree_with_trained_weights(record_property: Callable[[str, object], None]) -> None:
    """Trained weights amplify rounding more than random ones; zero tokens, which these never saw, most of all."""
    ensure_torchvision()
    from safetensors.torch import load_file
    from timm.models.vision_transformer import vit_tiny_patch16_224

    backbone = vit_tiny_patch16_224(pretrained=False)
    backbone.load_state_dict(load_file(WEIGHTS))
    model = SplitViT(backbone, (14, 2), 3, "published", mean=(0.5,) * 3, std=(0.5,) * 3).eval()
    coarse = torch.rand(3, 3, 7, 7, generator=torch.Generator().manual_seed(0))
    images = torch.nn.functional.interpolate(coarse, 224, mode="bilinear")
    logit, margin = compare(model, images)
    record_property("ratio", f"{logit:.4f} {margin:.4f}")
    assert logit < SHARE
    assert margin < 1


@pytest.mark.parametrize("operation", [DoubleMasking(), MinorityReports(), MinorityReports(0.3)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["single", "double"])
@pytest.mark.parametrize("size", [1.0, 1e-3, 300.0])
def test_margins_within_the_tolerance_do_not_count(
    operation: SecureOperation, dtype: torch.dtype, size: float, attackers: Attackers
) -> None:
    unit = float(tolerance(torch.tensor([[size, 0.0]], dtype=dtype))[0])
    zero = torch.zeros(1, dtype=torch.long)
    for margin, certified in ((0.0, False), (0.5, False), (0.99, False), (2.5, True)):
        alphabet = torch.tensor([[size, size - margin * unit, -size]], dtype=dtype)
        model = attackers.table(torch.eye(3, dtype=torch.bool), alphabet, together=operation.together)
        proof = operation.certify(model, torch.zeros(1, 4, 4, dtype=dtype), model.masks, model.threat, zero)
        assert bool(proof.certified) == bool(proof.strict) == certified
        assert bool(proof.safe[0].all()) == certified and bool(proof.largest_patch > 0) == certified


@pytest.mark.parametrize("nudge", [0.5, 1.0, 1.9])
def test_confidence_within_the_tolerance_of_tau_does_not_count(nudge: float, attackers: Attackers) -> None:
    """Heard for sure, or unheard for sure: a vote that rounding could silence protects nobody."""
    alphabet = torch.tensor([[2.0, 0.0, -1.0]])
    zero = torch.zeros(1, dtype=torch.long)
    unit = float(tolerance(alphabet)[0])
    model = attackers.table(torch.eye(3, dtype=torch.bool), alphabet, together=1)

    def certified(shift: float) -> bool:
        """With tau at the confidence that the first logit has when it is lower by `shift`."""
        tau = float((alphabet[0].double() - torch.tensor([shift, 0, 0])).softmax(0)[0])
        proof = MinorityReports(tau).certify(model, torch.zeros(1, 4, 4), model.masks, model.threat, zero)
        return bool(proof.certified)

    assert not certified(-nudge * unit) and not certified(nudge * unit)
    assert certified(3 * unit) and not certified(-3 * unit)
