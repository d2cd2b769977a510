"""A suggested declaration has the axes, dtypes and open questions of the batches that it was made from."""

from typing import Any

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slotgraph import BATCH, DecodeRunner, suggest
from slotgraph.errors import ConfigError


def made(source: str) -> Any:
    """The class that a source declares, with each tail decided."""
    space: dict[str, Any] = {"__name__": __name__}
    exec(source.replace("pad=...", "pad=0"), space)  # noqa: S102 - what a user pastes
    return space["StepInputs"]


def batch_of(requests: int, tokens: int, pages: int) -> dict[str, Any]:
    """A batch as engines have it."""
    return {
        "input_ids": torch.arange(tokens),
        "positions": np.arange(tokens),
        "seq_lens": [1] * requests,
        "cu_seqlens": torch.arange(requests + 1, dtype=torch.int32),
        "block_tables": torch.zeros(requests, pages, dtype=torch.int32),
        "heads": torch.zeros(requests * 4, 3),
        "scale": torch.ones(2),
        "mode": "decode",
    }


def test_sizes_that_move_together_become_one_axis() -> None:
    """Requests, tokens and pages are told apart; what follows from requests is an expression of them."""
    source = suggest([batch_of(3, 20, 7), batch_of(5, 31, 9), batch_of(2, 32, 8)])
    slots = made(source).slotgraph.slots
    shapes = {name: ", ".join(map(str, slot.shape)) for name, slot in slots.items()}
    assert shapes == {
        "input_ids": "TOKENS",
        "positions": "TOKENS",
        "seq_lens": "BATCH",
        "cu_seqlens": "BATCH + 1",
        "block_tables": "BATCH, BLOCK_TABLES_SIZE",
        "heads": "BATCH * 4, 3",
        "scale": "2",
    }
    assert "mode: Any" in source
    assert slots["cu_seqlens"].dtype == torch.int32


def test_a_decode_step_is_captured_from_a_suggestion() -> None:
    """Where each request has one token, known names tell tokens from requests, and a runner takes the batches."""
    batches = [{"input_ids": torch.arange(n), "seq_lens": torch.ones(n, dtype=torch.int32)} for n in (3, 5, 4)]
    runner = DecodeRunner(
        made(suggest(batches)), lambda view: view.input_ids + view.seq_lens, buckets=[8], backend="cpu"
    )
    runner.capture()
    for batch in batches:
        assert torch.equal(runner(batch), batch["input_ids"] + 1)


def test_what_samples_cannot_tell_stays_open() -> None:
    """Tails are never guessed; ragged rows, lists, constants and missing values are named."""
    batches: list[dict[str, Any]] = [
        {"pages": [[1] * i for i in range(1, n + 1)], "ids": [1] * n, "one": torch.ones(3), "maybe": torch.ones(n)}
        for n in (2, 4)
    ]
    source = suggest([*batches, {**batches[0], "maybe": None}])
    for batch in batches:
        batch["pages"] = torch.nested.nested_tensor([torch.tensor(row) for row in batch["pages"]], layout=torch.jagged)
    assert suggest([*batches, {**batches[0], "maybe": None}]) == source
    assert source.count(", pad=...") == 3
    assert "pages: torch.Tensor = copied(BATCH, ..., dtype=torch.int64, pad=..., ragged=True)" in source
    assert "its rows have different lengths" in source
    assert "it came in lists" in source
    assert "it is the same in all batches" in source
    assert "maybe: torch.Tensor = copied(BATCH, dtype=torch.float32, pad=..., default=None)" in source


def test_mappings_of_tensors_become_groups() -> None:
    """A step reads them as the engine's did, and a mapping that a batch lacks is None. Other mappings stay fields."""

    def batch_of_groups(rows: int, adapted: int | None) -> dict[str, Any]:
        adapters = None if adapted is None else {"q": torch.full((rows,), adapted), "k": torch.ones(rows)}
        tables = {"full": torch.arange(rows * 6).int().view(rows, 6), "sliding": torch.arange(rows * 2).view(rows, 2)}
        lists = {"long": [[1] * row for row in range(rows)], "short": torch.ones(rows, 3, dtype=torch.int64)}
        return {"tables": tables, "lists": lists, "adapters": adapters, "other": {"x": torch.ones(rows), "name": "y"}}

    batches = [batch_of_groups(2, 3), batch_of_groups(5, 4), batch_of_groups(4, None)]
    source = suggest(batches)
    assert 'TABLES_GROUP = Group("full", "sliding")' in source
    assert "other: Any" in source
    assert "# long: its rows have different lengths" in source
    slots = made(source.replace('"long": ...', '"long": 5')).slotgraph.slots
    assert {name: f"{', '.join(map(str, slot.shape))}, {slot.dtype}" for name, slot in slots.items()} == {
        "tables.full": "BATCH, 6, torch.int32",
        "tables.sliding": "BATCH, 2, torch.int64",
        "lists.long": "BATCH, 5, torch.int64",
        "lists.short": "BATCH, 3, torch.int64",
        "adapters.q": "BATCH, torch.int64",
        "adapters.k": "BATCH, torch.float32",
    }

    def step(view: Any) -> Any:
        sums = view.tables["full"].sum(1) + view.tables["sliding"].sum(1) + view.lists["long"].sum(1)
        return sums if view.adapters["q"] is None else sums * view.adapters["q"]

    declaration = made(source.replace('"long": ...', '"long": 5'))
    absent = [{"adapters.q", "adapters.k"}]
    runner = DecodeRunner(declaration, step, buckets=[4, 8], absent=absent, output_rows=BATCH, backend="cpu-capture")
    runner.capture()
    for batch in batches:
        sums = (
            batch["tables"]["full"].sum(1)
            + batch["tables"]["sliding"].sum(1)
            + torch.arange(len(batch["lists"]["long"]))
        )
        expected = sums if batch["adapters"] is None else sums * batch["adapters"]["q"]
        assert torch.equal(runner(batch), expected)


@attrs.frozen
class Slotted:
    """A batch of a class with slots and a method."""

    x: torch.Tensor
    y: torch.Tensor

    def size(self) -> int:
        """Return the number of rows."""
        return len(self.x)


def test_objects_of_all_kinds_are_batches() -> None:
    """Their attributes are read as fills read them, and methods are not slots."""
    slots = made(suggest([Slotted(torch.ones(n), torch.ones(n, 2)) for n in (2, 5)])).slotgraph.slots
    assert {name: ", ".join(map(str, slot.shape)) for name, slot in slots.items()} == {"x": "BATCH", "y": "BATCH, 2"}


@given(st.lists(st.tuples(*[st.integers(1, 60)] * 2), min_size=3, max_size=5, unique=True), st.randoms())
def test_any_names(sizes: list[tuple[int, int]], order: Any) -> None:
    """Two slots share an axis exactly if their sizes are the same in all batches, whatever their names."""
    names = ["b", "c", "d", "e"]
    order.shuffle(names)
    first = [{names[0]: torch.ones(a), names[1]: torch.ones(a, b), names[2]: torch.ones(b)} for a, b in sizes]
    rows, columns = zip(*sizes, strict=True)
    if len({*rows}) == len({*columns}) == 1:
        with pytest.raises(ConfigError, match="no size differs"):
            suggest(first)
        return
    shapes = {name: [*map(str, slot.shape)] for name, slot in made(suggest(first)).slotgraph.slots.items()}
    assert shapes[names[0]] == shapes[names[1]][:1]
    assert shapes[names[2]] == shapes[names[1]][1:]
    assert (shapes[names[0]] == shapes[names[2]]) == (rows == columns)


@pytest.mark.parametrize("name", ["my inputs", "class", ""])
def test_a_name_that_no_class_can_have(name: str) -> None:
    """It is refused, before a source is written that cannot run."""
    with pytest.raises(ConfigError, match="cannot be the name of a class"):
        suggest([{"x": torch.ones(n)} for n in (2, 5)], name)
