"""Weights that come with the package: whole, and worth what the committed records say."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import patchcure
from patchcure.data import open_data, preprocessing
from patchcure.evaluate import evaluate, pixels
from patchcure.records import Records
from patchcure.result import Result
from patchcure.train import Recipe, train
from patchcure.train.start import network
from patchcure.zoo.checkpoint import check
from patchcure.zoo.files import WEIGHTS

Run = Callable[..., tuple[int, str, str]]
RESULTS = Path(__file__).parents[2] / "results" / "families"


def test_weights_are_those_of_their_cards() -> None:
    files = sorted(WEIGHTS.glob("*.safetensors"))
    assert files
    for file in files:
        assert json.loads(file.with_suffix(".json").read_text())["sha256"]
        check(file)


def test_the_zoo_lists_its_weights_with_what_was_measured(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    code, text, _ = run("zoo")
    cards = json.loads(run("zoo", "--json")[1])
    assert code == 0
    assert {f"{card['name']}.safetensors" for card in cards} == {file.name for file in WEIGHTS.glob("*.safetensors")}
    lines = [line.split() for line in text.splitlines()]
    for card in cards:
        assert card["results"], card["name"]
        for row in card["results"]:
            operation = ["--operation", row["operation"]] if "operation" in row else []
            shares = [f"{100 * row[name]:.1f}%" if name in row else "–" for name in ("clean", "certified", "alarms")]
            assert [row["defense"], *operation, str(row["images"]), *shares] in lines
            assert f"{row['data']}: {row['threat']}" in text


def test_publishing_a_run(three_colours: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weights in half precision under their own hash, what its card tells, and later what was measured."""
    script = importlib.util.spec_from_file_location("publish", Path(__file__).parents[2] / "scripts" / "publish.py")
    assert script is not None and script.loader is not None
    publish = importlib.util.module_from_spec(script)
    script.loader.exec_module(publish)
    zoo, results = tmp_path / "zoo", tmp_path / "results"
    zoo.mkdir()
    monkeypatch.setattr(publish, "WEIGHTS", zoo)
    few = {"optimiser__samples": 8, "optimiser__batch": 8, "data__validation": 0, "select": {}}
    recipe = Recipe.load("bagcert-cifar10", start__options={"num_classes": 3, "image_size": 32, "width": 8}, **few)
    data = open_data(f"folder:{three_colours}", split="train")
    run = train(recipe, data, tmp_path / "run", workers=0)
    publish.publish(run.parent, None, None)
    file = zoo / run.name
    card = json.loads(file.with_suffix(".json").read_text())
    assert (card["start"], len(card["runs"]), card["results"]) == ("scratch", 1, [])
    assert file.stat().st_size < 0.6 * run.stat().st_size
    check(file)
    records = evaluate(patchcure.load(file), open_data(f"folder:{three_colours}"), out=results / "a.jsonl")
    assert records is not None
    Result.of(records, "bagcert-cifar10", file="a.jsonl", command="", device="cpu").save(results / "a.json")
    publish.measured([results])
    (row,) = json.loads(file.with_suffix(".json").read_text())["results"]
    assert (row["defense"], row["images"]) == ("bagcert-cifar10", 12)


def test_changed_weights_are_refused(tmp_path: Path) -> None:
    for ending in (".safetensors", ".json"):
        shutil.copy(WEIGHTS / f"ibp-digits{ending}", tmp_path)
    file = tmp_path / "ibp-digits.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"its card ibp-digits\.json says"):
        patchcure.load(file)
    with pytest.raises(ValueError, match=r"its card ibp-digits\.json says"):
        patchcure.load("IBP-CNN", weights=file, image_size=8, in_chans=1, mean=[0.0], std=[1.0])
    with pytest.raises(ValueError, match=r"its card ibp-digits\.json says"):
        network(Recipe.load("ibp-digits", start__weights=str(file)))


@pytest.mark.parametrize("name", ["ibp-digits"])
def test_records_are_what_the_weights_give(name: str) -> None:
    """The first images of the committed records, computed again."""
    records = Records.read(RESULTS / f"{name}.jsonl")
    data, defense = open_data(records.header["data"]["name"]), patchcure.load(name)
    rows = records.rows[:16]
    images = torch.stack([preprocessing(defense)(data[row.index].image) for row in rows])
    labels = torch.tensor([row.label for row in rows])
    assert [data[row.index].sha256 for row in rows] == [row.file for row in rows]
    assert defense.predict(images).labels.tolist() == [row.prediction for row in rows]
    assert defense.certify(images, labels, "verdict").certified.tolist() == [row.certified for row in rows]


@pytest.mark.parametrize(
    ("name", "clean", "certified"),
    [
        ("elastic-vit-ti-cifar10", 17, 8),
        ("elastic-vit-ti-cifar10:14x2-k9", 17, 8),
        ("elastic-vit-ti-cifar10:14x1-k0", 17, 10),
        ("hybrid-resnet-cifar10", 17, 6),
        ("hybrid-resnet-cifar10:k5", 17, 5),
        ("s-vit-ti-cifar10", 18, 10),
        ("drs-cifar10", 13, 8),
    ],
)
def test_weights_are_worth_something(name: str, clean: int, certified: int) -> None:
    """Sample images of the test set, at several operating points of the same weights."""
    data, defense = open_data("sample:cifar10"), patchcure.load(name)
    images, items = pixels(defense, data, range(len(data)))
    labels = torch.tensor([item.label for item in items])
    assert int((defense.predict(images).labels == labels).sum()) >= clean
    assert int(defense.certify(images, labels, "verdict").certified.sum()) >= certified
