"""Exchanges through shared memory: any order of ranks, bytes that are late, ranks that are late, and what is left."""

import contextlib
import multiprocessing
import os
import pathlib
import random
import signal
import time
from collections.abc import Iterator
from typing import Any, Final
from unittest import mock

import pytest

from slotgraph.runners.ranks import shared
from slotgraph.runners.ranks.shared import RankMemory
from tests.ranks import stepping
from tests.ranks.processes import Processes
from tests.ranks.stepping import Kept, soon

NBYTES: Final = 24
MOST: Final = 32
"""Exchanges that may be under way at once."""


@pytest.fixture
def alive() -> Iterator[None]:
    """Ranks that are all in this process: a lock keeps out other processes alone."""
    with mock.patch.object(RankMemory, "_ended", return_value=False):
        yield


class Group:
    """What the memory ends with."""


GROUP: Final = Group()


def opened(size: int, group: Group = GROUP) -> list[RankMemory]:
    """One rank's after another's, all in this process."""
    memories = [RankMemory(rank, size, NBYTES) for rank in range(size)]
    place = memories[0].open(group)
    assert place
    assert [one.open(group, place) for one in memories[1:]] == [place] * (size - 1)
    return memories


def told(rank: int, number: int) -> bytes:
    """What a rank says in an exchange."""
    return random.Random(rank * 100_003 + number).randbytes(NBYTES)


@pytest.mark.usefixtures("alive")
@pytest.mark.parametrize("seed", range(4))
def test_each_exchange_reads_what_all_said_in_any_order(seed: int) -> None:
    """Ranks begin exchanges in one order and end them in any, up to 32 at once: each reads what all said."""
    size, draw = 2 + seed % 3, random.Random(seed)
    memories, begun, under_way = opened(size), [0] * size, [list[int]() for _ in range(size)]
    ended = most = 0
    while ended < 3000:
        rank, turns, begins = draw.randrange(size), draw.choice([1, 7, MOST]), draw.random() < 0.5
        memory, open_here = memories[rank], under_way[rank]
        for _ in range(turns):
            if begins and len(open_here) < MOST:
                begun[rank] += 1
                assert memory.send(told(rank, begun[rank])) == begun[rank]
                open_here.append(begun[rank])
            elif open_here and not begins:
                number = draw.choice(open_here)
                assert memory.has_arrived(number) == (min(begun) >= number)
                if min(begun) >= number:
                    assert memory.take(number) == b"".join(told(one, number) for one in range(size))
                    open_here.remove(number)
                    ended += 1
        most = max(most, len(open_here))
    assert most == MOST


@pytest.mark.usefixtures("alive")
def test_a_number_before_its_bytes_is_no_message() -> None:
    """A processor may show it so: nothing has come until the bytes are there, too."""
    first, second = opened(2)
    number = first.send(told(0, 1))
    with mock.patch("zlib.crc32", return_value=7):
        second.send(told(1, 1))  # as it is seen while other bytes are there
    assert not first.has_arrived(number)
    second._number -= 1
    second.send(told(1, 1))
    assert first.has_arrived(number)
    assert first.take(number) == told(0, 1) + told(1, 1)


def test_what_a_rank_sent_before_it_ended_is_read() -> None:
    """What it sent after the last look is read before it counts as ended."""
    first, second = opened(2)
    with mock.patch.object(RankMemory, "_ended", side_effect=lambda _: second.send(told(1, 1))):
        assert first.has_arrived(first.send(told(0, 1)))


def test_memory_of_another_host_is_not_opened() -> None:
    """Is not opened."""
    place = RankMemory(0, 2, NBYTES).open(Group())  # which is closed by now
    host, path, secret = place.rsplit(" ", 2)
    there = RankMemory(0, 2, NBYTES).open(GROUP)
    for other in (place, there.replace(host, "another"), there.replace(there[-8:], secret[-8:]), f"{host} /dev/null 1"):
        assert RankMemory(1, 2, NBYTES).open(GROUP, other) == ""
    assert RankMemory(1, 2, NBYTES).open(GROUP, there) == there
    assert path.startswith(f"/proc/{os.getpid()}/fd/")


def second_rank(place: str, pipe: Any) -> None:
    """A rank that comes to one exchange, forks a child that outlives it, and is killed."""
    memory = RankMemory(1, 2, NBYTES)
    assert memory.open(GROUP, place)
    memory.send(told(1, 1))
    if os.fork() == 0:
        time.sleep(2)
        os._exit(0)
    pipe.send("sent")
    pipe.recv()
    os.kill(os.getpid(), signal.SIGKILL)


def test_what_a_process_sent_before_it_ended_is_read() -> None:
    """What it sent is read all the same; who waits for more is told, though nobody has waited for the process."""
    memory, context = RankMemory(0, 2, NBYTES), multiprocessing.get_context("forkserver")
    place = memory.open(GROUP)
    ours, theirs = context.Pipe()
    process = context.Process(target=second_rank, args=(place, theirs), daemon=True)
    process.start()
    assert ours.recv() == "sent"
    assert memory.send(told(0, 1)) == 1
    assert memory.send(told(0, 2)) == 2
    assert not memory.has_arrived(2)
    ours.send("end")
    deadline, raised = time.monotonic() + 1, ""
    while not raised and time.monotonic() < deadline:
        try:
            memory.has_arrived(2)
        except RuntimeError as error:
            raised = str(error)
    assert "have ended" in raised
    assert memory.has_arrived(1)
    assert memory.take(1) == told(0, 1) + told(1, 1)
    process.join()


def test_nothing_is_left() -> None:
    """No descriptor stays when the group is gone; a name in a file system there never is."""

    def files() -> list[str]:
        found = list[str]()
        for one in pathlib.Path("/proc/self/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                found.append(str(one.readlink()))
        return [one for one in found if "slotgraph" in one]

    before, group = files(), Group()
    opened(3, group)
    assert len(files()) > len(before)
    del group
    assert files() == before


def cannot(rank: int, failing: int) -> str | None:
    """One rank cannot say which host it is on."""
    if rank != failing:
        return soon().over
    with mock.patch.object(shared, "host_of", side_effect=OSError("no such file")):
        return soon().over


@pytest.mark.parametrize("failing", [0, 1, None])
def test_shared_memory_is_used_by_all_or_none(two: Processes, failing: int | None) -> None:
    """If one rank cannot use shared memory, none does."""
    assert two.run(cannot, failing) == ["shared memory" if failing is None else "gloo"] * 2


def late(rank: int) -> tuple[bool, str | None, int]:
    """Rank 1 comes half a second late; whether the step is right, over what, and how often rank 0 slept for it."""
    stepping.make(rank)
    if rank == 1:
        time.sleep(0.5)
    with mock.patch("time.sleep", wraps=time.sleep) as slept:
        right = stepping.run(rank, [3, 5], 1)[0]
    return right, Kept.runner.stats()["ranks"]["over"], slept.call_count


def test_a_late_rank_is_waited_for(two: Processes) -> None:
    """The other waits for it, and sleeps between its looks."""
    (right, over, slept), (also, *_) = two.run(late)
    assert right
    assert also
    assert over == "shared memory"
    assert slept
