"""Lending: an object outside gets a slot's view while the step's code runs, so that a graph records its fast path."""

from typing import Any

import attrs
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from slotgraph import BATCH, TOKENS, DecodeRunner, EagerRunner, Inputs, copied
from slotgraph.backends.base import Backend
from slotgraph.dataflow.errors import BatchError, CaptureError, ConfigError

LAYERS = 5
ROWS = 64
WINDOW = 40


@attrs.define(eq=False)
class Pool:
    """A sliding-window KV pool: rows of its own, reached through a table, or straight where it was lent the locations.

    translations: look-ups that its code made. seen: shapes of what it was lent, None where it was taken back.
    """

    table: torch.Tensor
    rows: torch.Tensor
    lent: torch.Tensor | None = None
    translations: int = 0
    seen: list[tuple[int, ...] | None] = attrs.field(factory=list)

    @classmethod
    def on(cls, device: torch.device | str) -> "Pool":
        """A pool in which each of the other pool's rows has its place; what was not written is no live row's value."""
        draw = torch.Generator().manual_seed(4)
        table = torch.cat([torch.zeros(1), torch.randperm(WINDOW - 1, generator=draw) + 1, torch.zeros(ROWS - WINDOW)])
        return cls(table.to(device, torch.int32), torch.full((LAYERS, WINDOW, 2), -1.0, device=device))

    def lend(self, locations: torch.Tensor | None) -> None:
        """Take the locations of this step's tokens, or give them back."""
        self.lent = locations
        self.seen.append(None if locations is None else tuple(locations.shape))

    def write(self, layer: int, locations: torch.Tensor, values: torch.Tensor) -> None:
        """Store one row a token at the other pool's locations."""
        where = self.lent
        if where is None:
            self.translations += 1
            where = self.table[locations]
        self.rows[layer].index_put_((where,), values)


class SlidingInputs(Inputs):
    """Tokens with their locations in both pools."""

    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    out_cache_loc: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    out_cache_loc_swa: torch.Tensor | None = copied(TOKENS, dtype=torch.int32, pad=0, default=None, when="window")


@attrs.frozen(eq=False)
class Model:
    """Stores something of each token in each layer."""

    pool: Pool

    def __call__(self, view: SlidingInputs) -> torch.Tensor:
        """[TOKENS, 2] floats."""
        hidden = torch.stack([view.ids, view.ids + 1], 1).float()
        for layer in range(LAYERS):
            hidden = hidden * 0.5 + layer
            self.pool.write(layer, view.out_cache_loc, hidden)
        return hidden


def batch_of(pool: Pool, rows: int, seed: int) -> dict[str, torch.Tensor]:
    """Random tokens at random places, no two at one."""
    draw = torch.Generator().manual_seed(seed)
    at = (torch.randperm(WINDOW - 1, generator=draw)[:rows] + 1).to(pool.table.device)
    ids = torch.randint(1, 100, (rows,), generator=draw).to(pool.table.device)
    return {"ids": ids, "out_cache_loc": at, "out_cache_loc_swa": pool.table[at]}


def runner_over(pool: Pool, backend: Backend | str, **options: Any) -> DecodeRunner[SlidingInputs]:
    """A runner for 2 and 4 requests that lends the pool its locations, unless told otherwise."""
    given: dict[str, Any] = {"lend": {"out_cache_loc_swa": pool.lend}, "settings": {"window": True}, **options}
    return DecodeRunner(SlidingInputs, Model(pool), backend=backend, buckets=[2, 4], **given)


def assert_stored(pool: Pool, batch: dict[str, torch.Tensor]) -> None:
    """The rows of a batch are where the table says, in each layer."""
    hidden = torch.stack([batch["ids"], batch["ids"] + 1], 1).float()
    for layer in range(LAYERS):
        hidden = hidden * 0.5 + layer
        assert torch.equal(pool.rows[layer][pool.table[batch["out_cache_loc"]].long()], hidden)


def looked_up(runner: DecodeRunner[SlidingInputs], batch: dict[str, torch.Tensor], device: torch.device) -> int:
    """Look-ups of one replay: calls of aten::index on the CPU, kernels of any kind on a device."""
    view = runner.fill(batch)
    on_device = device.type != "cpu"
    kind = ProfilerActivity.CUDA if on_device else ProfilerActivity.CPU
    with profile(activities=[kind], acc_events=True) as profiled:
        runner.replay(view)
        if on_device:
            torch.accelerator.synchronize()
    names = [event.name for event in profiled.events() or ()]
    return len([name for name in names if not name.startswith("Mem")]) if on_device else names.count("aten::index")


def test_graph_has_no_translation(backend: Backend) -> None:
    """A captured step of a pool that is lent its locations makes no look-up; without, it makes one in each layer."""
    if backend.device.type not in {"cpu", "cuda"}:
        pytest.skip(f"torch's profiler counts no kernels on {backend.device.type}")
    counts, pools = [], [Pool.on(backend.device) for _ in range(2)]
    for pool, lend in zip(pools, ({"out_cache_loc_swa": pools[0].lend}, {}), strict=True):
        runner = runner_over(pool, backend, lend=lend)
        runner.capture()
        for seed, rows in enumerate((3, 1, 4, 2)):
            batch = batch_of(pool, rows, seed)
            runner(batch)
            assert_stored(pool, batch)
        counts.append(looked_up(runner, batch_of(pool, 3, seed=9), backend.device))
    lent, translated = counts
    assert translated - lent == LAYERS
    assert lent == 0 or backend.device.type != "cpu"
    assert pools[0].translations == 0
    assert torch.equal(pools[0].rows[:, 1:], pools[1].rows[:, 1:])  # row 0 is the padded rows' own


@pytest.mark.parametrize("lazy", [False, True])
def test_what_is_lent_and_when(cpu: str, *, lazy: bool) -> None:
    """Each warm-up and each capture has its bucket's view, and each ends with None: early, or with the first batch."""
    pool = Pool.on("cpu")
    runner = runner_over(pool, cpu, warmups=2, lazy=lazy)
    runner.capture()
    each = len(pool.seen) // 4
    assert each in ({0} if lazy else {3, 4})  # the look, which may be the first warm-up, the other ones and the capture
    assert pool.seen == [(4,), None] * each + [(2,), None] * each
    runner(batch_of(pool, 3, 1))
    runner(batch_of(pool, 2, 2))
    assert (pool.lent, pool.translations) == (None, 0)
    replayed = [(4,), None, (2,), None] if cpu == "cpu" else []  # whose replays run the step's code again
    runs = (len(pool.seen) - len(replayed)) // 4
    assert runs in {3, 4}
    assert sorted(pool.seen, key=str) == sorted([(4,), None, (2,), None] * runs + replayed, key=str)


def test_eager_runs_lend_too(backend: Backend) -> None:
    """A batch without a graph, and every batch of an eager runner, has its own rows lent, without a look-up."""
    pool = Pool.on(backend.device)
    runner = runner_over(pool, backend)
    runner.capture()
    eager = EagerRunner(
        SlidingInputs, Model(pool), backend=backend, settings={"window": True}, lend={"out_cache_loc_swa": pool.lend}
    )
    for run in (runner, eager):
        pool.seen.clear()
        batch = batch_of(pool, 7, seed=5)
        run(batch)
        assert_stored(pool, batch)
        assert pool.seen == [(7,), None]
    assert pool.translations == 0


@pytest.mark.parametrize("how", ["switched off", "absent"])
def test_slot_that_is_not_there(cpu: str, how: str) -> None:
    """A slot that settings switch off, or that a batch comes without, is lent as None: the pool looks up."""
    pool = Pool.on("cpu")
    runner = runner_over(pool, cpu, settings={"window": how == "absent"}, absent=[{"out_cache_loc_swa"}])
    runner.capture()
    for seed, rows in enumerate((3, 7)):
        batch = batch_of(pool, rows, seed)
        del batch["out_cache_loc_swa"]
        pool.seen.clear()
        runner(batch)
        assert_stored(pool, batch)
        assert set(pool.seen) <= {None}
    assert pool.translations > 0


class Broken(Model):
    """A step that raises on the way."""

    def __call__(self, view: SlidingInputs) -> torch.Tensor:
        """Nothing."""
        assert self.pool.lent is not None
        super().__call__(view)
        message = "no kernel"
        raise RuntimeError(message)


def test_taken_back_where_the_step_raises(cpu: str) -> None:
    """A step that raises at capture, or in an eager run, leaves nothing lent."""
    pool = Pool.on("cpu")
    lend = {"out_cache_loc_swa": pool.lend}
    runner = DecodeRunner(
        SlidingInputs, Broken(pool), backend=cpu, buckets=[2], settings={"window": True}, lend=lend, warmups=0
    )
    with pytest.raises(CaptureError, match="no kernel"):
        runner.capture()
    assert pool.seen == [(2,), None]
    with pytest.raises(RuntimeError, match="no kernel"):
        runner(batch_of(pool, 1, 1))
    assert pool.seen == [(2,), None, (1,), None]


def test_all_are_taken_back(cpu: str) -> None:
    """Where one object refuses what it is lent, or to give it back, the others still get their None."""
    pools = [Pool.on("cpu") for _ in range(2)]

    def refuse(locations: torch.Tensor | None) -> None:
        message = "not now" if locations is not None else "never"
        raise RuntimeError(message)

    eager = EagerRunner(
        SlidingInputs,
        Model(pools[0]),
        backend=cpu,
        settings={"window": True},
        lend={"ids": pools[0].lend, "out_cache_loc_swa": refuse, "out_cache_loc": pools[1].lend},
    )
    with pytest.raises(RuntimeError, match="never"):
        eager(batch_of(pools[0], 3, 1))
    assert pools[0].seen == [(3,), None]
    assert pools[1].seen == []


def test_refused_batch_lends_nothing(cpu: str) -> None:
    """What is refused never comes to the step, so nothing is lent for it."""
    pool = Pool.on("cpu")
    runner = runner_over(pool, cpu)
    runner.capture()
    pool.seen.clear()
    for rows in (3, 7):
        with pytest.raises(BatchError):
            runner({**batch_of(pool, rows, 1), "ids": torch.rand(rows)})
    assert pool.seen == []


def test_wrong_loans(cpu: str) -> None:
    """A name that is no slot, and what cannot be called, are refused when the runner is made."""
    pool = Pool.on("cpu")
    for make in (runner_over, eager_over):
        with pytest.raises(ConfigError, match=r"lend names 'out_cache_loc_swe', which is no slot of SlidingInputs"):
            make(pool, cpu, lend={"out_cache_loc_swe": pool.lend})
        with pytest.raises(ConfigError, match="lend of slot 'ids': expected a function of the slot's view, got tensor"):
            make(pool, cpu, lend={"ids": pool.table})


def eager_over(pool: Pool, backend: str, **options: Any) -> EagerRunner[SlidingInputs]:
    """An eager runner over a pool."""
    return EagerRunner(SlidingInputs, Model(pool), backend=backend, settings={"window": True}, **options)


class Rows(Inputs):
    lens: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=1)


def test_lent_view_is_the_slot_itself(cpu: str) -> None:
    """What is lent is the memory that every fill writes, at the bucket's size."""
    taken: list[Any] = []
    runner = DecodeRunner(
        Rows, lambda view: view.lens * 2, backend=cpu, buckets=[4], output_rows=BATCH, lend={"lens": taken.append}
    )
    runner.capture()
    lent = taken[-2]
    assert runner({"lens": [5, 6, 7]}).tolist() == [10, 12, 14]
    assert (lent.tolist(), lent.data_ptr()) == ([5, 6, 7, 1], runner.inputs(4).lens.data_ptr())
