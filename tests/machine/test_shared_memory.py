"""Shared memory: without a name, gone with its user, asked for before it is used."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

import pytest
import torch
from support.messages import expect_error

from quorate.errors import UserError
from quorate.machine import shared_memory
from quorate.machine.shared_memory import Segment


def test_a_segment_is_the_users_alone_and_has_no_name() -> None:
    before = set(Path("/dev/shm").iterdir())
    segment = Segment(1 << 16)
    status = os.fstat(segment.fd)
    assert (status.st_mode & 0o777, status.st_size, status.st_nlink) == (0o600, 1 << 16, 0)
    assert set(Path("/dev/shm").iterdir()) == before
    assert not os.get_inheritable(segment.fd)
    assert not any(segment.map[:])
    other = Segment(1 << 16, os.dup(segment.fd))
    segment.tensor(torch.float32, 3, 64).fill_(1.5)
    assert other.tensor(torch.float32, 3, 64).tolist() == [1.5] * 3
    assert other.tensor(torch.float32, 0, 0).shape == (0,)


def test_tensors_outlive_their_segment_and_its_descriptor_does_not() -> None:
    segment = Segment(4096)
    fd, tensor = segment.fd, segment.tensor(torch.int64, 4, 0)
    tensor.fill_(7)
    del segment
    gc.collect()
    assert tensor.tolist() == [7] * 4
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_more_than_there_can_be() -> None:
    with expect_error(UserError, name="shared memory", hide=r"(?<=\()[^)]*"):
        Segment(1 << 62)


def test_free_memory_is_known_and_both_figures_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    free = shared_memory.free_bytes()
    assert free is None or 1 << 20 < free < 1 << 50
    monkeypatch.setattr(shared_memory, "free_bytes", lambda: 5 << 20)
    shared_memory.require(5 << 20, "rows", "use less")
    with expect_error(UserError, name="shared memory"):
        shared_memory.require(6 << 20, "rows", "use less")


@pytest.mark.skipif(sys.platform != "linux", reason="only there")
def test_one_becomes_another_and_tensors_stay_where_they_are() -> None:
    own, other = Segment(3 << 20), Segment(3 << 20)
    tensor, theirs = (each.tensor(torch.float32, 1000, 64) for each in (own, other))
    tensor.fill_(1.0)
    theirs.fill_(2.0)
    address, inode = tensor.data_ptr(), os.fstat(other.fd).st_ino
    before = os.dup(own.fd)
    own.become(other)
    assert tensor.data_ptr() == address
    assert os.fstat(before).st_size == 0  # what it had was given back
    os.close(before)
    assert tensor.eq(2.0).all()
    tensor.fill_(3.0)
    assert theirs.eq(3.0).all()
    del other, theirs
    assert os.fstat(own.fd).st_ino == inode
    assert Segment(own.nbytes, os.dup(own.fd)).tensor(torch.float32, 1000, 64).eq(3.0).all()
