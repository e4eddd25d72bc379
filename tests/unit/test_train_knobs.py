"""Each knob of a recipe does what it says: rates, averages, augmentation, losses, and where the weights come from."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot

import patchcure
from patchcure._torchvision import ensure_torchvision
from patchcure.data import open_data
from patchcure.train import Recipe, train
from patchcure.train.batches import Batches, generator
from patchcure.train.checkpoint import State
from patchcure.train.losses import masked_loss, votes_loss
from patchcure.train.points import elastic
from patchcure.train.recipe import Loss
from patchcure.train.run import _schedule, _shared
from patchcure.train.start import network, origin
from patchcure.train.world import World

OPTIONS = {"image_size": 48, "num_classes": 3, "mean": [0.5, 0.4, 0.2], "std": [0.1, 0.1, 0.1]}


def recipe(**changes: Any) -> Recipe:
    """A small one, with parts changed."""
    content: dict[str, Any] = {
        "name": "small",
        "data": {"train": "folder"},
        "start": {"instance": "PCURE-ViT-Ti-3x1-k12", "options": OPTIONS},
        "points": [{"name": "1x1-k12", "patch": 8}, {"name": "1x1-k0", "patch": 8}],
        "optimiser": {"lr": 1e-3, "batch": 4, "micro": 2, "samples": 16},
    }
    for key, value in changes.items():
        content[key] = {**content.get(key, {}), **value} if isinstance(value, dict) else value
    return Recipe(**content)


def test_rates_rise_to_the_peak_and_fall_to_the_end() -> None:
    chosen = recipe(optimiser={"lr": 0.1, "final_lr": 0.01, "warmup": 0.2})
    state = State.new(chosen, nn.Linear(2, 2))
    schedule = _schedule(chosen, state.optimiser, 100)

    def rate(step: int) -> float:
        schedule.step_update(step)
        return float(state.optimiser.param_groups[0]["lr"])

    rates = [rate(step) for step in range(101)]
    assert rates[0] == pytest.approx(0.001)
    assert rates[:20] == sorted(rates[:20]) and rates[20:] == sorted(rates[20:], reverse=True)
    assert max(rates) == pytest.approx(0.1, rel=0.15) and rates[100] == pytest.approx(0.01)


def test_layer_decay_slows_the_first_layers() -> None:
    chosen = recipe(optimiser={"layer_decay": 0.5})
    backbone: Any = network(chosen)
    scales = {
        id(parameter): group["lr_scale"]
        for group in State.new(chosen, backbone).optimiser.param_groups
        for parameter in group["params"]
    }
    found = [scales[id(block.mlp.fc1.weight)] for block in backbone.blocks]
    assert [later / earlier for earlier, later in pairwise(found)] == pytest.approx([2.0] * 11)
    assert scales[id(backbone.head.weight)] == 1.0
    with pytest.raises(ValueError, match="does not know this network's layers"):
        State.new(chosen, nn.Linear(2, 2))


def test_stochastic_depth_grows_with_the_depth() -> None:
    backbone: Any = network(recipe(start={"drop_path": 0.11}))
    rates = [getattr(block.drop_path2, "drop_prob", 0.0) for block in backbone.blocks]
    assert rates == pytest.approx([0.01 * number for number in range(12)])


def test_the_average_is_what_is_saved(three_colours: Path, tmp_path: Path) -> None:
    data = open_data(f"folder:{three_colours}", split="train")
    file = train(recipe(ema=0.9), data, tmp_path, workers=0)
    saved = load_file(file)
    kept = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert all(torch.equal(saved[key], kept["average"][key]) for key in saved)
    assert any(not torch.equal(saved[key], kept["backbone"][key]) for key in saved)


def test_the_teacher_of_a_recipe_teaches(three_colours: Path, tmp_path: Path) -> None:
    data = open_data(f"folder:{three_colours}", split="train")
    alone, taught = (
        load_file(train(recipe(loss=loss), data, tmp_path / str(number), workers=0))
        for number, loss in enumerate(({}, {"consistency": 1.0, "teacher": "1x1-k0"}))
    )
    assert any(not torch.equal(alone[key], taught[key]) for key in alone)


def test_smoothing_is_that_of_torch() -> None:
    point = elastic(recipe())[0]
    images, labels = torch.rand(3, 3, 48, 48), torch.tensor([0, 2, 1])
    logits = point.defense.model.under(images, point.draw(3, generator(0)))
    found = masked_loss(point, images, one_hot(labels, 3).float(), Loss(smoothing=0.3), None, generator(0))
    assert torch.allclose(found, cross_entropy(logits, labels, label_smoothing=0.3), atol=1e-6)


def test_votes_lose_what_they_lack_of_the_margin() -> None:
    """Cells that all vote for class 0 alone: nothing is missing there, 1 + margin elsewhere."""
    defense = patchcure.build("BagCert-BagNet9-R18", image_size=32, num_classes=3, patch=5, width=8).eval()
    head = [module for module in defense.model.backbone.modules() if isinstance(module, nn.Linear)][-1]
    nn.init.zeros_(head.weight)
    with torch.no_grad():
        head.bias.copy_(torch.tensor([50.0, -50.0, -50.0]))
    images = torch.rand(2, 3, 32, 32)
    assert votes_loss(defense, images, torch.eye(3)[[0, 0]], 0.4).item() == pytest.approx(0, abs=1e-6)
    assert votes_loss(defense, images, torch.eye(3)[[1, 1]], 0.4).item() == pytest.approx(1.4 + 0.4, abs=1e-6)


@pytest.mark.parametrize("k", [12, 0])
def test_in_bfloat16_gradients_reach_all_weights_after_a_search(k: int) -> None:
    """The search for the worst masks rounds the weights first, without a graph; the step must not use those."""
    point = replace(elastic(recipe())[0 if k else 1], greedy=3)
    backbone = point.defense.model.backbone
    with torch.autocast("cpu", torch.bfloat16):
        loss = masked_loss(point, torch.rand(2, 3, 48, 48), torch.eye(3)[:2], Loss(), None, generator(0))
    loss.backward()
    assert loss.isfinite()
    without = [name for name, weight in backbone.named_parameters() if weight.grad is None or not weight.grad.any()]
    assert without == ["cls_token"], "which is not part of this network's average"


def batch(three_colours: Path, **augment: Any) -> tuple[Tensor, Tensor]:
    """The images of one step: 8 of each class."""
    chosen = recipe(data={"augment": {"scale": (1.0, 1.0), "ratio": (1.0, 1.0), "flip": 0.0, **augment}})
    data = open_data(f"folder:{three_colours}", split="train")
    optimiser = chosen.optimiser.model_copy(update={"batch": 24, "micro": 24})
    model = elastic(chosen)[0].defense.model
    return Batches(data, range(24), model, chosen.data.augment, optimiser, range(24), 0)[0]


def test_nothing_changes_an_image_that_is_not_augmented(three_colours: Path) -> None:
    images, labels = batch(three_colours)
    defense = elastic(recipe())[0].defense
    data = open_data(f"folder:{three_colours}", split="train")
    plain = torch.stack([patchcure.data.preprocessing(defense)(item.image) for item in data])
    for image, label in zip(images, labels, strict=True):
        assert label.max() == 1
        assert (image.mean((1, 2)) - plain.mean((2, 3))).abs().sum(1).min() < 0.05


def test_what_is_erased_is_noise_around_the_mean_colour(three_colours: Path) -> None:
    plain, _ = batch(three_colours)
    images, _ = batch(three_colours, erase=1.0)
    for channel, mean in enumerate((0.5, 0.4, 0.2)):
        erased = images[:, channel][((images - plain).abs() > 1e-4).all(1)]
        assert len(erased) > 1000
        assert erased.mean().item() == pytest.approx(mean, abs=0.02)
        assert erased.std().item() == pytest.approx(0.1, abs=0.02)


def test_randaugment_fills_with_the_mean_colour(three_colours: Path) -> None:
    chosen = recipe(data={"augment": {"auto": "rand-m9"}})
    data = open_data(f"folder:{three_colours}", split="train")
    model = elastic(chosen)[0].defense.model
    batches = Batches(data, range(24), model, chosen.data.augment, chosen.optimiser, range(4), 0)
    (found,) = (step for step in batches.transform.transforms if hasattr(step, "ops"))
    assert found.ops[0].kwargs["fillcolor"] == (128, 102, 51)


@pytest.mark.parametrize("kind", ["mixup", "cutmix"])
def test_mixed_images_have_mixed_labels(three_colours: Path, kind: str) -> None:
    """The share of a colour in an image is the share of its class in the label."""
    images, labels = batch(three_colours, **{kind: 1.0})
    mixed = labels.max(1).values < 0.95
    assert mixed.any() and torch.allclose(labels.sum(1), torch.ones(24))
    bright = (images - 45 / 255).mean((2, 3)).flip(1) / (150 / 255)
    assert torch.allclose(bright[mixed], labels[mixed], atol=0.08)
    if kind == "cutmix":
        assert all(set(image.amax(0).gt(0.5).flatten().tolist()) == {True} for image in images)


def test_processes_share_batch_norms_statistics() -> None:
    backbone = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2))
    shared = _shared(backbone, torch.zeros(()), replace(World.join(torch.device("cpu")), size=2))
    ids = {id(tensor) for tensor in shared}
    assert {id(backbone[1].running_mean), id(backbone[1].running_var)} <= ids
    assert {id(parameter.grad) for parameter in backbone.parameters()} <= ids


def test_starts_from_timm_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The network's own weights, or those of a name; here timm makes them new instead of downloading them."""
    ensure_torchvision()
    import timm

    made: list[tuple[str, nn.Module]] = []
    create = timm.create_model

    def local(name: str, pretrained: bool = False, **options: Any) -> nn.Module:
        model = create(name, **options)
        if pretrained:
            made.append((name, model))
        return model

    monkeypatch.setattr(timm, "create_model", local)
    other = recipe(start={"weights": "vit_tiny_patch16_224.augreg_in21k"})
    backbone = network(other)
    ((name, source),) = made
    assert name == "vit_tiny_patch16_224.augreg_in21k"
    assert torch.equal(
        backbone.state_dict()["blocks.3.attn.qkv.weight"], source.state_dict()["blocks.3.attn.qkv.weight"]
    )
    assert origin(other, backbone) == {"weights": name, "sha256": None, "runs": []}
    own = recipe(start={"weights": "timm"})
    assert origin(own, network(own))["weights"] == "vit_tiny_patch16_224.augreg_in21k_ft_in1k"
    assert len(made) == 2


def test_starts_from_mae_and_from_a_classifier_of_another_size(tmp_path: Path) -> None:
    tensors = network(recipe()).state_dict()
    body = "blocks.5.mlp.fc2.weight"
    mae = {key: value + 1 for key, value in tensors.items() if not key.startswith(("head.", "fc_norm."))}
    torch.save({"model": {**mae, "decoder_embed.weight": torch.zeros(2, 2)}}, tmp_path / "mae.pth")
    more = {**tensors, "head.weight": torch.zeros(7, 192), "head.bias": torch.zeros(7), body: tensors[body] + 1}
    save_file(more, tmp_path / "seven.safetensors")
    for file in ("mae.pth", "seven.safetensors"):
        found = network(recipe(start={"weights": str(tmp_path / file)})).state_dict()
        assert torch.equal(found[body], tensors[body] + 1)
        assert found["head.weight"].shape == (3, 192) and found["head.weight"].any()


def test_starts_from_weights_of_the_package_at_any_point() -> None:
    start = {
        "instance": "PCURE-ViT-Ti-14x2-k12",
        "options": {"num_classes": 10},
        "weights": "elastic-vit-ti-cifar10:14x2-k9",
    }
    chosen = recipe(start=start, points=[{"name": "14x2-k12"}])
    backbone = network(chosen)
    shipped = patchcure.load("elastic-vit-ti-cifar10").model.backbone.state_dict()
    assert all(torch.equal(value, shipped[key]) for key, value in backbone.state_dict().items())
    told = origin(chosen, backbone)
    assert told["weights"] == "elastic-vit-ti-cifar10:14x2-k9" and len(told["runs"]) > 1


def stopped(chosen: Recipe, folder: Path, out: Path, **options: Any) -> None:
    """A run that is interrupted after two of its four steps."""

    def stop(step: int, steps: int, line: dict[str, Any]) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        data = open_data(f"folder:{folder}", split="train")
        train(chosen, data, out, workers=0, save_every=1, say=stop, **options)


LOOKING: dict[str, Any] = {"select": {"every": 2, "points": ["1x1-k12"], "images": 2}, "data": {"validation": 6}}


def test_a_run_keeps_its_precision_and_goes_on_where_its_data_moved(three_colours: Path, tmp_path: Path) -> None:
    chosen, out = recipe(**LOOKING), tmp_path / "out"
    stopped(chosen, three_colours, out, precision="bfloat16")
    moved = tmp_path / "moved"
    shutil.move(three_colours, moved)
    data = open_data(f"folder:{moved}", split="train")
    with pytest.raises(ValueError, match="was begun in bfloat16"):
        train(chosen, data, out, workers=0, precision="float32")
    elsewhere = recipe(**{**LOOKING, "data": {**LOOKING["data"], "train": f"folder:{moved}"}})
    card = train(elsewhere, data, out, workers=0).with_suffix(".json")
    assert json.loads(card.read_text())["runs"][0]["precision"] == "bfloat16"


def test_the_card_of_a_finished_run_stays(three_colours: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = open_data(f"folder:{three_colours}", split="train")
    card = train(recipe(), data, tmp_path, workers=0).with_suffix(".json")
    before = card.read_bytes()
    monkeypatch.setattr(torch, "__version__", "9.0")
    train(recipe(), data, tmp_path, workers=0)
    assert card.read_bytes() == before


def test_nothing_is_held_out_where_nothing_is_selected(three_colours: Path, tmp_path: Path) -> None:
    assert recipe().data.validation == 0
    with pytest.raises(ValueError, match=r"set data\.validation"):
        recipe(select=LOOKING["select"])
    data = open_data(f"folder:{three_colours}", split="train")
    kept = load_file(train(recipe(), data, tmp_path, workers=0))
    last = torch.load(tmp_path / "checkpoint.pt", weights_only=True)["backbone"]
    assert all(torch.equal(kept[key], last[key]) for key in kept)


@pytest.mark.parametrize("kind", ["votes", "interval"])
def test_a_loss_without_masks_says_so(kind: str) -> None:
    with pytest.raises(ValueError, match=f"loss.kind {kind} hides nothing"):
        recipe(loss={"kind": kind})
    with pytest.raises(ValueError, match=f"loss.kind {kind} hides nothing"):
        recipe(loss={"kind": kind, "masks": 0, "consistency": 1.0, "teacher": "1x1-k0"})
