"""The paper's tables with what was measured beside its numbers."""

from __future__ import annotations

from collections.abc import Iterator

from patchcure.report.matching import data, other_operation, rows
from patchcure.report.measured import Measured, percent
from patchcure.report.paper import PAPER, Entry, PaperTable
from patchcure.report.sheet import Cell, Published, Sheet

NOTES = {
    "memory": "memory: the paper's is allocated on the GPU, ours is the peak of the whole process.",
    "gflops": "multiply-adds: what the paper calls FLOP; ours count a clean image whose masks agree.",
}


MEASURED = "measured"
"""The name of the one table that is not the paper's."""


def table(name: str, measured: Measured | None = None) -> Sheet:
    """One table of the paper, with what was measured beside it; or `MEASURED`, all that was measured.

    >>> sheet = table("two-patches")
    >>> sheet.header[:3], sheet.rows[0][:3]
    (('defense', 'clean (%), paper', 'clean (%), measured'), ('PCURE-ViT2x2-k12', 72.0, None))
    """
    if name == MEASURED:
        return _measured(measured or Measured())
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
    header += ["n", "masks", "dataset"] * accurate
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
            cells += [result.n, case.masks, data(result)] if case and result else [None, None, None]
        lines.append(tuple(cells))
    return Sheet(name, spec.title, tuple(header), tuple(lines), tuple(_notes(spec, found, speedy)))


def _measured(found: Measured) -> Sheet:
    """Every result, by data, threat and certified accuracy."""
    header = ("defense", "data", "n", "clean (%)", "certified (%)", "alarms (%)", "masks", "relative speed")
    lines: list[tuple[Cell, ...]] = []
    order = sorted(found.results, key=lambda result: (data(result), -result.certified.value))
    for result in order:
        case = found.case(result, {}, "defense")
        shares = percent(result.clean), percent(result.certified), percent(result.alarms)
        name = f"{result.defense}{other_operation(result)}"
        lines.append((name, data(result), result.n, *shares, case.masks, case.relative()))
    notes = [
        "One patch of 2 % on 224x224 pixels unless said.",
        "In parentheses: 95 % intervals; for speeds the lowest and the highest.",
    ]
    if hardware := sorted({result.hardware for result in order if result.speed}):
        notes.append(f"Speed over that of the undefended network: {'; '.join(hardware)}.")
    return Sheet(MEASURED, "Measured", header, tuple(lines), tuple(notes))


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
