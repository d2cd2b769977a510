"""A whole engine's decode step, attention over a paged cache and all: no false alarm, and an engine's bug is found."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import slotgraph
from slotgraph import CACHE_LOC, TOKENS, copied
from tests.runners.check.test_planted import passed
from tests.runners.models import ready, recording

if TYPE_CHECKING:
    from slotgraph.backends import Backend

FOLDER = Path(__file__).parents[3] / "docs" / "examples" / "before_after"
PAGES, PAGE, LONGEST = 32, 4, 12


@pytest.fixture
def twins(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The example's modules by name."""
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
    with torch.no_grad():
        yield lambda name: importlib.import_module(f"twins.{name}")


def engine_of(twins: Any, backend: "Backend", *declaration: Any) -> Any:
    """The example's decode runner, captured, over a cache that is not empty."""
    model = twins("model").Model(3).to(backend.device)
    cache = model.new_cache(PAGES, PAGE)
    setting = twins("engine").Setting(model=model, cache=cache, backend=backend, buckets=(1, 2, 4, 8), max_pages=5)
    engine = ready(twins("after").Slotgraph(setting, *declaration))
    cache.rows.normal_()
    return engine.graphs


def batches_on(backend: "Backend") -> Any:
    """Sequences that each own three pages, of any length; page 0 is nobody's."""

    def make(rows: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
        pages = torch.randperm(PAGES - 1, generator=generator)[: rows * 3].add(1).reshape(rows, 3)
        positions = torch.randint(0, LONGEST, (rows,), generator=generator)
        batch = {
            "input_ids": torch.randint(0, 256, (rows,), generator=generator),
            "positions": positions,
            "slot_mapping": pages.gather(1, (positions // PAGE)[:, None])[:, 0] * PAGE + positions % PAGE,
            "context_lens": positions.int() + 1,
            "block_tables": pages.int(),
        }
        return {name: value.to(backend.device) for name, value in batch.items()}

    return make


@recording
def test_sound_engine(backend: "Backend", twins: Any) -> None:
    """On batches of its own, and on drawn ones of which no row reads the page that padded rows write."""
    runner = engine_of(twins, backend)
    for batches, values in ((batches_on(backend), {}), (None, {"block_tables": (1, PAGES - 1)})):
        passed(runner, batches, values=values)


@recording
def test_padded_rows_that_write_a_live_page(backend: "Backend", twins: Any) -> None:
    """Padded rows overwrite a sequence's keys: found by what they write there, through the slots it is made of."""

    class Clobbering(twins("after").DecodeInputs):  # type: ignore[misc] # a class of a module found at run time
        slot_mapping: torch.Tensor = copied(TOKENS, dtype=CACHE_LOC, pad=5 * PAGE)

    report = slotgraph.check(engine_of(twins, backend, Clobbering), batches_on(backend), progress=False)
    assert "input_ids" in {finding.slot for finding in report.of("poison")}, str(report)
    assert report.of("parity"), str(report)
