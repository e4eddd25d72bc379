"""The training loop: resumable at any moment, on one process or many."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from patchcure._torchvision import ensure_torchvision
from patchcure.train.batches import Batches, Images, generator, reseed, split
from patchcure.train.losses import masked_loss
from patchcure.train.points import Point, choose, elastic
from patchcure.train.recipe import Recipe
from patchcure.train.start import network
from patchcure.zoo.files import save

SAVE_EVERY = 200
"""Steps between two checkpoints."""
LOG_EVERY = 20

Say = Callable[[int, int, dict[str, Any]], None]
"""Told after some steps: the step, how many there are, and what was logged."""


@dataclass(frozen=True)
class World:
    """The processes that train together, as torchrun starts them."""

    rank: int = 0
    size: int = 1

    @classmethod
    def join(cls) -> World:
        """Find out about the others; one process needs none."""
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size > 1 and not dist.is_initialized():
            dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
        return cls(int(os.environ.get("RANK", "0")), size)

    def average(self, parameters: Sequence[nn.Parameter]) -> None:
        """Average the gradients over all processes."""
        if self.size == 1:
            return
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        flat = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(flat)
        parts = (flat / self.size).split([grad.numel() for grad in grads])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter)


@dataclass
class State:
    """Everything that changes during a run."""

    backbone: nn.Module
    optimiser: torch.optim.Optimizer
    average: Any
    step: int = 0
    best: float = -1.0
    history: list[dict[str, Any]] = field(default_factory=list)

    def write(self, file: Path, fingerprint: str) -> None:
        """Write a checkpoint; a reader sees the old one or the new one, never a part."""
        content = {
            "fingerprint": fingerprint,
            "step": self.step,
            "best": self.best,
            "history": self.history,
            "backbone": self.backbone.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "average": self.average.module.state_dict() if self.average is not None else None,
        }
        part = file.with_name(file.name + ".part")
        torch.save(content, part)
        os.replace(part, file)

    def read(self, file: Path, fingerprint: str) -> None:
        """Go on from a checkpoint, which must be of the same recipe."""
        content = torch.load(file, map_location="cpu", weights_only=True)
        if content["fingerprint"] != fingerprint:
            raise ValueError(f"{file} was written by another recipe: give another --out, or delete that folder.")
        self.step, self.best, self.history = content["step"], content["best"], content["history"]
        self.backbone.load_state_dict(content["backbone"])
        self.optimiser.load_state_dict(content["optimiser"])
        if self.average is not None:
            self.average.module.load_state_dict(content["average"])

    @property
    def weights(self) -> nn.Module:
        """The weights to use: the averaged ones where there are."""
        found: nn.Module = self.backbone if self.average is None else self.average.module
        return found


def train(
    recipe: Recipe, data: Images, out: Path, *, workers: int = 1, device: str | None = None, say: Say | None = None
) -> Path:
    """Train what a recipe says, and write the weights to ``out/NAME.safetensors``.

    Run again after an interruption, it goes on from its last checkpoint; on one process the weights at the end are
    those of an undisturbed run, bit for bit, because every random choice depends only on the seed and the step.

    Args:
        data: images and labels by number, and `classes`; see `patchcure.data`.
        out: the folder for checkpoints, log and weights.
        workers: processes that prepare images.
        device: where to compute; by default CUDA if there is one.
        say: told about the progress.

    Returns:
        The file with the weights, for `patchcure.load`.
    """
    world = World.join()
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(recipe.seed)
    points = elastic(recipe, network(recipe))
    model = points[0].defense.model
    _fits(data, model.num_classes)
    for point in points:
        point.defense.to(where)
    learn, held = split(len(data), recipe.data.validation, recipe.seed)
    state = _state(recipe, model.backbone)
    checkpoint, fingerprint = out / "checkpoint.pt", recipe.fingerprint
    if checkpoint.is_file():
        state.read(checkpoint, fingerprint)
    size, steps = recipe.optimiser.batch, recipe.optimiser.steps
    if size % world.size:
        raise ValueError(f"optimiser.batch: {size} images cannot be dealt to {world.size} processes.")
    own = slice(world.rank * size // world.size, (world.rank + 1) * size // world.size)
    batches = Batches(data, learn, model.image, recipe.data.augment, size, own, model.num_classes, recipe.seed)
    schedule = _schedule(recipe, state.optimiser)
    parameters = [p for p in model.backbone.parameters() if p.requires_grad]
    started, losses = time.monotonic(), []
    first = state.step
    for images, labels in batches.steps(state.step, steps, workers):
        schedule.step_update(state.step)
        state.backbone.train()
        loss = _step(recipe, points, images.to(where), labels.to(where), state.step, world)
        if not math.isfinite(loss):
            raise FloatingPointError(
                f"The loss is {loss} at step {state.step}: use a smaller optimiser.lr, or a longer warm-up; "
                f"{checkpoint} holds the last good weights."
            )
        losses.append(loss)
        world.average(parameters)
        if recipe.optimiser.clip is not None:
            nn.utils.clip_grad_norm_(parameters, recipe.optimiser.clip)
        state.optimiser.step()
        state.optimiser.zero_grad()
        state.step += 1
        if state.average is not None:
            state.average.update(state.backbone, step=state.step)
        last = state.step == steps
        if state.step % LOG_EVERY == 0 or last:
            line = {
                "step": state.step,
                "samples": state.step * size,
                "loss": round(sum(losses) / len(losses), 4),
                "lr": state.optimiser.param_groups[-1]["lr"],
            }
            losses = []
            if world.rank == 0:
                _log(out, line, first, started)
            if say is not None:
                say(state.step, steps, line)
        if world.rank == 0 and held and recipe.select.points and (state.step % recipe.select.every == 0 or last):
            _select(recipe, state, data, held, out)
        if world.rank == 0 and (state.step % SAVE_EVERY == 0 or last):
            state.write(checkpoint, fingerprint)
    return out / f"{recipe.name}.safetensors"


def _step(
    recipe: Recipe, points: Sequence[Point], images: Tensor, labels: Tensor, step: int, world: World
) -> float:
    """The gradients of one batch; each part of it draws its own point and masks."""
    teacher = next((point for point in points if point.name == recipe.loss.teacher), None)
    micro = recipe.optimiser.micro or len(images)
    total = 0.0
    for number, start in enumerate(range(0, len(images), micro)):
        random = generator(recipe.seed, 4, step, number, world.rank)
        reseed(recipe.seed, 5, step, number, world.rank)
        x, y = images[start : start + micro], labels[start : start + micro]
        with torch.autocast(x.device.type, torch.bfloat16, enabled=x.device.type == "cuda"):
            loss = masked_loss(choose(points, random), x, y, recipe.loss, teacher, random) * len(x) / len(images)
        loss.backward()
        total += loss.item()
    return total


def _state(recipe: Recipe, backbone: nn.Module) -> State:
    ensure_torchvision()
    from timm.optim import create_optimizer_v2
    from timm.utils import ModelEmaV3

    chosen = recipe.optimiser
    optimiser = create_optimizer_v2(
        backbone, chosen.name, chosen.lr, chosen.weight_decay, momentum=0.9, layer_decay=chosen.layer_decay
    )
    average = ModelEmaV3(backbone, decay=recipe.ema, use_warmup=True) if recipe.ema else None
    return State(backbone, optimiser, average)


def _schedule(recipe: Recipe, optimiser: torch.optim.Optimizer) -> Any:
    from timm.scheduler.cosine_lr import CosineLRScheduler

    steps = recipe.optimiser.steps
    warm = round(recipe.optimiser.warmup * steps)
    return CosineLRScheduler(
        optimiser,
        t_initial=steps,
        lr_min=recipe.optimiser.final_lr,
        warmup_t=warm,
        warmup_lr_init=recipe.optimiser.lr / 100,
        warmup_prefix=False,
        t_in_epochs=False,
    )


def _fits(data: Images, classes: int) -> None:
    """Refuse a dataset with other classes than the model's, or with a class that has no image."""
    names = list(data.classes)
    if len(names) != classes:
        raise ValueError(
            f"The data has {len(names)} classes, the model {classes}: set start.options.num_classes to {len(names)}."
        )


def _select(recipe: Recipe, state: State, data: Images, held: Sequence[int], out: Path) -> None:
    """Look at certified accuracy on held-out images, and keep the best weights."""
    scores = {}
    for point in elastic(recipe, state.weights):
        if point.name in recipe.select.points:
            clean, certified = accuracy(point.defense.eval(), data, held[: recipe.select.images])
            scores[point.name] = {"clean": round(clean, 4), "certified": round(certified, 4)}
            best = point.defense
    mean = sum(score["certified"] for score in scores.values()) / len(scores)
    state.history.append({"step": state.step, "certified": round(mean, 4), "points": scores})
    with (out / "log.jsonl").open("a") as log:
        log.write(json.dumps(state.history[-1]) + "\n")
    if mean >= state.best:
        state.best = mean
        save(best, out / f"{recipe.name}.safetensors")


@torch.no_grad()
def accuracy(defense: Defense, data: Images, numbers: Sequence[int], batch: int = 50) -> tuple[float, float]:
    """Clean and certified accuracy on some images."""
    right = safe = 0
    for start in range(0, len(numbers), batch):
        items = [data[number] for number in numbers[start : start + batch]]
        images = torch.stack([whole(item[0], defense.model.image) for item in items])
        labels = torch.tensor([item[1] for item in items])
        right += int((defense.predict(images).labels == labels).sum())
        safe += int(defense.certify(images, labels, detail="verdict").certified.sum())
    return right / len(numbers), safe / len(numbers)


def whole(picture: Any, size: Any) -> Tensor:
    from PIL import Image
    import numpy as np

    small = picture.convert("RGB").resize((size.width, size.height), Image.Resampling.BICUBIC)
    return torch.from_numpy(np.array(small)).permute(2, 0, 1).float() / 255


def _log(out: Path, line: dict[str, Any], first: int, started: float) -> None:
    done = line["step"] - first
    speed = {"seconds_per_step": round((time.monotonic() - started) / max(1, done), 3)}
    with (out / "log.jsonl").open("a") as log:
        log.write(json.dumps({**line, **speed}) + "\n")
