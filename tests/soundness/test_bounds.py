"""Interval bounds: they contain what a network computes, and no patch breaks a certificate of a trained one."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import Tensor, nn

from patchcure import AnyClassifier, Defense, Grid, MaskSet, PatchThreat, Resize, SplitViT, build
from patchcure.models import small_cnn
from patchcure.operations import DoubleMasking, IntervalBounds
from patchcure.operations.intervals import margins_below, sums_of_products

LAYERS: dict[str, list[nn.Module]] = {
    "convolutions": [nn.Conv2d(2, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 5, 3, stride=2, groups=1)],
    "norm and pools": [
        nn.Conv2d(2, 6, 2, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.AvgPool2d(2, padding=1, count_include_pad=False),
        nn.MaxPool2d(2, stride=1),
        nn.BatchNorm2d(6, affine=False),
    ],
    "global pool": [nn.Conv2d(2, 8, 3, padding="same", groups=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1)],
    "nested": [nn.Sequential(nn.Conv2d(2, 4, 3, dilation=2), nn.ReLU()), nn.Identity(), nn.Dropout(0.5)],
}


def network(name: str, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    body = nn.Sequential(*copy.deepcopy(LAYERS[name]), nn.Flatten())
    width = body.eval()(torch.zeros(2, 2, 6, 7)).shape[1]
    whole = nn.Sequential(body, nn.Linear(width, 16), nn.ReLU(), nn.Linear(16, 3))
    for module in whole.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean)  # type: ignore[arg-type]
            nn.init.uniform_(module.running_var, 0.2, 3.0)  # type: ignore[arg-type]
            if module.affine:
                nn.init.normal_(module.weight)
                nn.init.normal_(module.bias)
    return whole.to(dtype).eval().requires_grad_(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", LAYERS)
def test_bounds_contain_what_is_computed(name: str, dtype: torch.dtype) -> None:
    """Corners and random inputs; every label; and boxes from a point (where only rounding is left) to large."""
    whole = network(name, dtype)
    labels = torch.arange(3)
    closest = torch.inf
    for width in (0.0, 1e-6, 1e-2, 0.3, 1.0):
        lower = torch.rand(1, 2, 6, 7, dtype=dtype) * (1 - width)
        upper = torch.where(torch.rand(1, 1, 6, 7) < 0.3, lower + width, lower)
        share = torch.rand(600, 2, 6, 7, dtype=dtype)
        share[:300] = share[:300].round()
        inputs = torch.minimum(torch.maximum(lower + share * (upper - lower), lower), upper)
        below = margins_below(whole, lower.expand(3, -1, -1, -1), upper.expand(3, -1, -1, -1), labels, dtype)
        with sums_of_products():
            logits = whole(inputs).double()
        for y in labels.tolist():
            gap = logits[:, y, None] - logits - below[y]
            others = torch.arange(3) != y
            assert bool((gap[:, others] >= 0).all())
            assert below[y, y] == torch.inf
            closest = min(closest, float(gap[:, others].min()))
    assert closest < 1e-2, "bounds that are never nearly reached show little"


def test_bounds_of_one_layer_are_exact() -> None:
    """Without a hidden layer the bound is the minimum over the corners, up to the slack for rounding."""
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Flatten(), nn.Linear(6, 4)).double().requires_grad_(False)
    lower, upper = torch.full((1, 1, 2, 3), -0.4).double(), torch.full((1, 1, 2, 3), 0.9).double()
    corners = torch.tensor(list(itertools.product((-0.4, 0.9), repeat=6))).double().view(-1, 1, 2, 3)
    logits = whole(corners)
    for y in range(4):
        below = margins_below(whole, lower, upper, torch.tensor([y]), torch.float64)[0]
        exact = (logits[:, y, None] - logits).amin(0)
        others = torch.arange(4) != y
        assert bool((below <= exact)[others].all()) and torch.allclose(below[others], exact[others], atol=1e-6)


def test_merging_the_last_layer_is_tighter() -> None:
    whole = network("convolutions")
    lower = torch.rand(1, 2, 6, 7) * 0.9
    upper = lower + 0.1
    merged = margins_below(whole, lower, upper, torch.tensor([0]), torch.float32)[0, 1:]
    same = nn.Linear(3, 3, bias=False)
    nn.init.eye_(same.weight)
    assert bool(
        (
            margins_below(nn.Sequential(whole, same), lower, upper, torch.tensor([0]), torch.float32)[0, 1:] < merged
        ).all()
    )


def digits() -> tuple[Tensor, Tensor]:
    datasets = pytest.importorskip("sklearn.datasets")
    data = datasets.load_digits()
    return torch.tensor(data.images / 16, dtype=torch.float32)[:, None], torch.tensor(data.target)


@pytest.fixture(scope="module")
def trained() -> tuple[Defense, Tensor, Tensor]:
    """A small network trained against patches of 1x2 and 2x1 pixels: half the loss is that of the bounds."""
    torch.manual_seed(0)
    images, labels = digits()
    test, test_labels = images[1500:], labels[1500:]
    images, labels = images[:1500], labels[:1500]
    cnn = nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=1), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 32), nn.ReLU(), nn.Linear(32, 10)
    )
    optimizer = torch.optim.Adam(cnn.parameters(), lr=3e-3)
    for step in range(300):
        batch = torch.randint(1500, (64,))
        x, y = images[batch], labels[batch]
        row, col = (int(v) for v in torch.randint(7, (2,)))
        low, high = x.clone(), x.clone()
        height, width = (1, 2) if step % 2 else (2, 1)
        low[:, :, row : row + height, col : col + width] = 0
        high[:, :, row : row + height, col : col + width] = 1
        below = margins_below(cnn, low, high, y, torch.float32)
        worst = -below.masked_fill(below == torch.inf, 0)
        share = min(1.0, step / 150)
        loss = nn.functional.cross_entropy(cnn(x), y) + share * nn.functional.cross_entropy(worst.float(), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model = AnyClassifier(cnn, 8, 10, mean=(0.0,), std=(1.0,), max_jobs=512)
    threat = PatchThreat.rectangles([(1, 2), (2, 1)], 8)
    return Defense(model, threat, operation=IntervalBounds()).requires_grad_(False), test[:60], test_labels[:60]


def test_no_patch_breaks_a_trained_network(trained: tuple[Defense, Tensor, Tensor]) -> None:
    """Random, extreme and gradient patches at every location of every image; all images, certified or not."""
    defense, images, labels = trained
    proof = defense.certify(images, labels)
    clean = defense.predict(images).labels == labels
    assert int(proof.certified.sum()) > 15 and int(clean.sum()) > 45, "a test of few certificates shows little"
    assert not bool((proof.certified & ~clean).any())
    assert not bool(proof.certified.all()), "some locations should be open"
    random = torch.Generator().manual_seed(0)
    tried = found = 0
    for shape, (height, width) in enumerate(defense.threat.shapes):
        for row, col in itertools.product(range(9 - height), range(9 - width)):
            patch = (slice(None), slice(None), slice(row, row + height), slice(col, col + width))
            attacks = [torch.full((60, 1, height, width), v) for v in (0.0, 1.0)]
            attacks += [torch.rand(60, 1, height, width, generator=random) for _ in range(3)]
            corners = torch.tensor([[0.0, 1.0], [1.0, 0.0]]).view(2, 1, 1, height, width)
            attacks += list(corners.expand(-1, 60, -1, -1, -1))
            attacked = images.clone().requires_grad_()
            loss = nn.functional.cross_entropy(defense(attacked), labels, reduction="sum")
            (gradient,) = torch.autograd.grad(loss, attacked)
            attacks.append((gradient[patch] > 0).float())
            for content in attacks:
                broken = images.clone()
                broken[patch] = content
                wrong = defense.predict(broken).labels != labels
                assert not bool((wrong & proof.safe[shape][:, row, col]).any()), (shape, row, col)
                tried += int(proof.safe[shape][:, row, col].sum())
                found += int((wrong & clean).sum())
    assert tried > 10_000 and found > 0, "the attacks should succeed somewhere"


def test_smaller_and_larger_squares(trained: tuple[Defense, Tensor, Tensor]) -> None:
    """`largest_patch` is the largest side that a defense against that square certifies; a verdict agrees."""
    defense, images, labels = trained
    images, labels = images[:12], labels[:12]
    proof = defense.certify(images, labels)
    by_side = {
        side: Defense(defense.model, PatchThreat.square(side, 8), operation=IntervalBounds()).certify(images, labels)
        for side in (1, 2, 3)
    }
    for image, side in enumerate(proof.largest_patch.tolist()):
        for other, square in by_side.items():
            assert bool(square.certified[image]) == (other <= side)
            assert int(square.largest_patch[image]) == side
    assert len(set(proof.largest_patch.tolist())) > 1
    verdict = defense.certify(images, labels, detail="verdict")
    assert torch.equal(verdict.certified, proof.certified) and torch.equal(verdict.certified, verdict.strict)
    for map_ in verdict.safe:
        assert torch.equal(map_.flatten(1).all(1), map_.flatten(1).any(1))
    assert bool((verdict.margin >= proof.margin).all())


def test_two_patches(trained: tuple[Defense, Tensor, Tensor]) -> None:
    """All pairs of single pixels: both may be anywhere."""
    defense, images, labels = trained
    images, labels = images[:6], labels[:6]
    two = Defense(defense.model, PatchThreat.square(1, 8, count=2), operation=IntervalBounds())
    proof = two.certify(images, labels)
    one = Defense(defense.model, PatchThreat.square(1, 8), operation=IntervalBounds()).certify(images, labels)
    assert not bool((proof.safe[0] & ~one.safe[0]).any())
    tried = 0
    for first, second in itertools.combinations(itertools.product(range(8), repeat=2), 2):
        if (first[0] + second[1]) % 3:
            continue
        for values in itertools.product((0.0, 1.0), repeat=2):
            attacked = images.clone()
            attacked[:, :, first[0], first[1]], attacked[:, :, second[0], second[1]] = values
            wrong = two.predict(attacked).labels != labels
            safe = proof.safe[0][:, first[0], first[1]] | proof.safe[0][:, second[0], second[1]]
            assert not bool((wrong & safe).any())
            tried += int(safe.sum())
    assert tried > 500


def test_a_patch_before_the_resize(trained: tuple[Defense, Tensor, Tensor]) -> None:
    """One pixel of a 16x16 picture reaches several of the 8x8 that the network reads, whose range is still [0, 1]."""
    defense, images, _ = trained
    resize = Resize(Grid(16, 16), Grid(8, 8), interpolation="bilinear")
    pictures = nn.functional.interpolate(images[:20], (16, 16), mode="nearest")
    threat = PatchThreat.square(1, 16).before(resize)
    small = Defense(defense.model, threat, operation=IntervalBounds())
    labels = small.predict(resize(pictures)).labels
    safe = small.certify(resize(pictures), labels, detail="locations").safe[0]
    tried = 0
    for row, col, value in itertools.product(range(16), range(16), (0.0, 1.0)):
        attacked = pictures.clone()
        attacked[:, :, row, col] = value
        wrong = small.predict(resize(attacked)).labels != labels
        assert not bool((wrong & safe[:, row, col]).any())
        tried += int(safe[:, row, col].sum())
    assert tried > 200


def linear(weight: float, bias: float) -> tuple[Defense, nn.Linear]:
    """Two logits of nine pixels, both equal to the bias; label 1 also gets the middle pixel times the weight."""
    layer = nn.Linear(9, 2).requires_grad_(False)
    layer.weight.zero_()
    layer.weight[1, 4] = weight
    layer.bias.fill_(bias)
    model = AnyClassifier(nn.Sequential(nn.Flatten(), layer), 3, 2, (0.0,), (1.0,))
    return Defense(model, PatchThreat.square(1, 3), operation=IntervalBounds()), layer


def test_at_least_zero_is_not_enough() -> None:
    """With >= a network that says nothing certifies every label, and its prediction is label 0."""
    defense, layer = linear(0.0, 0.0)
    image, label = torch.rand(1, 1, 3, 3), torch.tensor([1])
    difference = layer.weight[1] - layer.weight[0]
    assert float(difference @ image.flatten() - difference.abs().sum()) >= 0
    assert int(defense.predict(image).labels) == 0
    assert not bool(defense.certify(image, label).certified)


def test_bounds_without_room_for_rounding_break() -> None:
    """Large equal parts of two logits hide their difference from the machine, but not from the merged layer."""
    defense, layer = linear(1e-4, 1e4)
    image, label = torch.ones(1, 1, 3, 3), torch.tensor([1])
    difference = layer.weight[1] - layer.weight[0]
    assert float(difference @ image.flatten()) > 0, "where the patch is elsewhere, real numbers certify label 1"
    assert int(defense.predict(image).labels) == 0
    assert not bool(defense.certify(image, label).safe[0].any())
    defense, _ = linear(1.0, 1.0)
    safe = defense.certify(image, label).safe[0][0]
    assert safe.flatten().tolist() == [at != 4 for at in range(9)]


def test_what_cannot_be_bounded_is_refused() -> None:
    def defended(*layers: nn.Module) -> Defense:
        model = AnyClassifier(nn.Sequential(*layers), 4, 2)
        return Defense(model, PatchThreat.square(1, 4), operation=IntervalBounds())

    image, label = torch.rand(1, 3, 4, 4), torch.tensor([0])
    refused: list[tuple[list[nn.Module], str]] = [
        ([nn.Flatten(), nn.GELU(), nn.Linear(48, 2)], "do not go through GELU"),
        ([nn.Conv2d(3, 2, 4), nn.Flatten()], "a linear layer at the end, got Flatten"),
        ([nn.Conv2d(3, 2, 3, padding=1, padding_mode="circular"), nn.Flatten(), nn.Linear(32, 2)], "zero padding"),
        ([nn.BatchNorm2d(3, track_running_stats=False), nn.Flatten(), nn.Linear(48, 2)], "running statistics"),
    ]
    for layers, message in refused:
        with pytest.raises(ValueError, match=message):
            defended(*layers).certify(image, label)
    vit = build("PCURE-ViT-Ti-2x2-k2", image_size=64, num_classes=2, patch=8, operation="interval-bounds")
    assert isinstance(vit.model, SplitViT)
    with pytest.raises(ValueError, match=r"needs? a classifier with masks on the pixels|AnyClassifier"):
        vit.certify(torch.rand(1, 3, 64, 64), label)
    good = defended(nn.Flatten(), nn.Linear(48, 2))
    torch.set_float32_matmul_precision("medium")
    try:
        with pytest.raises(ValueError, match="set_float32_matmul_precision"):
            good.predict(image)
    finally:
        torch.set_float32_matmul_precision("highest")


def test_a_rule_without_masks() -> None:
    """Its mask set is empty, has a length, and cannot be given masks; a rule with masks cannot go without."""
    model = AnyClassifier(small_cnn((10, 12), 4), (10, 12), 4)
    threat = PatchThreat.square(2, (10, 12))
    defense = Defense(model, threat, operation=IntervalBounds())
    assert len(defense.masks) == 0 and defense.masks.pairs == 0 and defense.masks.hidden.shape == (0, 10, 12)
    reach = threat.on_features(model.grid, model.corrupted)
    with pytest.raises(ValueError, match="Expected no masks"):
        Defense(model, threat, MaskSet.covering(reach), IntervalBounds())
    with pytest.raises(ValueError, match="Expected at least one mask"):
        MaskSet((), reach)
    with pytest.raises(ValueError, match="uses no masks"):
        build("IBP-CNN", mask_stride=2)
    with pytest.raises(ValueError, match="at least 10x10"):
        small_cnn(9, 4)
    assert len(Defense(model, threat, defense.masks, DoubleMasking()).masks) > 0
