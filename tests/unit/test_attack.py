"""Attacks stay inside their threat, are repeatable, break what is undefended, and never break a certificate."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import digits_vit
import pytest
import torch
from torch import Tensor

from patchcure import Defense, Grid, PatchThreat, Resize, SplitModel
from patchcure.attack import PatchAttack, placements
from patchcure.demo import answers
from patchcure.operations import Challenger, MinorityReports

Builders = dict[str, Callable[..., SplitModel]]
THREATS = {
    "square": PatchThreat.square(3, image=12),
    "rectangles": PatchThreat.rectangles([(2, 6), (5, 1)], image=12),
    "two": PatchThreat.square(2, image=6, count=2),
    "resized": PatchThreat.square(2, image=6).before(Resize(Grid(6, 6), Grid(12, 12))),
}


@pytest.fixture(scope="module")
def digits() -> tuple[dict[str, SplitModel | Defense], Tensor, Tensor]:
    """The demo's trained models, and some test images with labels."""
    images, labels = digits_vit.digits("test")
    return digits_vit.contestants(digits_vit.network()), images[:30], labels[:30]


def possible(threat: PatchThreat, changed: Tensor) -> bool:
    """Could patches of this threat have changed these pixels, and no others?"""
    alone = PatchThreat(threat.shapes, threat.image)
    places = placements(alone, 10**6, torch.Generator())
    choices = itertools.combinations_with_replacement(places, threat.count)
    return any(not bool((changed & ~torch.stack(choice).any(0)).any()) for choice in choices)


@pytest.mark.parametrize("name", THREATS)
@pytest.mark.parametrize("defended", [False, True])
def test_only_the_patches_change(build: Builders, name: str, defended: bool) -> None:
    threat = THREATS[name]
    model = build["classifier"]((threat.target.height, threat.target.width))
    target = Defense(model, threat, operation=Challenger()) if defended else model
    images = torch.rand(3, 3, threat.image.height, threat.image.width, generator=torch.Generator().manual_seed(1))
    seen = images if threat.resize is None else threat.resize(images)
    labels = model(seen).argmax(1)
    attack = PatchAttack(steps=3, trials=2, candidates=20)
    attacked = attack.attack(target, images, labels, threat)
    changed = (attacked != images).any(1)
    assert changed.any()
    assert all(possible(threat, each) for each in changed)
    assert attacked.min() >= 0
    assert attacked.max() <= 1
    assert torch.equal(attacked, attack.attack(target, images, labels, threat))


def test_images_that_are_wrong_already_stay(build: Builders) -> None:
    model, images = build["classifier"](12), torch.rand(4, 3, 12, 12)
    wrong = (model(images).argmax(1) + 1) % model.num_classes
    assert torch.equal(PatchAttack(steps=1).attack(model, images, wrong, THREATS["square"]), images)


def test_all_placements_or_a_sample() -> None:
    threat = PatchThreat.rectangles([(2, 3), (4, 1)], image=(5, 6))
    everything = placements(threat, 100, torch.Generator())
    assert len(everything) == len(everything.unique(dim=0)) == 4 * 4 + 2 * 6
    sample = placements(PatchThreat.square(32, image=224, count=2), 10, torch.Generator().manual_seed(0))
    assert sample.shape == (10, 224, 224)
    assert sample.sum((1, 2)).max() <= 2 * 32 * 32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"images": torch.rand(2, 3, 10, 12)}, "images of 12x12 pixels"),
        ({"images": torch.rand(3, 12, 12)}, "images of 12x12 pixels"),
        ({"labels": torch.zeros(3, dtype=torch.long)}, "one whole-number label"),
        ({"labels": torch.zeros(2)}, "one whole-number label"),
    ],
)
def test_wrong_input_is_refused(build: Builders, change: dict[str, Tensor], message: str) -> None:
    arguments = {"images": torch.rand(2, 3, 12, 12), "labels": torch.zeros(2, dtype=torch.long), **change}
    with pytest.raises(ValueError, match=message):
        PatchAttack().attack(build["classifier"](12), threat=THREATS["square"], **arguments)


@pytest.mark.parametrize("options", [{"steps": 0}, {"trials": 0}, {"candidates": 0}, {"masks": 0}, {"step_size": 2.0}])
def test_wrong_settings_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        PatchAttack(**options)


def test_the_undefended_model_breaks(digits: tuple[dict[str, SplitModel | Defense], Tensor, Tensor]) -> None:
    models, images, labels = digits
    model = models["undefended"]
    clean = (answers(model, images) == labels).double().mean()
    attacked = PatchAttack().attack(model, images, labels, digits_vit.THREAT)
    assert clean > 0.9
    assert (answers(model, attacked) == labels).double().mean() < 0.5 * clean


@pytest.mark.parametrize("operation", ["masks", "detects"])
def test_no_certificate_breaks(digits: tuple[dict[str, SplitModel | Defense], Tensor, Tensor], operation: str) -> None:
    models, images, labels = digits
    broken = 0
    for model in models.values():
        if isinstance(model, Defense):
            defense = model
            if operation == "detects":
                defense = Defense(model.model, model.threat, operation=MinorityReports()).eval()
            attacked = PatchAttack(steps=8, trials=2).attack(defense, images, labels, digits_vit.THREAT)
            prediction = defense.predict(attacked)
            wrong = (prediction.labels != labels) & ~prediction.alarm
            assert not (wrong & defense.certify(images, labels).certified).any()
            broken += int(wrong.sum())
    assert broken > 0 or operation == "detects"
