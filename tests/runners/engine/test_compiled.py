"""Functions of computed slots that are compiled as one, beside the same functions as written."""

import contextlib
from typing import Any, Final

import attrs
import pytest
import torch

import slotgraph
from slotgraph import BATCH, TOKENS, Axis, DecodeRunner, InputBuffers, Inputs, computed, copied, output
from slotgraph.backends import Backend
from slotgraph.backends.cpu import CpuBackend
from slotgraph.extend import fills
from slotgraph.runners.engine import compiled
from slotgraph.runners.engine.compiled import AS_ONE, OTHER_MODES, OWN_KERNEL
from tests.runners.models import decoder

POOL: Final = 64
PAGES: Final = Axis("PAGES", fixed=True)
COMPILED: Final = ("cpu", "cuda")
"""Backends whose graphs run compiled code. Captures of `cpu-capture` record each operator, and torch.compile has no
compiler for the NPUs that tests run on."""


def tables() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Two tables of a request pool, which functions read, by the kind of device."""
    made = tuple(torch.randint(1, 1000, (POOL,), generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    devices = {"cpu", "cpu" if accelerator is None else accelerator.type}
    return {device: (made[0].to(device), made[1].to(device)) for device in devices}


TABLES: Final = tables()


def write_pages(lens: torch.Tensor, table: torch.Tensor, settings: Any, out: torch.Tensor) -> None:
    """The page of each request's newest token, written into the slot."""
    out.copy_(table.gather(1, (lens % settings)[:, None])[:, 0])


def shifted(rows: torch.Tensor, extra: torch.Tensor | None) -> torch.Tensor:
    """The pool's rows, moved by an optional slot."""
    return rows + 1 if extra is None else rows + extra


class Pooled(Inputs):
    """What follows from tables of a request pool, in several ways."""

    rows: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
    table: torch.Tensor = copied(BATCH, PAGES, dtype=torch.int32, pad=0)
    extra: torch.Tensor | None = copied(BATCH, dtype=torch.int64, pad=3, default=None)
    ids: torch.Tensor = computed(lambda rows: TABLES[rows.device.type][0][rows], shape=TOKENS, dtype=torch.int64)
    lens: torch.Tensor = computed(lambda rows: TABLES[rows.device.type][1][rows] + 1, shape=BATCH, dtype=torch.int64)
    short: torch.Tensor = computed(lambda lens: (lens - 1).to(torch.int32), shape=BATCH, dtype=torch.int32)
    starts: torch.Tensor = computed(lambda lens: lens.cumsum(0) - lens, shape=BATCH, dtype=torch.int64)
    half: torch.Tensor = computed(lambda lens: (lens / 2).ceil().long(), shape=BATCH, dtype=torch.int64)
    blocks: torch.Tensor = computed(lambda half: half // 7 + half % 5, shape=BATCH, dtype=torch.int64)
    page: torch.Tensor = computed(write_pages, shape=BATCH, dtype=torch.int32)
    moved: torch.Tensor = computed(shifted, shape=BATCH, dtype=torch.int64)
    is_long: torch.Tensor = computed(lambda lens: lens > 500, shape=BATCH, dtype=torch.bool)
    most: torch.Tensor = computed(lambda lens: lens.amax().reshape(1), shape=1, dtype=torch.int64)


COMPUTED: Final = tuple(name for name, slot in Pooled.slotgraph.slots.items() if slot.needs)


def all_slots(view: Pooled) -> tuple[torch.Tensor, ...]:
    """Every slot, in new memory."""
    return tuple(value.clone() for name in COMPUTED if (value := getattr(view, name)) is not None)


def made(backend: Any, **options: Any) -> DecodeRunner[Any]:
    """A captured runner that returns all computed slots whole."""
    given: dict[str, Any] = {"buckets": [1, 2, 4, 8], "sizes": {PAGES: 3}, "settings": 3, "output_rows": None}
    runner: DecodeRunner[Any] = decoder(Pooled, all_slots, backend=backend, absent=[{"extra"}], **given, **options)
    return runner


@pytest.mark.slow
def test_compiled_functions_make_the_same_bytes(backend: Backend) -> None:
    """In every bucket, at every live size, with and without an optional slot; padded rows included."""
    ours, plain = made(backend, compile_computed=True), made(backend, compile_computed=False)
    how = {*ours.stats()["capture"]["functions"].values()}
    assert how == {AS_ONE} or backend.name not in COMPILED
    assert plain.stats()["capture"]["functions"] == {}
    draw = torch.Generator().manual_seed(5)
    for number in range(64):
        live = 1 + number % 8
        batch = {
            "rows": torch.randint(0, POOL, (live,), generator=draw).to(backend.device),
            "table": torch.randint(0, 1000, (live, 3), generator=draw, dtype=torch.int32).to(backend.device),
        }
        if number % 3:
            batch["extra"] = torch.randint(0, 1000, (live,), generator=draw).to(backend.device)
        for got, expected in zip(ours(batch), plain(batch), strict=True):
            assert torch.equal(got, expected)


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch) -> str:
    """A device that compiles functions of whole numbers."""
    record = attrs.evolve(CpuBackend().capabilities, compiles=True)
    monkeypatch.setattr(CpuBackend, "capabilities", record)
    return CpuBackend.name


def test_a_device_compiles_whole_numbers_only(monkeypatch: pytest.MonkeyPatch, compiling: str) -> None:
    """By default functions with floating-point numbers run as written, and reports say why."""
    compile_with, given = torch.compile, list[str]()

    def eager(function: Any, *, backend: str, **options: Any) -> Any:
        given.append(backend)
        return compile_with(function, backend="eager", **options)

    monkeypatch.setattr(torch, "compile", eager)
    runner = made(compiling)
    how = runner.stats()["capture"]["functions"]
    why = "it makes floating-point numbers, which may be rounded otherwise: ask by compile_computed=True"
    assert how == dict.fromkeys(COMPUTED, AS_ONE) | {"half": why}
    # one group before `half`, with and without the optional slot, and one after it, for all four buckets
    assert given.count("inductor") == 3
    assert f"functions half: {why}" in " ".join(str(slotgraph.explain(runner)).split())


@pytest.mark.parametrize("fault", ["raises", "differs"])
def test_what_is_not_compiled_right_runs_as_written(
    monkeypatch: pytest.MonkeyPatch, compiling: str, fault: str
) -> None:
    """A compiler that raises, or makes other numbers, costs no more than its time."""

    def broken(calls: Any, backend: str = "inductor") -> Any:
        def run(tensors: Any) -> None:
            if backend == "inductor" and fault == "raises":
                raise RuntimeError("no compiler here\nwith a long explanation")
            if backend == "inductor":
                tensors[calls[0].target].add_(1)

        return run

    monkeypatch.setattr(compiled, "_compiled", broken)
    ours, plain = made(compiling), made("cpu-capture")
    how = {one for name, one in ours.stats()["capture"]["functions"].items() if name != "half"}
    if fault == "raises":
        assert how == {"torch.compile refuses it: RuntimeError: no compiler here"}
    else:
        assert all(one.startswith("torch.compile gives '") and one.endswith("' other values") for one in how)
    batch = {"rows": [3, 5, 7], "table": [[1, 2, 3]] * 3}
    for got, expected in zip(ours(batch), plain(batch), strict=True):
        assert torch.equal(got, expected)


@torch.compiler.disable  # type: ignore[untyped-decorator] # torch has no types for it
def looked_up(rows: torch.Tensor) -> torch.Tensor:
    """A function that torch.compile may not look into."""
    return TABLES[rows.device.type][0][rows]


class Mixed(Inputs):
    """Functions of which torch.compile takes some."""

    rows: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
    ids: torch.Tensor = computed(looked_up, shape=BATCH, dtype=torch.int64)
    next_ids: torch.Tensor = computed(lambda ids: ids + 1, shape=BATCH, dtype=torch.int64)


@pytest.mark.slow
def test_a_function_that_cannot_be_compiled_leaves_the_others() -> None:
    """It runs as written between them, and its reason is reported."""
    runner = decoder(Mixed, lambda view: view.next_ids, backend="cpu", buckets=[4], compile_computed=True)
    how = runner.stats()["capture"]["functions"]
    assert how["ids"].startswith("torch.compile refuses it: ")
    assert how["next_ids"] == AS_ONE
    rows = torch.tensor([5, 9, 60])
    assert torch.equal(runner({"rows": rows}), TABLES["cpu"][0][rows] + 1)


class Stepping(Inputs):
    """Rules that are functions, one of which needs another's new value."""

    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=-1, then=lambda next_ids: next_ids)
    turn: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=7, then=lambda turn, ids: (turn * 3 + ids) % 11)
    place: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0, then=lambda place, turn: (place + turn) % 64)
    found: torch.Tensor = computed(lambda place: TABLES[place.device.type][0][place], shape=BATCH, dtype=torch.int64)
    next_ids: torch.Tensor = output(BATCH, dtype=torch.int64)


def follow(view: Stepping) -> torch.Tensor:
    """The next ids."""
    return view.next_ids.copy_((view.ids + view.turn + view.found) % 97)


@pytest.mark.slow
def test_compiled_rules_step_alike(backend: Backend) -> None:
    """Steps launched ahead, with requests that leave and join, and rules compiled or as written."""
    runners = [
        decoder(
            Stepping,
            follow,
            backend=backend,
            buckets=[2, 4],
            compile_computed=wanted,
            lowering="in_graph" if "in_graph" in backend.capabilities.lowerings else "auto",
            output_rows=BATCH,
        )
        for wanted in (True, False)
    ]
    how = runners[0].stats()["capture"]["functions"]
    assert how == dict.fromkeys(("ids", "turn", "place", "found"), AS_ONE) or backend.name not in COMPILED
    first = {"ids": [3, 5, 8], "turn": [1, 2, 3], "place": [10, 20, 30]}
    told = list[list[Any]]()
    for runner in runners:
        found = list[Any]()
        for step in runner.steps(first, keys=["a", "b", "c"], ahead=1):
            found += step.tokens()
            if step.number == 3:
                step.leave(["b"])
            if step.number == 5:
                step.join({"ids": [13, 21], "turn": [4, 5], "place": [40, 50]}, ["d", "e"])
            if step.number == 12:
                break
        told.append(found)
    assert told[0] == told[1]
    assert len(told[0]) > 36


@pytest.mark.slow
def test_prepare_compiles_for_graphs_of_ones_own(backend: Backend) -> None:
    """What `fill_in_graph` records is compiled by `prepare`, which leaves the slots as they are."""
    batch = {
        "rows": torch.tensor([3, 5, 60], device=backend.device),
        "table": torch.arange(9, dtype=torch.int32, device=backend.device).view(3, 3),
        "extra": torch.tensor([1, 2, 3], device=backend.device),
    }
    found = list[Any]()
    for wanted in (True, False):
        buffers = InputBuffers(
            Pooled, {BATCH: 4, TOKENS: 4, PAGES: 3}, settings=3, backend=backend, compile_computed=wanted
        )
        before = all_slots(buffers.fill(batch, live={TOKENS: 3}))
        buffers.prepare()
        assert all(map(torch.equal, before, all_slots(buffers.view())))
        view = buffers.view()
        with backend.stream():
            backend.synchronize()

            def step(buffers: InputBuffers[Pooled] = buffers, view: Pooled = view) -> tuple[torch.Tensor, ...]:
                buffers.fill_in_graph()
                return all_slots(view)

            step()
            graph = backend.capture(torch.no_grad()(step))
        buffers.fill(batch, live={TOKENS: 3})
        graph.replay()
        backend.synchronize()
        found.append([one.clone() for one in graph.outputs])
    assert all(map(torch.equal, *found))


@pytest.mark.slow
@pytest.mark.parametrize(
    "around",
    [torch.no_grad, torch.inference_mode, contextlib.nullcontext],
    ids=["no_grad", "inference_mode", "gradients"],
)
@pytest.mark.parametrize("prepared", [torch.no_grad, torch.inference_mode], ids=["in no_grad", "in inference_mode"])
def test_compiled_functions_run_in_every_mode(backend: Backend, around: Any, prepared: Any) -> None:
    """Nothing is compiled inside of a capture, whatever mode it runs in."""
    rows = torch.tensor([3, 5, 60], device=backend.device)
    buffers = InputBuffers(Stepping, {BATCH: 4, TOKENS: 4}, backend=backend, compile_computed=True)
    with prepared():
        buffers.prepare()
    before = buffers.stats()["functions"]
    assert {*before.values()} == {AS_ONE} or backend.device.type == "npu"
    with around():
        view = buffers.view()

        def step() -> torch.Tensor:
            buffers.fill_in_graph()
            return view.found.clone()

        graph = backend.capture(step)
    assert buffers.stats()["functions"] == before or backend.name not in COMPILED
    batch = {"ids": rows, "turn": rows, "place": rows}
    buffers.fill(batch, live={TOKENS: 3, BATCH: 3})
    graph.replay()
    backend.synchronize()
    assert graph.outputs[:3].tolist() == TABLES[backend.device.type][0][rows].tolist()


@pytest.mark.slow
def test_settings_of_torch_that_changed_since_are_reported(backend: Backend) -> None:
    """With other settings than those that it was compiled with a function runs as written, inside of a capture, too."""
    buffers = InputBuffers(Stepping, {BATCH: 4, TOKENS: 4}, backend=backend, compile_computed=True)
    buffers.prepare()
    with torch.autocast(backend.device.type, dtype=torch.bfloat16):
        buffers.fill_in_graph()
    assert OTHER_MODES in buffers.stats()["functions"].values() or backend.device.type == "npu"


LEFT_ALONE: Final = "leaves a slot alone"


def offsets_kernel(fault: str) -> Any:
    """What stands for a kernel of a device, by plain operators."""

    def launch(lens: torch.Tensor, out: Any) -> None:
        if fault == "raises":
            raise RuntimeError("no such chip")
        out["starts"].copy_(lens.cumsum(0) - lens)
        if fault != LEFT_ALONE:
            out["ends"].copy_(lens.cumsum(0) + (fault == "differs"))

    return launch


@pytest.mark.parametrize("fault", ["", "raises", "differs", LEFT_ALONE])
def test_a_kernel_of_its_own_runs_if_it_makes_the_same_bytes(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """The kernel replaces its function, and tails and later functions see what it wrote.

    A kernel that raises, or writes other bytes, is refused, and the function is compiled.
    """
    ran = list[str]()

    @fills("starts", "ends", kernel=offsets_kernel(fault))
    def offsets(lens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if not torch.compiler.is_compiling():  # a list that grows would be compiled anew
            ran.append("function")
        return lens.cumsum(0) - lens, lens.cumsum(0)

    class Offsets(Inputs):
        lens: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=2)
        starts: torch.Tensor = computed(offsets, shape=BATCH, dtype=torch.int64)
        ends: torch.Tensor = computed(offsets, shape=BATCH, dtype=torch.int64, pad=-1)
        middles: torch.Tensor = computed(lambda starts, ends: starts + ends, shape=BATCH, dtype=torch.int64)

    monkeypatch.setattr(compiled, "_has_kernel", lambda one: one.compute.kernel is not None)
    runner: DecodeRunner[Any] = decoder(
        Offsets,
        lambda view: torch.stack([view.starts, view.ends, view.middles], 1),
        backend="cpu",
        buckets=[4],
        compile_computed=True,
        output_rows=BATCH,
    )
    how = runner.stats()["capture"]["functions"]
    why = {
        "": OWN_KERNEL,
        "raises": f"{AS_ONE}, since {OWN_KERNEL} refuses it: RuntimeError: no such chip",
        "differs": f"{AS_ONE}, since {OWN_KERNEL} gives 'ends' other values",
        LEFT_ALONE: f"{AS_ONE}, since {OWN_KERNEL} gives 'ends' other values",
    }
    assert (how["starts"], how["ends"]) == (why[fault],) * 2
    ran.clear()
    view = runner.fill({"lens": [3, 5, 7]})
    assert runner.replay(view).tolist() == [[0, 3, 3], [3, 8, 11], [8, 15, 23]]
    assert view.ends.tolist() == [3, 8, 15, -1]
    assert not ran
