"""Ragged rows of steps: values that are appended, and how many each row needs before a later step."""

import types
from collections.abc import Iterator, Mapping
from typing import Any, Final

import pytest
import torch

from slotgraph import BATCH, TOKENS, Axis, Inputs, copied, output
from slotgraph.backends import Backend
from slotgraph.errors import BatchError, ConfigError, DeclarationErrors
from slotgraph.extend import Group, LaunchedStep
from tests.runners.models import decoder

PAGES: Final = Axis("PAGES", fixed=True)
WIDTH, PAGE = 4, 2
OPTIONS: Final[Any] = {
    "settings": types.SimpleNamespace(page=PAGE),
    "sizes": {PAGES: WIDTH},
    "output_rows": BATCH,
}


def pages_for(lens: Any, settings: Any) -> Any:
    """So many pages hold a request's tokens."""
    return -(-lens // settings.page)


class Paged(Inputs):
    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0, then=lambda next_ids: next_ids)
    lens: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=1, then=lambda lens: lens + 1)
    pages: torch.Tensor = copied(BATCH, PAGES, dtype=torch.int32, pad=-1, ragged=pages_for)
    weights: torch.Tensor = copied(BATCH, PAGES, dtype=torch.float32, pad=0.5, ragged=True)
    halves: torch.Tensor = copied(BATCH, PAGES, dtype=torch.bfloat16, pad=0.0, ragged=True)
    moving: torch.Tensor = copied(BATCH, PAGES, dtype=torch.int32, pad=-1, ragged=True, then=lambda pages: pages)
    next_ids: torch.Tensor = output(BATCH, dtype=torch.int64)


def tables(view: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The tables of each step, as they were."""
    view.next_ids.copy_(view.ids)
    return view.pages.clone(), view.weights.clone()


def batch(pages: Any) -> dict[str, Any]:
    """Requests with these pages."""
    rows = len(pages)
    floats = [[0.25] for _ in range(rows)]
    return {
        "ids": [1] * rows,
        "lens": [1] * rows,
        "pages": pages,
        "weights": floats,
        "halves": floats,
        "moving": [[1]] * rows,
    }


def steps(backend: Backend | str, pages: Any, **options: Any) -> Iterator[LaunchedStep]:
    """Steps of requests a, b, c with these pages."""
    runner = decoder(Paged, tables, backend=backend, **OPTIONS)
    launched: Iterator[LaunchedStep] = runner.steps(batch(pages), keys=[*"abc"][: len(pages)], **options)
    return launched


def rows(step: LaunchedStep, output: int = 0) -> dict[str, list[float]]:
    """The values of each row before the pad value."""
    pad = (-1, 0.5)[output]
    return {
        key: [one for one in row if one != pad]
        for key, row in zip(step.keys, step.outputs[output].tolist(), strict=True)
    }


def test_what_is_appended_follows_what_was_said_before(backend: Backend) -> None:
    """After a join, after an edit, several times for one step, and of a request that then leaves."""
    own = [[1], [2, 3]]  # an engine's own lists, to which it appends, too
    loop = steps(backend, own)
    step = next(loop)
    for pages in own:
        pages.append(9)
    assert rows(step) == {"a": [1], "b": [2, 3]}
    step.append(["b", "a"], pages=[[4], []], weights=[[1.5], [2.5, 3.5]])
    step.append(["b"], pages=((5,),))
    step.join(batch([[6]]), ["c"])
    step.append(["c", "a"], pages=[[7, 8], [9]])
    step = next(loop)
    assert rows(step) == {"a": [1, 9], "b": [2, 3, 4, 5], "c": [6, 7, 8]}
    assert rows(step, 1) == {"a": [0.25, 2.5, 3.5], "b": [0.25, 1.5], "c": [0.25]}
    step.edit(["b"], pages=[[]])
    step.append(["b", "a"], pages=[[11], [12]])
    step.leave(["a"])
    step = next(loop)
    assert rows(step) == {"c": [6, 7, 8], "b": [11]}
    step.append(["b"], pages=[[12, 13, 14]])
    assert rows(next(loop)) == {"c": [6, 7, 8], "b": [11, 12, 13, 14]}


class Grouped(Paged):
    tables: Mapping[str, torch.Tensor] = copied(
        BATCH, PAGES, dtype=torch.int32, pad=-1, ragged=True, group=Group("full", "sliding")
    )


def test_what_is_appended_follows_an_edit_of_a_group(backend: Backend) -> None:
    """A mapping gives the rows of each of the group's slots."""
    read = lambda view: (view.next_ids.copy_(view.ids), view.tables["full"].clone())[1]
    runner = decoder(Grouped, read, backend=backend, **OPTIONS)
    pages: Any = {"full": [[1], [2, 3]], "sliding": [[], []]}
    loop = runner.steps({**batch([[1], [2]]), "tables": pages}, keys=[*"ab"])
    step = next(loop)
    step.edit(["b"], tables={"full": [[5]], "sliding": [[6]]})
    step.append(["b", "a"], tables={"full": [[7], [8]]})
    assert next(loop).outputs.tolist() == [[1, 8, -1, -1], [5, 7, -1, -1]]


def test_rows_without_new_values_are_not_sent(cpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An append of nothing is no edit."""
    sent = list[object]()
    monkeypatch.setattr("slotgraph.runners.steps.chain.Chain.edit", lambda _, keys, slots: sent.append((keys, *slots)))
    loop = steps(cpu, [[1], [2, 3]])
    step = next(loop)
    step.append(["a", "b"], pages=[[], []])
    step.append([], pages=[])
    assert sent == []
    step.append(["a", "b"], pages=[[], [4]])
    assert sent == [(("b",), "pages")]


REFUSED: Final[dict[str, dict[str, Any]]] = {
    "'pages': the row of request 'b' has 3 values and gets 2 more, and the slot has room for 4": {
        "pages": [[1], [2, 3]]
    },
    "'pages': values for request 'a': .* not an integer; give a list of numbers that int32 holds": {
        "pages": [[1.5], []]
    },
    "'pages': values for request 'b': expected numbers, got bools": {"pages": [[], [True]]},
    "'pages': values for request 'a': .*(range|format)": {"pages": [[1 << 31], []]},
    "'pages': values for request 'a': ": {"pages": [1, 2]},
    "'pages': append takes a list with a list of values for each request": {"pages": [[1]]},
    "'weights': append takes a list": {"pages": [[1], []], "weights": 3},
    "append names 'lens': name ragged slots that only the host writes": {"lens": [[1], [2]]},
    "append names 'moving': name ragged": {"moving": [[1], [2]]},
    "'halves': append takes no values of bfloat16: give whole rows, by edit": {"halves": [[1], [2]]},
    "append names 'nothing': name ragged": {"pages": [[1], []], "nothing": [[1], [2]]},
}


@pytest.mark.parametrize("says", REFUSED)
def test_what_is_refused_changes_nothing(cpu: str, says: str) -> None:
    """The error names slot and request. No slot of that call is changed."""
    loop = steps(cpu, [[1], [2, 3, 4]])
    step = next(loop)
    with pytest.raises(BatchError, match=says):
        step.append(["a", "b"], **{"weights": [[1.0], []], **REFUSED[says]})
    with pytest.raises(BatchError, match="there is no request 'x'"):
        step.append(["a", "x"], pages=[[1], [2]])
    step = next(loop)
    assert rows(step) == {"a": [1], "b": [2, 3, 4]}
    assert rows(step, 1) == {"a": [0.25], "b": [0.25]}


def test_needs_of_ragged_rows(cpu: str) -> None:
    """How many values each row lacks in any later step, after joins, appends and leaves."""
    loop = steps(cpu, [[1], [2, 3]], ahead=1, needs=["pages"])
    step = next(loop)  # step 2 is next, with 3 tokens a request
    assert step.needs("pages") == {"a": 1, "b": 0}
    assert step.needs("pages", steps=3) == {"a": 2, "b": 1}
    with pytest.raises(ConfigError, match="slot 'lens' is not predicted"):
        step.needs("lens")
    with pytest.raises(ConfigError, match="steps: expected a number of steps, at least 1"):
        step.needs("pages", steps=0)
    step.append(["a"], pages=[[4, 5]])
    step.join({**batch([[]]), "lens": [4]}, ["c"])
    assert step.needs("pages", steps=3) == {"a": 0, "b": 1, "c": 3}
    step.leave(["b"])
    step.edit(["c"], lens=[1])
    assert step.needs("pages", steps=2) == {"a": 0, "c": 1}


def test_needs_that_cannot_be_predicted(cpu: str) -> None:
    """Without a function, of a length that does not grow by a number, or by a function of no whole numbers."""
    with pytest.raises(ConfigError, match=r"needs names 'weights'.*ragged="):
        steps(cpu, [[1]], needs=["weights"])

    class Wrong(Paged):
        pages: torch.Tensor = copied(BATCH, PAGES, dtype=torch.int32, pad=-1, ragged=lambda lens: lens / 2)
        weights: torch.Tensor = copied(BATCH, PAGES, dtype=torch.float32, pad=0.5, ragged=lambda next_ids: next_ids)

    runner = decoder(Wrong, tables, backend=cpu, sizes={PAGES: WIDTH}, output_rows=BATCH)
    with pytest.raises(ConfigError, match="needs names 'next_ids'"):
        runner.steps(batch([[1]]), needs=["weights"])
    with pytest.raises(ConfigError, match=r"slot 'pages': ragged= gives .*not a whole number for each request"):
        next(runner.steps(batch([[1]]), needs=["pages"])).needs("pages")


def test_lengths_are_functions_of_one_slot() -> None:
    """Anything else is reported when the class is defined."""
    with pytest.raises(DeclarationErrors) as faults:

        class Wrong(Inputs):
            two: torch.Tensor = copied(BATCH, PAGES, dtype=torch.int32, pad=0, ragged=lambda ids, lens: ids + lens)
            typo: torch.Tensor = copied(BATCH, PAGES, dtype=torch.int32, pad=0, ragged=lambda length: length)
            number: torch.Tensor = copied(BATCH, PAGES, dtype=torch.int32, pad=0, ragged=3)  # type: ignore[arg-type]
            lengths: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=0)

    texts = [str(one) for one in faults.value.exceptions]
    assert any("'two': ragged= is a function, so it takes one slot" in text for text in texts)
    assert any("'typo': its ragged= needs 'length'" in text and "did you mean 'lengths'" in text for text in texts)
    assert any("ragged=3: say True or False" in text for text in texts)


@pytest.mark.slotgraph_backends("cuda")
def test_rows_on_the_device_are_not_read(backend: Backend) -> None:
    """They would make the host wait. Rows that then come from the host can be appended to."""
    loop = steps(backend, torch.tensor([[1, 2, -1, -1], [3, -1, -1, -1]], dtype=torch.int32, device=backend.device))
    step = next(loop)
    with pytest.raises(BatchError, match="no row of request 'a': it came as a tensor on the device"):
        step.append(["a"], pages=[[4]])
    step.edit(["a"], pages=[[1, 2]])
    step.append(["a"], pages=[[4]])
    assert rows(next(loop)) == {"a": [1, 2, 4], "b": [3]}


def test_a_dense_table_has_no_room(cpu: str) -> None:
    """All of its columns are values."""
    loop = steps(cpu, torch.full((2, WIDTH), 5, dtype=torch.int32))
    step = next(loop)
    with pytest.raises(BatchError, match="the row of request 'a' has 4 values and gets 1 more"):
        step.append(["a"], pages=[[4]])
