"""The paper's numbers, tables and figures with results as `evaluate` writes them, and what is refused."""

from __future__ import annotations

import csv
import io
import json
import re
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from patchcure import PatchThreat, build, save
from patchcure.benchmark import Row
from patchcure.names import parse
from patchcure.report import MEASURED, PAPER, Measured, plot, plot_all, read, table, write
from patchcure.report.matching import own_operation
from patchcure.report.reproduce import plan, reproduce
from patchcure.report.sheet import FORMATS, Estimate, Published, Sheet
from patchcure.result import Result, Share, SizeShare, Threat, Timing

TABLES = [spec.id for spec in PAPER.tables]
FIGURES = [spec.id for spec in PAPER.figures]
VIT, CIFAR = "PCURE-ViT14x2-k9", "PCURE-ViT-Ti-14x1-k3"


def result(
    instance: str, dataset: str = "imagenet", certified: float = 0.5, patches: int = 1, number: int = 0
) -> Result:
    """A result such as `evaluate --speed` writes for a detector or another defense."""
    threat = PatchThreat.square("2%", 224, patches)
    share = [Share(value, value - 0.02, value + 0.02) for value in (certified + 0.2, certified, certified + 0.25, 0.1)]
    operation = own_operation(instance)
    return Result(
        defense=f"{instance}.safetensors",
        instance=instance,
        weights=f"{number:064}",
        dataset=dataset,
        split="test",
        threat=Threat(threat.describe(), 32, patches, (224, 224)),
        operation=operation,
        n=1000,
        seed=0,
        clean=share[0],
        certified=share[1],
        undefended=share[2],
        alarms=share[3] if operation == "minority-reports" else None,
        sizes=(SizeShare(8, certified + 0.1), SizeShare(32, certified), SizeShare(64, certified / 2)),
        evaluations=6.5,
        speed=Timing(4.2, 10.0, 0.42, 0.40, 0.45, batch=4),
        gmacs=48.8,
        hardware="a processor, 2 threads",
        versions={"patchcure": "0.1.0"},
        command="patchcure evaluate",
        records=f"{instance}-{dataset}-{number}.jsonl",
    )


def speed(name: str, batch: int) -> Row:
    return Row(name, batch, 9.5, 10.0, 0.95, 0.93, 0.98, 4.0, 7, 105.2, 17.7, 17.6, 900.0, 0.94)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Results of the paper's instances, of small ones, with two sets of masks, and speeds."""
    found = [result(VIT, certified=0.467), result("PCURE-ViT14x2-k12", certified=0.44), result("MR-ViT-B")]
    found += [result("PCURE-ViT2x2-k12", certified=0.35, patches=2), result("PCURE-ViT14x2-k6", "cifar10")]
    found += [result("S-ViT-b19-s10", certified=0.33), result("PCURE-ViT-Ti-14x2-k12", "folder:imagenette")]
    found += [result(CIFAR, "cifar10", 0.6 + number / 10, number=number) for number in range(2)]
    for number, one in enumerate(found):
        one.save(tmp_path / f"{number}.json")
        (tmp_path / one.records).write_text(json.dumps({"masks": {"count": 6 + number}}) + "\n")
    rows = [asdict(speed(name, batch)) for name in ("PCURE-ViT14x2-k12", "PatchCleanser-ViT-B") for batch in (1, 4, 8)]
    (tmp_path / "speeds.json").write_text(json.dumps(rows))
    return tmp_path


@pytest.fixture
def measured(folder: Path) -> Measured:
    return read(folder)


@pytest.mark.parametrize(
    ("name", "row", "numbers"),
    [
        ("main", "PCURE-ViT14x2-k12", (78.3, 44.2, 189.9)),
        ("main", "PCURE-ViT14x1-k12", (76.3, 47.1, 182.0)),
        ("main", "PCURE-ViT2x2-k12", (71.3, 46.8, 158.1)),
        ("main", "PCURE-ViT14x2-k9", (80.0, 46.7, 58.4)),
        ("main", "PCURE-ViT14x2-k6", (81.8, 47.5, 34.4)),
        ("main", "PCURE-ViT14x2-k3", (82.1, 47.8, 23.9)),
        ("main", "PCURE-ViT14x1-k0", (82.5, 53.8, 8.3)),
        ("main", "PCURE-ViT2x2-k0", (82.5, 61.6, 2.0)),
        ("main", "PatchCleanser (robust)", (82.5, 61.1, 2.1)),
        ("main", "PatchCleanser (efficient)", (82.0, 55.1, 12.5)),
        ("cifar", "PCURE-ViT14x2-k12", (95.3, 67.6, 190.0)),
        ("cifar", "PCURE-ViT2x2-k3", (97.8, 80.5, 5.0)),
        ("cifar", "PatchCleanser", (98.0, 86.5, 3.8)),
        ("cifar", "S-ViT", (90.8, 67.6, 0.7)),
        ("cifar", "ECViT", (93.5, 76.4, 2.3)),
        ("two-patches", "PCURE-ViT2x2-k12", (72.0, 34.9, 164.6)),
        ("detection", "PCURE-ViT14x2-k12", (64.7, 64.7, 196.8)),
        ("detection", "PCURE-ViT2x2-k12", (59.5, 59.5, 166.5)),
        ("detection", "ViP", (74.6, 74.6, 2.5)),
        ("detection", "PatchGuard++", (49.8, 49.8, 151.1)),
    ],
)
def test_numbers_of_the_paper(name: str, row: str, numbers: tuple[float, ...]) -> None:
    (entry,) = [entry for entry in PAPER.rows(name) if entry.row == row]
    assert tuple(entry.values[key] for key in ("clean", "certified", "throughput")) == numbers
    assert entry.source == "paper"


def test_every_row_of_the_paper_is_there_with_an_instance_that_we_know() -> None:
    counts = {name: len(PAPER.rows(name)) for name in TABLES}
    assert counts == {
        "undefended": 8,
        "main": 25,
        "cifar": 7,
        "datasets": 3,
        "detection": 7,
        "model-sizes": 3,
        "batch-sizes": 5,
        "cost": 33,
        "two-patches": 1,
        "backbones": 14,
        "reproducibility": 11,
    }
    for entry in PAPER.entries:
        assert entry.instance is not None and str(parse(entry.instance)) == entry.instance
        assert set(entry.values) == set(PAPER.table(entry.table).columns)


def test_the_papers_speed_is_compared_with_its_own_network() -> None:
    found = {entry.row: PAPER.relative(entry) for entry in PAPER.rows("main")}
    assert found["PCURE-ViT14x2-k12"] == 189.9 / 191.7
    assert found["PCURE-BagNet33-k50"] == 136.8 / 192.2
    assert found["DRS"] == 1.5 / 295.5
    assert PAPER.relative(PAPER.rows("cifar")[0]) == 190.0 / 188.3
    assert PAPER.relative(PAPER.rows("model-sizes")[2]) is None  # no undefended ViT-L in the paper


@pytest.mark.parametrize("name", TABLES)
def test_every_table_in_every_format(name: str, measured: Measured, tmp_path: Path) -> None:
    sheet = table(name, measured)
    width = len(sheet.header)
    for kind, (ending, _) in FORMATS.items():
        text = write(sheet, kind, tmp_path / "out")
        assert (tmp_path / "out" / f"{name}.{ending}").read_text("utf-8") == text
    lines = [line for line in write(sheet).splitlines() if line.startswith("|")]
    assert {line.count("|") for line in lines} == {width + 1} and len(lines) == len(sheet.rows) + 2
    latex = write(sheet, "latex")
    assert latex.count("\\begin") == latex.count("\\end") == 2
    assert re.findall(r"\\begin\{tabular\}\{(\w+)\}", latex) == ["l" + "r" * (width - 1)]
    body = [line for line in latex.splitlines() if line.endswith("\\\\")]
    assert {len(re.findall(r"(?<!\\)&", line)) for line in body} == {width - 1} and len(body) == len(sheet.rows) + 1
    assert not re.search(r"(?<!\\)[%#_]", latex) and latex.isascii()
    parsed = list(csv.reader(io.StringIO(write(sheet, "csv"))))
    assert {len(row) for row in parsed} == {len(parsed[0])} and len(parsed) == len(sheet.rows) + 1
    assert len(set(parsed[0])) == len(parsed[0])


def row_of(sheet: Sheet, title: str) -> dict[str, object]:
    (row,) = [row for row in sheet.rows if row[0] == title]
    return dict(zip(sheet.header, row, strict=True))


def test_a_result_stands_in_the_row_of_its_instance(measured: Measured) -> None:
    row = row_of(table("main", measured), VIT)
    assert row["certified (%), paper"] == Published(46.7, 0.76)
    assert str(row["certified (%), measured"]) == "46.7 (44.7–48.7)"
    assert row["throughput (img/s), measured"] == 4.2
    assert str(row["relative speed, measured"]) == "0.420 (0.400–0.450)"
    assert (row["n"], row["masks"], row["dataset"]) == (1000, 6, "imagenet")
    missing = row_of(table("main", measured), "PCURE-ViT14x2-k3")
    assert missing["clean (%), measured"] is None and "| 23.9 (11.4) | – |" in write(table("main", measured))
    assert row_of(table("main", measured), "S-ViT (efficient)")["n"] == 1000
    assert row_of(table("main", measured), "PatchCleanser (efficient)")["n"] is None


def test_every_other_result_stands_where_it_belongs(measured: Measured) -> None:
    titles = {name: [str(row[0]) for row in table(name, measured).rows] for name in TABLES}
    small = "PCURE-ViT-Ti-14x2-k12 (ours)"
    assert small in titles["main"] and small in titles["model-sizes"] and small not in titles["cifar"]
    assert titles["cifar"].count(f"{CIFAR} (ours)") == 2 and f"{CIFAR} (ours)" not in titles["main"]
    assert row_of(table("datasets", measured), "CIFAR-10")["n"] == 1000
    assert row_of(table("detection", measured), "ViT + MR")["n"] == 1000
    assert row_of(table("two-patches", measured), "PCURE-ViT2x2-k12")["n"] == 1000
    assert row_of(table("main", measured), "PCURE-ViT2x2-k12")["n"] is None
    assert row_of(table("reproducibility", measured), "S-ViT")["n"] == 1000
    unmasked = row_of(table("undefended", measured), "ViT14x2")
    assert isinstance(unmasked["clean (%), measured"], Estimate) and unmasked["throughput (img/s), measured"] is None
    assert row_of(table("batch-sizes", measured), "ViT-B")["batch 8 (img/s), measured"] == 10.0
    assert row_of(table("cost", measured), "PCURE-ViT14x2-k12")["latency (ms), measured"] == 105.2


def test_all_that_was_measured_stands_in_one_table(measured: Measured) -> None:
    sheet = table(MEASURED, measured)
    assert len(sheet.rows) == len(measured.results)
    wanted = {(one.defense, one.n, round(100 * one.certified.value, 6)) for one in measured.results}
    shown = [dict(zip(sheet.header, row, strict=True)) for row in sheet.rows]
    assert {(row["defense"], row["n"], round(row["certified (%)"].value, 6)) for row in shown} == wanted  # type: ignore[union-attr]
    assert write(table(MEASURED)).count("|") == 2 * (len(sheet.header) + 1)


def test_another_operation_is_another_row(folder: Path) -> None:
    replace(result(VIT), operation="challenger").save(folder / "0.json")
    sheet = table("main", read(folder))
    assert row_of(sheet, VIT)["n"] is None and row_of(sheet, f"{VIT} challenger (ours)")["n"] == 1000
    assert row_of(table(MEASURED, read(folder)), f"{VIT}.safetensors challenger")["n"] == 1000


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        (
            "throughput",
            ["certified accuracy (%)", "throughput relative to the undefended network on the same hardware"],
        ),
        ("split", ["clean accuracy (%)", "certified accuracy (%)", "k, the layer of the split"]),
        ("levels", ["clean accuracy (%)", "certified accuracy (%)"]),
        ("patch-sizes", ["side of the square patch (% of the image's side)", "certified accuracy (%)"]),
        ("masks", ["number of masks", "certified accuracy (%)", "undefended network on the same hardware"]),
        ("cifar", ["clean accuracy (%)", "certified accuracy (%)", "undefended network on the same hardware"]),
    ],
)
def test_every_figure(name: str, labels: list[str], measured: Measured, tmp_path: Path) -> None:
    png, svg = plot(name, measured, tmp_path / "out")
    assert png.read_bytes().startswith(b"\x89PNG\r\n") and png.stat().st_size > 10_000
    text = svg.read_text("utf-8")
    assert all(f">{label}<" in text for label in labels)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [f"{name}.png", f"{name}.svg"]


def test_figures_of_the_paper_alone(tmp_path: Path) -> None:
    names = {file.stem for file in plot_all(folder=tmp_path)}
    assert names == set(FIGURES) - {"masks"}
    with pytest.raises(ValueError, match="no numbers of this figure"):
        plot("masks", folder=tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "0.json is not a result of patchcure"),
        ("{", "0.json is not a result of patchcure"),
        ("{}", "0.json is not a result of patchcure: defense: Field required"),
        ("[{}]", "0.json is not what `patchcure bench --json` prints: 0.name: Field required"),
        (json.dumps(asdict(replace(result(VIT), clean=Share(1.7, 1.6, 1.8)))), "clean: expected 0 <= low"),
        (json.dumps(asdict(result(VIT)) | {"n": "many"}), "n: Input should be a valid integer"),
    ],
)
def test_a_malformed_result_is_refused(content: str, message: str, folder: Path) -> None:
    (folder / "0.json").write_text(content)
    with pytest.raises(ValueError, match=re.escape(message)):
        read(folder)


def test_other_mistakes_are_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no results"):
        read(tmp_path)
    with pytest.raises(ValueError, match="expected a folder"):
        read(tmp_path / "missing")
    with pytest.raises(ValueError, match=r"There is no table 'mian'\. Did you mean 'main'\?"):
        table("mian")
    with pytest.raises(ValueError, match=r"There is no figure 'splt'\. Did you mean 'split'\?"):
        plot("splt", folder=tmp_path)
    with pytest.raises(ValueError, match="format: expected one of markdown, latex, csv, got 'html'"):
        write(table("main"), "html")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"Cannot write in .*file"):
        write(table("main"), folder=tmp_path / "file" / "below")
    with pytest.raises(ValueError, match=r"Cannot write in .*file"):
        plot("split", folder=tmp_path / "file")


def test_reproduce_runs_what_there_are_weights_for(tmp_path: Path) -> None:
    weights, out = tmp_path / "weights", tmp_path / "out"
    weights.mkdir()
    defense = build("IBP-CNN", image_size=16, num_classes=10, patch=5)
    save(defense, weights / "mine.safetensors")
    sheet, skipped = reproduce("main", "digits", weights, out, limit=3, shown=lambda name: nullcontext(print))
    assert row_of(sheet, "IBP-CNN (ours)")["n"] == 3
    assert "PCURE-ViT14x2-k9: no weights for PCURE-ViT14x2-k9 in" in "\n".join(skipped)
    assert len(skipped) == 25 and not any("\n" in line for line in skipped)
    found = Result.load(out / "IBP-CNN-digits.json")
    assert found.threat.text == "one patch of 3x3 pixels anywhere on 16x16" and found.speed is not None


def test_the_plan_of_a_table(tmp_path: Path) -> None:
    for name in ("vitsrf14x2_masked.pth.tar", "PatchGuard-BagNet33.pth", "mae_masked.pth.tar", "notes.txt"):
        (tmp_path / name).touch()
    jobs = {(job.instance, job.operation): job.file.name for job in plan("backbones", "imagenet", tmp_path).jobs}
    assert jobs == {
        ("PatchCleanser-ViT-B", None): "mae_masked.pth.tar",
        ("PCURE-ViT14x2-k12", None): "vitsrf14x2_masked.pth.tar",
        ("PatchGuard-ViT14x2", None): "vitsrf14x2_masked.pth.tar",
        ("PCURE-BagNet33-k50", None): "PatchGuard-BagNet33.pth",
        ("PatchGuard-BagNet33", None): "PatchGuard-BagNet33.pth",
    }
    detect = plan("detection", "imagenet", tmp_path)
    assert [(job.instance, job.operation) for job in detect.jobs] == [
        ("PCURE-ViT14x2-k12", "minority-reports"),
        ("MR-ViT-B", None),
        ("PatchGuard++-BagNet33", None),
    ]
    with pytest.raises(ValueError, match="cifar10 is in cifar and datasets"):
        plan("main", "cifar10", tmp_path)
    assert "SVHN: needs --data svhn." in plan("datasets", "cifar10", None).skipped
    with pytest.raises(ValueError, match="weights: expected a folder"):
        plan("main", "imagenet", tmp_path / "missing")
