"""Buffers and fills without a runner: the oracle's bytes, graphs of the caller's own, and what is refused."""

from typing import Any, Final

import pytest
import torch

from slotgraph import BATCH, TOKENS, Axis, InputBuffers, Inputs, computed, copied
from slotgraph.backends import load
from slotgraph.dataflow.oracle import fill_slot_by_slot
from slotgraph.errors import BatchError, CaptureError, ConfigError, DeclarationError
from slotgraph.extend import HOST, side
from tests.strategies import same_bytes

LOWERINGS: Final = ("in_graph", "fused", "foreach", "slot_by_slot")


PAGES = Axis("PAGES")


CAPACITY: Final = {BATCH: 6, TOKENS: 9, PAGES: 4}


class Wide(Inputs):
    """Slots over two axes that are independent here, on the device and on the host, some computed."""

    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=-7)
    lengths: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=1, converts=(torch.int64,))
    lengths_cpu: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=1, placement=HOST)
    tables: torch.Tensor = copied(BATCH, PAGES, dtype=torch.int32, pad=-1)
    heats: torch.Tensor | None = copied(BATCH, dtype=torch.float32, pad=0.5, default=None)
    flags: torch.Tensor = copied(BATCH, dtype=torch.bool, pad=True, source=side("flags"))
    count: torch.Tensor = computed(lambda step: step.live(TOKENS), shape=1, dtype=torch.int32)
    ends: torch.Tensor = computed(lambda lengths: lengths.cumsum(0), shape=BATCH, dtype=torch.int64)


def batch_of(requests: int, tokens: int, pages: int, seed: int, *, heats: bool) -> tuple[dict[str, Any], torch.Tensor]:
    """Random values, and the side argument."""
    draw = torch.Generator().manual_seed(seed)
    made: dict[str, Any] = {
        "ids": torch.randint(1, 99, (tokens,), generator=draw),
        "lengths": torch.randint(1, 99, (requests,), generator=draw).to((torch.int32, torch.int64)[seed % 2]),
        "lengths_cpu": torch.randint(1, 99, (requests,), generator=draw).int(),
        "tables": torch.randint(1, 99, (requests, pages), generator=draw).int(),
        "heats": torch.rand(requests, generator=draw) if heats else None,
    }
    if seed % 3 == 0:
        made["ids"] = made["ids"].tolist()
    return made, torch.randint(0, 2, (requests,), generator=draw).bool()


def right_of(batch: Any, flags: torch.Tensor, live: Any, padded: Any, buffers: InputBuffers[Wide]) -> Any:
    """What the oracle makes of the same batch, over memory of its own."""
    other = InputBuffers(Wide, CAPACITY, backend=buffers._stage.backend, lowering="slot_by_slot")
    step = Wide.slotgraph.step([live[axis] for axis in Wide.slotgraph.varying], {**CAPACITY, **padded})
    capabilities = buffers._stage.backend.capabilities
    return fill_slot_by_slot(Wide.slotgraph, other._buffers, capabilities, step, batch, {"flags": flags})


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("backend", ["cpu", "cpu-capture"])
def test_the_oracle_s_bytes(backend: str, lowering: str) -> None:
    """Any live sizes in any padded sizes, axis by axis, leave what the oracle leaves."""
    buffers = InputBuffers(Wide, CAPACITY, backend=backend, lowering=lowering)
    draw = torch.Generator().manual_seed(5)
    for seed in range(40):
        requests, tokens, pages = (int(torch.randint(0, most + 1, (1,), generator=draw)) for most in (6, 9, 4))
        padded = {BATCH: max(requests, 1 + seed % 6), TOKENS: max(tokens, 1 + seed % 9)}
        batch, flags = batch_of(requests, tokens, pages, seed, heats=seed % 4 > 0)
        view = buffers.fill(batch, padded, flags=flags)
        right = right_of(batch, flags, {BATCH: requests, TOKENS: tokens, PAGES: pages}, padded, buffers)
        for name, expected in right.items():
            mine = getattr(view, name)
            assert (mine is None) == (expected is None), name
            assert mine is None or same_bytes(mine, expected), (name, mine, expected)


def test_sizes_that_change_axis_by_axis() -> None:
    """In few buckets, where one plan often fills twice in a row, each tail holds its value after each fill."""
    buffers = InputBuffers(Wide, CAPACITY, backend="cpu", lowering="foreach")
    draw = torch.Generator().manual_seed(9)
    for seed in range(300):
        most = ((3, 4), (6, 9))[seed // 2 % 3 % 2]
        requests, tokens = (int(torch.randint(0, one + 1, (1,), generator=draw)) for one in most)
        batch, flags = batch_of(requests, tokens, 4, 1, heats=True)
        view = buffers.fill(batch, dict(zip((BATCH, TOKENS), most, strict=True)), flags=flags)
        assert view.heats is not None
        found = (view.ids[tokens:], view.lengths[requests:], view.heats[requests:], view.tables[requests:])
        for tail, value in zip(found, (-7, 1, 0.5, -1), strict=True):
            assert (tail == value).all()
        assert view.ids[:tokens].tolist() == batch["ids"].tolist()


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_a_graph_of_the_caller_s_own(lowering: str) -> None:
    """The caller captures with the fill's device part in front, and replays behind each fill: the eager answer."""
    backend = load("cpu-capture")()
    buffers = InputBuffers(Wide, CAPACITY, backend=backend, lowering=lowering)

    def step(view: Wide) -> torch.Tensor:
        return view.ids.sum() + view.ends * 3 + view.tables.sum(1) + view.count

    graphs = {}
    for requests in (2, 6):
        padded = {BATCH: requests, TOKENS: 9}
        buffers.prepare(padded, absent={"heats"})

        def captured(padded: Any = padded) -> torch.Tensor:
            buffers.fill_in_graph(padded, absent={"heats"})
            return step(buffers.view(padded, absent={"heats"}))

        graphs[requests] = backend.capture(captured)
    for seed in range(20):
        requests = 1 + seed % 6
        bucket = 2 if requests <= 2 else 6
        batch, flags = batch_of(requests, 1 + seed % 9, seed % 5, seed, heats=False)
        buffers.fill(batch, {BATCH: bucket, TOKENS: 9}, flags=flags)
        graphs[bucket].replay()
        plain = InputBuffers(Wide, CAPACITY, backend="cpu", lowering="slot_by_slot")
        right = step(plain.fill(batch, {BATCH: bucket, TOKENS: 9}, flags=flags))
        assert torch.equal(graphs[bucket].outputs[:requests], right[:requests])


def test_live_sizes_that_no_source_tells() -> None:
    """Live rows may be given where no copied slot tells them; else the error says so."""

    class Untold(Inputs):
        count: torch.Tensor = computed(
            lambda step: [step.live(BATCH)] * step.padded(BATCH), shape=BATCH, dtype=torch.int32
        )

    buffers = InputBuffers(Untold, {BATCH: 4}, backend="cpu")
    assert buffers.fill({}, {BATCH: 3}, live={BATCH: 2}).count.tolist() == [2, 2, 2]
    with pytest.raises(DeclarationError, match="or give live="):
        buffers.fill({})


def test_given_live_sizes_are_held_to_sources() -> None:
    """A live size that a source contradicts is refused by the slot's name, and nothing is written."""
    buffers = InputBuffers(Wide, CAPACITY, backend="cpu")
    batch, flags = batch_of(3, 4, 2, 1, heats=True)
    before = buffers.fill(batch, flags=flags).ids.clone()
    with pytest.raises(BatchError, match="slot 'ids'"):
        buffers.fill({**batch, "lengths": batch["lengths"] + 1}, live={TOKENS: 5}, flags=flags)
    assert torch.equal(buffers.view().ids, before)


@pytest.mark.parametrize("lowering", ["in_graph", "foreach"])
def test_adopted_memory_is_kept_where_asked(lowering: str) -> None:
    """Adopted memory holds what it held, or the initial value; either way each fill resets its padding."""
    for keep in (False, True):
        mine = torch.arange(9)
        buffers = InputBuffers(Wide, CAPACITY, bind={"ids": mine}, keep_bound=keep, backend="cpu", lowering=lowering)
        assert mine.tolist() == (list(range(9)) if keep else [-7] * 9)
        batch, flags = batch_of(2, 3, 1, 1, heats=True)
        view = buffers.fill(batch, {TOKENS: 7}, flags=flags)
        assert view.ids.data_ptr() == mine.data_ptr()
        assert mine.tolist() == [*batch["ids"].tolist(), *[-7] * 4, *(range(7, 9) if keep else [-7] * 2)]


def test_what_is_refused() -> None:
    """Sizes and slots that do not fit are named, before anything is made."""
    with pytest.raises(ConfigError, match="needs sizes= for PAGES, TOKENS"):
        InputBuffers(Wide, {BATCH: 3}, backend="cpu")
    buffers = InputBuffers(Wide, CAPACITY, backend="cpu")
    batch, flags = batch_of(3, 4, 2, 1, heats=True)
    with pytest.raises(ConfigError, match="padded size 10 of TOKENS is more than its capacity, 9"):
        buffers.fill(batch, {TOKENS: 10}, flags=flags)
    with pytest.raises(ConfigError, match="padded names OTHER"):
        buffers.fill(batch, {Axis("OTHER"): 1}, flags=flags)
    with pytest.raises(BatchError, match="more than the 2 of this bucket"):
        buffers.fill(batch, {BATCH: 2}, flags=flags)
    with pytest.raises(BatchError, match="flag"):
        buffers.fill(batch, flag=flags)
    with pytest.raises(CaptureError, match=r"call fill\(\) or prepare\(\)"):
        buffers.fill_in_graph({BATCH: 5})
    with pytest.raises(ConfigError, match="ids"):
        buffers.prepare(absent={"ids"})
