"""Who of the ranks is lost: from beats and times alone."""

from __future__ import annotations

from contextlib import closing

from quorate.services.device_use import Gauges
from quorate.transports.collective.beat import MOST_BYTES, Beat, Member
from quorate.transports.collective.judge import LOST_S, Heard, Judge, Times, Verdict

TIMES = Times.of(300.0)


def beat(rank: int, number: int, **more: object) -> Beat:
    member = Member(rank, f"node{rank}", f"mark{rank}", 100 + rank, "cpu")
    return Beat(member, number)._replace(**more)  # type: ignore[arg-type]


class Ranks:
    """The beats of three ranks, as one of them hears them, twice a second."""

    def __init__(self, rank: int, times: Times = TIMES) -> None:
        self.judge = Judge(rank, 3, times)
        self.now = 0.0
        self.silent: set[int] = set()
        self.is_cut = False
        self.told: dict[int, dict[str, object]] = {0: {}, 1: {}, 2: {}}
        self._number = 0
        self._beats: list[Beat] = [beat(rank, 0) for rank in range(3)]
        self._reached_at = 0.0

    def look(self, seconds: float) -> Verdict | None:
        """Return the first verdict within so many seconds."""
        until = self.now + seconds
        while self.now < until:
            self.now += TIMES.beat_s / 2
            self._number += 1
            if not self.is_cut:
                self._reached_at = self.now
                for rank in {0, 1, 2} - self.silent:
                    self._beats[rank] = beat(rank, self._number, **self.told[rank])
            heard = Heard(tuple(self._beats), self._reached_at, "the store")
            if (verdict := self.judge.look(heard, self.now)) is not None:
                return verdict
        return None


def test_ranks_that_tell_are_not_lost() -> None:
    assert Ranks(0).look(1000) is None
    assert Ranks(2).look(1000) is None


def test_a_silent_rank_is_lost_after_a_time_and_not_before() -> None:
    ranks = Ranks(0)
    ranks.told[1] = {"phase": "forward", "step": 7, "shard": 3, "shards": 9}
    ranks.look(5)
    ranks.silent = {1}
    assert ranks.look(LOST_S - 1) is None
    verdict = ranks.look(2)
    assert verdict is not None
    assert verdict.rank == 1
    assert "rank 1 on node1 was not heard of for 10 s" in verdict.text
    assert "it was at forward of step 7, shard 3" in verdict.text


def test_a_short_silence_is_none() -> None:
    ranks = Ranks(0)
    for _ in range(5):
        ranks.silent = {1, 2}
        assert ranks.look(LOST_S - 1) is None
        ranks.silent = set()
        assert ranks.look(2) is None


def test_a_rank_that_is_spared_has_its_time_again() -> None:
    """One that a person has stopped, and who may go on: it tells a moment later."""
    ranks = Ranks(1)
    ranks.look(5)
    ranks.silent = {0}
    assert ranks.look(LOST_S - 1) is None
    ranks.judge.spare(0, ranks.now)
    assert ranks.look(LOST_S - 1) is None
    assert ranks.look(2) is not None


def test_others_judge_rank_0_alone_and_hear_the_rest_from_it() -> None:
    ranks = Ranks(1)
    ranks.silent = {2}
    assert ranks.look(5 * LOST_S) is None
    ranks.told[0] = {"verdict": "rank 2 is lost", "lost": 2}
    assert ranks.look(1) == Verdict("rank 2 is lost", 2)
    ranks = Ranks(1)
    ranks.look(3)
    ranks.silent = {0}
    verdict = ranks.look(2 * LOST_S)
    assert verdict is not None
    assert verdict.rank == 0


def test_whoever_is_cut_off_names_the_board_and_the_host_of_rank_0() -> None:
    for rank, lost in ((0, "all other hosts"), (2, "rank 0 on node0")):
        ranks = Ranks(rank)
        ranks.look(3)
        ranks.is_cut = True
        assert ranks.look(LOST_S - 1) is None
        verdict = ranks.look(3)
        assert verdict is not None
        assert verdict.rank is None
        assert f"the store was not reached for 10 s, and nothing heard of {lost}" in verdict.text


def test_a_rank_that_said_that_it_leaves_is_not_lost() -> None:
    ranks = Ranks(0)
    ranks.told[1] = {"left": "its loop is over"}
    ranks.look(3)
    ranks.silent = {1}
    assert ranks.look(10 * LOST_S) is None


def test_whoever_was_stopped_itself_hears_before_it_judges() -> None:
    ranks = Ranks(0)
    ranks.look(5)
    ranks.now += 100  # all others went on meanwhile
    assert ranks.look(5) is None
    ranks.now += 100
    ranks.silent = {2}
    assert ranks.look(LOST_S - 1) is None
    assert ranks.look(3) is not None


def test_a_rank_hangs_in_user_code_of_a_shard_and_nowhere_else() -> None:
    times = Times.of(20.0)
    at: dict[str, object] = {"phase": "backward", "shards": 5, "step": 2, "shard": 1}
    for told, is_hung in (
        ({**at, "lasted_s": 21.0, "is_late": True}, True),
        ({**at, "lasted_s": 19.0, "is_late": True}, False),
        ({**at, "lasted_s": 21.0, "is_late": False}, False),  # its shards take as long
        ({**at, "lasted_s": 21.0, "is_late": True, "phase": "pushing"}, False),
        ({**at, "lasted_s": 21.0, "is_late": True, "phase": "waiting"}, False),
    ):
        for hung in (0, 2):  # rank 0 looks at itself too
            ranks = Ranks(0, times)
            ranks.told[hung] = told
            verdict = ranks.look(5)
            assert (verdict is not None) == is_hung, told
            if verdict is not None:
                assert verdict.rank == hung
                assert f"rank {hung} on node{hung} hangs: it is at backward of step 2, shard 1" in (
                    verdict.text
                )
                assert "worker_timeout_s is 20" in verdict.text
    ranks = Ranks(2, times)
    ranks.told[2] = {**at, "lasted_s": 21.0, "is_late": True}
    assert ranks.look(5) is None  # rank 0 says it to all


def test_all_times_follow_from_one_that_the_timeout_of_workers_bounds() -> None:
    assert Times(lost_s=LOST_S, hang_s=300.0) == TIMES
    short = Times.of(3.0)
    assert (short.lost_s, short.hang_s) == (3.0, 3.0)
    assert (short.beat_s, TIMES.beat_s) == (0.3, 1.0)
    assert short.most_s > short.lost_s
    # The longest silence, then the longest way out: within half a minute all have ended.
    assert 2 * TIMES.lost_s + 2 * TIMES.beat_s < 30


def test_beats_travel_as_they_are_and_never_take_more_room() -> None:
    told = beat(1, 5, phase="forward", seconds=tuple(map(float, range(6))), asked="SIGTERM")
    assert Beat.unpacked(told.packed()) == told
    long = beat(1, 2**62, verdict='"\\\n\x00é' * 1000, left="é" * 1000, asked="x" * 1000)
    packed = long.packed()
    assert len(packed) <= MOST_BYTES
    assert Beat.unpacked(packed).verdict


def test_a_beat_is_the_status_of_a_worker() -> None:
    told = beat(1, 5, phase="forward", step=3, shard=2, lasted_s=4.0, shards=7)
    here = told.status(100.0, own_mark="mark1", show_host=False)
    assert (here.number, here.where, here.pid, here.since) == (1, "cpu", 101, 96.0)
    assert not here.is_gone
    assert sum(here.seconds.values()) == 0.0
    there = told.status(100.0, own_mark="mark0", show_host=True)
    assert (there.where, there.pid, there.is_elsewhere) == ("cpu of node1", None, True)
    assert not there.is_gone
    with closing(Gauges()) as gauges:
        (use,), _ = gauges.read([there])
    assert (use.use, use.memory_bytes) == (None, None)  # a process of that number is another one
