"""`patchcure predict` and `patchcure choose` on files of a user."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import patchcure
from patchcure.data import open_data
from patchcure.evaluate import pixels

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Three digits: clean, with a white patch, and cut short."""
    image = open_data("digits")[3].image
    patched = image.copy()
    patched.paste((255, 255, 255), (0, 0, 2, 3))
    names = [tmp_path / name for name in ("clean.png", "patched.png", "short.png")]
    for file, content in zip(names, (image, patched, image), strict=True):
        content.save(file)
    names[2].write_bytes(names[2].read_bytes()[:70])
    return names


def test_predict_files(run: Run, digits_file: Path, files: list[Path], tmp_path: Path) -> None:
    arguments = ["predict", *map(str, files), str(tmp_path / "none.jpg"), "--defense", str(digits_file)]
    code, text, problem = run(*arguments, "--json", "--picture", str(tmp_path / "pictures"))
    assert code == 1
    clean, patched, short, none = json.loads(text)
    defense, data = patchcure.load(digits_file), open_data("digits")
    expected = defense.predict(pixels(defense, data, [3])[0])
    assert (clean["label"], clean["unanimous"]) == (int(expected.labels[0]), bool(expected.unanimous[0]))
    assert clean["name"] is None and clean["alarm"] is False and patched["label"] is not None
    assert "short.png is a damaged image" in short["problem"] and short["label"] is None
    assert "none.jpg" in none["problem"]
    assert problem.count("patchcure: ") == problem.count("\n") == 2
    for answer in (clean, patched):
        assert Path(answer["picture"]).read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in (tmp_path / "pictures").iterdir()) == ["clean.png", "patched.png"]


def test_predict_in_words(run: Run, digits_file: Path, files: list[Path], tmp_path: Path) -> None:
    classes = tmp_path / "classes.txt"
    classes.write_text("zero one two three four five six seven eight nine".replace(" ", "\n"))
    arguments = ["predict", str(files[0]), "--defense", str(digits_file), "--classes", str(classes)]
    code, text, problem = run(*arguments)
    assert (code, problem) == (0, "")
    assert text.startswith(f"{files[0]}: ") and any(name in text for name in classes.read_text().split())
    assert "the masks agree" in text or "the masks disagree" in text
    classes.write_text("only\ntwo")
    code, _, problem = run(*arguments)
    assert (code, problem) == (2, "patchcure: Expected 10 names of classes, one for each, got 2.\n")


def test_choose_writes_what_load_takes(run: Run, digits_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "choice.yaml"
    arguments = ["choose", "--model", str(digits_file), "--data", "digits", "--limit", "24", "--out", str(out)]
    arguments += ["--masks-per-axis", "2", "--masks-per-axis", "4"]
    code, text, problem = run(*arguments, "--json")
    assert code == 0, problem
    choice = json.loads(text)
    assert [point["masks"] for point in choice["points"]] == [4, 16]
    assert choice["chosen"] in choice["front"]
    loaded = patchcure.load(out)
    assert len(loaded.masks) == choice["chosen"]["masks"]
    assert out.read_text().startswith(f"# {choice['why']}")
    out.unlink()
    code, text, _ = run(*arguments, "--min-throughput", "1e9")
    assert code == 1 and "lower --min-throughput by" in " ".join(text.split())
    assert not out.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["choose", "--model", "{file}", "--data", "digits", "--k", "3"], "only the weights of a ViT serve several k"),
        (
            ["choose", "--model", "{file}", "--data", "digits", "--out", "choice.txt"],
            "the ending .yaml, got",
        ),
        (["choose", "--model", "{file}", "--data", "nothing"], "Unknown data"),
        (["choose", "--model", "nothing", "--data", "digits"], "There are no weights at nothing"),
        (["predict", "x.png", "--defense", "nothing"], "There are no weights at nothing"),
        (["predict", "--defense", "{file}"], "Missing argument"),
    ],
)
def test_a_mistake_is_one_clear_line(run: Run, digits_file: Path, arguments: list[str], message: str) -> None:
    code, text, problem = run(*(word.format(file=digits_file) for word in arguments))
    assert (code, text) == (2, "")
    assert problem.startswith("patchcure: ") and problem.count("\n") == 1
    assert message in problem
