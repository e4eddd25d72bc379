"""The command line in this process, and a small defense on digits to give to it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import patchcure
from patchcure.cli import main
from patchcure.data import open_data
from patchcure.evaluate import pixels

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command line in this process: exit code, stdout, stderr."""

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["patchcure", *arguments])
        with pytest.raises(SystemExit) as stopped:
            main()
        return int(stopped.value.code or 0), *capsys.readouterr()

    return call


@pytest.fixture(scope="session")
def digits_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved defense: a small network, trained a little on digits under the defense's own pairs of masks."""
    torch.manual_seed(0)
    defense = patchcure.build(
        "IBP-CNN",
        image_size=16,
        in_chans=1,
        mean=[0.3],
        std=[0.4],
        patch=3,
        masks_per_axis=3,
        operation="double-masking",
    )
    data = open_data("digits", split="train")
    images, labels = pixels(defense, data, range(len(data)))[0], torch.tensor(data.labels)
    network = defense.model.backbone
    hidden, pick = defense.masks.hidden, torch.Generator().manual_seed(0)
    optimizer = torch.optim.Adam(network.parameters(), 3e-3)
    for _ in range(90):
        batch = torch.randint(len(images), (96,), generator=pick)
        masks = hidden[torch.randint(len(hidden), (2, 96), generator=pick)].any(0)[:, None]
        inputs = torch.where(masks, 0, defense.model.normalize(images[batch]))
        loss = torch.nn.functional.cross_entropy(network(inputs), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    file = tmp_path_factory.mktemp("defense") / "mine.safetensors"
    patchcure.save(defense, file)
    return file
