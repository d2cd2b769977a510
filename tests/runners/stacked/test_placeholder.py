"""The placeholder that a bucket is captured on: one request, or what a declaration says instead."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from slotgraph import BATCH, CACHE_LOC, TOKENS, Step, copied, errors, graph_break, keep
from slotgraph.backends import Backend
from slotgraph.extend import once
from tests.runners.prefilled import Prefill, around, batch_of

seen: list[dict[str, Any]] = []


@graph_break
def noting(hidden: torch.Tensor, view: Prefill) -> torch.Tensor:
    """Note all that the view holds."""
    values = view.__dict__.items()
    seen.append({name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in values})
    return hidden * 2


class Told(Prefill):  # a placeholder that names slots of all kinds, beside those that it leaves to their pad values
    positions: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=3)
    weights: torch.Tensor = copied(BATCH, 2, dtype=torch.float32, pad=once(0.5))
    table: torch.Tensor = copied(BATCH, dtype=CACHE_LOC, pad=keep("no one reads padded requests"))
    extra: torch.Tensor | None = copied(TOKENS, dtype=torch.int32, pad=-1, default=None)
    swa: torch.Tensor | None = copied(TOKENS, dtype=torch.int32, pad=0, when="swa")
    mode: str = "prefill"

    @classmethod
    def placeholder(cls, step: Step) -> Mapping[str, Any]:
        """Values of all kinds: a list, a tensor, a number for all rows."""
        tokens = step.live(TOKENS)
        return {
            "extend_seq_lens": [tokens],
            "input_ids": torch.arange(tokens) + 1,
            "weights": 2.5,
            "extra": 9,
            "swa": 4,
            "scale": 5,
        }


def placeholder_that_gives(**values: Any) -> type[Prefill]:
    """A declaration whose placeholder gives these values."""

    class Given(Prefill):
        @classmethod
        def placeholder(cls, step: Step) -> Mapping[str, Any]:
            """What is to be given, beside one request of all tokens."""
            return {"extend_seq_lens": [step.live(TOKENS)], "scale": 1, **values}

    return Given


def test_what_breaks_see(backend: Backend) -> None:
    """Breaks see the placeholder's values, pad values of what it does not name, computed slots, and fields."""
    seen.clear()
    around(noting, backend, inputs=Told, settings={"swa": True}, buckets=[2], absent=[{"extra"}], warmups=0)
    assert all(view == {**seen[0], "_slotgraph_view": view["_slotgraph_view"]} for view in seen[:3])
    first, last = seen[0], seen[-1]
    assert first["extend_seq_lens"] == [2]
    assert first["extend_start_loc"] == [0]
    assert first["input_ids"] == [1, 2]
    assert first["positions"] == [3, 3]
    assert first["weights"] == [[2.5, 2.5]]
    assert len(first["table"]) == 1
    assert (first["extra"], last["extra"]) == ([9, 9], None)
    assert first["swa"] == [4, 4]
    assert (first["scale"], first["mode"]) == (5, "prefill")


def test_slots_that_are_switched_off(backend: Backend) -> None:
    """A placeholder may name slots that settings switch off, and optional ones that a pattern is without."""
    seen.clear()
    runner, _ = around(noting, backend, inputs=Told, settings={"swa": False}, buckets=[4])
    assert seen[0]["swa"] is None
    given = batch_of([2, 1], 1, backend.device)
    given |= {"weights": [[1.0, 2.0]] * 2, "table": [3, 4], "extra": [7, 8, 9]}
    assert runner(given).shape == (3, 2)
    assert seen[-1]["extra"] == [7, 8, 9, -1]
    assert seen[-1]["table"] == [3, 4]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"typo": 1}, r"Given.placeholder\(\) names 'typo', which is no copied slot and no field"),
        ({"extend_start_loc": [0]}, "names 'extend_start_loc', which is no copied slot and no field"),
        ({"extend_seq_lens": [1, 2]}, r"slot 'extend_seq_lens': its placeholder: expected int32 of shape \[1\], got"),
        ({"extend_seq_lens": 1.5}, r"its placeholder: expected int32 of shape \[1\], got the number 1.5"),
        ({"extend_seq_lens": True}, r"its placeholder: expected int32 of shape \[1\], got the number True"),
        ({"input_ids": [1, 2, 3]}, r"slot 'input_ids': its placeholder: expected int64 of shape \[4\]"),
        ({"input_ids": torch.ones(4)}, r"expected int64 of shape \[4\], got float32 of shape \[4\]"),
        ({"positions": [0.5] * 4}, "slot 'positions': its placeholder: expected int64"),
        ({"positions": "0123"}, "slot 'positions': its placeholder: expected int64 of shape .* got str"),
    ],
)
def test_values_that_do_not_fit(values: dict[str, Any], said: str) -> None:
    """What a placeholder gives is held to its slot: name, shape and kind of number, with nothing cast or cut."""
    with pytest.raises(errors.CaptureError, match=said):
        around(noting, "cpu-capture", inputs=placeholder_that_gives(**values), buckets=[4])
