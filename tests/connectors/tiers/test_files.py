"""Blocks as files: whole or not there, whoever is killed while writing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pellucid.connectors.tiers.files import UNFINISHED, listing, name_of, path_of, read, write

SIZE = 100_000


def block(number: int) -> tuple[str, list[memoryview]]:
    digest = number.to_bytes(32, "big")[::-1]
    return name_of(0, digest), [
        memoryview(bytearray([number % 251, page] * (SIZE // 2))) for page in range(2)
    ]


def test_what_was_written_is_read_by_a_rank_that_wrote_it(tmp_path: Path) -> None:
    name, pages = block(7)
    write(path_of(tmp_path, name, 1), pages)
    found = [memoryview(bytearray(SIZE)) for _ in range(2)]
    read(path_of(tmp_path, name, 1), found)
    assert found == pages
    with pytest.raises(FileNotFoundError):
        read(path_of(tmp_path, name, 0), found)
    assert not listing(tmp_path, 2), "one rank's part is missing"
    write(path_of(tmp_path, name, 0), pages)
    assert list(listing(tmp_path, 2)) == [name]


@pytest.mark.parametrize("at", [0, 17, 30, SIZE, -1])
def test_a_changed_byte_and_a_cut_are_noticed(tmp_path: Path, at: int) -> None:
    name, pages = block(3)
    path = path_of(tmp_path, name, 0)
    write(path, pages)
    data = bytearray(path.read_bytes())
    found = [memoryview(bytearray(SIZE)) for _ in range(2)]
    path.write_bytes(data[:at])
    with pytest.raises(ValueError, match="not a block|cut off"):
        read(path, found)
    data[at] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match="not a block|checksum"):
        read(path, found)


def test_the_oldest_come_first(tmp_path: Path) -> None:
    names = [block(number)[0] for number in range(3)]
    for name, age in zip(names, (1, 3, 2), strict=True):
        write(path_of(tmp_path, name, 0), block(0)[1])
        os.utime(path_of(tmp_path, name, 0), (1e9 - age, 1e9 - age))
    assert list(listing(tmp_path, 1)) == [names[1], names[2], names[0]]


WRITER = """
import sys
from pathlib import Path
from tests.connectors.tiers.test_files import block, path_of, write
for number in range(10**6):
    name, pages = block(number)
    write(path_of(Path(sys.argv[1]), name, 0), pages)
"""


def test_who_is_killed_while_saving_leaves_a_good_disk(tmp_path: Path) -> None:
    for _ in range(3):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)])
        until = time.monotonic() + 30
        while len(list(tmp_path.glob("??/*"))) < 20 and time.monotonic() < until:
            time.sleep(0.02)
        time.sleep(0.05)
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait()
        names = list(listing(tmp_path, 1))
        assert len(names) >= 20
        for name in names:
            read(path_of(tmp_path, name, 0), [memoryview(bytearray(SIZE)) for _ in range(2)])
        assert not list(tmp_path.rglob(f"*{UNFINISHED}"))
        for path in list(tmp_path.glob("??/*")):
            path.unlink()
