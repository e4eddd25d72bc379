"""Training: batches and masks that depend only on seed and step, losses, recipes, and what is refused."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import patchcure
from patchcure._device import has_bfloat16
from patchcure.data import open_data
from patchcure.evaluate import pixels
from patchcure.train import Recipe, train
from patchcure.train.batches import Batches, generator, split
from patchcure.train.losses import interval_loss, masked_loss, taught
from patchcure.train.points import choose, elastic, worst_pairs
from patchcure.train.recipe import RECIPES, Loss
from patchcure.train.run import Precision

SMALL: dict[str, Any] = {
    "name": "small",
    "data": {"train": "folder", "validation": 6, "augment": {"mixup": 0.2, "erase": 0.5, "auto": "rand-m5"}},
    "start": {
        "instance": "PCURE-ViT-Ti-6x1-k12",
        "options": {"image_size": 96, "num_classes": 3, "mean": [0.5] * 3, "std": [0.5] * 3},
        "drop_path": 0.1,
    },
    "points": [{"name": "6x1-k12", "patch": 16}, {"name": "2x2-k6", "patch": 16}, {"name": "6x1-k0", "patch": 16}],
    "optimiser": {"lr": 1e-3, "batch": 4, "micro": 2, "samples": 16},
    "select": {"every": 2, "points": ["6x1-k12"], "images": 6},
    "ema": 0.9,
}


@pytest.fixture
def small() -> Recipe:
    return Recipe(**SMALL)


def test_under_is_the_model_under_a_mask() -> None:
    torch.manual_seed(0)
    for window, k in (((6, 1), 12), ((2, 2), 5), ((6, 1), 0)):
        name = f"PCURE-ViT-Ti-{window[0]}x{window[1]}-k{k}"
        model = patchcure.build(name, image_size=96, num_classes=3, patch=16).model
        hidden = torch.zeros(2, model.grid.height, model.grid.width, dtype=torch.bool)
        hidden[0, 0, 0] = hidden[1, -1, -1] = True
        images = torch.rand(2, 3, 96, 96)
        assert torch.allclose(
            model.under(images, hidden), model.logits(model.features(images), torch.arange(2), hidden), atol=1e-5
        )
        hidden[0, 0, 1] = True  # now they hide unequally many
        assert torch.allclose(
            model.under(images, hidden), model.logits(model.features(images), torch.arange(2), hidden), atol=1e-5
        )


def test_points_share_one_network(small: Recipe) -> None:
    points = elastic(small)
    assert len({id(point.defense.model.backbone) for point in points}) == 1
    assert [point.defense.model.grid.cells for point in points] == [6, 9, 6]


def test_a_draw_hides_a_pair_of_masks_and_equally_many_cells_for_all(small: Recipe) -> None:
    for point in elastic(small):
        masks = point.defense.masks.hidden
        pairs = {(a | b).numpy().tobytes() for a in masks for b in masks}
        drawn = [hidden for seed in range(30) for hidden in point.draw(4, generator(seed))]
        assert {hidden.numpy().tobytes() for hidden in drawn} == pairs
        assert all(len(point.draw(8, generator(seed)).sum((1, 2)).unique()) == 1 for seed in range(10))


def test_greedy_masks_are_the_worst_ones(small: Recipe) -> None:
    """With all masks as candidates: no first mask is worse, and no second one given it."""
    torch.manual_seed(1)
    defense = elastic(small)[1].defense.eval()
    images, labels = torch.rand(3, 3, 96, 96), torch.tensor([0, 1, 2])
    table = defense.masks.hidden
    found = worst_pairs(defense, defense.model.features(images), labels, 2, len(table), generator(0))

    def loss(image: int, hidden: torch.Tensor) -> float:
        with torch.no_grad():
            logits = defense.model.under(images[image : image + 1], hidden[None])
        return float(torch.nn.functional.cross_entropy(logits, labels[image : image + 1]))

    for image in range(3):
        first = max(table, key=lambda mask: loss(image, mask))
        assert loss(image, found[image]) == pytest.approx(max(loss(image, first | mask) for mask in table), abs=1e-5)


def test_the_loss_of_a_greedy_point_is_the_loss_under_its_worst_masks(small: Recipe) -> None:
    """The features are computed once, for the search and for the gradient: the value and the gradient are those of a
    model that sees the worst masks from the start."""
    torch.manual_seed(1)
    images, labels = torch.rand(3, 3, 96, 96), torch.eye(3)
    for point in elastic(small):
        defense = point.defense
        table = defense.masks.hidden
        hidden = worst_pairs(defense, defense.model.features(images), torch.arange(3), 2, len(table), generator(0))
        found = []
        for value in (
            masked_loss(replace(point, greedy=len(table)), images, labels, Loss(smoothing=0), None, generator(0)),
            torch.nn.functional.cross_entropy(defense.model.under(images, hidden), labels),
        ):
            defense.model.backbone.zero_grad()
            value.backward()
            gradient = defense.model.backbone.get_parameter("blocks.0.mlp.fc1.weight").grad
            assert gradient is not None and gradient.any()
            found.append((value.detach(), gradient.clone()))
        (here, slope), (there, other) = found
        assert torch.allclose(here, there, atol=1e-5)
        assert torch.allclose(slope, other, atol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_greedy_masks_are_found_where_the_features_are(small: Recipe) -> None:
    defense = elastic(small)[1].defense.cuda()
    features = defense.model.features(torch.rand(3, 3, 96, 96, device="cuda"))
    assert worst_pairs(defense, features, torch.arange(3, device="cuda"), 2, 4, generator(0)).is_cuda


def test_points_are_drawn_by_their_weights(small: Recipe) -> None:
    points = [replace(point, weight=weight) for point, weight in zip(elastic(small), (6.0, 3.0, 1.0), strict=True)]
    names = [choose(points, generator(0, number)).name for number in range(500)]
    assert [names.count(point.name) for point in points] == pytest.approx([300, 150, 50], abs=40)


def test_points_of_another_network_are_refused() -> None:
    """A network that is a BagNet up to another layer has other receptive fields: the masks would not cover."""
    hybrid = Recipe.load("hybrid-resnet-cifar10")
    assert {"k5", "k1"} <= {point.name for point in elastic(hybrid)}
    options = {key: value for key, value in hybrid.start.options.items() if key != "bag_k"}
    with pytest.raises(ValueError, match=r"no point of the network of PCURE-BagNet.* needs start\.options\.bag_k"):
        elastic(Recipe.load("hybrid-resnet-cifar10", start__options=options))
    with pytest.raises(ValueError, match="patch belongs to each of the points"):
        elastic(Recipe.load("hybrid-resnet-cifar10", start__options__patch=5))


def test_a_point_may_be_listed_twice_once_with_the_worst_masks(small: Recipe) -> None:
    twice = Recipe(**{**SMALL, "points": [*SMALL["points"], {"name": "6x1-k12", "patch": 16, "greedy": 5}]})
    assert [point.greedy for point in elastic(twice)] == [0, 0, 0, 5]


def test_batches_depend_on_seed_and_step_only(small: Recipe, three_colours: Path) -> None:
    data = open_data(f"folder:{three_colours}", split="train")
    model = elastic(small)[0].defense.model

    def batches(own: range) -> Batches:
        return Batches(data, range(len(data)), model, small.data.augment, small.optimiser, own, 7)

    whole = batches(range(4))
    later = list(whole.steps(2, 4, workers=1))
    again = [whole[3], whole[2]][::-1]
    halves = [batches(range(2))[2], batches(range(2, 4))[2]]
    for (images, labels), (same, known) in zip(later, again, strict=True):
        assert torch.equal(images, same) and torch.equal(labels, known)
    assert torch.equal(torch.cat([images for images, _ in halves]), later[0][0])
    assert later[0][0].min() >= 0 and later[0][0].max() <= 1
    seen = [number for step in range(6) for number in whole.numbers(step)]
    assert sorted(seen) == list(range(24)), "an epoch sees every image once"


def test_held_out_images_are_apart() -> None:
    learn, held = split(10, 3)
    assert len(held) == 3 and sorted(learn + held) == list(range(10))
    with pytest.raises(ValueError, match="more than half"):
        split(10, 6)
    few = split(1000, 300)[1][:100]  # of data that is sorted by class: from all of them
    assert {number // 100 for number in few} == set(range(10))


def test_consistency_pulls_towards_the_teacher(small: Recipe) -> None:
    torch.manual_seed(0)
    points = elastic(small)
    images, labels = torch.rand(4, 3, 96, 96), torch.eye(3)[[0, 1, 2, 0]]
    plain = masked_loss(points[0], images, labels, Loss(), None, generator(0))
    loss = Loss(consistency=2.0, teacher="6x1-k0")
    taughtful = masked_loss(points[0], images, labels, loss, points[2], generator(0))
    hidden = points[0].draw(4, generator(0))
    target, own = taught(points[2], images), points[0].defense.model.under(images, hidden).log_softmax(1)
    divergence = (target.exp() * (target - own)).sum(1).mean()
    assert (taughtful - plain).item() == pytest.approx(2 * divergence.item(), rel=1e-4)


def test_interval_loss_is_above_the_loss_of_every_patch() -> None:
    torch.manual_seed(0)
    defense = patchcure.build("IBP-CNN", image_size=12, in_chans=1, mean=[0.0], std=[1.0], patch=2)
    images, labels = torch.rand(8, 1, 12, 12), torch.eye(10)[torch.arange(8)]
    bound = interval_loss(defense, images, labels, 1.0, generator(3))
    boxes = list(defense.masks.threat.locations())
    places = torch.randint(len(boxes), (8,), generator=generator(3)).tolist()
    for _ in range(50):
        attacked = images.clone()
        for row, place in enumerate(places):
            box = boxes[place]
            attacked[row, :, box.top : box.bottom, box.left : box.right] = torch.rand(1, box.height, box.width).round()
        assert torch.nn.functional.cross_entropy(defense(attacked), labels) <= bound


@pytest.mark.parametrize(
    ("change", "precision"),
    [({}, "float32"), ({"masks": 1, "greedy": 2, "kind": "bce"}, None), ({"greedy": 2}, "bfloat16")],
)
def test_it_learns(three_colours: Path, tmp_path: Path, change: dict[str, Any], precision: Precision | None) -> None:
    """Three colours are told apart after a few steps, in either precision, and the file holds a defense."""
    recipe = Recipe(
        **{
            **SMALL,
            "data": {"train": "folder", "validation": 6},
            "optimiser": {**SMALL["optimiser"], "samples": 160, "batch": 8, "micro": 4},
            "loss": change,
            "select": {"every": 20, "points": ["6x1-k12", "6x1-k0"], "images": 6},
        }
    )
    heard: list[int] = []
    file = train(
        recipe,
        open_data(f"folder:{three_colours}", split="train"),
        tmp_path / "out",
        workers=0,
        precision=precision,
        say=lambda step, steps, line: heard.append(step),
    )
    used = "bfloat16" if has_bfloat16(torch.device("cpu")) else "float32"
    assert json.loads(file.with_suffix(".json").read_text())["runs"][0]["precision"] == (precision or used)
    defense = patchcure.load(file, name="PCURE-ViT-Ti-2x2-k6", patch=16)
    assert {weight.dtype for weight in defense.model.parameters()} == {torch.float32}
    data = open_data(f"folder:{three_colours}", split="test")
    images = torch.stack([patchcure.data.preprocessing(defense)(item.image) for item in data])
    labels = torch.tensor(list(data.labels))
    assert (defense.predict(images).labels == labels).float().mean() > 0.9
    assert heard == [20, 20], "a line with the loss, and one with what was measured"


def test_the_best_weights_are_kept_and_a_run_tells_where_it_came_from(three_colours: Path, tmp_path: Path) -> None:
    """The weights are those that were best on the held-out images, not the last; the run goes on without the file
    that it started from."""
    data = open_data(f"folder:{three_colours}", split="train")
    first = train(Recipe(**SMALL), data, tmp_path / "first", workers=0)
    change = {
        "data": {"train": "folder", "validation": 12},
        "start": {**SMALL["start"], "weights": str(first)},
        "optimiser": {**SMALL["optimiser"], "samples": 64, "lr": 0.01},
        "select": {"every": 2, "points": ["6x1-k12"], "images": 12},
        "ema": 0.0,
    }
    recipe = Recipe(**{**SMALL, **change})
    file = train(recipe, data, tmp_path / "second", workers=0)
    card = json.loads(file.with_suffix(".json").read_text())
    looks = [look["certified"] for look in card["runs"][-1]["held_out"]]
    assert len(looks) == 8 and len(set(looks)) > 1
    defense = patchcure.load(file)
    images, items = pixels(defense, data, split(len(data), 12)[1])
    safe = defense.certify(images, torch.tensor([item.label for item in items])).certified
    assert safe.float().mean() == pytest.approx(max(looks), abs=1e-4)
    assert card["runs"][-1]["start_sha256"] == hashlib.sha256(first.read_bytes()).hexdigest()
    first.unlink()
    again = train(recipe, data, tmp_path / "second", workers=0)
    assert json.loads(again.with_suffix(".json").read_text()) == card


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"optimiser": {"lr": 1e-3}}, "either samples or epochs"),
        ({"optimiser": {"lr": 1e-3, "samples": 10, "batch": 4, "micro": 3}}, "do not divide"),
        ({"loss": {"consistency": 1.0}}, "loss.teacher"),
        ({"loss": {"kind": "interval"}}, "mixup and cutmix off"),
        ({"select": {"points": ["2x2-k1"]}}, "not among the points"),
        ({"colour": "red"}, "recipe: there is no colour; expected name, seed, data"),
        ({"optimiser": {"lrr": 1e-3}}, "optimiser: there is no lrr; expected name, lr"),
        ({"points": []}, "points"),
    ],
)
def test_a_wrong_recipe_is_one_line(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_text(yaml.safe_dump({**SMALL, **change}))
    with pytest.raises(ValueError, match=message):
        Recipe.load(file)


def test_what_does_not_fit_is_refused(small: Recipe, three_colours: Path, tmp_path: Path) -> None:
    data = open_data(f"folder:{three_colours}", split="train")
    four = Recipe(**{**SMALL, "start": {**SMALL["start"], "options": {"image_size": 96, "num_classes": 4}}})
    with pytest.raises(ValueError, match="has 3 classes, the model 4"):
        train(four, data, tmp_path / "a")
    (three_colours / "train" / "yellow").mkdir()
    with pytest.raises(ValueError, match="no training image of yellow"):
        train(four, open_data(f"folder:{three_colours}", split="train"), tmp_path / "b")
    wild = Recipe(**{**SMALL, "optimiser": {**SMALL["optimiser"], "lr": 1e30, "clip": None, "warmup": 0.0}})
    (three_colours / "train" / "yellow").rmdir()
    with pytest.raises(FloatingPointError, match=r"smaller optimiser\.lr"):
        train(wild, data, tmp_path / "c", workers=0)
    train(small, data, tmp_path / "d", workers=0)
    other = Recipe(**{**SMALL, "seed": 1})
    with pytest.raises(ValueError, match="another recipe"):
        train(other, data, tmp_path / "d", workers=0)
    torch.save({"model": {}}, tmp_path / "d" / "checkpoint.pt")
    with pytest.raises(ValueError, match="no checkpoint of a training run"):
        train(small, data, tmp_path / "d", workers=0)
    (tmp_path / "d" / "checkpoint.pt").write_bytes(b"half")
    with pytest.raises(ValueError, match="cannot be read as a PyTorch checkpoint"):
        train(small, data, tmp_path / "d", workers=0)
    odd = Recipe(**{**SMALL, "data": {**SMALL["data"], "augment": {"auto": "rnd-m9"}}})
    with pytest.raises(ValueError, match="timm cannot read 'rnd-m9'"):
        train(odd, data, tmp_path / "e", workers=0)
    held = Recipe(**{**SMALL, "data": {**SMALL["data"], "validation": 13}})
    with pytest.raises(ValueError, match="13 of 24 training images would be held out"):
        train(held, data, tmp_path / "e", workers=0)
    with pytest.raises(ValueError, match="device: nowhere cannot be used"):
        train(small, data, tmp_path / "e", workers=0, device="nowhere")
    assert not (tmp_path / "e").exists()
    with pytest.raises(FileNotFoundError, match="elastic-vit-ti-cifar10"):
        Recipe.load("no-such-recipe")


def test_only_two_precisions(small: Recipe, three_colours: Path, tmp_path: Path) -> None:
    data = open_data(f"folder:{three_colours}", split="train")
    with pytest.raises(ValueError, match="expected float32 or bfloat16, got 'half'"):
        train(small, data, tmp_path / "out", precision="half")  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


def test_products_are_of_the_precision_that_was_asked_for(small: Recipe, three_colours: Path, tmp_path: Path) -> None:
    """What the network's linear layers give in training."""
    data = open_data(f"folder:{three_colours}", split="train")
    precisions: tuple[Precision, Precision] = ("float32", "bfloat16")
    for precision in precisions:
        made: set[torch.dtype] = set()
        hook = torch.nn.modules.module.register_module_forward_hook(
            lambda module, _, out, made=made: (
                made.add(out.dtype) if isinstance(module, torch.nn.Linear) and module.training else None
            )
        )
        try:
            train(small, data, tmp_path / precision, workers=0, precision=precision)
        finally:
            hook.remove()
        assert made == {getattr(torch, precision)}


def test_mixup_needs_pairs_in_every_process(small: Recipe, three_colours: Path) -> None:
    data = open_data(f"folder:{three_colours}", split="train")
    model = elastic(small)[0].defense.model
    with pytest.raises(ValueError, match="in pairs, but 1 images of each step"):
        Batches(data, range(len(data)), model, small.data.augment, small.optimiser, range(1), 0)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_damaged_image_is_named_in_one_line(small: Recipe, three_colours: Path, tmp_path: Path, workers: int) -> None:
    for file in (three_colours / "train" / "red").iterdir():
        file.write_bytes(file.read_bytes()[:80])
    with pytest.raises(ValueError, match=r"red.\d\.png") as caught:
        train(small, open_data(f"folder:{three_colours}", split="train"), tmp_path / "out", workers=workers)
    assert "\n" not in str(caught.value)


def test_any_value_of_a_recipe_can_be_changed() -> None:
    changed = Recipe.load("ibp-digits", points__0__weight=2, optimiser__samples=64)
    assert changed.points[0].weight == 2
    assert (changed.optimiser.samples, changed.optimiser.epochs) == (64, None)
    assert Recipe.load("elastic-vit-ti-cifar10", optimiser__epochs=1).optimiser.samples is None
    for wrong in ("points__7__weight", "optimiser__lr__high", "points__first"):
        with pytest.raises(ValueError, match="there is nothing to set"):
            Recipe.load("ibp-digits", **{wrong: 1})


def test_every_shipped_recipe_is_valid() -> None:
    found = sorted(file.stem for file in RECIPES.glob("*.yaml"))
    assert found
    for name in found:
        assert Recipe.load(name).name == name


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(file.stem for file in RECIPES.glob("*.yaml")))
def test_a_few_steps_of_every_shipped_recipe(name: str, three_colours: Path, tmp_path: Path) -> None:
    """As it is shipped, but for the data, their classes, the first weights, the length and the size of a batch."""
    shipped = Recipe.load(name)
    data, classes = f"folder:{three_colours}", 3
    if shipped.data.train == "digits":
        data, classes = "digits", 10
    small = {
        "data__train": data,
        "data__validation": 6 if shipped.data.validation else 0,
        "start__weights": "scratch",
        "start__options": {**shipped.start.options, "num_classes": classes},
        "optimiser": {**shipped.optimiser.model_dump(), "samples": 8, "epochs": None, "batch": 4, "micro": 2},
        "select__images": 1,
    }
    recipe = Recipe.load(name, **small)
    file = train(recipe, open_data(data, split="train"), tmp_path / "out", workers=0)
    assert patchcure.load(file).model.num_classes == classes


def test_searching_and_teaching_leave_the_model_in_training(small: Recipe) -> None:
    """Stochastic depth and batch statistics are for the step that learns, not for the searches around it."""
    points = elastic(small)
    for point in points:
        point.defense.train()
    images, labels = torch.rand(2, 3, 96, 96), torch.eye(3)[:2]
    loss = Loss(consistency=1.0, teacher="6x1-k0")
    masked_loss(replace(points[0], greedy=2), images, labels, loss, points[2], generator(0))
    assert all(module.training for point in points for module in point.defense.model.modules())
