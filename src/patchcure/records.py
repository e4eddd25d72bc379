"""Records: a header and one JSON line per image, written as it goes, resumed and merged."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any

FORMAT = 1

Header = dict[str, Any]
Block = Sequence[int]
"""The numbers of the images that are evaluated together."""


@dataclass(frozen=True)
class Record:
    """What was found for one image; nothing here depends on when or by whom.

    Args:
        index: its number in the dataset.
        file: the sha256 of its file.
        label: the true one.
        prediction: of the defense; -1 for an alarm instead of a label.
        undefended: of the model with nothing hidden; None if that was not asked for.
        certified: can no patch of the threat change the label (for a detector: without an alarm)?
        margin: see `Certificate`, to three digits; None where there is none.
        largest: the side of the largest certified square patch.
        alarm: did a detector raise an alarm?
        evaluations: how often the LRF part ran for the prediction.
    """

    index: int
    file: str
    label: int
    prediction: int
    undefended: int | None
    certified: bool
    margin: float | None
    largest: int
    alarm: bool
    evaluations: int


@dataclass(frozen=True)
class Records:
    """A complete file of records."""

    header: Header
    rows: tuple[Record, ...]

    @classmethod
    def read(cls, path: str | Path) -> Records:
        """Read a file that `evaluate` finished."""
        path = Path(path)
        first, *lines = path.read_bytes().split(b"\n")
        header = _header(first, path)
        rows = [_record(line, path, number) for number, line in enumerate(lines[:-1], 2)]
        if lines[-1:] != [b""] or len(rows) != header["data"]["images"]:
            raise ValueError(
                f"{path} holds {len(rows)} of {header['data']['images']} records: run the same evaluation again to "
                "finish it."
            )
        return cls(header, tuple(rows))


class Journal:
    """A file of records in the making. It continues after the last whole block, so that it becomes the file of an
    uninterrupted run, byte for byte; only one process at a time may have it.

    Args:
        path: the file, new or begun with the same header.
        header: what the records depend on.
        blocks: the images that belong in the file, in order.
    """

    def __init__(self, path: Path, header: Header, blocks: Sequence[Block]) -> None:
        self.path, self.blocks = path, blocks
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a+b")
        try:
            self._lock()
            self._file.seek(0)
            content, start = self._file.read(), as_line(header)
            if b"\n" not in content and start.startswith(content):
                self.rows: list[Record] = []
                self._file.truncate(0)
                self._write(start)
            else:
                self.rows, size = begun(path, content, header, blocks)
                self._file.truncate(size)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._file.close()

    @property
    def remaining(self) -> Iterator[Block]:
        """The blocks that are not there yet."""
        done = len(self.rows)
        for block in self.blocks:
            done -= len(block)
            if done < 0:
                yield block

    def append(self, rows: Sequence[Record]) -> None:
        """Write a block's records."""
        self._write(b"".join(as_line(asdict(row)) for row in rows))
        self.rows += rows

    def _write(self, content: bytes) -> None:
        self._file.write(content)
        self._file.flush()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OSError(f"Another process is writing {self.path}: wait for it, or choose another --out.") from None


def write_atomically(path: Path, content: bytes) -> None:
    """Write a whole file or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        unfinished.write_bytes(content)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def as_line(content: Header) -> bytes:
    """A header or a record as it stands in the file."""
    return json.dumps(content, allow_nan=False).encode() + b"\n"


def begun(path: Path, content: bytes, header: Header, blocks: Sequence[Block]) -> tuple[list[Record], int]:
    """The records of the whole blocks in a file, and how many bytes they take; what follows is torn."""
    first, *lines = content.split(b"\n")
    if (differs := _difference(json.loads(as_line(header)), _header(first, path))) is not None:
        field, wanted, found = differs
        raise ValueError(
            f"{path} was begun with another {field}: {found} there, {wanted} now. Choose another --out, or remove it."
        )
    expected = [index for block in blocks for index in block]
    rows = [_record(line, path, number) for number, line in enumerate(lines[:-1], 2)]
    if len(rows) > len(expected):
        raise ValueError(f"{path} holds {len(rows)} records: expected at most {len(expected)}.")
    for number, (row, index) in enumerate(zip(rows, expected, strict=False), 2):
        if row.index != index:
            raise ValueError(f"{path}, line {number}: expected the record of image {index}, got that of {row.index}.")
    whole = 0
    for block in blocks:
        if whole + len(block) > len(rows):
            break
        whole += len(block)
    return rows[:whole], sum(len(line) + 1 for line in [first, *lines[:whole]])


def _header(line: bytes, path: Path) -> Header:
    try:
        header = json.loads(line)
    except ValueError:
        header = None
    if not isinstance(header, dict) or "format" not in header:
        raise ValueError(f"{path} is not a file of records. Choose another --out, or remove it.")
    if header["format"] != FORMAT:
        raise ValueError(f"{path} has the format {header['format']!r}, this release reads {FORMAT}.")
    return header


def _record(line: bytes, path: Path, number: int) -> Record:
    try:
        content = json.loads(line)
        if set(content) != {field.name for field in fields(Record)}:
            raise ValueError("other fields")
        return Record(**content)
    except (ValueError, TypeError):
        raise ValueError(f"{path}, line {number} is damaged. Remove the file and evaluate again.") from None


def _difference(ours: Any, theirs: Any, name: str = "header") -> tuple[str, Any, Any] | None:
    """The first field in which two headers differ, and both values."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key in [*ours, *(key for key in theirs if key not in ours)]:
            inner = key if name == "header" else f"{name}.{key}"
            if (found := _difference(ours.get(key), theirs.get(key), inner)) is not None:
                return found
        return None
    return None if ours == theirs else (name, ours, theirs)
