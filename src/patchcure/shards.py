"""Several processes, perhaps on several machines, that share an evaluation: one file each, merged by rank 0."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from patchcure.records import Block, Header, Record, as_line, begun, write_atomically

POLL = 0.5
"""Seconds between two looks at the records of other processes."""


@dataclass(frozen=True)
class Shard:
    """One of several processes that share the blocks: block b is for rank b modulo the number of processes.

    >>> Shard(1, 2).of([[0, 1], [2, 3], [4, 5], [6]])
    [[2, 3], [6]]
    """

    rank: int = 0
    world: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world:
            raise ValueError(f"RANK: expected 0 to WORLD_SIZE - 1 = {self.world - 1}, got {self.rank}.")

    @classmethod
    def here(cls) -> Shard:
        """What torchrun says in the environment; one process without it."""
        rank, world = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
        if not (rank.isdecimal() and world.isdecimal()):
            raise ValueError(f"Expected whole numbers in $RANK and $WORLD_SIZE, got {rank!r} and {world!r}.")
        return cls(int(rank), int(world))

    def of(self, blocks: Sequence[Block]) -> Sequence[Block]:
        """This process's blocks."""
        return blocks[self.rank :: self.world]

    def path(self, out: Path) -> Path:
        """This process's file."""
        return out if self.world == 1 else out.with_name(f"{out.name}.rank{self.rank}-of-{self.world}")


def finished(path: Path, header: Header, blocks: Sequence[Block]) -> list[Record] | None:
    """The rows of a file that holds all these blocks; None where there is none, or only a part of it."""
    if not path.is_file():
        return None
    content = path.read_bytes()
    if b"\n" not in content and as_line(header).startswith(content):
        return None
    rows, _ = begun(path, content, header, blocks)
    return rows if len(rows) == sum(map(len, blocks)) else None


def merge(
    out: Path,
    header: Header,
    blocks: Sequence[Block],
    world: int,
    wait: float | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> list[Record]:
    """Wait for the files of all processes, and put them together as one process would have written them.

    Args:
        wait: give up when no file has grown for so many seconds; by default never: a process that died can be started
            again at any time.
        say: hears what is being waited for.
    """
    shards = [Shard(rank, world) for rank in range(world)]
    parts: dict[Shard, list[Record]] = {}
    sizes: dict[Shard, int] = {}
    since = time.monotonic()
    while missing := [shard for shard in shards if shard not in parts]:
        for shard in missing:
            path = shard.path(out)
            size = path.stat().st_size if path.exists() else -1
            if size == sizes.get(shard):
                continue
            sizes[shard], since = size, time.monotonic()
            if (rows := finished(path, header, shard.of(blocks))) is not None:
                parts[shard] = rows
        ranks = ", ".join(str(shard.rank) for shard in missing if shard not in parts)
        if ranks:
            say(f"waiting for rank {ranks}")
            if wait is not None and time.monotonic() - since > wait:
                raise TimeoutError(
                    f"The records of rank {ranks} have not grown for {wait:g} s: start it again with the same command, "
                    "and then rank 0; both go on from where they stopped."
                )
            time.sleep(POLL)
    sources = [iter(parts[shard]) for shard in shards]
    rows = [next(sources[number % world]) for number, block in enumerate(blocks) for _ in block]
    write_atomically(out, b"".join([as_line(header), *(as_line(asdict(row)) for row in rows)]))
    for shard in shards:
        shard.path(out).unlink()
    return rows
