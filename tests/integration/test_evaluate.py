"""`patchcure evaluate` as a stranger runs it: in one process, in two, killed and started again; and bad input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import digits_vit
import numpy as np
import pytest
import torch
from PIL import Image

import patchcure
from patchcure.data import open_data
from patchcure.evaluate import evaluate, pixels
from patchcure.records import Records
from patchcure.result import Result

Run = Callable[..., tuple[int, str, str]]
OPTIONS = ("--data", "digits", "--batch", "8", "--seed", "3")


def start(*command: str, **environment: str) -> subprocess.Popen[str]:
    """Start `python -m ...` with as many threads as this process has: others round differently."""
    return subprocess.Popen(
        [sys.executable, "-m", *command],
        env={**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads()), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_records_and_result(run: Run, digits_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "records.jsonl"
    arguments = ["evaluate", str(digits_file), *OPTIONS, "--limit", "50", "--out", str(out), "--json", "--speed"]
    code, text, problem = run(*arguments)
    assert (code, problem) == (0, "")
    summary = json.loads(text)
    written = json.loads(out.with_suffix(".json").read_text())
    for share in ("clean", "certified", "undefended"):
        shares = {"value": summary[share], "low": summary[f"{share}_low"], "high": summary[f"{share}_high"]}
        assert written[share] == shares
    assert {key: summary[key] for key in ("n", "speed", "sizes", "threat")} == {
        key: written[key] for key in ("n", "speed", "sizes", "threat")
    }
    assert (summary["n"], summary["dataset"], summary["instance"]) == (50, "digits", "IBP-CNN")
    assert 0.2 < summary["certified"] <= summary["clean"] <= 1
    assert summary["undefended_low"] < summary["undefended"] <= summary["undefended_high"]
    assert summary["command"] == "patchcure " + " ".join(arguments)
    assert summary["speed"]["batch"] == 8 and summary["gmacs"] > 0 and summary["alarms"] is None
    result, records = Result.load(out.with_suffix(".json")), Records.read(out)
    assert result == Result.of(
        records, str(digits_file), file=out.name, command=result.command, speed=result.speed, gmacs=result.gmacs
    )
    defense, data = patchcure.load(digits_file), open_data("digits")
    images, items = pixels(defense, data, [row.index for row in records.rows])
    labels = torch.tensor([item.label for item in items])
    certificate = defense.certify(images, labels)
    assert [row.prediction for row in records.rows] == defense.predict(images).labels.tolist()
    assert [row.certified for row in records.rows] == certificate.certified.tolist()
    assert [row.largest for row in records.rows] == certificate.largest_patch.tolist()
    assert [row.undefended for row in records.rows] == defense(images).argmax(1).tolist()
    assert all((row.largest >= 3) == row.certified for row in records.rows)
    before = out.read_bytes()
    again = json.loads(run(*arguments)[1])
    assert out.read_bytes() == before
    assert {**again, "speed": None} == {**summary, "speed": None}


def test_the_demos_weights_keep_their_numbers(tmp_path: Path) -> None:
    """Digits as bytes, not sixteenths: within an image or two of the card."""
    defense = digits_vit.contestants(digits_vit.network())["PCURE-ViT1x1-k4"]
    assert isinstance(defense, patchcure.Defense)
    records = evaluate(defense, open_data("digits"), out=tmp_path / "records.jsonl", batch=100)
    assert records is not None
    result, card = Result.of(records, "demo"), digits_vit.card()["results"]["PCURE-ViT1x1-k4"]
    assert result.clean.value == pytest.approx(card["clean"], abs=0.004)
    assert result.certified.value == pytest.approx(card["certified"], abs=0.006)
    assert result.sizes[-1].certified <= result.certified.value <= result.sizes[0].certified


def test_verdicts_are_those_of_the_whole_certificate(run: Run, digits_file: Path, tmp_path: Path) -> None:
    whole, quick = tmp_path / "whole.jsonl", tmp_path / "quick.jsonl"
    for out, more in ((whole, ()), (quick, ("--verdicts",))):
        code, _, problem = run("evaluate", str(digits_file), *OPTIONS, "--limit", "60", "--out", str(out), *more)
        assert code == 0, problem
    rows = [Records.read(file).rows for file in (whole, quick)]
    assert [row.certified for row in rows[0]] == [row.certified for row in rows[1]]
    assert Result.load(whole.with_suffix(".json")).sizes and not Result.load(quick.with_suffix(".json")).sizes


def test_two_processes_write_what_one_does(digits_file: Path, tmp_path: Path) -> None:
    defense, data = patchcure.load(digits_file), open_data("digits")
    evaluate(defense, data, out=tmp_path / "one.jsonl", limit=60, seed=3, batch=8)
    out = tmp_path / "two.jsonl"
    arguments = ("patchcure", "evaluate", str(digits_file), *OPTIONS, "--limit", "60", "--out", str(out), "--json")
    done = start("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", *arguments)
    text, problem = done.communicate(timeout=300)
    assert done.returncode == 0, problem
    assert json.loads(text)["n"] == 60  # printed once
    assert out.read_bytes() == (tmp_path / "one.jsonl").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.jsonl", "two.json", "two.jsonl"]


def test_a_killed_rank_is_started_again_alone(
    digits_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    defense, data = patchcure.load(digits_file), open_data("digits")
    evaluate(defense, data, out=tmp_path / "one.jsonl", limit=160, batch=2)
    out = tmp_path / "two.jsonl"
    part = tmp_path / "two.jsonl.rank1-of-2"
    arguments = ["patchcure", "evaluate", str(digits_file), "--data", "digits", "--limit", "160"]
    arguments += ["--batch", "2", "--out", str(out)]
    first = start(*arguments, RANK="0", WORLD_SIZE="2")
    second = start(*arguments, RANK="1", WORLD_SIZE="2")
    while not part.exists() or part.read_bytes().count(b"\n") < 5:
        assert second.poll() is None, second.communicate()[1]
        time.sleep(0.005)
    second.kill()
    second.communicate()
    kept = part.read_bytes()
    assert not out.exists() and first.poll() is None
    assert kept.count(b"\n") < 81, "it was killed too late"
    with part.open("ab") as file:
        file.write(b'{"index": 1')  # as if the kill had struck in the middle of a line
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert evaluate(defense, data, out=out, limit=160, batch=2) is None
    text, problem = first.communicate(timeout=300)
    assert first.returncode == 0, problem
    assert "160 images of digits" in text
    assert out.read_bytes() == (tmp_path / "one.jsonl").read_bytes()
    assert not part.exists()
    assert evaluate(defense, data, out=out, limit=160, batch=2) is None, "a late rank finds nothing to do"
    assert not part.exists()


def test_several_defenses_go_to_a_folder(run: Run, digits_file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.safetensors"
    patchcure.save(patchcure.load(digits_file, operation="minority-reports"), other)
    folder = tmp_path / "results"
    arguments = (*OPTIONS, "--limit", "20", "--no-undefended", "--out", str(folder))
    code, text, _ = run("evaluate", str(digits_file), str(other), *arguments, "--json")
    assert code == 0
    first, second = json.loads(text)
    assert (first["alarms"], first["undefended"]) == (None, None)
    assert second["alarms"] >= 0 and second["operation"] == "minority-reports"
    assert sorted(path.name for path in folder.iterdir()) == [
        f"{name}.{end}" for name in ("mine", "other") for end in ("json", "jsonl")
    ]
    code, text, _ = run("evaluate", str(digits_file), str(other), *arguments)
    assert code == 0 and "alarms" in text and "20 images of digits" in text


def test_an_instance_with_weights_takes_its_classes_from_the_data(run: Run, tmp_path: Path) -> None:
    options = {"image_size": 32, "num_classes": 10, "in_chans": 3}
    patchcure.save(patchcure.build("IBP-CNN", **options), tmp_path / "w.safetensors")  # type: ignore[arg-type]
    arguments = ["evaluate", "IBP-CNN", "--weights", str(tmp_path / "w.safetensors"), "--data", "digits"]
    arguments += ["--limit", "2", "--out", str(tmp_path / "r.jsonl"), "--patch", "2x3", "--json"]
    arguments += ["--operation", "double-masking", "--masks-per-axis", "2"]
    code, text, problem = run(*arguments)
    assert code == 0, problem
    assert json.loads(text)["threat"]["patch"] == [[2, 3]]


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Ten classes with one photograph each, the last of them cut short."""
    root = tmp_path / "photos"
    for number in range(10):
        file = root / f"class{number}" / "photo.jpg"
        file.parent.mkdir(parents=True)
        pixels = np.random.RandomState(number).randint(0, 256, (90, 120, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(file)
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    return root


def test_a_truncated_photograph_is_named_and_can_be_mended(
    run: Run, digits_file: Path, photos: Path, tmp_path: Path
) -> None:
    out, bad = tmp_path / "r.jsonl", photos / "class9" / "photo.jpg"
    arguments = ("evaluate", str(digits_file), "--data", f"folder:{photos}", "--batch", "4", "--out", str(out))
    code, text, problem = run(*arguments)
    assert (code, text) == (2, "")
    assert f"Image 9 of folder:photos: {bad} is a damaged image" in problem and problem.count("\n") == 1
    lines = out.read_text().splitlines()
    assert [json.loads(line)["index"] for line in lines[1:]] == list(range(8))
    assert not out.with_suffix(".json").exists()
    bad.write_bytes((photos / "class8" / "photo.jpg").read_bytes())
    assert run(*arguments)[0] == 0
    assert out.read_text().splitlines()[:9] == lines
    assert len(Records.read(out).rows) == 10


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{file}", "--data", "folder:{tmp}/empty"], "empty holds no images"),
        (["{file}", "--data", "folder:{tmp}/two"], "folder:two has 2 classes but the model 10"),
        (["{file}", "--data", "cifar11"], "Unknown data cifar11: expected one of imagenet:DIR"),
        (["{file}", "--data", "digits", "--split", "all"], "split: expected one of train, val, test, got all"),
        (["{file}", "--data", "digits", "--out", "{tmp}"], "is a folder: expected a file for the records"),
        (["{file}", "--data", "digits", "--out", os.devnull + "/r.jsonl"], os.devnull),
        (["{file}", "--data", "digits", "--out", "{tmp}/r.json"], "use the ending .jsonl"),
        (["{file}", "--data", "digits", "--out", "{file}"], "is for the card of those weights"),
        (["{file}", "--data", "digits", "--device", "nowhere"], "device: nowhere cannot be used here"),
        (
            ["{file}", "--data", "digits", "--limit", "9", "--out", "{tmp}/begun.jsonl"],
            "another batch: 5 there, 32 now",
        ),
        (["{file}", "--data", "digits", "--limit", "0"], "--limit"),
        (["{file}", "--data", "digits", "--operation", "magic"], "operation: expected one of double-masking"),
        (["{tmp}/none.safetensors", "--data", "digits"], "There are no weights at"),
        (["PCURE-ViT14x2-k9", "--data", "digits"], "There are no weights at PCURE-ViT14x2-k9"),
        (["PCURE", "--weights", "{file}", "--data", "digits"], "Unknown defense PCURE"),
    ],
)
def test_a_mistake_is_one_clear_line(
    run: Run, digits_file: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("a", "b"):
        (tmp_path / "two" / name).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / "two" / name / "1.png")
    if "begun" in arguments[-1]:
        defense = patchcure.load(digits_file)
        evaluate(defense, open_data("digits"), out=tmp_path / "begun.jsonl", batch=5, limit=9)
    before = sorted(tmp_path.rglob("*"))
    code, text, problem = run("evaluate", *(word.format(file=digits_file, tmp=tmp_path) for word in arguments))
    assert (code, text) == (2, "")
    assert problem.startswith("patchcure: ") and problem.count("\n") == 1
    assert message in problem.replace("'", "")
    assert sorted(tmp_path.rglob("*")) == before, "nothing half written"


def test_labels_out_of_range_are_named(digits_file: Path, tmp_path: Path) -> None:
    from dataclasses import replace

    data = open_data("digits")
    wrong = replace(data, labels=[*data.labels[:7], 10, *data.labels[8:]])
    with pytest.raises(ValueError, match="Labels go from 0 to 9, but image 7 of digits has 10"):
        evaluate(patchcure.load(digits_file), wrong, out=tmp_path / "r.jsonl")
    assert not list(tmp_path.iterdir())


def test_a_nan_in_the_weights_is_told_with_its_images(digits_file: Path, tmp_path: Path) -> None:
    defense = patchcure.load(digits_file)
    next(defense.model.parameters()).data.fill_(torch.nan)
    with pytest.raises(FloatingPointError, match="Images 0 to 31 of digits: A logit is NaN"):
        evaluate(defense, open_data("digits"), out=tmp_path / "r.jsonl")
