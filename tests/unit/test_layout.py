"""Imports go one way: a module imports only from those before it."""

from __future__ import annotations

import ast
from pathlib import Path

import patchcure

ORDER = [
    "_atomic",
    "_device",
    "_torchvision",
    "geometry",
    "preprocess",
    "threat",
    "masks",
    "ablations",
    "models",
    "certificate",
    "operations",
    "defense",
    "instances",
    "names",
    "reference",
    "zoo",
    "attack",
    "benchmark",
    "benchmark_record",
    "picture",
    "images",
    "data",
    "records",
    "shards",
    "evaluate",
    "demo",
    "result",
    "report",
    "predict",
    "choose",
    "train",
    "cli",
]


def test_imports_go_one_way() -> None:
    root = Path(patchcure.__file__).parent
    rooms = {path.stem if path.is_file() else path.name for path in root.iterdir() if not path.name.startswith("__")}
    assert {room for room in rooms if room.isidentifier()} <= {*ORDER, "py"}, "name new rooms in ORDER"
    for path in root.rglob("*.py"):
        inside = path.relative_to(root).parts[0].removesuffix(".py")
        if inside in ("__init__", "__main__"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ImportFrom) or node.module is None or not node.module.startswith("patchcure"):
                continue
            parts = node.module.split(".")
            for room in [parts[1]] if len(parts) > 1 else [alias.name for alias in node.names]:
                if room in ORDER:
                    assert ORDER.index(room) <= ORDER.index(inside), f"{path.name} imports {room}"
