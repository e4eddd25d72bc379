"""The command line as a stranger runs it; the demo in a process of its own, quick verbs in this one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., tuple[int, str, str]]


def start(*arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run `python -m patchcure` in a new process, with modules from `path` first."""
    search = os.pathsep.join(filter(None, [str(path or ""), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "patchcure", *arguments]
    return subprocess.run(
        command, env={**os.environ, "PYTHONPATH": search}, capture_output=True, text=True, timeout=300
    )


def test_demo_as_json(tmp_path: Path) -> None:
    result = start("demo", "--json", "--limit", "4", "--out", str(tmp_path / "new" / "folder"))
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["images"] == 4
    assert found["rows"][0]["name"] == "undefended"
    for row in found["rows"]:
        assert 0 <= row["certified"] <= row["attacked"] <= row["clean"] <= 1
        assert row["spread"][0] <= row["speed"] <= row["spread"][1]
    assert found["rows"][0]["attacked"] < found["rows"][0]["clean"]
    assert any(row["certified"] > 0 for row in found["rows"][1:])
    picture = Path(found["picture"])
    assert picture.parent == tmp_path / "new" / "folder"
    assert picture.read_bytes().startswith(b"\x89PNG\r\n")
    assert [file.name for file in picture.parent.iterdir()] == [picture.name]


def test_demo_as_a_table(run: Run, tmp_path: Path) -> None:
    code, text, _ = run("demo", "--limit", "1", "--out", str(tmp_path))
    assert code == 0
    for word in ("undefended", "14x2-k12", "14x2-k0", "certified", str(tmp_path)):
        assert word in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--limit", "0"], "limit: expected 1 to 20 images, got 0."),
        (["demo", "--limit", "many"], "limit"),
        (["demo", "--lmit", "3"], "No such option: --lmit"),
        (["demo", "--limit", "1", "--out", os.devnull], os.devnull),
        (["describe", "PCURE-ViT14x3-k9"], "does not divide the 14x14 tokens"),
        (["describe", "PCURE-ViT14x2-k9", "--patch", "small"], "small"),
        (["describe", "PCURE-ViT14x2-k9", "--patch", "100"], "together hide all"),
        (["describe"], "Missing argument name"),
        (["dmo"], "dmo"),
    ],
)
def test_a_mistake_is_one_clear_line(run: Run, arguments: list[str], message: str) -> None:
    code, text, problem = run(*arguments)
    assert (code, text) == (2, "")
    assert problem.startswith("patchcure: ")
    assert problem.count("\n") == 1
    assert message in problem.replace("'", "")


def test_without_foolbox_the_demo_names_the_extra(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as u\nfind = u.find_spec\n"
        "u.find_spec = lambda name, *rest: None if name == 'foolbox' else find(name, *rest)\n"
    )
    result = start("demo", "--out", str(tmp_path), path=tmp_path)
    assert result.returncode == 2
    assert result.stderr == "patchcure: The sample images come with foolbox: pip install 'patchcure[demo]'.\n"


def test_describe_tells_the_papers_geometry(run: Run) -> None:
    facts = json.loads(run("describe", "PCURE-ViT14x1-k6", "--json")[1])
    assert (facts["grid"], facts["mask"], facts["masks"], facts["pairs"]) == ("1x14 cells", "1x3 cells", 12, 78)
    text = run("describe", "PatchCleanser-ViT-B", "--masks-per-axis", "6", "--patch", "32")[1]
    assert "one patch of 32x32 pixels anywhere on 224x224" in text
    assert "64x64 cells" in text


def test_describe_takes_what_every_command_takes(run: Run) -> None:
    facts = json.loads(run("describe", "elastic-vit-ti-cifar10:14x1-k6", "--json")[1])
    assert (facts["grid"], facts["mask"], facts["masks"], facts["pairs"]) == ("1x14 cells", "1x3 cells", 12, 78)
    facts = json.loads(run("describe", "hybrid-resnet-cifar10:k0", "--masks-per-axis", "10", "--json")[1])
    assert (facts["threat"], facts["masks"]) == ("one patch of 5x5 pixels anywhere on 32x32", 100)
    facts = json.loads(run("describe", "ibp-digits", "--json")[1])
    assert (facts["operation"], facts["mask"], facts["masks"]) == ("IntervalBounds", "none", 0)


def test_names_and_version(run: Run) -> None:
    listed = run("names")[1].split()
    assert "PCURE-ViT14x2-k9" in listed
    assert json.loads(run("names", "--json")[1]) == listed
    assert run("--version")[1].startswith("patchcure 0.")


def test_importing_the_package_is_light() -> None:
    code = "import sys, patchcure; print(*{'timm', 'torchvision', 'matplotlib', 'typer', 'sklearn'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "", result.stderr
