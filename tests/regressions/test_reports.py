"""Public reports of engines: slotgraph's way gives the right answer, or refuses at the earliest moment.

The docstring of each test begins with its class in docs/troubleshooting.md, and says what went wrong there.
"""

import functools
import types
from typing import Any, Final, final

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs

import slotgraph
from slotgraph import BATCH, CACHE_LOC, SEQ_LEN_FILL, TOKENS, Axis, DecodeRunner, Inputs, Step, computed, copied, keep
from slotgraph import standard as standards
from slotgraph.backends import load
from slotgraph.backends.base import Graph
from slotgraph.backends.cpu import HostBackend
from slotgraph.backends.ring import ENTRIES
from slotgraph.dataflow.capabilities import Capabilities
from slotgraph.dataflow.errors import BatchError, CaptureError, ConfigError, ReplayError, StaleOutputError
from slotgraph.dataflow.tails import Pad
from slotgraph.graphs import variant
from slotgraph.pool import InputPool
from tests.backends.test_ring import LazyDevice, chance, play
from tests.runners.models import Ids, decoder
from tests.strategies import declaration_of, draw

BACKEND: Final = "cpu-capture"
PAGES: Final = Axis("PAGES")
CONTEXT: Final = 64
captured = functools.partial(decoder, backend=BACKEND)


class Tokens(Inputs):
    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    positions: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)


def twice(view: Any) -> Any:
    """Any step."""
    return view.ids * 2


def scored(view: Any) -> Any:
    """[TOKENS] whole numbers that tell both slots."""
    return view.ids * 1000 + view.positions


def rope(view: Any) -> Any:
    """Reads a table of CONTEXT rows at each position, and moves on to the next token."""
    found = (torch.arange(CONTEXT, dtype=torch.float64) / 4)[view.positions]
    view.positions.add_(1)
    return found


def test_sglang_24361_positions_beyond_the_table() -> None:
    """A: positions in padded rows walk on, step by step, until they are beyond the rope table."""
    positions = copied(TOKENS, dtype=torch.int64, pad=0, rewritten=True)
    runner = captured(declaration_of({"positions": positions}), rope)
    runner({"positions": draw(CONTEXT - 9, CONTEXT - 4, (4,), 1)})
    for position in range(40):
        assert runner({"positions": [position]}).tolist() == [position / 4]


def test_sglang_24361_a_step_that_does_not_say_so() -> None:
    """A: a step that moves positions on where they are declared to be only read is refused at capture, by name."""
    with pytest.raises(CaptureError, match="'positions'"):
        captured(Tokens, rope)


def test_sglang_24743_locations_of_other_requests() -> None:
    """A: locations that an earlier replay left in the tail send padding into other requests' rows of the pool."""
    pool = draw(100, 200, (16,), 2).float()

    class Window(Inputs):
        values: torch.Tensor = copied(TOKENS, dtype=torch.float32, pad=0.0)
        out_cache_loc_swa: torch.Tensor = copied(TOKENS, dtype=torch.int32, pad=0)

    def step(view: Window) -> torch.Tensor:
        pool.index_copy_(0, view.out_cache_loc_swa.long(), view.values)
        return view.values * 2

    runner = captured(Window, step)
    runner({"values": draw(1, 9, (3,), 3).float(), "out_cache_loc_swa": [5, 6, 7]})
    pool[6] = 77.0  # written since by the request that owns it
    runner({"values": [4.0], "out_cache_loc_swa": [9]})
    assert pool[[6, 9]].tolist() == [77.0, 4.0]
    with pytest.raises(BatchError, match=r"slot 'out_cache_loc_swa': expected int32 .*got int64; convert it"):
        runner({"values": [4.0], "out_cache_loc_swa": torch.tensor([9])})


def test_sglang_26292_request_rows_in_one_list_of_five() -> None:
    """A: each runner keeps its own list of what to reset, and four of five forget the rows of the request table."""
    declared = [one for one in vars(standards).values() if isinstance(one, type) and issubclass(one, Inputs)]
    rows = [one.slotgraph.slots["req_pool_indices"] for one in declared if "req_pool_indices" in one.slotgraph.slots]
    assert len(rows) >= 5  # decode, verify, draft, extend, prefill, ...
    assert all(slot.rule() == Pad(0) for slot in rows)  # none without a rule, and none with another
    table = torch.tensor([0, 0, 0, 31, 41, 51])  # row 0 is nobody's
    runner = captured(Ids, lambda view: table[view.ids].sum() + view.ids * 0)
    runner({"ids": [3, 4, 5]})
    assert runner({"ids": [3]}).tolist() == [31]


@pytest.mark.parametrize("skips", [True, False])
def test_sglang_33810_a_sentinel_that_one_kernel_ignores(*, skips: bool) -> None:
    """A: padding by -1 is skipped by one kernel, and taken for the last request's state by another."""
    states = draw(10, 20, (6,), 4).float()

    class States(Inputs):
        index: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)  # a row that is kept free: no kernel need know
        values: torch.Tensor = copied(BATCH, dtype=torch.float32, pad=0.0)

    def step(view: States) -> torch.Tensor:
        index, values = view.index, view.values
        if skips:
            index, values = index.clamp(min=0), torch.where(index >= 0, values, 0.0)
        rows = torch.where(index < 0, index + len(states), index)  # as an index of -1 is read
        states.index_add_(0, rows, values)
        return states[rows]

    runner, before = captured(States, step), states.clone()
    assert runner({"index": [1, 2], "values": [2.0, 3.0]}).tolist() == [before[1] + 2, before[2] + 3]
    assert torch.equal(states[3:], before[3:])


def route(ids: torch.Tensor, live: torch.Tensor | None) -> torch.Tensor:
    """Each token's share of its expert, which is cut by how many tokens come to it."""
    chosen = torch.nn.functional.one_hot(ids % 2, 2)
    if live is not None:
        chosen = chosen * (torch.arange(len(ids)) < live)[:, None]
    return ids / chosen.sum(0)[ids % 2].clamp(min=1)


def test_sglang_30895_padded_rows_at_the_experts() -> None:
    """A: padded rows are routed to experts like tokens, and take their part of what those can do."""

    class Experts(Inputs):
        ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
        live: torch.Tensor = computed(lambda step: step.live(TOKENS), shape=1, dtype=torch.int32)

    runner = captured(Experts, lambda view: route(view.ids, view.live))
    for ids in (torch.tensor([2, 4, 3]), draw(1, 9, (2,), 5)):  # the padded row, 0, goes to the expert of even ones
        assert torch.equal(runner({"ids": ids}), route(ids, None))
    assert slotgraph.check(runner, only=["poison"], progress=False).ok
    careless = captured(Experts, lambda view: route(view.ids, None))
    assert {finding.slot for finding in slotgraph.check(careless, only=["poison"], progress=False).findings} == {"ids"}


def test_sglang_32555_the_tail_of_a_whole_buffer() -> None:
    """A: a kernel that takes the last rows of what it gets is given a whole buffer, of which only the first are new."""
    runner = captured(Ids, lambda view: view.ids[-view.ids.shape[0] :] * 10, buckets=[2, 4])
    assert runner({"ids": [31, 32, 33, 34]}).tolist() == [310, 320, 330, 340]
    assert runner({"ids": [21, 22]}).tolist() == [210, 220]  # a bucket's view has the bucket's rows


@final
class EmptyRequests(HostBackend):
    """A device whose attention takes a length of 0 for a row that is none, and looks into the pages of all others."""

    name = "empty-requests"

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(fills={"seq_len_fill": 0})

    def capture(self, step: "object", **options: "object") -> Graph:
        return load(BACKEND)().capture(step, **options)  # type: ignore[arg-type] # handed on as they came


def test_sglang_1469_a_length_that_the_kernel_does_not_bear() -> None:
    """A: padded lengths of 1, right for one attention backend, send another one's kernel to a page that is none."""

    class Lengths(Inputs):
        lengths: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=SEQ_LEN_FILL)
        pages: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=keep("not looked at"), starts=99)

    def attention(view: Lengths) -> torch.Tensor:
        cache, is_one = torch.arange(8, dtype=torch.float64), view.lengths > 0
        return torch.where(is_one, cache[torch.where(is_one, view.pages, 0)], 0.0)

    runner = captured(Lengths, attention, backend=EmptyRequests())
    batch = {"lengths": torch.tensor([5], dtype=torch.int32), "pages": [3]}
    assert runner.fill(batch).lengths.tolist() == [5, 0, 0, 0]
    assert runner(batch).tolist() == [3.0]


def test_nano_vllm_190_columns_of_a_block_table() -> None:
    """A: a table of fewer pages than the last one leaves that one's pages in its further columns."""

    class Tables(Inputs):
        block_tables: torch.Tensor = copied(BATCH, PAGES, dtype=torch.int64, pad=-1)
        out_cache_loc: torch.Tensor = copied(BATCH, dtype=CACHE_LOC, pad=0)

    runner = captured(Tables, lambda view: view.block_tables.clamp(min=0).sum(1), sizes={PAGES: 6})
    runner({"block_tables": [[3, 4, 5, 6]], "out_cache_loc": [1]})
    assert runner({"block_tables": [[7, 8]], "out_cache_loc": [1]}).tolist() == [15]
    wide = {"block_tables": [[1] * 7], "out_cache_loc": [1]}  # where a copy that is kept by hand fails
    assert runner.decide(wide).reason == "7 rows on PAGES are more than the 6 of every bucket"
    assert runner(wide).tolist() == [7]


def test_nano_vllm_190_ragged_rows_after_longer_ones() -> None:
    """A: a request with fewer pages takes the row of one with more, whose last pages stay behind its own."""

    class Tables(Inputs):
        block_tables: torch.Tensor = copied(BATCH, 6, dtype=torch.int64, pad=-1, ragged=True)

    runner = captured(Tables, lambda view: view.block_tables.clamp(min=0).sum(1))
    assert runner({"block_tables": [[3, 4, 5, 6], [1], [2, 2]]}).tolist() == [18, 1, 4]
    assert runner({"block_tables": [[7], [], [8, 9, 9]]}).tolist() == [7, 0, 26]
    view = runner.fill({"block_tables": [[5, 5]]})
    assert view.block_tables.tolist() == [[5, 5, -1, -1, -1, -1], *[[-1] * 6] * 3]


class Lengths(Inputs):  # a length of 2 in padded rows, so that their part of the sum is seen
    seq_lens: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=2)
    total: torch.Tensor = computed(lambda seq_lens: seq_lens.sum(0, keepdim=True), shape=1, dtype=torch.int64)


def pages_of(view: Any) -> torch.Tensor:
    """How many pages each request's attention finds: those of its own that lie below the total that was planned."""
    ends = view.seq_lens.cumsum(0)
    return torch.minimum(ends, view.total) - torch.minimum(ends - view.seq_lens, view.total)


def test_sglang_1789_a_sum_that_forgets_padded_rows() -> None:
    """B: the sum of lengths is that of the batch, while the graph lays out pages for every row of the bucket."""
    runner, lengths = captured(Lengths, pages_of, output_rows=None), draw(3, 9, (2,), 1)
    assert runner({"seq_lens": lengths}).tolist() == [*lengths.tolist(), 2, 2]
    assert runner.fill({"seq_lens": lengths}).seq_lens.tolist() == [*lengths.tolist(), 2, 2]


def test_sglang_26880_a_sum_of_the_step_before() -> None:
    """B: the draft's graph takes the sum that another runner's fill left, since its own fill does not pad it."""
    runner = captured(Lengths, pages_of)
    for batch in ([4, 5], [7, 8], [1]):
        assert runner({"seq_lens": batch}).tolist() == batch  # the sum is part of the graph: none can be older


def starts(step: Step) -> list[int]:
    """Where each request's queries begin: as many tokens apart as this runner's requests have."""
    width = step.padded(TOKENS) // step.padded(BATCH)
    return [width * row for row in range(step.padded(BATCH) + 1)]


def test_sglang_27545_a_stride_of_another_width() -> None:
    """B: queries are laid out by the number of drafted tokens, and looked for by the number of steps and one."""

    class Queries(Inputs):
        ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
        seq_lens: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=1)
        qo_indptr: torch.Tensor = computed(starts, shape=BATCH + 1, dtype=torch.int64)

    ids, lengths = draw(1, 99, (18,), 3), torch.ones(3, dtype=torch.int32)
    runner = captured(Queries, lambda view: view.ids[view.qo_indptr[:-1]], width=6, output_rows=BATCH)
    assert runner({"ids": ids, "seq_lens": lengths}).tolist() == ids[::6].tolist()
    with pytest.raises(BatchError, match=r"TOKENS is 4 x BATCH: did you mean width=4\?"):
        runner({"ids": ids[:12], "seq_lens": lengths})  # four tokens a request


DRAFT, VERIFY = ({"ids": one, "positions": one} for one in (draw(1, 9, (4,), 1), draw(10, 19, (4,), 2)))


def pooled(**options: Any) -> tuple[InputPool, DecodeRunner[Any], DecodeRunner[Any]]:
    """A pool, and a runner of each of its two phases: all join before the first is captured."""
    pool = InputPool("draft", "verify", **options)
    given: dict[str, Any] = {"buckets": [4], "backend": BACKEND, "sharing": True}
    one, two = (DecodeRunner(Tokens, scored, phase=pool[phase], **given) for phase in ("draft", "verify"))
    one.capture()
    two.capture()
    return pool, one, two


def test_sglang_19507_a_plan_stream_in_shared_buffers() -> None:
    """C: the target's inputs are filled by a plan stream before the draft's graph has read its own of the same name."""
    _, draft, verify = pooled(overlaps=[("draft", "verify")])
    view = draft.fill(DRAFT)
    verify.fill(VERIFY)
    assert torch.equal(draft.replay(view), DRAFT["ids"] * 1001)


def test_sglang_19507_phases_that_do_share() -> None:
    """C: phases that come one after the other share memory; a view of one that has gone by is refused."""
    pool, draft, verify = pooled()
    assert len({runner.graphs.buffers["ids"].tensor.data_ptr() for runner in (draft, verify)}) == 1
    view = draft.fill(DRAFT)
    assert torch.equal(verify(VERIFY), VERIFY["ids"] * 1001)
    with pytest.raises(ReplayError, match="another runner of the same pool was filled since"):
        draft.replay(view)
    with pytest.raises(ConfigError, match="no phase 'plan'"):
        pool["plan"]


def test_sglang_23037_outputs_kept_over_a_replay() -> None:
    """C: what one step hands to the next is the graph's own memory, which the next replay writes before it was read."""
    shares = declaration_of({"shares": copied(BATCH, 2, dtype=torch.float32, pad=0.0)})
    runner = captured(shares, lambda view: {"topk_p": view.shares.max(1).values}, debug=True, output_rows=BATCH)
    first = runner({"shares": [[0.1, 0.9], [0.8, 0.2]]})
    cloned = first["topk_p"].clone()
    runner({"shares": [[0.3, 0.7], [0.4, 0.6]]})
    assert cloned.tolist() == pytest.approx([0.9, 0.8])
    with pytest.raises(StaleOutputError, match="of generation 1 and overwritten since"):
        first["topk_p"].sum()


def test_vllm_53520_a_buffer_that_two_graphs_write() -> None:
    """C: the drafter's padded graph writes its outputs where the logprobs of the prompt still lie."""
    runner = captured(Ids, twice, buckets=[2, 4], debug=True)
    logprobs = runner({"ids": [3, 4, 5, 6]})
    kept = logprobs.clone()
    runner({"ids": [11, 12]})  # another bucket's graph
    assert kept.tolist() == [6, 8, 10, 12]
    with pytest.raises(StaleOutputError, match="keep a clone"):
        logprobs.tolist()


def test_vllm_53915_what_the_engine_has_replaced_since() -> None:
    """D: a graph goes on with the metadata of its capture, while each step makes new ones that nobody reads."""

    class Scaled(Ids):
        longest: int

    class Known(Ids):
        longest: int = 1

    class Copied(Scaled):
        factor: torch.Tensor = computed(lambda longest: longest, shape=1, dtype=torch.int64)

    def step(view: Any) -> Any:
        return view.ids * view.longest

    with pytest.raises(CaptureError, match="longest"):  # a field that capture would freeze
        captured(Scaled, step)
    runner, ids = captured(Known, step), draw(2, 9, (3,), 2)  # or one with a value that graphs saw
    assert torch.equal(runner({"ids": ids, "longest": 7}), ids * 7)
    assert runner.decide({"ids": ids, "longest": 7}).why == "field_differs"
    assert torch.equal(runner({"ids": ids}), ids)
    graphed = captured(Copied, lambda view: view.ids * view.factor)  # or a slot, which each fill writes
    assert torch.equal(graphed({"ids": ids, "longest": 7}), ids * 7)
    assert graphed.stats()["steps"] == {"graph": 1, "eager": 0}


def test_sglang_39825_host_values_in_a_graph_of_several_steps() -> None:
    """D: a graph that holds two steps reads lengths on the host between them, and keeps those of its capture."""

    class Drafts(Ids):
        seq_lens: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)

    def by_host(view: Any) -> Any:
        longest = int(view.seq_lens.max())  # read in the capture alone
        return view.ids * (longest + 1) + (longest + 2)

    def by_device(view: Any) -> Any:
        longest = view.seq_lens.max()
        return view.ids * (longest + 1) + (longest + 2)

    with pytest.raises(CaptureError, match="value"):
        captured(Drafts, by_host)
    runner = captured(Drafts, by_device)
    for lengths in ([3, 5], [9], [1, 1, 2]):
        ids = draw(1, 9, (len(lengths),), max(lengths))
        found = runner({"ids": ids, "seq_lens": lengths})
        assert torch.equal(found, ids * (max(lengths) + 1) + (max(lengths) + 2))
    assert runner.stats()["steps"] == {"graph": 3, "eager": 0}


class Told(Inputs):  # rows of a cache, and the longest of them, as an engine tells its attention kernel
    lengths: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
    max_seqlen: int = 8


def attention(view: Any, max_seqlen: int) -> Any:
    """[BATCH]; reads the first rows of the cache, as many as the kernel is launched for."""
    places = torch.arange(max_seqlen)
    return torch.where(places < view.lengths[:, None], places + 1, 0).sum(1)


def test_transformers_45323_a_max_seqlen_frozen_in_a_graph() -> None:
    """D: the longest sequence at capture stays in the graph, whose kernel reads no further; GSM8K from 0.45 to 0.23."""
    variants = [variant("max_seqlen", at_least=[8, 32])]
    runner = captured(Told, lambda view: attention(view, view.max_seqlen), variants=variants, output_rows=BATCH)
    for longest, why in ((3, "fits"), (8, "fits"), (9, "fits"), (32, "fits"), (33, "field_differs")):
        batch = {"lengths": torch.tensor([longest, 1]), "max_seqlen": longest}
        assert runner(batch).tolist() == [longest * (longest + 1) // 2, 1]
        assert runner.decide(batch).why == why
    assert runner.stats()["steps"] == {"graph": 4, "eager": 1}
    plain = captured(Told, lambda view: attention(view, view.max_seqlen), output_rows=BATCH)  # without variants
    assert plain({"lengths": torch.tensor([9]), "max_seqlen": 9}).tolist() == [45]
    assert plain.decide({"lengths": torch.tensor([9]), "max_seqlen": 9}).why == "field_differs"


def test_transformers_45323_a_step_that_reads_it_elsewhere() -> None:
    """D: a number that the step takes from the engine itself, not from its view, is found by the first check."""
    engine = types.SimpleNamespace(max_seqlen=8)
    runner = captured(Told, lambda view: attention(view, engine.max_seqlen), output_rows=BATCH)

    def batch(rows: int, seed: torch.Generator) -> dict[str, Any]:
        lengths = torch.randint(9, 30, (rows,), generator=seed)
        engine.max_seqlen = int(lengths.max())  # as the engine does before each step
        return {"lengths": lengths}

    (found,) = slotgraph.check(runner, batch, only="parity", progress=False).findings
    assert "the step reads something that is not a slot, such as a host value" in str(found)


def test_trtllm_15534_a_workspace_that_is_given_back() -> None:
    """D: memory that a kernel was captured with is given back, and is someone else's at the next replay."""

    def step(view: Any) -> torch.Tensor:
        workspace = torch.empty(view.ids.shape[0], dtype=torch.int64)  # the graph's own, for as long as it lives
        return workspace.copy_(view.ids).mul_(2)

    runner = captured(Ids, step)
    strangers = [torch.full((4,), 5) for _ in range(50)]
    assert runner({"ids": [3, 4]}).tolist() == [6, 8]
    assert all(bool((one == 5).all()) for one in strangers)


def test_vllm_50386_a_buffer_that_grew() -> None:
    """D: a larger batch, run eagerly, has a shared buffer replaced by a larger one; graphs read the old one."""
    runner, large = captured(Ids, twice), draw(1, 9, (50,), 3)
    assert torch.equal(runner({"ids": large}), large * 2)  # in buffers of its own, which may grow
    assert runner({"ids": [1, 2, 3, 4]}).tolist() == [2, 4, 6, 8]
    adopted = torch.zeros(4, dtype=torch.int64)
    bound = captured(Ids, twice, bind={"ids": adopted})
    adopted.set_(torch.zeros(8, dtype=torch.int64))  # type: ignore[call-overload] # what resizing amounts to
    with pytest.raises(ReplayError, match="moved"):
        bound({"ids": [1, 2]})


def planned(step: Step) -> list[int]:
    """How much of the work each row takes, by how many are live."""
    return [60 // max(step.live(BATCH), 1)] * step.padded(BATCH)


def test_vllm_42444_a_plan_left_by_the_warm_up() -> None:
    """D: the warm-up makes a plan that is kept, so that the capture finds one and records no planning."""

    class Planned(Ids):
        plan: torch.Tensor = computed(planned, shape=BATCH, dtype=torch.int64)

    runner = captured(Planned, lambda view: view.ids * view.plan, warmups=3)
    for live in ([5, 6], [7], [1, 2, 3, 4]):
        assert runner({"ids": live}).tolist() == [length * (60 // len(live)) for length in live]


@pytest.mark.parametrize("placement", ["device", "host"])
def test_rtp_llm_1084_a_plan_of_another_batch(placement: Any) -> None:
    """B: a graph is replayed with the plan that an attention library made for another batch: wrong work, or a hang."""
    plans = list[list[int]]()

    def plan(kv_lens: torch.Tensor) -> torch.Tensor:
        plans.append(kv_lens.tolist())
        return torch.cat([kv_lens.new_zeros(1), kv_lens.cumsum(0)])

    def declared(*again: str) -> type[Inputs]:
        class Planned(Ids):
            requests: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0, placement="host")
            kv_lens: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=1, placement="host")
            indptr: torch.Tensor = computed(plan, shape=BATCH + 1, dtype=torch.int64, again=again, placement=placement)

        return Planned

    def attention(view: Any) -> torch.Tensor:
        found: torch.Tensor = view.ids * 100 + view.indptr.diff()
        return found

    def batch(*kv_lens: int) -> dict[str, Any]:
        return {"ids": [2] * len(kv_lens), "requests": [7, 8, 9][: len(kv_lens)], "kv_lens": [*kv_lens]}

    batches, values = [batch(3, 16), batch(3, 16), batch(4, 17), batch(5)], {"kv_lens": (1, 99)}
    runner = captured(declared("kv_lens"), attention)
    plans.clear()
    for one in batches:
        assert runner(one).tolist() == [200 + length for length in one["kv_lens"]]
    assert plans == [[3, 16, 1, 1], [4, 17, 1, 1], [5, 1, 1, 1]]  # and none for what is planned already
    assert slotgraph.check(runner, only="poison", values=values, progress=False).ok
    assert slotgraph.check(runner, batches, only="poison", progress=False).ok
    stale = captured(declared("requests"), attention)  # as if the same requests had the same lengths for ever
    for brought, drawn in ((batches, {}), (None, values)):
        report = slotgraph.check(stale, brought, only="poison", values=drawn, progress=False)
        assert "indptr" in {finding.slot for finding in report.findings}, report
        assert "all that its function depends on, by again=" in str(report)


def test_vllm_53057_one_staging_buffer() -> None:
    """E: the next step's numbers are written into the staging buffer that the last step's copy has not read yet."""
    device = LazyDevice()
    ring = device.ring()
    play(device, ring, chance(1), (3000, 3000), 0, 2)
    assert len(device.queues[0]) == 4  # both are in flight
    device.drain()
    assert device.faults == []


def test_megatron_lm_5715_steps_back_to_back() -> None:
    """E: in a warm-up nothing keeps the host busy between steps, so that it is always ahead of the copies."""
    device = LazyDevice()
    ring = device.ring()
    play(device, ring, chance(1), (3000, 3000), 0, 3 * ENTRIES + 5)
    assert device.ran > ENTRIES  # it came round to what was still to be read, and waited
    device.drain()
    assert device.faults == []


class Queries(Ids):
    starts: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=0)


@pytest.mark.parametrize("lowering", ["foreach", "in_graph", "fused"])
def test_vllm_ascend_12191_an_array_that_its_owner_goes_on_to_use(lowering: str) -> None:
    """E: a scheduler's array is handed to a copy that comes later, and updated for the next step meanwhile."""
    runner = captured(Queries, lambda view: view.starts + view.ids, lowering=lowering)
    starts, ids = np.array([10, 20], dtype=np.int32), [1, 2]
    view = runner.fill({"starts": starts, "ids": ids})
    starts += 5  # the call has returned: its owner may do with it what it likes
    ids[:] = [77, 77]
    assert runner.replay(view).tolist() == [11, 22]


def test_megatron_lm_5715_a_runner_far_ahead() -> None:
    """E: the same through a runner: more steps than the ring has room for, each with data of its own."""
    runner = captured(Queries, lambda view: view.ids * 10 + view.starts, lowering="in_graph")
    for number in range(2 * ENTRIES):
        batch = {"starts": [number % 7, 1], "ids": [number, number + 1]}
        assert runner(batch).tolist() == [10 * number + number % 7, 10 * number + 11]


@pytest.mark.parametrize(
    ("name", "rows", "says"),
    [
        ("ids", 1, "BATCH=1; 'positions' says 3"),
        ("positions", 1, "'positions' says 1"),
        ("positions", 2, "'positions' says 2"),
    ],
)
def test_trtllm_18207_a_source_of_another_length(name: str, rows: int, says: str) -> None:
    """F: a source that is too short leaves the last step's rows behind it; one of a single row is spread over all."""
    runner, batch = captured(Tokens, scored), {"ids": draw(1, 9, (3,), 1), "positions": draw(1, 9, (3,), 2)}
    right = batch["ids"] * 1000 + batch["positions"]
    assert torch.equal(runner(batch), right)
    with pytest.raises(BatchError, match=says):
        runner({**batch, name: batch[name][:rows]})
    assert torch.equal(runner(batch), right)


def test_sglang_22958_a_twin_without_padding() -> None:
    """G: the runner of one layer resets its tails; the one of several layers, written after it, does not."""

    class Layered(Ids):
        depths: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)

    table = torch.arange(16) ** 2
    for inputs in (Ids, Layered):
        runner = captured(inputs, lambda view: table[view.ids] + table[view.ids].sum(), output_rows=BATCH)
        names = inputs.slotgraph.slots
        runner({name: draw(3, 15, (4,), 1) for name in names})
        assert runner({name: [5] for name in names}).tolist() == [50]


def test_sglang_22958_the_standard_twins() -> None:
    """G: the standard declarations of both runners say the same of the tail of each slot that reaches the cache."""
    one, several = standards.DraftExtendInputs.slotgraph.slots, standards.MultiLayerDraftExtendInputs.slotgraph.slots
    for name in ("req_pool_indices", "seq_lens", "positions", "out_cache_loc"):
        assert one[name].rule() is not None
        assert one[name].rule() == several[name].rule()


def test_sglang_30242_ranks_that_choose_different_buckets() -> None:
    """H: each rank chooses a bucket by its own batch, and all of them wait for a collective of different sizes."""
    batches = [{"ids": draw(1, 9, (rows,), rows)} for rows in (3, 7)]
    ranks = [captured(Ids, twice, buckets=[4, 8]) for _ in batches]
    decisions = [rank.decide(batch) for rank, batch in zip(ranks, batches, strict=True)]
    assert [(one.path, one.bucket, one.reason) for one in decisions] == [
        ("graph", size, f"bucket {size} fits") for size in (4, 8)
    ]  # plain data, to be agreed upon before anything runs
    assert all(rank.stats()["steps"] == {"graph": 0, "eager": 0} for rank in ranks)
    alone = captured(Ids, twice, buckets=[8])  # what ranks do that agree on one bucket
    for batch in batches:
        assert alone.decide(batch).bucket == 8
        assert torch.equal(alone(batch), batch["ids"] * 2)


def test_trtllm_16072_eager_for_good_and_nobody_knows() -> None:
    """H: a dummy request for padding is made at the first padded step; without room, all are eager for good."""
    runner = captured(Ids, twice)  # padding is a value in each slot's tail: it takes no request
    for rows in (3, 2, 1):
        batch = draw(1, 9, (rows,), rows)
        assert torch.equal(runner({"ids": batch}), batch * 2)
    assert runner.stats()["steps"] == {"graph": 3, "eager": 0}
    with capture_logs() as events:
        for seed in (1, 2):
            runner({"ids": draw(1, 9, (6,), seed)})
    reason = "6 rows are more than the largest bucket, 4"
    assert runner.decide({"ids": draw(1, 9, (6,), 1)}).reason == reason
    assert [(one["event"], one["reason"]) for one in events if one["event"] == "fallback"] == [("fallback", reason)]
    assert runner.stats()["eager"] == {"too_large": {"steps": 2, "live": 12}}
