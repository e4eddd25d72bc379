"""A defense in a few lines of YAML: which model, whose weights, which options."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from patchcure._atomic import write_atomically

KEYS = ("model", "weights", "options")


def write(file: Path, model: str, weights: str, options: dict[str, Any], comment: str = "") -> None:
    """Write a config that `patchcure.load` reads.

    Args:
        model: the instance's name.
        weights: a file (noted relative to the config, so that both can move together), or what `load` takes.
        options: plain values, as for `patchcure.build`.
        comment: one line for the reader.
    """
    import yaml

    if Path(weights).is_file():
        weights = os.path.relpath(Path(weights).resolve(), file.resolve().parent)
    text = yaml.safe_dump({"model": model, "weights": weights, "options": options}, sort_keys=False)
    note = f"# {' '.join(comment.split())}\n" if comment else ""
    write_atomically(file, (note + text).encode())


def read(file: Path) -> tuple[str, str, str]:
    """The model, its weights (a path that exists, or what `load` takes), and the options as JSON."""
    import yaml

    try:
        content = yaml.safe_load(file.read_text("utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is not YAML: {error}") from error
    if not isinstance(content, dict) or set(content) != set(KEYS) or not isinstance(content["options"], dict):
        raise ValueError(f"{file}: expected {', '.join(KEYS)}, as `patchcure choose` writes them.")
    model, weights = str(content["model"]), str(content["weights"])
    beside = file.parent / weights
    return model, str(beside if beside.is_file() else weights), json.dumps(content["options"])
