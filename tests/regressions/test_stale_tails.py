"""Class A: tails that no one reset are executed."""

from typing import Final, final

import pytest
import torch

import slotgraph
from slotgraph import BATCH, CACHE_LOC, SEQ_LEN_FILL, TOKENS, Axis, Inputs, Step, computed, copied, keep, standard
from slotgraph.backends import Backend, load
from slotgraph.backends.base import Graph
from slotgraph.backends.cpu import HostBackend
from slotgraph.dataflow.capabilities import Capabilities
from slotgraph.dataflow.errors import BatchError, CaptureError, ReplayError
from slotgraph.dataflow.tails import Pad
from tests.regressions.engines import BACKEND, ByHand, Views, captured, draw

PAGES: Final = Axis("PAGES")
CONTEXT: Final = 64


def rope(positions: torch.Tensor) -> torch.Tensor:
    """Reads a table of CONTEXT rows at each position, and moves on to the next token."""
    table = torch.arange(CONTEXT, dtype=torch.float64) / 4
    found = table[positions]
    positions.add_(1)
    return found


def test_sglang_24361_positions_beyond_the_table() -> None:
    """Positions in padded rows walk on, step by step, until they are beyond the rope table."""
    engine = ByHand(lambda views: rope(views["positions"]), 4, positions=torch.zeros(4, dtype=torch.int64))
    engine(positions=draw(CONTEXT - 9, CONTEXT - 4, (4,), 1))
    one = torch.tensor([3])
    for _ in range(CONTEXT):
        if max(engine.buffers["positions"][1:]) < CONTEXT:
            engine(positions=one)
    with pytest.raises(ReplayError, match="out of bounds"):  # on a device: an illegal access, hours later
        engine(positions=one)

    class Positions(Inputs):
        positions: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0, rewritten=True)

    runner = captured(Positions, lambda view: rope(view.positions))
    runner({"positions": draw(CONTEXT - 9, CONTEXT - 4, (4,), 1)})
    for position in range(40):
        assert runner({"positions": [position]}).tolist() == [position / 4]


def test_sglang_24361_a_step_that_does_not_say_so() -> None:
    """A step that moves positions on where they are declared to be only read is refused at capture, by name."""

    class Positions(Inputs):
        positions: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)

    with pytest.raises(CaptureError, match="'positions'"):
        captured(Positions, lambda view: rope(view.positions))


class WindowInputs(Inputs):
    values: torch.Tensor = copied(TOKENS, dtype=torch.float32, pad=0.0)
    out_cache_loc_swa: torch.Tensor = copied(TOKENS, dtype=torch.int32, pad=0)


def test_sglang_24743_locations_of_other_requests() -> None:
    """Locations that an earlier replay left in the tail send padding into other requests' rows of the window pool."""
    pool = draw(100, 200, (16,), 2).float()

    def step(values: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        pool.index_copy_(0, places.long(), values)
        return values * 2

    def by_hand(views: Views) -> torch.Tensor:
        return step(views["values"], views["places"])

    engine = ByHand(by_hand, 4, values=torch.zeros(4), places=torch.zeros(4, dtype=torch.int32))
    first = {"values": draw(1, 9, (3,), 3).float(), "places": torch.tensor([5, 6, 7], dtype=torch.int32)}
    engine(**first)
    pool[6] = 77.0  # written since by the request that owns it
    engine(values=torch.tensor([4.0]), places=torch.tensor([9], dtype=torch.int32))
    assert pool[6] != 77.0

    runner = captured(WindowInputs, lambda view: step(view.values, view.out_cache_loc_swa))
    runner({"values": first["values"], "out_cache_loc_swa": first["places"]})
    pool[6] = 77.0
    runner({"values": [4.0], "out_cache_loc_swa": [9]})
    assert pool[[6, 9]].tolist() == [77.0, 4.0]
    with pytest.raises(BatchError, match=r"slot 'out_cache_loc_swa': expected int32 .*got int64; convert it"):
        runner({"values": [4.0], "out_cache_loc_swa": torch.tensor([9])})


def test_sglang_26292_request_rows_in_one_list_of_five() -> None:
    """Each runner keeps its own list of what to reset, and four of five forget the rows of the request table."""
    table = torch.zeros(8, dtype=torch.int64)
    table[3:6] = torch.tensor([31, 41, 51])  # row 0 is nobody's

    def looked_up(views: Views) -> torch.Tensor:
        return table[views["rows"]].sum() + views["rows"] * 0

    forgetful, careful = (ByHand(looked_up, 4, rows=torch.zeros(4, dtype=torch.int64)) for _ in range(2))
    for engine, resets in ((forgetful, []), (careful, ["rows"])):
        engine(rows=torch.tensor([3, 4, 5]))
        for name in resets:
            engine.buffers[name][1:].zero_()
        engine(rows=torch.tensor([3]))
    assert (int(careful.graph.outputs[0]), int(forgetful.graph.outputs[0])) == (31, 31 + 41 + 51)

    declared = [one for one in vars(standard).values() if isinstance(one, type) and issubclass(one, Inputs)]
    rows = [one.slotgraph.slots["req_pool_indices"] for one in declared if "req_pool_indices" in one.slotgraph.slots]
    assert len(rows) >= 5  # decode, verify, draft, extend, prefill, ...
    assert all(slot.rule() == Pad(0) for slot in rows)  # none without a rule, and none with another

    class Rows(Inputs):
        rows: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)

    runner = captured(Rows, lambda view: looked_up({"rows": view.rows}))
    runner({"rows": [3, 4, 5]})
    assert runner({"rows": [3]}).tolist() == [31]


def update(states: torch.Tensor, index: torch.Tensor, values: torch.Tensor, *, skips: bool) -> torch.Tensor:
    """A kernel that adds to each row's state; one that skips -1 has learnt to."""
    if skips:
        values = torch.where(index >= 0, values, 0.0)
        index = index.clamp(min=0)
    rows = torch.where(index < 0, index + states.shape[0], index)  # as an index of -1 is read
    states.index_add_(0, rows, values)
    return states[rows]


def test_sglang_33810_a_sentinel_that_one_kernel_ignores() -> None:
    """Padding by -1 is skipped by one kernel, and taken for the last request's state by another."""
    for skips, kept in ((True, True), (False, False)):
        states = draw(10, 20, (6,), 4).float()

        def step(views: Views, *, states: torch.Tensor = states, skips: bool = skips) -> torch.Tensor:
            return update(states, views["index"], views["values"], skips=skips)

        engine = ByHand(step, 4, index=torch.full((4,), -1), values=torch.ones(4))
        before = states[5].clone()
        engine(index=torch.tensor([1, 2]), values=torch.tensor([2.0, 3.0]))
        assert bool(states[5] == before) is kept

    class States(Inputs):
        index: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)  # a row that is kept free: no kernel need know
        values: torch.Tensor = copied(BATCH, dtype=torch.float32, pad=0.0)

    for skips in (True, False):
        states = draw(10, 20, (6,), 4).float()

        def stepping(view: States, *, states: torch.Tensor = states, skips: bool = skips) -> torch.Tensor:
            return update(states, view.index, view.values, skips=skips)

        runner = captured(States, stepping)
        before = states.clone()
        assert runner({"index": [1, 2], "values": [2.0, 3.0]}).tolist() == [before[1] + 2, before[2] + 3]
        assert torch.equal(states[3:], before[3:])


def route(ids: torch.Tensor, live: torch.Tensor | None) -> torch.Tensor:
    """Each token's share of its expert, which is cut by how many tokens come to it."""
    expert = ids % 2
    chosen = torch.nn.functional.one_hot(expert, 2)
    if live is not None:
        chosen = chosen * (torch.arange(len(ids)) < live)[:, None]
    return ids / chosen.sum(0)[expert].clamp(min=1)


def count(step: Step) -> int:
    """Live tokens."""
    return step.live(TOKENS)


def test_sglang_30895_padded_rows_at_the_experts() -> None:
    """Padded rows are routed to experts like tokens, and take their part of what those can do."""
    ids = torch.tensor([2, 4, 3])  # the padded row, 0, goes to the expert of the even ones
    right = route(ids, None)
    engine = ByHand(lambda views: route(views["ids"], None), 4, ids=torch.zeros(4, dtype=torch.int64))
    assert not torch.equal(engine(ids=ids), right)

    class Experts(Inputs):
        ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
        num_token_non_padded: torch.Tensor = computed(count, shape=1, dtype=torch.int32)

    runner = captured(Experts, lambda view: route(view.ids, view.num_token_non_padded))
    assert torch.equal(runner({"ids": ids}), right)
    others = draw(1, 9, (2,), 5)
    assert torch.equal(runner({"ids": others}), route(others, None))
    assert slotgraph.check(runner, only=["poison"], progress=False).ok
    careless = captured(Experts, lambda view: route(view.ids, None))
    assert {finding.slot for finding in slotgraph.check(careless, only=["poison"], progress=False).findings} == {"ids"}


def test_sglang_32555_the_tail_of_a_whole_buffer() -> None:
    """A kernel that takes the last rows of what it gets is given a whole buffer, of which only the first are new."""

    def saved(track: torch.Tensor, decodes: int) -> torch.Tensor:
        return track[-decodes:] * 10

    whole = draw(1, 9, (4,), 6)
    graph = load(BACKEND)().capture(lambda: saved(whole, 2))  # two rows of four
    whole[:2].copy_(torch.tensor([21, 22]))
    graph.replay()
    assert graph.outputs.tolist() != [210, 220]

    class Track(Inputs):
        track: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)

    runner = captured(Track, lambda view: saved(view.track, view.track.shape[0]), buckets=[2, 4])
    assert runner({"track": [31, 32, 33, 34]}).tolist() == [310, 320, 330, 340]
    assert runner({"track": [21, 22]}).tolist() == [210, 220]  # a bucket's view has the bucket's rows


@final
class EmptyRequests(HostBackend):
    """A device whose attention takes a length of 0 for a row that is none, and looks into the pages of all others."""

    name = "empty-requests"

    @property
    def capabilities(self) -> Capabilities:
        """Padded requests are of length 0."""
        return Capabilities(fills={"seq_len_fill": 0})

    def capture(self, step: "object", **options: "object") -> Graph:
        """As cpu-capture does."""
        backend: Backend = load(BACKEND)()
        return backend.capture(step, **options)  # type: ignore[arg-type] # handed on as they came


def attention(lengths: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """Looks at the last page of each request that has one."""
    cache = torch.arange(8, dtype=torch.float64)
    return torch.where(lengths > 0, cache[torch.where(lengths > 0, pages, 0)], 0.0)


def test_sglang_1469_a_length_that_the_kernel_does_not_bear() -> None:
    """Padded lengths of 1, right for one attention backend, send another one's kernel to a page that is none."""
    nowhere = torch.full((4,), 99)
    engine = ByHand(
        lambda views: attention(views["lengths"], views["pages"]), 4, lengths=torch.zeros(4).int(), pages=nowhere
    )
    engine.buffers["lengths"].fill_(1)
    with pytest.raises(ReplayError, match="out of bounds"):
        engine(lengths=torch.tensor([5], dtype=torch.int32), pages=torch.tensor([3]))

    class Lengths(Inputs):
        lengths: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=SEQ_LEN_FILL)
        pages: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=keep("not looked at"), starts=99)

    runner = captured(Lengths, lambda view: attention(view.lengths, view.pages), backend=EmptyRequests())
    batch = {"lengths": torch.tensor([5], dtype=torch.int32), "pages": [3]}
    assert runner.fill(batch).lengths.tolist() == [5, 0, 0, 0]
    assert runner(batch).tolist() == [3.0]


def test_nano_vllm_190_columns_of_a_block_table() -> None:
    """A table of fewer pages than the last one leaves that one's pages in its further columns."""

    def pages(table: torch.Tensor) -> torch.Tensor:
        return torch.where(table >= 0, table, 0).sum(1)

    buffer = torch.full((4, 6), -1)
    graph = load(BACKEND)().capture(lambda: pages(buffer))
    for table in ([[3, 4, 5, 6]], [[7, 8]]):
        buffer[:1, : len(table[0])].copy_(torch.tensor(table))
        graph.replay()
    assert graph.outputs[0] != 15

    class Tables(Inputs):
        block_tables: torch.Tensor = copied(BATCH, PAGES, dtype=torch.int64, pad=-1)
        out_cache_loc: torch.Tensor = copied(BATCH, dtype=CACHE_LOC, pad=0)

    runner = captured(Tables, lambda view: pages(view.block_tables), sizes={PAGES: 6})
    runner({"block_tables": [[3, 4, 5, 6]], "out_cache_loc": [1]})
    assert runner({"block_tables": [[7, 8]], "out_cache_loc": [1]}).tolist() == [15]
    wide = {"block_tables": [[1] * 7], "out_cache_loc": [1]}  # where the hand-kept copy fails
    assert runner.decide(wide).reason == "7 rows on PAGES are more than the 6 of every bucket"
    assert runner(wide).tolist() == [7]
