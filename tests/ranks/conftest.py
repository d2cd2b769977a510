"""Groups of processes that all tests of a session share."""

from collections.abc import Iterator

import pytest

from tests.ranks.processes import Processes, ranks


@pytest.fixture(scope="session")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    """Two ranks."""
    with ranks(2, tmp_path_factory.mktemp("two")) as made:
        yield made


@pytest.fixture(scope="session")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    """Four ranks."""
    with ranks(4, tmp_path_factory.mktemp("four")) as made:
        yield made
