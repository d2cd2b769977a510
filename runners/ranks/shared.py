"""Shared memory: how the ranks of one host exchange bytes without a thread that must wake."""

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
"""Cells of a ring: up to half as many exchanges may be under way at once.

Of 32 exchanges in a row a rank has ended one before it begins the next: all ranks had begun that one, each after it had
read one of the 32 before, and with it all earlier ones. So a cell is read everywhere before it is written again.
"""
_TAG: Final = struct.Struct("<QI")


@final
class RankMemory:
    """Memory that all ranks of one host have open: for each rank a ring of cells, which this rank alone writes.

    A cell has the number of an exchange, a checksum, and the rank's bytes, which are written first. A processor may
    show others the number before the bytes: the checksum is wrong then, and they look again. The memory has no name in
    a file system, and ends with the last process that has it open. Each rank holds a lock until its process ends.
    """

    def __init__(self, rank: int, size: int, nbytes: int) -> None:
        self._rank, self._size, self._stride, self._number = rank, size, _TAG.size + nbytes, 0
        self._under_way: dict[int, list[bytes]] = {}

    def open(self, group: object, place: str = "") -> str:
        """Make the memory, or open what another rank has made.

        Args:
            group: The process group that it ends with, as connections do.
            place: Where another rank has made it.

        Returns:
            Where it is; empty if this process cannot open it.
        """
        whole = self._size * _CELLS * self._stride
        try:
            host = host_of()
            if place:
                path, _ = place.removeprefix(host).split()  # ValueError if the host is another
                self._file = os.open(path, os.O_RDWR)
            else:
                self._file = os.memfd_create("slotgraph")
                place = f"{host} /proc/{os.getpid()}/fd/{self._file} {secrets.token_hex()}"
                os.write(self._file, place.encode())  # where the first cell will be
                os.truncate(self._file, whole)
            weakref.finalize(group, lambda: os.close(self._file))  # which keeps the memory, too
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
        """Return whether all ranks have sent their bytes. RuntimeError if a rank's process has ended that has not."""
        self._read()
        received = self._under_way[number]
        ended = [rank for rank, data in enumerate(received) if not data and self._ended(rank)]
        self._read()
        if not all(received[rank] for rank in ended):
            raise RuntimeError(f"of ranks {ended}, whose processes have ended, one sent nothing")
        return all(received)

    def take(self, number: int) -> bytes:
        """Return every rank's bytes, which have arrived, one behind another."""
        return b"".join(self._under_way.pop(number))

    def _read(self) -> None:
        """Read what has arrived of all exchanges that are under way."""
        for number, received in self._under_way.items():
            for rank, known in enumerate(received):
                at = self._at(rank, number)
                tag, data = _TAG.unpack_from(self._cells, at), self._cells[at + _TAG.size : at + self._stride]
                if not known and tag == (number, zlib.crc32(data)):
                    received[rank] = data

    def _at(self, rank: int, number: int) -> int:
        """Return where a rank's cell of an exchange begins."""
        return (rank * _CELLS + number % _CELLS) * self._stride

    def _ended(self, rank: int) -> bool:
        """Return whether another rank's process has ended."""
        try:
            lockf(self._file, LOCK_SH | LOCK_NB, 1, rank)
        except OSError:
            return False
        return True


def host_of() -> str:
    """Return what processes of one host have in common that see each other. OSError where there is no such thing."""
    boot, ids = pathlib.Path("/proc/sys/kernel/random/boot_id"), pathlib.Path("/proc/self/ns/pid")
    return f"{boot.read_text().strip()} {ids.readlink()}"
