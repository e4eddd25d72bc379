"""The paper's tables with what was measured beside its numbers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from patchcure.names import parse
from patchcure.report.measured import Case, Measured
from patchcure.report.paper import PAPER, Entry, PaperTable, Quantity
from patchcure.report.sheet import Cell, Published, Sheet
from patchcure.result import Result
from patchcure.threat import PatchThreat

OURS = {
    "undefended": ".*",
    "main": ".*",
    "cifar": ".*",
    "datasets": ".*",
    "detection": ".*",
    "model-sizes": "PCURE-ViT.*",
    "cost": ".*",
    "two-patches": ".*",
    "backbones": "(PatchCleanser|PatchGuard)-.*",
}
"""Which instances that the paper does not have get a row of their own, marked as ours."""
NOTES = {
    "memory": "memory: the paper's is allocated on the GPU, ours is the peak of the whole process.",
    "gflops": "multiply-adds: what the paper calls FLOP; ours count a clean image whose masks agree.",
}


def table(name: str, measured: Measured | None = None) -> Sheet:
    """One table of the paper, with what was measured beside it.

    >>> sheet = table("two-patches")
    >>> sheet.header[:3], sheet.rows[0][:3]
    (('defense', 'clean (%), paper', 'clean (%), measured'), ('PCURE-ViT2x2-k12', 72.0, None))
    """
    spec, found = PAPER.table(name), measured or Measured()
    published = {key: PAPER.columns[key] for key in spec.columns}
    compared = {key: column for key, column in published.items() if column.unit}
    defended = any(entry.measures == "defense" for entry in PAPER.rows(name))
    speedy = defended and "throughput" in compared
    plain = [key for key in published if key not in compared]
    results = () if compared else ("clean", "certified")
    header = ["defense" if defended else "network", *(str(published[key]) for key in plain)]
    header += [f"{column}, {who}" for column in compared.values() for who in ("paper", "measured")]
    header += ["instance", *(f"{PAPER.columns[key]}, measured" for key in results)] if results else []
    header += ["relative speed, paper", "relative speed, measured"] * speedy
    accurate = bool(results) or "clean" in compared
    header += ["n", "dataset"] * accurate
    lines: list[tuple[Cell, ...]] = []
    for title, entry, case in rows(spec, found):
        cells: list[Cell] = [title, *(entry.values.get(key) if entry else None for key in plain)]
        for key in compared:
            cells += [_published(entry, key) if entry else None, case.cell(key) if case else None]
        if results:
            cells += [entry.instance if entry else None, *(case.cell(key) if case else None for key in results)]
        if speedy:
            ratio = PAPER.relative(entry) if entry and entry.measures == "defense" else None
            cells += [None if ratio is None else round(ratio, 3), case.relative() if case else None]
        if accurate:
            result = case.result if case else None
            cells += [result.n, data(result)] if result else [None, None]
        lines.append(tuple(cells))
    return Sheet(name, spec.title, tuple(header), tuple(lines), tuple(_notes(spec, found, speedy)))


def _published(entry: Entry, column: str) -> Cell:
    value = entry.values.get(column)
    if column in entry.relative and isinstance(value, float):
        return Published(value, entry.relative[column])
    return value


def _notes(spec: PaperTable, measured: Measured, speedy: bool) -> Iterator[str]:
    """What stands below a table; a note of several rows once."""
    yield f"Paper: {PAPER.hardware}, batches of {PAPER.batch} unless said."
    if hardware := sorted({result.hardware for result in measured.results if result.speed}):
        yield f"Measured: {'; '.join(hardware)}."
    entries = PAPER.rows(spec.id)
    if any(entry.relative for entry in entries):
        yield "In parentheses in the paper's columns: relative to its PatchCleanser."
    if speedy:
        yield "Relative speed: throughput over that of the undefended network on the same hardware."
    yield from (note for key, note in NOTES.items() if key in spec.columns)
    for note in dict.fromkeys(note for entry in entries for note in entry.notes):
        yield f"{', '.join(entry.row for entry in entries if note in entry.notes)}: {note}"


def rows(spec: PaperTable, measured: Measured) -> Iterator[tuple[str, Entry | None, Case | None]]:
    """The paper's rows, each with its results (or without), and then our own: title, the paper's, what was measured."""
    used: set[int] = set()
    entries = PAPER.rows(spec.id)
    about_accuracy = "clean" in spec.columns or spec.id == "reproducibility"
    results = measured.results if about_accuracy else ()
    for entry in entries:
        mine = [result for result in results if _belongs(result, entry, spec)]
        used |= {id(result) for result in mine}
        speeds = measured.speeds_of(entry) if spec.datasets == ("imagenet",) else {}
        alone = [Case(None, speeds, entry.measures)] if speeds else [None]
        for case in [Case(result, speeds, entry.measures) for result in _distinct(mine, entry.measures)] or alone:
            yield entry.row, entry, case
    measures: Quantity = "undefended" if all(entry.measures != "defense" for entry in entries) else "defense"
    ours = [result for result in results if id(result) not in used and _ours(result, spec)]
    for result in _distinct(ours, measures):
        title = f"network of {result.instance}" if measures == "undefended" else label(result)
        yield f"{title} (ours)", None, Case(result, measured.speeds_by(result.instance), measures)
    if set(spec.columns) & {"batch1", "latency"}:
        known = {entry.instance for entry in entries} | {result.instance for result in ours}
        for instance in dict.fromkeys(row.name for row in measured.speeds):
            if instance not in known:
                yield f"{instance} (ours)", None, Case(None, measured.speeds_by(instance))


def _distinct(results: Sequence[Result], measures: Quantity) -> Iterable[Result]:
    """The results; of an undefended network, one for each set of weights and data."""
    if measures == "defense":
        return results
    return {(result.weights, result.dataset, result.n): result for result in reversed(results)}.values()


def _belongs(result: Result, entry: Entry, spec: PaperTable) -> bool:
    """Is this result what that row of the paper is about?"""
    if entry.variant or result.instance != entry.instance or result.dataset != (entry.dataset or spec.datasets[0]):
        return False
    if entry.measures != "defense":
        return True
    return result.operation == (entry.operation or own_operation(entry.instance)) and same_threat(
        result, spec.patch, spec.patches
    )


def _ours(result: Result, spec: PaperTable) -> bool:
    """Does a result that no row of the paper is about belong in this table?

    Datasets that the paper does not have go where ImageNet goes.
    """
    known = {dataset for table in PAPER.tables for dataset in table.datasets}
    here = result.dataset in spec.datasets or (result.dataset not in known and spec.datasets == ("imagenet",))
    if spec.id not in OURS:
        return False
    kind = (result.alarms is not None) == spec.detectors and result.threat.patches == spec.patches
    return here and kind and re.fullmatch(OURS[spec.id], result.instance) is not None


def own_operation(instance: str) -> str:
    """The operation that a name stands for."""
    operation = parse(instance).operation
    return operation if isinstance(operation, str) else "voting"


def same_threat(result: Result, patch: str, patches: int) -> bool:
    """Was the result made with squares of this share of the image?"""
    height, width = result.threat.image
    return result.threat.text == PatchThreat.square(patch, (height, width), patches).describe()


def label(result: Result) -> str:
    """The name of a result in a row or at a point."""
    other = "" if result.operation == own_operation(result.instance) else f" {result.operation}"
    return f"{result.instance}{other}"


def data(result: Result) -> str:
    """The dataset, and the threat where it is not one 2 % patch."""
    text = result.threat.text.replace(" anywhere", "")
    return result.dataset if same_threat(result, "2%", 1) else f"{result.dataset}, {text}"
