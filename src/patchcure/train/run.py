"""The training loop: resumable at any moment, on one process or many."""

from __future__ import annotations

import hashlib
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from patchcure._atomic import write_atomically
from patchcure._device import has_bfloat16
from patchcure.defense import Defense
from patchcure.evaluate import pixels
from patchcure.images import Data
from patchcure.train.batches import Batches, generator, reseed, split
from patchcure.train.checkpoint import Log, State
from patchcure.train.losses import masked_loss
from patchcure.train.points import Point, choose, elastic
from patchcure.train.recipe import Recipe
from patchcure.train.start import network, origin
from patchcure.train.world import World, place
from patchcure.zoo.files import save

LOG_EVERY = 20
"""Steps between two lines of the log."""

Precision = Literal["float32", "bfloat16"]
"""Of the products in the network; weights, sums and the loss are float32 in any case."""

Say = Callable[[int, int, dict[str, Any]], None]
"""Told after some steps: the step, how many there are, and the line of the log: loss and rate, or what was measured on
held-out images."""


def train(
    recipe: Recipe,
    data: Data,
    out: str | Path,
    *,
    workers: int = 1,
    device: str | None = None,
    precision: Precision | None = None,
    save_every: int = 200,
    say: Say | None = None,
) -> Path:
    """Train what a recipe says, and write the weights to ``out/NAME.safetensors`` with a card beside them.

    Run again after an interruption, it goes on from its last checkpoint. On one process the weights at the end are
    those of an undisturbed run, bit for bit, because every random choice depends only on the seed and the step.

    Args:
        recipe: see `Recipe.load`.
        data: the training split, see `patchcure.data.open_data`.
        out: the folder for checkpoint, log, weights and card.
        workers: processes that prepare images.
        device: where to compute; by default CUDA if there is one.
        precision: of the products in the network; by default that of the run so far, or bfloat16 where the device
            multiplies it in hardware.
        save_every: steps between two checkpoints.
        say: told about the progress.

    Returns:
        The file with the weights, for `patchcure.load`.
    """
    where = place(device)
    if precision not in (None, "float32", "bfloat16"):
        raise ValueError(f"precision: expected float32 or bfloat16, got {precision!r}.")
    world = World.join(where)
    out = Path(out)
    checkpoint, fingerprint = out / "checkpoint.pt", _fingerprint(recipe, data)
    begun = checkpoint.is_file()
    torch.manual_seed(recipe.seed)
    points = elastic(recipe, network(recipe, new=begun))
    model = points[0].defense.model
    learn, held = split(len(data), recipe.data.validation)
    _fits(data, model.num_classes, learn)
    batches = Batches(
        data, learn, model, recipe.data.augment, recipe.optimiser, world.share(recipe.optimiser.batch), recipe.seed
    )
    for point in points:
        point.defense.to(where)
    state = State.new(recipe, model.backbone)
    if begun:
        state.read(checkpoint, fingerprint)
        if precision not in (None, state.precision):
            raise ValueError(
                f"precision: {out} was begun in {state.precision}; leave it out, or choose another folder."
            )
    else:
        state.origin = origin(recipe, model.backbone)
        state.precision = precision or ("bfloat16" if has_bfloat16(where) else "float32")
    resumed = state.step
    if world.total(state.step) != [state.step * world.size]:
        raise ValueError(f"The processes are at different steps (this one at {state.step}): let all see one {out}.")
    judged = points if state.average is None else elastic(recipe, state.weights)
    for point in judged:
        point.defense.to(where)
    log = None
    if world.rank == 0:
        out.mkdir(parents=True, exist_ok=True)
        log = Log(out / "log.jsonl", state.step)
    steps = recipe.optimiser.steps(len(learn))
    schedule = _schedule(recipe, state.optimiser, steps)
    clock = time.monotonic() - state.seconds
    for images, labels in batches.steps(state.step, steps, workers):
        schedule.step_update(state.step)
        for point in points:
            point.defense.train()
        inputs = images.to(where), labels.to(where)
        loss = _gradients(recipe, points, *inputs, state.step, batches.own.start, state.step / steps, state.precision)
        world.average(_shared(model.backbone, loss, world))
        size = nn.utils.clip_grad_norm_(model.backbone.parameters(), recipe.optimiser.clip or math.inf)
        if not (loss.isfinite() and size.isfinite()):
            raise FloatingPointError(
                f"The loss is {loss.item()} and its gradient {size.item()} at step {state.step}: use a smaller "
                "optimiser.lr or a longer warm-up, in another folder."
            )
        state.losses.append(loss.item())
        state.optimiser.step()
        state.optimiser.zero_grad()
        state.step += 1
        state.seconds = time.monotonic() - clock
        if state.average is not None:
            state.average.update(state.backbone, step=state.step)
        last = state.step == steps
        if state.step % LOG_EVERY == 0 or last:
            rate = state.optimiser.param_groups[-1]["lr"]
            line = {"step": state.step, "loss": round(statistics.fmean(state.losses), 4), "lr": float(f"{rate:.4g}")}
            state.losses.clear()
            if log is not None:
                log.add({**line, "seconds": round(state.seconds, 1)})
            if say is not None:
                say(state.step, steps, line)
        if recipe.select.points and (state.step % recipe.select.every == 0 or last):
            best = _look(recipe, state, judged, data, held, world)
            if say is not None:
                say(state.step, steps, state.history[-1])
            if log is not None:
                log.add(state.history[-1])
                if best:
                    save(judged[0].defense, _weights(recipe, out))
        if log is not None and (state.step % save_every == 0 or last):
            state.write(checkpoint, fingerprint)
    if log is not None and (state.step > resumed or not _weights(recipe, out).with_suffix(".json").is_file()):
        _finish(recipe, state, judged[0], data, out)
    world.wait()
    return _weights(recipe, out)


def _shared(backbone: nn.Module, loss: Tensor, world: World) -> list[Tensor]:
    """What the processes average after each batch: gradients, batch norm's statistics, the loss."""
    if world.size > 1:
        for parameter in backbone.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
    gradients = [parameter.grad for parameter in backbone.parameters() if parameter.grad is not None]
    return [*gradients, *(buffer for buffer in backbone.buffers() if buffer.is_floating_point()), loss]


def _gradients(
    recipe: Recipe,
    points: Sequence[Point],
    images: Tensor,
    labels: Tensor,
    step: int,
    first: int,
    progress: float,
    precision: str,
) -> Float[Tensor, ""]:
    """The gradients of one batch and its loss; each part of it draws its own point and masks."""
    teacher = next((point for point in points if point.name == recipe.loss.teacher), None)
    micro = recipe.optimiser.parts
    total = torch.zeros((), device=images.device)
    for start in range(0, len(images), micro):
        random = generator(recipe.seed, 4, step, first + start)
        reseed(recipe.seed, 5, step, first + start)
        x, y = images[start : start + micro], labels[start : start + micro]
        with torch.autocast(x.device.type, torch.bfloat16, enabled=precision == "bfloat16"):
            loss = masked_loss(choose(points, random), x, y, recipe.loss, teacher, random, progress)
        loss = loss * len(x) / len(images)
        loss.backward()
        total += loss.detach()
    return total


def _schedule(recipe: Recipe, optimiser: torch.optim.Optimizer, steps: int) -> Any:
    from timm.scheduler.cosine_lr import CosineLRScheduler

    chosen = recipe.optimiser
    return CosineLRScheduler(
        optimiser,
        t_initial=steps,
        lr_min=chosen.final_lr,
        warmup_t=round(chosen.warmup * steps),
        warmup_lr_init=chosen.lr / 100,
        t_in_epochs=False,
    )


def _fits(data: Data, classes: int, learn: Sequence[int]) -> None:
    """Refuse data with other classes than the model's, or with a class that has no image to learn from."""
    if len(data.classes) != classes:
        raise ValueError(
            f"{data.name} has {len(data.classes)} classes, the model {classes}: set start.options.num_classes to "
            f"{len(data.classes)}."
        )
    found = {data.labels[number] for number in learn}
    if empty := [name for number, name in enumerate(data.classes) if number not in found]:
        raise ValueError(f"{data.name} has no training image of {', '.join(empty[:5])}: add some or remove the class.")


def _fingerprint(recipe: Recipe, data: Data) -> str:
    """Tells whether a checkpoint belongs to this recipe and this data, wherever their files are."""
    content = recipe.told(data.fingerprint, Path(recipe.start.weights).name)
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _look(recipe: Recipe, state: State, points: Sequence[Point], data: Data, held: Sequence[int], world: World) -> bool:
    """Measure certified accuracy on held-out images, dealt to all processes; are these the best weights so far?"""
    chosen = held[: recipe.select.images]
    scores: dict[str, tuple[float, float]] = {}
    for point in points:
        if point.name in recipe.select.points and point.name not in scores:
            own = _counted(point.defense.eval(), data, chosen[world.rank :: world.size])
            right, safe = (round(count / len(chosen), 4) for count in world.total(*own))
            scores[point.name] = right, safe
    mean = sum(certified for _, certified in scores.values()) / len(scores)
    state.history.append({"step": state.step, "certified": round(mean, 4), "points": scores})
    best = mean >= state.best
    state.best = max(state.best, mean)
    return best


def _counted(defense: Defense, data: Data, numbers: Sequence[int], batch: int = 50) -> tuple[int, int]:
    """How many of these images are classified correctly, and how many are certified."""
    right = safe = 0
    for start in range(0, len(numbers), batch):
        images, items = pixels(defense, data, numbers[start : start + batch])
        labels = torch.tensor([item.label for item in items], device=images.device)
        right += int((defense.predict(images).labels == labels).sum())
        safe += int(defense.certify(images, labels, detail="verdict").certified.sum())
    return right, safe


def _weights(recipe: Recipe, out: Path) -> Path:
    return out / f"{recipe.name}.safetensors"


def _finish(recipe: Recipe, state: State, first: Point, data: Data, out: Path) -> None:
    """Write the weights if nothing chose among them, and the card."""
    if not recipe.select.points:
        save(first.defense, _weights(recipe, out))
    weights = _weights(recipe, out)
    run = {
        "recipe": recipe.told(data.name, state.origin["weights"]),
        "samples": state.step * recipe.optimiser.batch,
        "hours": round(state.seconds / 3600, 2),
        "torch": torch.__version__,
        "precision": state.precision,
        "held_out": state.history,
        "start_sha256": state.origin["sha256"],
    }
    card = {
        "name": recipe.name,
        "sha256": hashlib.sha256(weights.read_bytes()).hexdigest(),
        "data": {"name": data.name, "split": data.split, "images": len(data), "fingerprint": data.fingerprint},
        "runs": [*state.origin["runs"], run],
    }
    write_atomically(out / f"{recipe.name}.json", (json.dumps(card, indent=2) + "\n").encode())
