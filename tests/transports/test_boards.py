"""Boards: what a rank tells the others hear; ranks of an earlier start are not heard."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
import torch.distributed as dist

from quorate.transports.collective.beat import Beat, Member
from quorate.transports.collective.board import Board, FileBoard
from quorate.transports.collective.judge import Times
from quorate.transports.collective.links import Links
from quorate.transports.collective.store_board import StoreBoard

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")

TIMES = Times.of(2.0)


def beat(rank: int, number: int = 1) -> Beat:
    return Beat(Member(rank, "here", "mark", 1, "cpu"), number)


def soon(holds: Callable[[], bool]) -> bool:
    until = time.monotonic() + 60
    while not holds() and time.monotonic() < until:
        time.sleep(0.01)
    return holds()


def numbers(board: Board) -> list[int | None]:
    return [None if told is None else told.number for told in board.heard().beats]


@pytest.fixture
def store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)


def test_a_file_of_one_machine(tmp_path: Path) -> None:
    path = tmp_path / "board"
    path.write_bytes(bytes(FileBoard.nbytes(3)))
    boards = [FileBoard(path, rank, 3) for rank in range(3)]
    path.unlink()  # once all have met
    assert numbers(boards[0]) == [None, None, None]
    for number in range(1, 6):
        boards[1].tell(beat(1, number))
        assert numbers(boards[0]) == [None, number, None]
    boards[2].tell(beat(2, 7)._replace(verdict="é" * 3000))
    assert numbers(boards[1]) == [None, 5, 7]


def test_a_beat_is_whole_whenever_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "board"
    path.write_bytes(bytes(FileBoard.nbytes(2)))
    writer, reader = FileBoard(path, 0, 2), FileBoard(path, 1, 2)
    done = threading.Event()

    def write() -> None:
        for number in range(1, 3000):
            writer.tell(beat(0, number)._replace(verdict=str(number) * (1 + number % 50)))
        done.set()

    thread = threading.Thread(target=write)
    thread.start()
    newest = 0
    while not done.is_set():
        told = reader.heard().beats[0]
        if told is not None:
            assert told.number >= newest
            newest = told.number
            assert told.verdict == (str(newest) * (1 + newest % 50))[:400]
    thread.join()


def test_a_store_of_torchrun(store: dist.TCPStore) -> None:
    with ExitStack() as stack:
        boards = [
            stack.enter_context(closing(StoreBoard(store, rank, 3, TIMES, "here")))
            for rank in range(3)
        ]
        for rank in (0, 1):
            boards[rank].tell(beat(rank))
        assert soon(lambda: numbers(boards[0])[1] == 1)
        assert soon(lambda: numbers(boards[1])[0] == 1)
        assert numbers(boards[0])[2] is None
        boards[2].tell(beat(2, 4))
        assert soon(lambda: numbers(boards[0])[1:] == [1, 4])
        assert len({board.session for board in boards}) == 1
        assert boards[0].session


def test_ranks_of_an_earlier_start_are_not_heard(store: dist.TCPStore) -> None:
    """A host has left and come back: torchrun starts the ranks anew and does not count it."""

    def start(*numbered: int) -> list[StoreBoard]:
        boards = [StoreBoard(store, rank, 2, TIMES, "here") for rank in numbered]
        for rank, board in zip(numbered, boards, strict=True):
            board.tell(beat(rank, 10 * len(before) + 1))
        return boards

    before: list[str] = []
    first = start(0, 1)
    assert soon(lambda: numbers(first[0])[1] == 1 and numbers(first[1])[0] == 1)
    before.append(first[0].session)
    for board in first:
        board.close()
    for order in ((0, 1), (1, 0)):
        early, late = order
        (one,) = start(early)
        time.sleep(5 * TIMES.beat_s)
        # What is in the store is of ranks that have ended.
        assert numbers(one)[late] is None
        (other,) = start(late)
        expected = 10 * len(before) + 1
        assert soon(lambda e=expected, a=one, n=late: numbers(a)[n] == e)
        assert soon(lambda e=expected, b=other, n=early: numbers(b)[n] == e)
        assert one.session == other.session
        assert one.session not in before
        before.append(one.session)
        one.close()
        other.close()


def test_the_last_word_is_told_before_a_board_is_closed(store: dist.TCPStore) -> None:
    one, other = (StoreBoard(store, rank, 2, TIMES, "here") for rank in (0, 1))
    one.tell(beat(0))
    other.tell(beat(1))
    assert soon(lambda: numbers(other)[0] == 1)
    one.tell(beat(0, 2)._replace(verdict="rank 1 is lost"))
    one.close()
    assert soon(lambda: numbers(other)[0] == 2)
    other.close()


class Gone:
    """A store that was reached once."""

    def __init__(self, store: dist.Store) -> None:
        self.store: dist.Store | None = store

    def clone(self) -> Gone:
        return self

    def __getattr__(self, name: str) -> object:
        if self.store is None:
            raise dist.DistNetworkError("connection reset")
        return getattr(self.store, name)


def test_a_store_that_is_gone_is_not_reached_and_ends_nothing(store: dist.TCPStore) -> None:
    gone = Gone(store)
    board = StoreBoard(gone, 0, 1, TIMES, "here")
    board.tell(beat(0))
    assert soon(lambda: bool(board.session))
    gone.store = None
    time.sleep(3 * TIMES.beat_s)
    was = board.heard().reached_at
    board.tell(beat(0, 2))
    time.sleep(3 * TIMES.beat_s)
    assert board.heard().reached_at == was
    gone.store = store
    assert soon(lambda: board.heard().reached_at > was)
    board.close()


def test_links_that_are_cut_wake_whoever_waits() -> None:
    links = Links()
    with socket.create_server(("127.0.0.1", 0)) as outside, links.noting():
        server = socket.create_server(("127.0.0.1", 0))
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    said: list[bytes] = []
    waiting = threading.Thread(target=lambda: said.append(one.recv(1)))
    waiting.start()
    try:
        links.cut()
        waiting.join(60)
        assert said == [b""]
        assert server.fileno() >= 0  # one that listens is left alone
        with socket.create_connection(server.getsockname()):
            pass
        assert outside.fileno() == -1
    finally:
        for end in (one, other, server):
            end.close()
