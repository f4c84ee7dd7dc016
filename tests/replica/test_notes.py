"""Notes are said once; those that are doubts are kept."""

from __future__ import annotations

from quorate.replica.notes import Note, Notes


def test_a_note_is_said_once_by_its_first_line() -> None:
    notes = Notes()
    notes.add("slow kernel\n  at a.py:1")
    notes.add("slow kernel\n  at b.py:2")
    assert [str(note) for note in notes.take()] == ["slow kernel\n  at a.py:1"]
    notes.add("slow kernel")
    assert notes.take() == []
    assert notes.doubts == []


def test_a_doubt_is_said_once_and_kept() -> None:
    notes = Notes()
    notes.doubt("net.calls changes in forward\n  at a.py:1")
    (note,) = notes.take()
    assert str(note) == "same bits: no, because net.calls changes in forward\n  at a.py:1"
    elsewhere = Notes()
    elsewhere.put(Note(note.text, note.is_doubt))
    assert elsewhere.doubts == notes.doubts == ["net.calls changes in forward"]


def test_the_doubts_of_a_run_that_goes_on_are_not_said_again() -> None:
    notes = Notes()
    notes.remember(["it draws from the clock"])
    notes.doubt("it draws from the clock")
    assert notes.take() == []
    assert notes.doubts == ["it draws from the clock"]
