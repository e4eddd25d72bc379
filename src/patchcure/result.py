"""Results: what a file of records says about a defense, with intervals, in one JSON file."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from patchcure._atomic import write_atomically
from patchcure.benchmark import Speed
from patchcure.benchmark_record import processor
from patchcure.records import Header, Record, Records

Z = 1.959963984540054
"""Half of a 95 % interval in standard deviations."""


@dataclass(frozen=True)
class Share:
    """A share of images with its 95 % interval (Wilson's).

    >>> Share.of([True] * 9 + [False])
    Share(value=0.9, low=0.5958499732047615, high=0.9821237869049271)
    """

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, flags: Iterable[bool]) -> Share:
        """The share of what is true."""
        found = list(flags)
        n, value = len(found), sum(found) / len(found)
        middle = (value + Z * Z / (2 * n)) / (1 + Z * Z / n)
        reach = Z / (1 + Z * Z / n) * math.sqrt(value * (1 - value) / n + Z * Z / (4 * n * n))
        return cls(value, min(value, middle - reach), max(value, middle + reach))  # rounding must not exclude 0 and 1


@dataclass(frozen=True)
class Threat:
    """The threat in words and numbers.

    Args:
        patch: the side of a square in pixels, or the (height, width) of other shapes.
        patches: how many at once.
        image: the (height, width) that the patch is put on.
    """

    text: str
    patch: int | tuple[tuple[int, int], ...]
    patches: int
    image: tuple[int, int]


@dataclass(frozen=True)
class SizeShare:
    """The certified accuracy for square patches of this side."""

    side: int
    certified: float


@dataclass(frozen=True)
class Timing(Speed):
    """`Speed` on a batch of so many images."""

    batch: int


@dataclass(frozen=True)
class Result:
    """One defense on one dataset against one threat.

    Args:
        defense: as the user named it.
        instance: what it was built as.
        weights: the sha256 of its tensors.
        operation: the secure operation.
        n: how many images.
        clean, certified: shares of right answers, and of certified ones.
        undefended: share of right answers with nothing hidden; None if that was not asked for.
        alarms: share of alarms on these clean images, all of them false; None for a defense that raises none.
        sizes: certified accuracy for every side at which it changes, and for the threat's own; between two of them it
            is that of the larger.
        evaluations: how often the LRF part ran for an image, on average.
        speed, gmacs: of a batch of these images, if they were measured.
        records: the name of the file of records beside this one.
    """

    defense: str
    instance: str
    weights: str
    dataset: str
    split: str
    threat: Threat
    operation: str
    n: int
    seed: int
    clean: Share
    certified: Share
    undefended: Share | None
    alarms: Share | None
    sizes: tuple[SizeShare, ...]
    evaluations: float
    speed: Timing | None
    gmacs: float | None
    hardware: str
    versions: dict[str, str]
    command: str
    records: str

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    @classmethod
    def of(
        cls,
        records: Records,
        defense: str,
        *,
        file: str = "",
        command: str = "",
        speed: Timing | None = None,
        gmacs: float | None = None,
        device: str | torch.device = "cpu",
    ) -> Result:
        """What these records say.

        Args:
            defense: the name to show.
            file: the name of the records' file.
        """
        header, rows = records.header, records.rows
        plain = [row.undefended == row.label for row in rows if row.undefended is not None]
        threat = _threat(header["threat"])
        return cls(
            defense=defense,
            instance=header["defense"],
            weights=header["weights"],
            dataset=header["data"]["name"],
            split=header["data"]["split"],
            threat=threat,
            operation=header["operation"],
            n=len(rows),
            seed=header["data"]["seed"],
            clean=Share.of(row.prediction == row.label for row in rows),
            certified=Share.of(row.certified for row in rows),
            undefended=Share.of(plain) if plain else None,
            alarms=Share.of(row.alarm for row in rows) if header["detects"] else None,
            sizes=_sizes(rows, threat) if header["detail"] != "verdict" else (),
            evaluations=sum(row.evaluations for row in rows) / len(rows),
            speed=speed,
            gmacs=gmacs,
            hardware=hardware(device),
            versions=header["versions"],
            command=command,
            records=file,
        )

    def summary(self) -> dict[str, Any]:
        """The same for programs, flat: ``clean`` is a number, beside it ``clean_low`` and ``clean_high``, and so on."""
        flat: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Share):
                flat |= {field.name: value.value, f"{field.name}_low": value.low, f"{field.name}_high": value.high}
            else:
                flat[field.name] = asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
        flat["sizes"] = [asdict(size) for size in self.sizes]
        return flat

    def save(self, path: str | Path) -> None:
        """Write it as JSON, whole or not at all."""
        write_atomically(Path(path), (json.dumps(asdict(self), indent=2) + "\n").encode())

    @classmethod
    def load(cls, path: str | Path) -> Result:
        """Read what `save` wrote."""
        from pydantic import TypeAdapter, ValidationError

        try:
            return TypeAdapter(cls).validate_json(Path(path).read_bytes())
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise ValueError(f"{path} is not a result of patchcure: {where or 'content'}: {first['msg']}.") from error


def hardware(device: str | torch.device = "cpu") -> str:
    """The processor, in words."""
    if torch.device(device).type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"{processor()}, {torch.get_num_threads()} threads"


def _threat(header: Header) -> Threat:
    shapes = tuple((height, width) for height, width in header["shapes"])
    square = len(shapes) == 1 and shapes[0][0] == shapes[0][1]
    height, width = header["image"]
    return Threat(header["text"], shapes[0][0] if square else shapes, header["patches"], (height, width))


def _sizes(rows: Iterable[Record], threat: Threat) -> tuple[SizeShare, ...]:
    largest = [row.largest for row in rows]
    own = {threat.patch} if isinstance(threat.patch, int) else set()
    sides = sorted({*largest, *own} - {0})
    return tuple(SizeShare(side, sum(side <= each for each in largest) / len(largest)) for side in sides)
