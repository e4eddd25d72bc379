"""The tables in the README and in the documents are those that their commands print from the committed records."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("page", "command"),
    [
        ("README.md", ("table", "measured", "--results", str(ROOT / "results"))),
        ("docs/zoo.md", ("table", "measured", "--results", str(ROOT / "results" / "families"))),
        ("README.md", ("bench", "--show", str(ROOT / "results" / "bench" / "cpu-2-threads.json"), "--markdown")),
    ],
)
def test_tables(run: Callable[..., tuple[int, str, str]], page: str, command: tuple[str, ...]) -> None:
    code, text, problem = run(*command)
    assert code == 0, problem
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len(lines) > 3
    assert "\n".join(lines) in (ROOT / page).read_text("utf-8")
