"""Everything that changes during a run, on disk: a run that is killed goes on where it was."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from patchcure._atomic import write_atomically
from patchcure._torchvision import ensure_torchvision
from patchcure.train.recipe import Recipe
from patchcure.zoo.checkpoint import unpickled


@dataclass
class State:
    """Everything that changes during a run.

    Args:
        average: timm's moving average of the weights, if there is one.
        best: the best certified accuracy on held-out images so far.
        seconds: how long all sittings of the run took.
        losses: since the last line of the log.
        history: what was measured on held-out images.
        origin: where the first weights came from, see `patchcure.train.start.origin`.
        precision: of the products in the network; a run keeps the one that it began with.
    """

    backbone: nn.Module
    optimiser: torch.optim.Optimizer
    average: Any
    step: int = 0
    best: float = -1.0
    seconds: float = 0.0
    losses: list[float] = field(default_factory=list)
    history: list[dict[str, Any]] = field(default_factory=list)
    origin: dict[str, Any] = field(default_factory=dict)
    precision: str = ""

    @classmethod
    def new(cls, recipe: Recipe, backbone: nn.Module) -> State:
        """Before the first step."""
        ensure_torchvision()
        from timm.optim._optim_factory import create_optimizer_v2
        from timm.utils.model_ema import ModelEmaV3

        chosen = recipe.optimiser
        if chosen.layer_decay is not None and not hasattr(backbone, "group_matcher"):
            raise ValueError("optimiser.layer_decay: timm does not know this network's layers; leave it out.")
        optimiser = create_optimizer_v2(
            backbone, chosen.name, chosen.lr, chosen.weight_decay, momentum=0.9, layer_decay=chosen.layer_decay
        )
        average = ModelEmaV3(backbone, decay=recipe.ema, use_warmup=True) if recipe.ema else None
        return cls(backbone, optimiser, average)

    @property
    def weights(self) -> nn.Module:
        """The weights to use: the averaged ones where there are."""
        found: nn.Module = self.backbone if self.average is None else self.average.module
        return found

    def write(self, file: Path, fingerprint: str) -> None:
        """Write a checkpoint; a reader sees the old one or the new one, never a part."""
        content = {
            "fingerprint": fingerprint,
            "step": self.step,
            "best": self.best,
            "seconds": self.seconds,
            "losses": self.losses,
            "history": self.history,
            "origin": self.origin,
            "precision": self.precision,
            "backbone": self.backbone.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "average": None if self.average is None else self.average.module.state_dict(),
        }
        buffer = io.BytesIO()
        torch.save(content, buffer)
        write_atomically(file, buffer.getvalue())
        for left in file.parent.glob(f".{file.name}.*.part"):  # by a process that was killed while it wrote
            left.unlink(missing_ok=True)

    def read(self, file: Path, fingerprint: str) -> None:
        """Go on from a checkpoint, which must be of the same recipe and data."""
        content = unpickled(file)
        if not isinstance(content, dict) or "fingerprint" not in content:
            raise ValueError(f"{file} is no checkpoint of a training run: choose another folder, or delete it.")
        if content["fingerprint"] != fingerprint:
            raise ValueError(
                f"{file} belongs to another recipe or other data: choose another folder for this run, or delete that "
                "one."
            )
        self.step, self.best, self.seconds = content["step"], content["best"], content["seconds"]
        self.losses, self.history = content["losses"], content["history"]
        self.origin, self.precision = content["origin"], content["precision"]
        self.backbone.load_state_dict(content["backbone"])
        self.optimiser.load_state_dict(content["optimiser"])
        if self.average is not None:
            self.average.module.load_state_dict(content["average"])


class Log:
    """One JSON line for every few steps; lines after the last checkpoint are written again by a resumed run."""

    def __init__(self, file: Path, step: int) -> None:
        self.file = file
        lines = file.read_text().splitlines(keepends=True) if file.is_file() else []
        kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
        if lines or step == 0:
            write_atomically(file, "".join(kept).encode())

    def add(self, line: dict[str, Any]) -> None:
        """Write a line at once."""
        with self.file.open("a") as log:
            log.write(json.dumps(line) + "\n")
