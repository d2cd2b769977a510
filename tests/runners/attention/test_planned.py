"""FlashInfer's `plan` as a slot: it runs on the host only if it must, and what it makes is this step's."""

import itertools
import random
from collections.abc import Sequence
from typing import Any, Final

import pytest
import torch

import slotgraph
from slotgraph import BATCH, SEQ_LEN_FILL, DecodeRunner, attention, computed, copied, errors
from slotgraph.backends import Backend
from slotgraph.runners.attention import schedules
from tests.runners.attention import kinds
from tests.runners.attention.builders import Requests, starts
from tests.runners.models import recording

PAGE: Final = 4
TILES: Final = 12  # blocks that the kernel launches, whatever the lengths are
BYTES: Final = 4 * (2 * TILES + 1)
HEADS: Final = (8, 2, 4)  # of queries, of keys, and their size


def tiles_of(counts: Sequence[int]) -> list[int]:
    """Plan request by request: of each block its request and its first page, then the pages that each takes."""
    size = 1
    while sum(-(-count // size) for count in counts) > TILES:
        size += 1
    tiles = [(request, page) for request, count in enumerate(counts) for page in range(0, count, size)]
    tiles += [(-1, 0)] * (TILES - len(tiles))
    return [request for request, _ in tiles] + [page for _, page in tiles] + [size]


class Wrapper:
    """A stand-in for `BatchDecodeWithPagedKVCacheWrapper` in graphs of one size, with the arguments of its `plan`."""

    def __init__(self, rows: int) -> None:
        """Allocate a workspace, as the library does."""
        self._fixed_batch_size = rows
        self._int_workspace_buffer = torch.zeros(8)
        self._plan_info = list[int]()
        self.plans = list[list[int]]()

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        disable_split_kv: bool = False,
    ) -> None:
        """Write the plan into the workspace, as the library copies it there."""
        assert (num_qo_heads, num_kv_heads, head_dim, page_size) == (*HEADS, PAGE)
        assert indptr.device.type == last_page_len.device.type == "cpu"
        assert len(last_page_len) == self._fixed_batch_size, "the batch size is fixed in graphs"
        assert len(indices) >= int(indptr[-1])
        counts = indptr.diff().tolist()
        made = torch.tensor(tiles_of(counts), dtype=torch.int32)
        self._int_workspace_buffer[:BYTES].copy_(made.view(torch.uint8))
        self._plan_info = [TILES, int(disable_split_kv)]
        self.plans.append(counts)


class Planned(kinds.Tokens, attention.FlashInferPlanned):
    """What a decode step has."""


class Planner:
    """An engine's own part: a wrapper for each size, and the plan that a graph was captured with."""

    def __init__(self) -> None:
        """Begin without wrappers."""
        self.wrappers = dict[int, Wrapper]()
        self.frozen = dict[int, list[int]]()
        self.most_pages = torch.zeros(max(kinds.BUCKETS) * kinds.PAGES, dtype=torch.int32)

    def plan(self, kv_indptr: torch.Tensor, workspace: torch.Tensor) -> None:
        """Plan for so many requests, and refuse what does not fit the graph."""
        rows = len(kv_indptr) - 1
        wrapper = self.wrappers.setdefault(rows, Wrapper(rows))
        wrapper._int_workspace_buffer = workspace
        lengths = torch.ones(rows, dtype=torch.int32)
        wrapper.plan(kv_indptr, self.most_pages, lengths, *HEADS, PAGE)
        if self.frozen.setdefault(rows, wrapper._plan_info) != wrapper._plan_info:
            raise ValueError(f"the graph of {rows} requests has another plan: {wrapper._plan_info}")

    @property
    def plans(self) -> list[list[int]]:
        """Pages of all requests, of each plan since the last look."""
        found = [plan for wrapper in self.wrappers.values() for plan in wrapper.plans]
        for wrapper in self.wrappers.values():
            wrapper.plans.clear()
        return found


def attended(view: Any, cache: torch.Tensor) -> torch.Tensor:
    """As FlashInfer's kernels run: each block the pages that the plan gives it, then a request's blocks together."""
    *numbers, size = view.plan_workspace[:BYTES].view(torch.int32).split([TILES, TILES, 1])
    requests, firsts = numbers
    keys = cache.view(-1, PAGE, cache.shape[1])
    rows = torch.arange(view.queries.shape[0], device=cache.device)
    counts = view.kv_indptr.diff()
    places = torch.arange(kinds.PAGES, device=cache.device)
    own = view.kv_indptr[:-1, None] + places
    pages = view.kv_indices[own.clamp(max=view.kv_indices.shape[0] - 1)].long()
    scores = (keys[pages].flatten(1, 2) @ view.queries[:, :, None])[:, :, 0]
    positions = torch.arange(scores.shape[1], device=cache.device)
    lens = (counts - 1).clamp(min=0) * PAGE + view.kv_last_page_len
    found, logs = [], []
    for request, first in zip(requests, firsts, strict=True):
        page = positions // PAGE
        mine = (rows == request)[:, None] & (page >= first) & (page < first + size) & (positions < lens[:, None])
        masked = scores.masked_fill(~mine, -1e9)
        logs.append(masked.logsumexp(1))
        found.append((masked.softmax(1)[:, :, None] * keys[pages].flatten(1, 2)).sum(1))
    weights = torch.stack(logs).softmax(0)
    return (weights[:, :, None] * torch.stack(found)).sum(0)


def cache_on(device: torch.device) -> torch.Tensor:
    """Keys, which are their own values."""
    places = (1 + max(kinds.BUCKETS) * kinds.PAGES) * PAGE
    return torch.randn(places, 4, generator=torch.Generator().manual_seed(2)).to(device)


def runner_of(
    backend: Backend, inputs: Any = Planned, settings: Any = None
) -> tuple[DecodeRunner[Any], Planner, torch.Tensor]:
    """A captured runner, what plans for it, and the cache that it reads."""
    cache = cache_on(backend.device)
    planner = Planner()
    runner: DecodeRunner[Any] = DecodeRunner(
        inputs,
        lambda view: attended(view, cache),
        buckets=kinds.BUCKETS,
        sizes={**kinds.sizes_of(inputs, PAGE), attention.PLAN_BYTES: BYTES + 32},
        settings=settings or {"plan": planner.plan},
        backend=backend,
        progress=False,
        output_rows=BATCH,
    )
    runner.capture()
    return runner, planner, cache


def batch_of(one: Requests, device: torch.device, seed: int = 0) -> dict[str, Any]:
    """These requests, with lengths on the host, too."""
    return {**kinds.batch_of(one, "FlashInferPlanned", device, seed), "seq_lens_cpu": torch.tensor(one.lens)}


def expected(one: Requests, queries: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    """Each request by itself."""
    keys = [cache[torch.tensor(one.places_of(i), device=cache.device)] for i in range(len(one.lens))]
    return torch.stack([(row @ own.T).softmax(0) @ own for row, own in zip(queries, keys, strict=True)])


@pytest.mark.parametrize("batches", [40, pytest.param(1000, marks=pytest.mark.slow)])
def test_the_plan_is_this_steps(batches: int, backend: Backend) -> None:
    """Byte for byte what the library makes of padded requests, all of the workspace; and attention by it is right."""
    runner, _, cache = runner_of(backend)
    for seed, (draw, rows) in enumerate(kinds.games(17, batches)):
        one = kinds.random_requests(draw, "FlashInferPlanned", PAGE, 1, rows, 1)
        batch = batch_of(one, backend.device, seed)
        torch.testing.assert_close(runner(batch), expected(one, batch["queries"], cache), atol=1e-5, rtol=1e-5)
        view = runner.fill(batch)
        whole = kinds.padded(one, "FlashInferPlanned", 1, kinds.bucket_of(rows), backend)
        counts = [len(whole.pages_of(i)) for i in range(len(whole.lens))]
        made = torch.tensor(tiles_of(counts), dtype=torch.int32).view(torch.uint8)
        assert torch.equal(view.plan_workspace.cpu(), torch.nn.functional.pad(made, (0, 32)))
        assert view.host_page_counts.tolist() == counts
        assert view.kv_indptr.tolist() == starts(counts)


def test_it_runs_only_if_a_request_has_another_number_of_pages(backend: Backend) -> None:
    """Lengths that stay in their pages keep the plan; a page more, another bucket or another size make a new one."""
    runner, planner, _ = runner_of(backend)
    behind = -(-int(SEQ_LEN_FILL.on(backend.capabilities)) // PAGE)  # pages of a padded request
    assert sorted(planner.plans, key=len) == [[behind] * rows for rows in kinds.BUCKETS]  # the captures'
    for lens, planned in (
        ([5, 9], [[2, 3, behind]]),
        ([6, 10], []),
        ([8, 12], []),
        ([9, 12], [[3, 3, behind]]),
        ([9], [[3]]),
        ([10], []),
        ([9, 12], [[3, 3, behind]]),
        ([9, 12, 1], [[3, 3, 1]]),
        ([12, 11, 4], []),
    ):
        table = [list(range(1 + 5 * i, 6 + 5 * i)) for i in range(len(lens))]
        one = Requests(lens=lens, table=table, queries=[1] * len(lens), page=PAGE, pages=5)
        runner(batch_of(one, backend.device))
        assert planner.plans == planned
    assert runner.stats()["again"]["plan_workspace"] == {"ran": 3 + 5, "kept": 4}


class Looping(Planned):
    """Each step a token longer, on the host and on the device."""

    seq_lens: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=SEQ_LEN_FILL, then=lambda seq_lens: seq_lens + 1)
    host_seq_lens: torch.Tensor = copied(
        BATCH,
        dtype=torch.int32,
        pad=SEQ_LEN_FILL,
        placement="host",
        converts=(torch.int64,),
        source="seq_lens_cpu",
        then=lambda host_seq_lens: host_seq_lens + 1,
    )


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_in_steps_it_runs_at_the_ends_of_pages(ahead: int, backend: Backend) -> None:
    """And where requests leave; the results are right in each step."""
    runner, planner, cache = runner_of(backend, Looping)
    draw = random.Random(4)
    one = kinds.random_requests(draw, "FlashInferPlanned", PAGE, 1, 3, 1)
    one = Requests(lens=[1, 5, 9], table=one.table, queries=[1] * 3, page=PAGE, pages=kinds.PAGES)
    batch = batch_of(one, backend.device)
    batch["page_table"] = [list(row) for row in one.table]
    _ = planner.plans
    queries = batch["queries"]
    for step in runner.steps(batch, keys=["a", "b", "c"], ahead=ahead):
        lens = [length + step.number for length in one.lens]
        now = Requests(lens=lens, table=one.table, queries=[1] * 3, page=PAGE, pages=kinds.PAGES)
        got = torch.as_tensor(step.outputs)
        torch.testing.assert_close(got.to(cache.device), expected(now, queries, cache), atol=1e-5, rtol=1e-5)
        if step.number == 9:
            break
    counts = [[-(-(length + number) // PAGE) for length in one.lens] for number in range(10 + ahead)]
    changes = [counts for counts, _ in itertools.groupby(counts)]
    planned = [counts for counts, _ in itertools.groupby(planner.plans)]  # a loop trusts no contents at first
    assert planned == changes[: len(planned)]  # the last steps may not have been launched
    assert len(planned) >= len([counts for counts, _ in itertools.groupby(counts[:10])]) == 3


class Stale(Planned):
    """A plan that follows sizes alone: of whichever lengths were there first."""

    plan_workspace: torch.Tensor = computed(schedules.planned, shape=attention.PLAN_BYTES, dtype=torch.uint8, again=())


@recording
@pytest.mark.parametrize(("inputs", "is_found"), [(Planned, False), (Stale, True)])
def test_check_finds_a_plan_that_is_stale(inputs: Any, *, is_found: bool, backend: Backend) -> None:
    """By its slot, with batches whose lengths differ."""
    runner, _, _ = runner_of(backend, inputs)

    def draw(rows: int, generator: torch.Generator) -> Any:
        seed = int(torch.randint(1 << 30, (1,), generator=generator))
        one = kinds.random_requests(random.Random(seed), "FlashInferPlanned", PAGE, 1, rows, 1)
        return batch_of(one, backend.device, seed)

    report = slotgraph.check(runner, draw, rounds=2, progress=False)
    found = {one.slot for one in report.findings if one.check == "poison"}
    assert report.ok is not is_found, str(report)
    assert found == ({"plan_workspace"} if is_found else set())


def test_a_plan_that_does_not_fit_the_graph_is_refused(backend: Backend) -> None:
    """Before the step runs, and so is a runner without a plan."""
    runner, planner, _ = runner_of(backend)
    one = Requests(lens=[17], table=[[1, 2, 3, 4, 5]], queries=[1], page=PAGE, pages=5)
    planner.frozen[1] = [TILES + 1, 0]
    with pytest.raises(errors.ComputeError, match=r"slot 'plan_workspace'.*the graph of 1 requests has another plan"):
        runner(batch_of(one, backend.device))
    with pytest.raises(errors.CaptureError, match="settings have no 'plan'"):
        runner_of(backend, settings={"plans": planner.plan})
