"""Run what a table of the paper needs: evaluate its rows whose weights are there, measure its speeds."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from patchcure.benchmark import bench, speed
from patchcure.data import open_data
from patchcure.evaluate import Progress, evaluate, pixels
from patchcure.images import Data
from patchcure.instances import CleanserName, LocalName
from patchcure.names import parse
from patchcure.report.matching import OURS
from patchcure.report.measured import Measured, read
from patchcure.report.paper import PAPER, PaperTable
from patchcure.report.sheet import Sheet, writable
from patchcure.report.tables import table
from patchcure.result import Result, Timing
from patchcure.zoo import holds, load

ENDINGS = (".safetensors", ".pth.tar", ".pth", ".pt", ".bin", ".ckpt")
BATCHES = (1, 4, 8, 32)
Shown = Callable[[str], AbstractContextManager[Callable[[Progress], None]]]
"""Given a name, what shows the progress of its evaluation."""


@dataclass(frozen=True)
class Job:
    """An instance to evaluate, with the operation if it is not its own, and the file of its weights."""

    instance: str
    operation: str | None
    file: Path


@dataclass(frozen=True)
class Plan:
    """What can be run, and in one line each what cannot and why."""

    jobs: tuple[Job, ...]
    skipped: tuple[str, ...]


def plan(name: str, dataset: str, weights: str | Path | None) -> Plan:
    """Which rows of a table can be evaluated on a dataset with the weights in a folder.

    A row is found by a file that `patchcure.save` wrote for its instance, by a released checkpoint, or by a file with
    the instance's name; defenses with the same network share its file. Files for which the table has no row are
    evaluated as ours.
    """
    spec = PAPER.table(name)
    elsewhere = [other.id for other in PAPER.tables if dataset in other.datasets]
    if elsewhere and dataset not in spec.datasets:
        raise ValueError(f"{name} is about {', '.join(spec.datasets)}; {dataset} is in {' and '.join(elsewhere)}.")
    files = {} if weights is None else stock(weights)
    networks = {_network(instance): file for instance, file in files.items()}
    jobs: dict[tuple[str, str | None], Job] = {}
    skipped: dict[str, None] = {}
    for entry in PAPER.rows(name):
        instance = entry.instance or entry.row
        file = files.get(instance) or networks.get(_network(instance))
        if entry.variant:
            skipped[f"{entry.row}: {entry.variant}, which the paper does not tell exactly."] = None
        elif entry.dataset not in (None, dataset):
            skipped[f"{entry.row}: needs --data {entry.dataset}."] = None
        elif file is None:
            skipped[f"{entry.row}: no weights for {instance} in {weights or 'a folder: give --weights'}."] = None
        else:
            jobs.setdefault((instance, entry.operation), Job(instance, entry.operation, file))
    if not spec.detectors:
        known = {entry.instance for entry in PAPER.rows(name)}
        ours = [instance for instance in files if instance not in known and re.fullmatch(OURS.get(name, ""), instance)]
        jobs |= {(instance, None): Job(instance, None, files[instance]) for instance in ours}
    return Plan(tuple(jobs.values()), tuple(skipped))


def stock(folder: str | Path) -> dict[str, Path]:
    """The weights in a folder, by the instance that they are for."""
    path = Path(folder)
    if not path.is_dir():
        raise ValueError(f"weights: expected a folder with files of weights, got {path}.")
    found: dict[str, Path] = {}
    for file in sorted(path.iterdir()):
        ending = next((ending for ending in ENDINGS if file.name.endswith(ending)), None)
        if ending is None:
            continue
        with contextlib.suppress(ValueError):  # a file of something else
            found.setdefault(str(parse(holds(file) or file.name.removesuffix(ending))), file)
    return found


def _network(instance: str) -> str:
    """The network of a defense, by which others that can use its weights are known."""
    name = parse(instance)
    if isinstance(name, LocalName):
        return str(name.network)
    return name.network if isinstance(name, CleanserName) else instance


def reproduce(
    name: str,
    data: str | None,
    weights: str | Path | None,
    out: str | Path,
    *,
    limit: int | None = None,
    batch: int = 32,
    shown: Shown,
) -> tuple[Sheet, tuple[str, ...]]:
    """Run what a table needs and put the results in a folder; returns the table and what was skipped.

    Started again, it goes on where it was, and results of earlier runs in the same folder are shown too.
    """
    spec, folder = PAPER.table(name), writable(out)
    skipped: tuple[str, ...] = ()
    if "batch1" in spec.columns:
        _measure(spec, folder)
    elif data is None:
        raise ValueError(f"{name} needs images: give --data, such as --data imagenet:DIR.")
    else:
        images = open_data(data)
        found = plan(name, images.name, weights)
        skipped = found.skipped
        for job in found.jobs:
            with shown(job.instance) as progress:
                _run(job, spec, images, folder, limit, batch, progress)
    results = read(folder) if any(folder.glob("*.json")) else Measured()
    return table(name, results), skipped


def _run(
    job: Job,
    spec: PaperTable,
    images: Data,
    folder: Path,
    limit: int | None,
    batch: int,
    progress: Callable[[Progress], None],
) -> None:
    """Evaluate one instance and write its result beside its records."""
    operation = job.operation or parse(job.instance).operation
    options: dict[str, Any] = {"operation": operation, "patch": spec.patch, "patches": spec.patches}
    if holds(job.file):
        defense = load(job.file, name=job.instance, **options)
    else:
        defense = load(job.instance, weights=job.file, num_classes=len(images.classes), **options)
    parts = [job.instance, job.operation, images.name, f"{spec.patches}-patches" if spec.patches > 1 else None]
    file = folder / (re.sub(r"[^\w.+-]+", "-", "-".join(part for part in parts if part)) + ".jsonl")
    records = evaluate(defense, images, out=file, limit=limit, batch=batch, progress=progress)
    if records is None:
        return
    indices = [row.index for row in records.rows[: PAPER.batch]]
    measured = speed(defense, pixels(defense, images, indices)[0])
    timing = Timing(**asdict(measured), batch=len(indices))
    command = shlex.join(["patchcure", *sys.argv[1:]])
    result = Result.of(records, job.file.name, file=file.name, command=command, speed=timing)
    result.save(file.with_suffix(".json"))


def _measure(spec: PaperTable, folder: Path) -> None:
    """Speeds with new weights: they do not depend on them."""
    names = list(dict.fromkeys(entry.instance for entry in PAPER.rows(spec.id) if entry.instance))
    rows = [asdict(row) for row in bench(names, BATCHES, rounds=3)]
    (folder / f"{spec.id}.json").write_text(json.dumps(rows, indent=2) + "\n")
