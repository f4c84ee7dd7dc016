"""Files of lines: any line by its number."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.messages import expect_error

from quorate.data.streams import LinesDataset, lines
from quorate.errors import DataError

fixed = settings(max_examples=150, derandomize=True, deadline=None, database=None)


@given(st.lists(st.sampled_from([b"", b"\r", b"a", b"bc\r", b" ", b"\r\r"])), st.booleans())
@fixed
def test_lines_are_pythons_but_for_empty_ones(parts: list[bytes], has_end: bool) -> None:
    """At any border of the pieces that are read."""
    content = b"\n".join(parts) + (b"\n" if has_end else b"")
    expected = [line.removesuffix(b"\r") for line in content.split(b"\n")]
    with pytest.MonkeyPatch.context() as patch:
        for piece_bytes in (1, 2, 3, 1 << 22):
            patch.setattr(lines, "_PIECE_BYTES", piece_bytes)
            found = lines._scan(Path(), io.BytesIO(content), len(content))
            bounds = zip(found["starts"].tolist(), found["sizes"].tolist(), strict=True)
            assert [content[at : at + size] for at, size in bounds] == [*filter(None, expected)]


def test_rows_of_several_files(tmp_path: Path) -> None:
    for number in range(3):
        text = "".join(json.dumps({"n": 10 * number + k}) + "\n" for k in range(number + 1))
        (tmp_path / f"{number}.jsonl").write_text(text)
    rows = LinesDataset(sorted(tmp_path.glob("*.jsonl")), json.loads)
    assert [row["n"] for row in rows.__getitems__(list(range(6)))] == [0, 10, 11, 20, 21, 22]
    assert rows.starts.tolist() == [0, 1, 3, 6]
    # It has the name of no tar file's index.
    assert (tmp_path / ".0.jsonl.text.index").exists()


def test_an_error_of_parse_says_where(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"n": 1}\n{"n": \n')
    with pytest.raises(json.JSONDecodeError) as raised:
        LinesDataset(path, json.loads)[1]
    assert raised.value.__notes__ == [f"quorate: in {path}, row 1, at byte 9"]
    with path.open("a") as file:
        file.write("{}\n")
    with expect_error(DataError):
        LinesDataset(tmp_path / "b.jsonl", json.loads)
