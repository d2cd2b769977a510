"""Groups of processes that all tests of a module share."""

import pathlib
from collections.abc import Iterator

import pytest

from tests.ranks.processes import Processes, ranks


@pytest.fixture(scope="session")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    """Two ranks."""
    yield from _shared(2, tmp_path_factory)


@pytest.fixture(scope="session")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    """Four."""
    yield from _shared(4, tmp_path_factory)


def _shared(size: int, factory: pytest.TempPathFactory) -> Iterator[Processes]:
    folder: pathlib.Path = factory.mktemp(f"ranks{size}")
    with ranks(size, folder) as made:
        yield made
