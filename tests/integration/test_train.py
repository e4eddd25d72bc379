"""Training as users run it: killed and run again, and on two processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

import patchcure

RECIPE: dict[str, Any] = {
    "name": "small",
    "data": {"train": "cifar10", "validation": 6, "augment": {"mixup": 0.2}},
    "start": {"instance": "PCURE-ViT-Ti-3x1-k12", "options": {"image_size": 96, "patch_size": 32, "num_classes": 3}},
    "points": [{"name": "1x1-k12", "patch": 8}, {"name": "1x1-k0", "patch": 8}],
    "optimiser": {"lr": 1e-3, "batch": 4, "micro": 2, "samples": 160},
    "select": {"every": 20, "points": ["1x1-k12"], "images": 4},
    "ema": 0.9,
}


@pytest.fixture
def recipe(tmp_path: Path, three_colours: Path) -> Path:
    file = tmp_path / "small.yaml"
    file.write_text(yaml.safe_dump({**RECIPE, "data": {**RECIPE["data"], "train": f"folder:{three_colours}"}}))
    return file


def command(recipe: Path, out: Path, *more: str) -> list[str]:
    return ["patchcure", "train", str(recipe), "--out", str(out), "--threads", "1", "--workers", "0", *more]


def start(words: list[str], *prefix: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    program = [sys.executable, "-m", *prefix, *words] if prefix else [sys.executable, "-m", *words]
    return subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def finish(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return out


def test_killed_and_run_again_gives_the_same_weights(recipe: Path, tmp_path: Path) -> None:
    words = command(recipe, tmp_path / "killed", "--save-every", "4", "--json")
    process = start(words)
    deadline = time.monotonic() + 200
    while not (tmp_path / "killed" / "checkpoint.pt").exists():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[1]
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "killed" / "small.json").exists()
    out, err = start(words).communicate(timeout=300)
    assert "step 40 of 40" in err and "0:00 h left" in err
    file = json.loads(out)["weights"]
    finish(start(command(recipe, tmp_path / "whole", "--save-every", "1000")))
    again, undisturbed = load_file(file), load_file(tmp_path / "whole" / "small.safetensors")
    assert all(torch.equal(again[key], undisturbed[key]) for key in undisturbed)
    logs = [[json.loads(line) for line in (tmp_path / run / "log.jsonl").open()] for run in ("killed", "whole")]
    for log in logs:
        for line in log:
            line.pop("seconds", None)
    assert logs[0] == logs[1]
    assert patchcure.load(f"{file}:1x1-k0").model.num_classes == 3


def test_the_card_tells_every_run(recipe: Path, tmp_path: Path) -> None:
    few = ("--set", "optimiser.samples=8", "--json")
    first = json.loads(finish(start(command(recipe, tmp_path / "first", *few))))
    again = command(recipe, tmp_path / "second", *few, "--weights", first["weights"])
    text = Path(json.loads(finish(start(again)))["card"]).read_text()
    assert str(tmp_path) not in text
    card = json.loads(text)
    assert [run["samples"] for run in card["runs"]] == [8, 8]
    assert [run["recipe"]["start"]["weights"] for run in card["runs"]] == ["scratch", "small.safetensors"]
    assert all(run["held_out"][-1]["step"] == 2 for run in card["runs"])


def test_tensorboard_shows_every_line_of_the_log(recipe: Path, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out = tmp_path / "out"
    _, err = start(command(recipe, out, "--tensorboard")).communicate(timeout=300)
    assert "step 40, clean / certified on held-out images: 1x1-k12 " in err
    (file,) = out.glob("events.out.tfevents.*")
    board = EventAccumulator(str(file))
    board.Reload()
    shown = {
        key: [(event.step, round(event.value, 4)) for event in board.Scalars(key)] for key in board.Tags()["scalars"]
    }
    lines = [json.loads(line) for line in (out / "log.jsonl").open()]
    losses = [line for line in lines if "loss" in line]
    looks = [line for line in lines if "certified" in line]
    assert shown["loss"] == [(line["step"], pytest.approx(line["loss"], abs=1e-4)) for line in losses]
    assert shown["certified/1x1-k12"] == [(line["step"], line["points"]["1x1-k12"][1]) for line in looks]
    assert {"lr", "clean/1x1-k12", "certified"} < set(shown) and len(losses) == len(looks) == 2


def test_two_processes_learn_what_one_learns(recipe: Path, tmp_path: Path) -> None:
    few = ("--set", "optimiser.samples=24", "--precision", "float32")
    pair, alone = (command(recipe, tmp_path / name, *few) for name in ("pair", "alone"))
    launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")
    running = [start(pair, *launcher), start(alone)]
    printed = [finish(process) for process in running]
    assert printed[0].count("small.safetensors") == 1, "one process speaks for both"
    looks = [
        json.loads((tmp_path / run / "small.json").read_text())["runs"][0]["held_out"] for run in ("pair", "alone")
    ]
    assert looks[0] == looks[1], "the held-out images are dealt to both"
    together, single = (load_file(tmp_path / run / "small.safetensors") for run in ("pair", "alone"))
    assert all(torch.allclose(together[key], single[key], atol=1e-5) for key in single)


def test_mistakes_are_one_line(recipe: Path, tmp_path: Path) -> None:
    process = start([*command(recipe, tmp_path / "out", "--tensorboard"), "--set", "start.options.num_classes=7"])
    _, err = process.communicate(timeout=100)
    assert process.returncode == 2
    assert (
        err.strip().splitlines()[-1].startswith("patchcure: ") and "num_classes to 3" in err and "Traceback" not in err
    )
    assert not (tmp_path / "out").exists()
