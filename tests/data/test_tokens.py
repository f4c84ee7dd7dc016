"""Tokens: rows of any lengths in a file mapped by processes; damage; a worker's memory."""

import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.examples import fixed
from support.messages import expect_error

from quorate.data.tokens import Tokens, write_tokens
from quorate.errors import DataError

rows = st.integers(1, 3).flatmap(
    lambda fields: st.lists(
        st.tuples(*[st.lists(st.integers(-(2**31), 2**31 - 1), max_size=9)] * fields),
        min_size=1,
        max_size=20,
    )
)
PAIRS = [([1, 2, 3], [4]), ([], [5, 6]), ([7], [8, 9])]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "pairs.tokens"


@given(rows)
@fixed(20)
def test_rows_are_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, written: list[tuple[list[int], ...]]
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.tokens"
    write_tokens(path, written)
    found = Tokens(path)
    assert len(found) == len(written)
    for number, row in enumerate(written):
        values = found[number] if len(row) > 1 else (found[number],)
        assert [v.tolist() for v in values] == [*row]
        assert all(v.dtype == torch.int32 for v in values)
    for field in range(len(written[0])):
        assert found.lengths(field).tolist() == [len(row[field]) for row in written]


@pytest.mark.parametrize("dtype", ["u1", "i1", "u2", "i2", "i4", "i8", "f4", "f8"])
def test_types(path: Path, dtype: str) -> None:
    write_tokens(path, [np.array([1, 2]), [3]], dtype=dtype)
    rows = Tokens(path)
    assert [rows[0].tolist(), rows[1].tolist(), rows[-1].tolist()] == [[1, 2], [3], [3]]
    assert rows[0].numpy().dtype == np.dtype(dtype)
    with pytest.raises(IndexError, match="row 2 of 2"):
        rows[2]
    rows[0][0] = 9  # separate memory
    assert rows[0].tolist() == [1, 2]
    again = pickle.loads(pickle.dumps(rows))
    assert again[1].tolist() == [3]


def test_a_file_is_built_once(path: Path) -> None:
    calls = 0

    def make() -> Iterator[Any]:
        nonlocal calls
        calls += 1
        yield from PAIRS

    first = Tokens.built(path, make, made_from="vocabulary 1")
    again = Tokens.built(path, make, made_from="vocabulary 1")
    assert calls == 1
    assert [len(row) for row in again[0]] == [3, 1]
    Tokens.built(path, make, made_from="vocabulary 2")
    assert calls == 2
    assert first[2][1].tolist() == [8, 9]  # readers of the former file still have the file
    # If writing is cut off, the old file stays.
    with pytest.raises(ZeroDivisionError):
        write_tokens(path, ([1 // (3 - n)] for n in range(9)))
    again = Tokens.built(path, make, made_from="vocabulary 2")
    assert (Tokens(path).made_from_sha256, calls) == (again.made_from_sha256, 2)
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_file_that_is_cut_or_damaged_is_refused(path: Path) -> None:
    write_tokens(path, PAIRS)
    content = path.read_bytes()
    for cut in range(0, len(content), 7):
        path.write_bytes(content[:cut])
        with pytest.raises(DataError, match=r"damaged|another"):
            Tokens(path)
    # Values have no checksum: all other parts have a checksum, or have to be as they are.
    for at in [*range(64), *range(128, len(content))]:
        path.write_bytes(content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :])
        try:
            Tokens(path)
        except DataError:
            continue
        assert content[at] == 0, at  # padding
        assert at >= len(content) - 60, at
    path.write_bytes(content + b"\0")
    with expect_error(DataError):
        Tokens(path)
    with expect_error(DataError):
        Tokens(path.with_name("other"))


@pytest.mark.parametrize(
    ("got", "written"),
    [
        ("no row", []),
        ("1 fields", [([1], [2]), ([1],)]),
        (300, [[1, 300]]),
        (-1, [[1], [-1]]),
        ("an array of shape (1, 1)", [[[1]]]),
        ("values of float64", [[1.5]]),
    ],
)
def test_rows_that_do_not_fit_are_named(path: Path, got: object, written: Any) -> None:
    with expect_error(DataError, got=got):
        write_tokens(path, written, dtype=np.uint8)
    assert not path.exists()


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="reads /proc/self/smaps")
def test_what_a_worker_reads_is_memory_that_all_of_them_share(path: Path) -> None:
    def own_bytes() -> int:
        lines = Path("/proc/self/smaps").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith("Anonymous:")) << 10

    values = np.arange(40_000, dtype=np.int32)
    write_tokens(path, ((values, values) for _ in range(100)))  # 32 MB
    if (pid := os.fork()) == 0:
        before, rows = own_bytes(), Tokens(path)
        assert all(int(field[-1]) == 39_999 for row in rows for field in row)
        os._exit(0 if own_bytes() - before < 4 << 20 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
