"""A capture changes nothing that a user can see: state beside the slots is as it was, up front and in the middle."""

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from slotgraph import TOKENS, DecodeRunner, Inputs, copied
from slotgraph.backends import Backend, load
from slotgraph.dataflow.errors import CaptureError
from tests.runners import prefilled

ROWS = 8
BUCKETS = [1, 2, 4]


class Carrying(Inputs):
    """Requests that take their id from the step before, as asynchronous schedulers have it."""

    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    carry: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=-1)
    places: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)


def by_slice(state: dict[str, torch.Tensor], _: torch.Tensor, values: torch.Tensor) -> None:
    """Write the first rows."""
    state["last"][: values.shape[0]].copy_(values)


def by_index(state: dict[str, torch.Tensor], places: torch.Tensor, values: torch.Tensor) -> None:
    """Write rows of a cache by indices."""
    state["cache"][places] = values


def by_index_copy(state: dict[str, torch.Tensor], places: torch.Tensor, values: torch.Tensor) -> None:
    """Write rows as a static cache does."""
    state["cache"].index_copy_(0, places, values)


def by_out(state: dict[str, torch.Tensor], _: torch.Tensor, values: torch.Tensor) -> None:
    """Write by `out=`."""
    torch.add(values, 1, out=state["last"][: values.shape[0]])


def by_count(state: dict[str, torch.Tensor], _places: torch.Tensor, _values: torch.Tensor) -> None:
    """Count steps, and write where the count says."""
    state["count"].add_(1)
    state["cache"].index_copy_(0, state["count"] % ROWS, state["count"])


def by_random(state: dict[str, torch.Tensor], _places: torch.Tensor, values: torch.Tensor) -> None:
    """Draw random numbers."""
    state["noise"][: values.shape[0]].copy_(torch.rand(values.shape, device=values.device))


def by_batch_norm(state: dict[str, torch.Tensor], _places: torch.Tensor, values: torch.Tensor) -> None:
    """Move a running mean, which the operator's schema does not say."""
    channels = values.double().reshape(-1, 1, 1).expand(-1, ROWS, 2).to(torch.float32)
    functional.batch_norm(channels, state["noise"], torch.ones(ROWS, device=values.device), training=True)


WRITES = [by_slice, by_index, by_index_copy, by_out, by_count, by_random, by_batch_norm]
Write = Callable[[dict[str, torch.Tensor], torch.Tensor, torch.Tensor], None]


def state_on(device: torch.device, seed: int) -> dict[str, torch.Tensor]:
    """A step's state, with random contents."""
    draw = torch.Generator(device="cpu").manual_seed(seed)
    numbers = {
        "last": torch.randint(1, 99, (ROWS,), generator=draw),
        "cache": torch.randint(1, 99, (ROWS,), generator=draw),
        "pool": torch.randint(1, 99, (ROWS, 1), generator=draw),
        "count": torch.randint(1, 99, (1,), generator=draw),
        "noise": torch.rand(ROWS, generator=draw),
    }
    return {name: one.to(device) for name, one in numbers.items()}


def step_of(state: dict[str, torch.Tensor], writes: Sequence[Write]) -> Callable[[Any], torch.Tensor]:
    """A step that reads and writes its state."""

    def step(view: Any) -> torch.Tensor:
        known = state["last"] + state["cache"] + state["pool"][:, 0]
        out = torch.where(view.carry >= 0, known[view.carry.clamp(min=0)], view.ids) * 3 + 1
        for write in writes:
            write(state, view.places, out % 97)
        return out

    return step


def batch_of(rows: int, seed: int, device: torch.device) -> dict[str, torch.Tensor]:
    """A batch whose rows write places of their own."""
    draw = torch.Generator(device="cpu").manual_seed(seed)
    columns = {
        "ids": torch.randint(1, 99, (rows,), generator=draw),
        "carry": torch.randint(-1, ROWS, (rows,), generator=draw),
        "places": 1 + torch.randperm(ROWS - 1, generator=draw)[:rows],
    }
    return {name: one.to(device) for name, one in columns.items()}


def assert_same(state: dict[str, torch.Tensor], before: dict[str, torch.Tensor]) -> None:
    """No byte of the state changed."""
    assert [name for name in state if not torch.equal(state[name], before[name])] == []


def check_every_capture(backend: Backend, writes: Sequence[Write], seeds: list[int], *, compiler: bool) -> None:
    """A runner that captures up front and one that captures late do the same, and captures alone change nothing."""
    states = [state_on(backend.device, seeds[0]) for _ in range(2)]
    early, late = (
        DecodeRunner(Carrying, step_of(state, writes), buckets=BUCKETS, backend=backend, lazy=lazy, warmups=2)
        for state, lazy in zip(states, (False, True), strict=True)
    )
    if compiler:
        importlib.import_module("torch._dynamo")  # the look is no warm-up then: compiled functions were not compiled
    befores = [{name: one.clone() for name, one in state.items()} for state in states]
    random = torch.get_rng_state()
    for runner, state, before in zip((early, late), states, befores, strict=True):
        runner.capture()
        assert_same(state, before)
    assert torch.equal(torch.get_rng_state(), random)
    for seed in seeds:
        batch = batch_of(1 + seed % 4, seed, backend.device)
        outputs = []
        for runner in (early, late):
            torch.manual_seed(seed)
            outputs.append(runner(batch).clone())
        assert torch.equal(*outputs)
        assert_same({**states[1], "noise": states[0]["noise"]}, states[0])
        if backend.device.type == "cpu":  # a device's graphs draw from their own offsets
            assert torch.equal(states[1]["noise"], states[0]["noise"])


@given(
    writes=st.lists(st.sampled_from(WRITES), min_size=1, max_size=4),
    seeds=st.lists(st.integers(0, 999), min_size=1, max_size=6),
    name=st.sampled_from(["cpu", "cpu-capture"]),
)
def test_early_and_late(writes: Sequence[Write], seeds: list[int], name: str) -> None:
    """Any state that operators write."""
    check_every_capture(load(name)(), writes, seeds, compiler=False)


@pytest.mark.parametrize("compiler", [False, True])
def test_all_writes(backend: Backend, *, compiler: bool) -> None:
    """All of them in one step, on each device that has them: the stand-in for an NPU has no batch_norm."""
    writes = [one for one in WRITES if one is not by_batch_norm or backend.device.type != "npu"]
    check_every_capture(backend, writes, [3, 5, 8, 1, 6], compiler=compiler)


@pytest.mark.parametrize("kind", ["breakable", "piecewise"])
def test_prefill_joins_a_running_decoder(backend: Backend, kind: str) -> None:
    """A runner over caches in use leaves them as they are when it captures, up front and in the middle of a run."""
    models = [prefilled.Model(named=kind == "piecewise").to(backend.device) for _ in range(2)]
    draw = torch.Generator().manual_seed(7)
    for caches in zip(*(held_by(model) for model in models), strict=True):
        used = torch.rand(caches[0].shape, generator=draw)
        for cache in caches:
            cache.copy_(used)
    before = models[0].caches().clone()
    early, late = (
        prefilled.runner_of(kind, model, backend, buckets=[4, 8], lazy=lazy)
        for model, lazy in zip(models, (False, True), strict=True)
    )
    for runner, model in zip((early, late), models, strict=True):
        runner.capture()
        assert torch.equal(model.caches(), before)
    for seed, lengths in enumerate(([3], [2, 4], [1, 1])):
        batch = prefilled.batch_of(lengths, seed, backend.device)
        assert torch.equal(late(batch), early(batch))
        assert torch.equal(models[1].caches(), models[0].caches())


def held_by(model: prefilled.Model) -> list[torch.Tensor]:
    """The tensors that the model writes."""
    return [layer.cache for layer in model.modules() if isinstance(layer, prefilled.Layer)]


def test_too_large_to_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state of which no copy fits is refused by its name, up front and late, and `state=` is the way out."""
    kv_cache = torch.rand(64)
    before = kv_cache.clone()

    def step(view: Any) -> torch.Tensor:
        kv_cache.add_(1)
        ids: torch.Tensor = view.ids + kv_cache[0].long() * 0
        return ids

    monkeypatch.setattr("slotgraph.runners.state._free_on", lambda *_: 100)
    runner = DecodeRunner(Carrying, step, buckets=[2], backend="cpu")
    with pytest.raises(CaptureError, match=r"kv_cache: the float32 tensor of shape \[64\].*give state="):
        runner.capture()
    assert torch.equal(kv_cache, before)
    late = DecodeRunner(Carrying, step, buckets=[2], backend="cpu", lazy=True)
    late.capture()
    late(batch_of(2, 1, torch.device("cpu")))
    assert late.report is not None
    assert "kv_cache" in late.report.failed[2]
    assert torch.equal(kv_cache, before + 1)  # the step itself, which ran eagerly
    kv_cache.copy_(before)
    given_part = DecodeRunner(Carrying, step, buckets=[2], backend="cpu", state=[kv_cache[:8]])
    given_part.capture()
    assert torch.equal(kv_cache[:8], before[:8])
    assert not torch.equal(kv_cache[8:], before[8:])


def test_rows_of_a_large_cache_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a cache that is written by indices, the rows alone are kept: it may fill the device."""
    monkeypatch.setattr("slotgraph.runners.state._free_on", lambda *_: 4096)
    cache = torch.rand(100_000)
    before = cache.clone()

    def step(view: Any) -> torch.Tensor:
        cache[view.places] = view.ids.float()
        cache.index_add_(0, view.places, view.ids.float() + 1)
        return cache[view.places]

    runner = DecodeRunner(Carrying, step, buckets=[4], backend="cpu", warmups=3)
    runner.capture()
    assert torch.equal(cache, before)
