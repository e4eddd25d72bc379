"""Files of records: resumed from any byte, refused where they do not belong, merged; and what results say of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from patchcure.records import FORMAT, Journal, Record, Records
from patchcure.result import Result, Share, Timing, hardware
from patchcure.shards import Shard, finished, merge

BLOCKS = [[0, 2, 3], [5, 7, 8], [9]]
HEADER = {
    "format": FORMAT,
    "defense": "PCURE",
    "operation": "double-masking",
    "detects": True,
    "weights": "ab",
    "threat": {"text": "one patch", "shapes": [[4, 4]], "patches": 1, "image": [8, 8]},
    "data": {"name": "digits", "split": "test", "images": 7, "seed": 0},
    "versions": {"patchcure": "0"},
    "detail": "locations",
}


def record(index: int) -> Record:
    label = index % 4
    largest = {0: 0, 1: 2}.get(label, 5)
    return Record(
        index, f"hash {index}", label, label if index != 9 else 0, 1, largest > 3, 0.25, largest, index == 9, 6
    )


def write(path: Path, blocks: list[list[int]] = BLOCKS, most: int = 9) -> bytes:
    with Journal(path, HEADER, blocks) as journal:
        for block, _ in zip(journal.remaining, range(most), strict=False):
            journal.append([record(index) for index in block])
    return path.read_bytes()


def test_a_file_cut_anywhere_becomes_the_same_file(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole.jsonl")
    assert whole.count(b"\n") == 8
    cut = tmp_path / "cut.jsonl"
    ends = [number for number, byte in enumerate(whole) if byte == ord("\n")]
    for length in {*range(0, len(whole), 19), *(end + step for end in ends for step in (-1, 0, 1, 2))}:
        cut.write_bytes(whole[:length])
        assert write(cut) == whole
    assert Records.read(cut).rows == tuple(record(index) for block in BLOCKS for index in block)


def test_only_whole_blocks_are_kept(tmp_path: Path) -> None:
    whole = write(tmp_path / "records.jsonl")
    lines = whole.splitlines(keepends=True)
    (tmp_path / "records.jsonl").write_bytes(b"".join(lines[:6]))  # the second block lacks its last record
    with Journal(tmp_path / "records.jsonl", HEADER, BLOCKS) as journal:
        assert list(journal.remaining) == BLOCKS[1:]
        assert len(journal.rows) == 3
    assert (tmp_path / "records.jsonl").read_bytes() == b"".join(lines[:4])


def test_other_records_are_refused_by_the_field_that_differs(tmp_path: Path) -> None:
    whole = write(path := tmp_path / "records.jsonl")
    other = {**HEADER, "threat": {**HEADER["threat"], "patches": 2}}  # type: ignore[dict-item]
    with pytest.raises(ValueError, match=r"begun with another threat.patches: 1 there, 2 now. Choose another --out"):
        Journal(path, other, BLOCKS)
    with pytest.raises(ValueError, match="line 5: expected the record of image 6, got that of 5"):
        Journal(path, HEADER, [[0, 2, 3], [6, 7, 8], [9]])
    with pytest.raises(ValueError, match="holds 7 records: expected at most 3"):
        Journal(path, HEADER, BLOCKS[:1])
    assert path.read_bytes() == whole


@pytest.mark.parametrize("content", [b"precious", b"precious\nthings\n", b"[1]\n", b'{"format": 99}\n'])
def test_a_strangers_file_is_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "records.jsonl"
    path.write_bytes(content)
    for attempt in (lambda: Journal(path, HEADER, BLOCKS), lambda: finished(path, HEADER, BLOCKS)):
        with pytest.raises(ValueError, match=r"is not a file of records|has the format 99"):
            attempt()
    assert path.read_bytes() == content


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    lines = write(path := tmp_path / "records.jsonl").splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:3], b'{"index": 3}\n', *lines[4:]]))
    with pytest.raises(ValueError, match="line 4 is damaged"):
        Journal(path, HEADER, BLOCKS)


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    with Journal(path, HEADER, BLOCKS), pytest.raises(OSError, match="Another process is writing"):
        Journal(path, HEADER, BLOCKS)
    write(path)


def test_an_unfinished_file_is_no_result(tmp_path: Path) -> None:
    write(path := tmp_path / "records.jsonl", most=1)
    with pytest.raises(ValueError, match="holds 3 of 7 records: run the same evaluation again"):
        Records.read(path)


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_merged_shards_are_the_file_of_one_process(tmp_path: Path, world: int) -> None:
    whole = write(tmp_path / "whole.jsonl")
    out = tmp_path / "out.jsonl"
    for rank in reversed(range(world)):
        shard = Shard(rank, world)
        write(shard.path(out), list(map(list, shard.of(BLOCKS))))
    rows = merge(out, HEADER, BLOCKS, world) if world > 1 else finished(out, HEADER, BLOCKS)
    assert out.read_bytes() == whole
    assert rows == list(Records.read(out).rows)
    assert sorted(tmp_path.iterdir()) == [out, tmp_path / "whole.jsonl"]


def test_a_rank_that_stands_still_is_named(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    write(Shard(0, 2).path(out), BLOCKS[::2])
    said: list[str] = []
    with pytest.raises(TimeoutError, match=r"The records of rank 1 have not grown for 0.1 s: start it again"):
        merge(out, HEADER, BLOCKS, 2, wait=0.1, say=said.append)
    assert set(said) == {"waiting for rank 1"}
    assert not out.exists()


def test_the_environment_names_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert Shard.here() == Shard(1, 3)
    for value, message in (("3", "expected 0 to WORLD_SIZE - 1 = 2, got 3"), ("x", "whole numbers")):
        monkeypatch.setenv("RANK", value)
        with pytest.raises(ValueError, match=message):
            Shard.here()


def test_a_result_sums_up_its_records(tmp_path: Path) -> None:
    write(tmp_path / "records.jsonl")
    records = Records.read(tmp_path / "records.jsonl")
    result = Result.of(records, "mine", file="records.jsonl", speed=Timing(1.0, 2.0, 0.5, 0.4, 0.6, batch=4))
    assert result.n == 7
    assert result.clean.value == 6 / 7
    assert result.certified.value == 3 / 7
    assert result.undefended is not None and result.undefended.value == 2 / 7
    assert result.alarms is not None and result.alarms.value == 1 / 7
    assert [(size.side, size.certified) for size in result.sizes] == [(2, 5 / 7), (4, 3 / 7), (5, 3 / 7)]
    assert (result.threat.patch, result.threat.image, result.evaluations) == (4, (8, 8), 6)
    assert result.hardware == hardware()
    result.save(tmp_path / "result.json")
    assert Result.load(tmp_path / "result.json") == result
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_what_was_not_asked_for_is_none(tmp_path: Path) -> None:
    rows = tuple(replace(record(index), undefended=None) for index in range(4))
    threat = {**HEADER["threat"], "shapes": [[2, 8], [8, 2]]}  # type: ignore[dict-item]
    records = Records({**HEADER, "detects": False, "detail": "verdict", "threat": threat}, rows)
    result = Result.of(records, "mine")
    assert (result.undefended, result.alarms, result.speed, result.sizes) == (None, None, None, ())
    assert result.threat.patch == ((2, 8), (8, 2))
    result.save(tmp_path / "result.json")
    assert Result.load(tmp_path / "result.json") == result


def test_a_file_that_is_no_result_is_told(tmp_path: Path) -> None:
    result = Result.of(Records(HEADER, (record(1),)), "mine")
    result.save(file := tmp_path / "result.json")
    content = json.loads(file.read_text())
    for broken, message in (
        ({**content, "n": "many"}, "n: Input should be a valid integer"),
        ({**content, "more": 1}, "more: Unexpected keyword argument"),
        ([], "is not a result of patchcure"),
    ):
        file.write_text(json.dumps(broken))
        with pytest.raises(ValueError, match=message):
            Result.load(file)


@pytest.mark.parametrize(
    ("right", "n", "low", "high"),
    [(0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (81, 263, 0.2553, 0.3662), (500, 1000, 0.4691, 0.5309)],
)
def test_wilsons_interval(right: int, n: int, low: float, high: float) -> None:
    share = Share.of([True] * right + [False] * (n - right))
    assert share.low == pytest.approx(low, abs=5e-5)
    assert share.high == pytest.approx(high, abs=5e-5)
    assert share.low <= share.value <= share.high
