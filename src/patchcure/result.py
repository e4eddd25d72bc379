"""What was measured of one defense on one dataset against one threat."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Threat:
    text: str
    patch: str | int | list[int]
    patches: int
    image: tuple[int, int]


@dataclass(frozen=True)
class Share:
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class SizeShare:
    side: int
    certified: float


@dataclass(frozen=True)
class Speed:
    throughput: float
    undefended: float
    relative: float
    relative_low: float
    relative_high: float
    batch: int


@dataclass(frozen=True)
class Result:
    defense: str
    instance: str
    weights: str
    dataset: str
    split: str
    threat: Threat
    operation: str
    n: int
    seed: int
    clean: Share | None
    certified: Share | None
    undefended: Share | None
    alarms: Share | None
    sizes: list[SizeShare]
    evaluations: float
    speed: Speed | None
    gmacs: float | None
    hardware: str
    versions: Mapping[str, str]
    command: str
    records: str
