"""Shared memory: lets the ranks of one host exchange bytes without waking a thread."""

import mmap
import os
import pathlib
import secrets
import struct
import weakref
import zlib
from fcntl import LOCK_EX, LOCK_NB, LOCK_SH, lockf
from typing import Final, final

_CELLS: Final = 64
"""Cells of a ring: half as many exchanges may run at once.

Of 32 exchanges in a row, a rank has ended one before it begins the next. So all ranks had begun that one, each after it
had read one of the 32 before, and with it all earlier ones. A cell is therefore read everywhere before it is rewritten.
"""
_TAG: Final = struct.Struct("<QI")


@final
class RankMemory:
    """Memory that all ranks of one host have open. Each rank has a ring of cells, which it alone writes.

    A cell has the number of an exchange, a checksum, and the rank's bytes, which are written first. If a processor
    shows others the number before the bytes, the checksum is wrong, and they look again. The memory has no name in a
    file system, and ends with the last process that has it open. Each rank keeps a lock until its process ends.
    """

    def __init__(self, rank: int, size: int, nbytes: int) -> None:
        self._rank, self._size, self._stride, self._number = rank, size, _TAG.size + nbytes, 0
        self._under_way: dict[int, list[bytes]] = {}

    def open(self, group: object, place: str = "") -> str:
        """Make the memory, or open the memory that another rank has made.

        Args:
            group: The process group. The memory ends with it, as connections do.
            place: Where another rank has made the memory.

        Returns:
            Where it is, or empty if this process cannot open it.
        """
        whole = self._size * _CELLS * self._stride
        try:
            host = host_of()
            if place:
                path, _ = place.removeprefix(host).split()  # ValueError if the other rank is on another host
                self._file = os.open(path, os.O_RDWR)
            else:
                self._file = os.memfd_create("slotgraph")
                place = f"{host} /proc/{os.getpid()}/fd/{self._file} {secrets.token_hex()}"
                os.write(self._file, place.encode())  # in the first cell, which no exchange has used yet
                os.truncate(self._file, whole)
            weakref.finalize(group, lambda: os.close(self._file))  # the file is open as long as the group
            self._cells = mmap.mmap(self._file, whole)
            lockf(self._file, LOCK_EX | LOCK_NB, 1, self._rank)
            return place if self._cells[:].startswith(place.encode()) else ""
        except (OSError, ValueError):
            return ""

    def send(self, data: bytes | bytearray) -> int:
        """Begin an exchange with this rank's bytes, and return its number."""
        self._number += 1
        at = self._at(self._rank, self._number)
        self._cells[at + _TAG.size : at + self._stride] = data
        _TAG.pack_into(self._cells, at, self._number, zlib.crc32(data))
        self._under_way[self._number] = [b""] * self._size
        return self._number

    def has_arrived(self, number: int) -> bool:
        """Return whether all ranks have sent their bytes.

        Raise RuntimeError if a rank's process has ended before it sent any.
        """
        self._read()
        received = self._under_way[number]
        ended = [rank for rank, data in enumerate(received) if not data and self._ended(rank)]
        self._read()
        if not all(received[rank] for rank in ended):
            raise RuntimeError(f"of ranks {ended}, whose processes have ended, one sent nothing")
        return all(received)

    def take(self, number: int) -> bytes:
        """Return every rank's bytes, which have arrived, in the order of ranks."""
        return b"".join(self._under_way.pop(number))

    def _read(self) -> None:
        """Read what has arrived for all open exchanges."""
        for number, received in self._under_way.items():
            for rank, known in enumerate(received):
                at = self._at(rank, number)
                tag = _TAG.unpack_from(self._cells, at)
                data = self._cells[at + _TAG.size : at + self._stride]
                if not known and tag == (number, zlib.crc32(data)):
                    received[rank] = data

    def _at(self, rank: int, number: int) -> int:
        """Return the offset of a rank's cell of an exchange."""
        return (rank * _CELLS + number % _CELLS) * self._stride

    def _ended(self, rank: int) -> bool:
        """Return whether another rank's process has ended."""
        try:
            lockf(self._file, LOCK_SH | LOCK_NB, 1, rank)
        except OSError:
            return False
        return True


def host_of() -> str:
    """Return an identifier of this host, the same for all processes that can share memory. Raise OSError if unknown."""
    boot = pathlib.Path("/proc/sys/kernel/random/boot_id")
    ids = pathlib.Path("/proc/self/ns/pid")
    return f"{boot.read_text().strip()} {ids.readlink()}"
