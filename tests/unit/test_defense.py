"""The contract of a defense: what it refuses, and what copies and conversions leave alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from patchcure import AnyClassifier, Box, Defense, Grid, MaskSet, PatchThreat, Resize, SplitModel
from patchcure.operations import OPERATIONS, DoubleMasking, MinorityReports

Build = dict[str, Callable[..., Any]]


def linear(image: int = 8, classes: int = 4) -> AnyClassifier:
    torch.manual_seed(0)
    return AnyClassifier(nn.Sequential(nn.Flatten(), nn.Linear(3 * image**2, classes)), image, classes)


@pytest.fixture
def defense() -> Defense:
    return Defense(linear(), PatchThreat.square(2, 8))


GOOD = torch.rand(2, 3, 8, 8)


@pytest.mark.parametrize(
    "images",
    [
        GOOD[0],
        GOOD[:0],
        torch.rand(2, 1, 8, 8),
        torch.rand(2, 3, 8, 9),
        torch.rand(2, 8, 8, 3),
        (GOOD * 255).byte(),
        GOOD.to(torch.complex64),
    ],
    ids=["no batch", "empty", "channels", "size", "channels last", "bytes", "complex"],
)
def test_wrong_images(defense: Defense, images: Tensor) -> None:
    labels = torch.zeros(len(images), dtype=torch.long)
    for call in (lambda: defense.predict(images), lambda: defense.certify(images, labels)):
        with pytest.raises(ValueError, match=r"Expected a batch of float images \(n, 3, 8, 8\)"):
            call()


@pytest.mark.parametrize("value", [-0.01, 1.01, 255.0, torch.nan, torch.inf, -torch.inf])
def test_wrong_range(defense: Defense, value: float) -> None:
    images = GOOD.clone()
    images[1, 2, 3, 4] = value
    for call in (lambda: defense.predict(images), lambda: defense.certify(images, torch.tensor([0, 0]))):
        with pytest.raises(ValueError, match=r"must be in \[0, 1\] without NaN"):
            call()


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([0], "one whole-number label for each of the 2 images"),
        ([[0, 1]], "one whole-number label"),
        ([0.0, 1.0], "one whole-number label.*float32"),
        ([0, 4], "Labels go from 0 to 3, got 0 to 4"),
        ([-1, 0], "Labels go from 0 to 3, got -1 to 0"),
    ],
)
def test_wrong_labels(defense: Defense, labels: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        defense.certify(GOOD, torch.tensor(labels))


def test_training_mode_is_refused(defense: Defense) -> None:
    defense.train()
    for call in (lambda: defense.predict(GOOD), lambda: defense.certify(GOOD, torch.tensor([0, 0]))):
        with pytest.raises(ValueError, match=r"training mode.*eval"):
            call()


def test_a_part_in_training_mode_is_refused() -> None:
    """A batch norm in training mode mixes all pixels of all images: a patch reaches every prediction under masks."""
    network = nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(192, 4))
    defense = Defense(AnyClassifier(network, 8, 4), PatchThreat.square(2, 8))
    network[0].train()
    with pytest.raises(ValueError, match="training mode"):
        defense.predict(GOOD)


@pytest.mark.filterwarnings("ignore")
def test_dynamic_quantisation_is_refused() -> None:
    """Its scale is a function of the whole input, so a patch reaches every cell (spec, section 8)."""
    quantised = torch.ao.quantization.quantize_dynamic(linear(), {nn.Linear}, dtype=torch.qint8)
    with pytest.raises(ValueError, match="quanti"):
        Defense(quantised, PatchThreat.square(2, 8)).predict(GOOD)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_not_a_number_is_an_error_and_no_label(operation: str) -> None:
    model = linear()
    defense = Defense(model, PatchThreat.square(2, 8), operation=OPERATIONS[operation])
    for value in (torch.nan, torch.inf):
        with torch.no_grad():
            next(model.parameters())[1, 5] = value
        with pytest.raises(FloatingPointError, match="NaN or infinite"):
            defense.predict(GOOD)
        try:
            proof = defense.certify(GOOD, torch.tensor([0, 0]))
        except FloatingPointError as error:
            assert "NaN or infinite" in str(error)
        else:  # interval bounds find no bound and say so
            assert operation == "interval-bounds" and not bool(proof.certified.any())


class BadUnmasked(nn.Module):
    """Finite under every mask, and not a number when all pixels are seen."""

    def forward(self, x: Tensor) -> Tensor:
        logits = torch.stack([x.mean((1, 2, 3)), -x.mean((1, 2, 3))], 1)
        return torch.where((x != 0).flatten(1).all(1, keepdim=True), torch.nan, logits)


def test_an_unmasked_reference_that_is_not_a_number() -> None:
    model = AnyClassifier(BadUnmasked(), 8, 2)
    defense = Defense(model, PatchThreat.square(2, 8), operation=DoubleMasking("unmasked"))
    with pytest.raises(FloatingPointError, match="NaN or infinite"):
        defense.predict(GOOD)


def test_threat_and_model_must_agree() -> None:
    with pytest.raises(ValueError, match="reads images of 8x8 but the threat ends on 9x9 pixels"):
        Defense(linear(), PatchThreat.square(2, 9))
    small = PatchThreat.square(1, 8)
    with pytest.raises(ValueError, match=r"PatchThreat\.before"):
        Defense(linear(16), small)
    assert Defense(linear(16), small.before(Resize(Grid(8, 8), Grid(16, 16)))).threat.target == Grid(16, 16)


def test_masks_for_another_threat_are_refused() -> None:
    model = linear()

    def masks(side: int, count: int = 1) -> MaskSet:
        return MaskSet.covering(PatchThreat.square(side, 8, count).on_features(model.grid, model.corrupted))

    for given in (masks(1), masks(2)):
        with pytest.raises(ValueError, match="do not cover the threat"):
            Defense(model, PatchThreat.square(3, 8), given)
    with pytest.raises(ValueError, match=r"do not cover the threat: .*Box.* and Box"):
        Defense(model, PatchThreat.square(1, 8, count=2), masks(1))
    larger = Defense(model, PatchThreat.square(1, 8), masks(2))
    assert larger.masks.threat.footprints[0].extent == (1, 1), "smaller patches than designed for are welcome"


def test_masks_for_one_round_are_checked_for_two() -> None:
    """For a detector two masks may hide everything together; double masking would then predict from nothing."""
    model = linear()
    halves = [Box(top, 0, top + 5, 8) for top in range(4)]
    reach = PatchThreat.square(2, 8).on_features(model.grid, model.corrupted)
    one_round = MaskSet(tuple((half,) for half in halves), reach, together=1)
    assert len(Defense(model, PatchThreat.square(2, 8), one_round, MinorityReports()).predict(GOOD).labels) == 2
    with pytest.raises(ValueError, match="together hide all"):
        Defense(model, PatchThreat.square(2, 8), one_round, DoubleMasking())


def test_a_job_that_hides_everything_is_refused(family: SplitModel) -> None:
    hidden = torch.ones(1, family.grid.height, family.grid.width, dtype=torch.bool)
    features = family.features(torch.rand(1, 3, family.image.height, family.image.width))
    with pytest.raises(ValueError, match="hides every cell"):
        family.logits(features, torch.tensor([0]), hidden)


@torch.no_grad()
def test_copies_and_conversions(family: SplitModel) -> None:
    images = torch.rand(2, 3, family.image.height, family.image.width)
    logits = family(images)
    assert torch.equal(copy.deepcopy(family)(images), logits)
    state = {name: tensor.clone() for name, tensor in family.state_dict().items()}
    for parameter in family.parameters():
        parameter.zero_()
    assert not torch.equal(family(images), logits)
    family.load_state_dict(state)
    assert torch.equal(family(images), logits)
    double = family.double()(images.double())
    assert double.dtype == torch.float64
    torch.testing.assert_close(double.float(), logits, rtol=1e-3, atol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize(
    "write",
    [
        "data",
        "vector",
        "fused",
        pytest.param("rest", marks=pytest.mark.xfail(strict=True, reason="only first values are compared")),
    ],
)
def test_weights_written_behind_autograds_back(build: Build, write: str) -> None:
    """`tensor.data` leaves no trace in a tensor's version, but the network is another one all the same."""
    model = build["resnet"](18, 13, 18, 32)
    images = torch.rand(2, 3, 32, 32)
    model(images)
    if write == "fused":  # torch's fused optimisers do not count up the version either
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        torch.optim.SGD(model.parameters(), lr=0.1, fused=True).step()
    elif write == "vector":
        weights = nn.utils.parameters_to_vector(model.parameters())
        nn.utils.vector_to_parameters(1.1 * weights, model.parameters())
    else:
        for parameter in model.parameters():
            parameter.data.flatten()[1 if write == "rest" else 0 :].mul_(1.1)
    with torch.enable_grad():
        want = model(images).detach()
    torch.testing.assert_close(model(images), want, rtol=1e-3, atol=1e-3)


def test_defense_copies(defense: Defense) -> None:
    twin = copy.deepcopy(defense)
    labels = defense.predict(GOOD).labels
    assert torch.equal(twin.predict(GOOD).labels, labels)
    assert torch.equal(twin.certify(GOOD, labels).margin, defense.certify(GOOD, labels).margin)
    assert twin.masks is not defense.masks and twin.masks == defense.masks
    other = Defense(linear(), PatchThreat.square(2, 8))
    other.load_state_dict(defense.state_dict())
    assert torch.equal(other(GOOD), defense(GOOD))
    assert torch.equal(defense.double().predict(GOOD.double()).labels, labels)


def test_meta_device(family: SplitModel) -> None:
    images = torch.empty(2, 3, family.image.height, family.image.width, device="meta")
    assert family.to("meta")(images).shape == (2, family.num_classes)


def test_operations_refuse_wrong_options() -> None:
    with pytest.raises(ValueError, match="reference: expected 'majority' or 'unmasked', got 'mean'"):
        DoubleMasking("mean")  # type: ignore[arg-type]
    for tau in (-0.1, 1.0, torch.nan):
        with pytest.raises(ValueError, match="tau: expected a confidence"):
            MinorityReports(tau)
