"""Put trained weights among those that come with the package, and what was measured of them on their cards.

    python scripts/publish.py train-output/elastic-vit-ti-cifar10
    python scripts/publish.py --results results results/families

The first writes the weights as float16 and the card of the run; the second adds to every card the numbers in those
result files that were measured with its weights. `patchcure evaluate` the published weights, not those of the run.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from patchcure import load
from patchcure._atomic import write_atomically
from patchcure.evaluate import weights_sha256
from patchcure.report.matching import other_operation
from patchcure.result import Result
from patchcure.zoo.files import WEIGHTS, save


def publish(folder: Path, start: str | None, point: str | None) -> None:
    """Write a run's weights and card; with a point, that one is what the bare name loads. What was aimed at stays."""
    (file,) = folder.glob("*.safetensors")
    card = json.loads(file.with_suffix(".json").read_text())
    target = WEIGHTS / file.name
    if (before := target.with_suffix(".json")).is_file() and "wanted" in (told := json.loads(before.read_text())):
        card["wanted"] = told["wanted"]
    save(load(f"{file}:{point}" if point else file), target, half=True)
    runs = card.pop("runs")
    card |= {
        "sha256": hashlib.sha256(target.read_bytes()).hexdigest(),
        "license": "Apache-2.0",
        "start": start or runs[0]["recipe"]["start"]["weights"],
        "hours": round(sum(run["hours"] for run in runs), 2),
        "runs": runs,
        "results": [],
    }
    _write(target, card)
    print(f"{target}: {target.stat().st_size / 1e6:.1f} MB, {card['hours']} hours in {len(runs)} runs")


def measured(folders: Sequence[Path]) -> None:
    """Add what was measured to the cards."""
    found = [Result.load(file) for folder in folders for file in sorted(folder.glob("*.json"))]
    for file in sorted(WEIGHTS.glob("*.safetensors")):
        own = {weights_sha256(load(name)) for name in (str(file), *_names(file, found))}
        rows = [_row(result) for result in found if result.weights in own]
        _write(file, {**json.loads(file.with_suffix(".json").read_text()), "results": rows})
        print(f"{file.stem}: {len(rows)} results")


def _names(file: Path, found: Sequence[Result]) -> set[str]:
    """Other names of these weights in the results: another family's network may keep its norm elsewhere."""
    return {result.defense for result in found if result.defense.startswith(f"{file.stem}:")}


def _row(result: Result) -> dict[str, Any]:
    return {
        "defense": result.defense,
        **({"operation": result.operation} if other_operation(result) else {}),
        "data": f"{result.dataset} {result.split}",
        "threat": result.threat.text,
        "images": result.n,
        "clean": round(result.clean.value, 4),
        "certified": round(result.certified.value, 4),
        **({} if result.alarms is None else {"alarms": round(result.alarms.value, 4)}),
    }


def _write(weights: Path, card: dict[str, Any]) -> None:
    write_atomically(weights.with_suffix(".json"), (json.dumps(card, indent=2) + "\n").encode())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", type=Path, help="the folder of a finished run of patchcure train")
    parser.add_argument("--start", help="what the first run started from, for the card [default: what its recipe says]")
    parser.add_argument("--point", help="the recommended operating point, such as 14x2-k9")
    parser.add_argument("--results", nargs="+", type=Path, help="folders with results; adds them to the cards")
    asked = parser.parse_args()
    if asked.run is not None:
        publish(asked.run, asked.start, asked.point)
    if asked.results is not None:
        measured(asked.results)


if __name__ == "__main__":
    main()
