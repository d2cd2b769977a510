"""What the tests of invariants share: a declaration, a step that returns all that it sees, and plain answers."""

from collections.abc import Mapping, Sequence
from typing import Any, Final
from unittest import mock

import pytest
import torch

from slotgraph import BATCH, Axis, DecodeRunner, Inputs, Step, computed, copied
from slotgraph.backends import Backend, load
from slotgraph.extend import HOST
from slotgraph.pool import InputPool

PAGES: Final = Axis("PAGES")
MOST_PAGES: Final = 3
BUCKETS: Final = (2, 6)
BEYOND: Final = 9  # rows that no bucket takes: such a batch runs eagerly, with exact slots
LOWERINGS: Final = tuple(one for one in load("cpu-capture")().capabilities.lowerings if one != "direct")
"""Those of a device, whose memory the host cannot write."""
each_lowering = pytest.mark.parametrize("lowering", LOWERINGS)
TAILS: Final[Mapping[str, Any]] = {"ids": -3, "weights": 0.5, "table": -1, "here": 4, "extra": 9.0}
Values = dict[str, torch.Tensor]
Seen = Mapping[str, torch.Tensor | None]
BROKEN: Final[dict[str, str]] = {}


def breaking() -> Any:
    """A context in which the host's function raises, in the middle of a fill."""
    return mock.patch.dict(BROKEN, why="planted")


def live_rows(step: Step) -> int:
    """Computed on the host."""
    if BROKEN:
        raise OSError(BROKEN["why"])
    return step.live(BATCH)


class Quick(Inputs):
    """Slots that every lowering fills its quickest way: copied, strided, optional, computed on either side."""

    ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=TAILS["ids"])
    weights: torch.Tensor = copied(
        BATCH, 2, dtype=torch.float32, pad=TAILS["weights"], strided=True, converts=(torch.float64,)
    )
    extra: torch.Tensor | None = copied(BATCH, dtype=torch.float64, pad=TAILS["extra"], default=None)
    live: torch.Tensor = computed(live_rows, shape=1, dtype=torch.int64)
    twice: torch.Tensor = computed(lambda ids: ids * 2, shape=BATCH, dtype=torch.int64)


class Afar(Quick):  # with one of two dims that vary, which no kernel fills
    table: torch.Tensor = copied(BATCH, PAGES, dtype=torch.int32, pad=TAILS["table"])


class Slots(Afar):  # with one in the host's memory, of which the step copies when the device gets there
    here: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=TAILS["here"], placement=HOST)


DTYPES: Final[Mapping[str, Any]] = {name: slot.dtype for name, slot in Slots.slotgraph.slots.items()}
EITHER: Final[tuple[type[Quick], ...]] = (Quick, Slots)
"""The declaration that goes the quickest way, and the one with all kinds of slots."""


def everything(view: Any) -> Seen:
    """A step that returns a copy of each slot: whatever is wrong in one of them shows."""
    shown = {name: getattr(view, name) for name in (*TAILS, "live", "twice") if hasattr(view, name)}
    to = view.ids.device
    return {n: None if one is None else one.to(to, non_blocking=True, copy=True) for n, one in shown.items()}


def runner_of(
    backend: Backend | str,
    lowering: str = "foreach",
    inputs: type[Quick] = Slots,
    *,
    captured: bool = True,
    **options: Any,
) -> DecodeRunner[Any]:
    """A runner, captured or not yet."""
    given = {"step": everything, "buckets": BUCKETS, "absent": [{"extra"}], "output_rows": None, **options}
    sizes = {PAGES: MOST_PAGES} if issubclass(inputs, Afar) else {}
    runner = DecodeRunner(inputs, backend=backend, lowering=lowering, sizes=sizes, progress=False, **given)
    if captured:
        runner.capture()
    return runner


def neighbours(backend: Backend, lowering: str, count: int) -> list[Any]:
    """Captured runners that share their memory: all are made before the first is captured."""
    pool = InputPool(*(f"phase {number}" for number in range(count)))
    phases = [pool[f"phase {number}"] for number in range(count)]
    runners = [runner_of(backend, lowering, Quick, captured=False, phase=one, sharing=True) for one in phases]
    for runner in runners:
        runner.capture()
    assert pool.layout is not None
    assert pool.layout.saved > 0
    return runners


def drawn(rows: int, seed: int, *, absent: bool = False, inputs: type[Quick] = Slots) -> Values:
    """Random numbers for each source, none of which is a tail's."""
    draw = torch.Generator().manual_seed(seed)
    pages = int(torch.randint(0, MOST_PAGES + 1, (1,), generator=draw))
    values = {
        "ids": torch.randint(10, 99, (rows,), generator=draw),
        "weights": torch.randint(10, 99, (rows, 2), generator=draw).float(),
        "table": torch.randint(10, 99, (rows, pages), generator=draw, dtype=torch.int32),
        "here": torch.randint(10, 99, (rows,), generator=draw),
        "extra": torch.randint(10, 99, (rows,), generator=draw).double(),
    }
    known = inputs.slotgraph.slots.keys() - ({"extra"} if absent else set())
    return {name: value for name, value in values.items() if name in known}


def on(backend: Backend, values: Values) -> Values:
    """The same where slots are, as new tensors."""
    return {
        name: value.clone() if name == "here" else value.to(backend.device, copy=True) for name, value in values.items()
    }


def expected(values: Mapping[str, Any], buckets: Sequence[int] = BUCKETS) -> Seen:
    """What the step must see of tensors or lists, worked out without slotgraph; without buckets, all is exact."""
    rows = len(values["ids"])
    bucket = next((size for size in buckets if size >= rows), None)
    found: dict[str, torch.Tensor | None] = {"extra": None}
    for name, given in values.items():
        value = torch.as_tensor(given, dtype=DTYPES[name], device="cpu")
        columns = (MOST_PAGES,) if name == "table" and bucket is not None else value.shape[1:]
        whole = torch.full((bucket or rows, *columns), TAILS[name], dtype=value.dtype)
        whole[tuple(slice(0, size) for size in value.shape)] = value
        found[name] = whole
    ids = found["ids"]
    assert ids is not None
    return {**found, "live": torch.tensor([rows]), "twice": ids * 2}


def same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Whether two slots show the same."""
    if one is None or other is None:
        return one is other
    return one.dtype == other.dtype and torch.equal(one.cpu(), other.cpu())


def apart(seen: Seen, right: Seen) -> list[str]:
    """The slots that a step saw otherwise."""
    assert seen.keys() == right.keys()
    return sorted(name for name in right if not same(seen[name], right[name]))


def wrong(seen: Seen, values: Mapping[str, Any], buckets: Sequence[int] = BUCKETS) -> list[str]:
    """The slots that do not hold what a batch of these values gives."""
    return apart(seen, expected(values, buckets))


def taken(outputs: Seen) -> Seen:
    """A copy, which the next replay does not overwrite."""
    return {name: None if one is None else one.clone() for name, one in outputs.items()}
