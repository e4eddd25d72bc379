"""Which measured result belongs in which row of which table."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from patchcure.names import parse
from patchcure.operations import OPERATIONS
from patchcure.report.measured import Case, Measured, canonical
from patchcure.report.paper import PAPER, Entry, PaperTable, Quantity
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


def rows(spec: PaperTable, measured: Measured) -> Iterator[tuple[str, Entry | None, Case | None]]:
    """The paper's rows, each with its results (or without), and then our own: title, the paper's, what was measured."""
    used: set[int] = set()
    entries = PAPER.rows(spec.id)
    results = () if "batch1" in spec.columns else measured.results
    for entry in entries:
        mine = [result for result in results if _belongs(result, entry, spec)]
        used |= {id(result) for result in mine}
        speeds = measured.speeds_of(entry) if spec.datasets == ("imagenet",) else {}
        alone = [Case(None, speeds, entry.measures)] if speeds else [None]
        for case in [
            measured.case(result, speeds, entry.measures) for result in _distinct(mine, entry.measures)
        ] or alone:
            yield entry.row, entry, case
    measures: Quantity = "unmasked" if all(entry.measures != "defense" for entry in entries) else "defense"
    ours = [result for result in results if id(result) not in used and _ours(result, spec)]
    for result in _distinct(ours, measures):
        title = f"{result.instance} unmasked" if measures == "unmasked" else label(result)
        yield f"{title} (ours)", None, measured.case(result, measured.speeds_by(canonical(result.instance)), measures)
    if set(spec.columns) & {"batch1", "latency"}:
        known = {entry.instance for entry in entries} | {canonical(result.instance) for result in ours}
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
    if (
        entry.variant
        or canonical(result.instance) != entry.instance
        or result.dataset != (entry.dataset or spec.datasets[0])
    ):
        return False
    if entry.measures != "defense":
        return True
    operation = entry.operation or own_operation(result.instance)
    return result.operation == operation and same_threat(result, spec.patch, spec.patches)


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
    """The operation that a name stands for, as results write it; empty for a defense without a name."""
    try:
        operation = parse(instance).operation
    except ValueError:  # a defense without a name
        return ""
    if isinstance(operation, str):
        return operation
    return next((name for name, known in OPERATIONS.items() if known == operation), repr(operation))


def same_threat(result: Result, patch: str, patches: int) -> bool:
    """Was the result made with squares of this share of the image?"""
    height, width = result.threat.image
    return result.threat.text == PatchThreat.square(patch, (height, width), patches).describe()


def label(result: Result) -> str:
    """The name of a result in a row or at a point of the paper's."""
    return f"{canonical(result.instance)}{other_operation(result)}"


def other_operation(result: Result) -> str:
    """What a name is followed by where the operation was another than the name's own."""
    return "" if own_operation(result.instance) in ("", result.operation) else f" {result.operation}"


def data(result: Result) -> str:
    """The dataset, and the threat where it is not one 2 % patch on 224 pixels."""
    text = result.threat.text.replace(" anywhere", "")
    usual = result.threat.text == PatchThreat.square("2%", 224).describe()
    return result.dataset if usual else f"{result.dataset}, {text}"
