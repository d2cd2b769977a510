"""Shortcuts beside what they must not step over: fields, absent slots, limits, and slots that are filled apart."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slotgraph import BATCH, TOKENS, Axis, DecodeRunner, Inputs, computed, copied
from slotgraph.backends import Backend
from slotgraph.dataflow.errors import BatchError, ComputeError, ReplayError
from slotgraph.extend import HOST
from tests.strategies import noise

CONTEXT = Axis("CONTEXT", fixed=True)


class Wide(Inputs):
    """Everything that a standard declaration has beside device slots with one dtype each."""

    input_ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    weights: torch.Tensor = copied(TOKENS, 3, dtype=torch.float32, pad=0.0)
    extra: torch.Tensor | None = copied(TOKENS, dtype=torch.float32, pad=0.0, default=None)
    lengths: torch.Tensor | None = copied(BATCH, dtype=torch.int32, pad=1, placement=HOST, limit=CONTEXT, default=None)
    mode: str = "null"


PATTERNS = [{"extra"}, {"lengths"}, {"extra", "lengths"}]


def step(view: Wide) -> torch.Tensor:
    """What every slot on the device says."""
    out = view.weights.sum(1) * view.input_ids
    return out if view.extra is None else out + view.extra


def runner_of(backend: Backend, lowering: str) -> DecodeRunner[Wide]:
    """A captured runner."""
    runner = DecodeRunner(
        Wide,
        step,
        buckets=[1, 2, 4, 8],
        backend=backend,
        absent=PATTERNS,
        sizes={CONTEXT: 90},
        lowering=lowering,
        progress=False,
    )
    runner.capture()
    return runner


@pytest.fixture(scope="module")
def runners() -> dict[str, dict[str, DecodeRunner[Wide]]]:
    """Captured runners that a module's tests share, by backend and lowering."""
    return {}


def pair(backend: Backend, kept: dict[str, dict[str, DecodeRunner[Wide]]]) -> tuple[DecodeRunner[Wide], ...]:
    """One with shortcuts, and one without."""
    if "in_graph" not in backend.capabilities.lowerings:
        pytest.skip(f"{backend.name} has no in_graph")
    made = kept.setdefault(backend.name, {})
    for lowering in ("in_graph", "foreach"):
        if lowering not in made:
            made[lowering] = runner_of(backend, lowering)
    return made["in_graph"], made["foreach"]


def batch_of(rows: int, seed: int, without: frozenset[str], device: torch.device, **other: Any) -> Mapping[str, Any]:
    """Random rows, without some slots."""
    every = {
        "input_ids": noise((rows,), torch.int64, seed).to(device),
        "weights": noise((rows, 3), torch.float32, seed + 1).to(device),
        "extra": noise((rows,), torch.float32, seed + 2).to(device),
        "lengths": noise((rows,), torch.int32, seed + 3).abs().clamp(max=90),
    }
    return {name: value for name, value in every.items() if name not in without} | other


steps = st.lists(
    st.tuples(
        st.integers(1, 9),
        st.integers(0, 1 << 20),
        st.sampled_from([frozenset[str](), *map(frozenset, PATTERNS)]),
        st.sampled_from(["null", "null", "null", "full"]),
    ),
    min_size=4,
    max_size=14,
)


@given(turns=steps)
@settings(max_examples=25)
def test_any_turn_of_fields_and_absent_slots(
    backend: Backend, runners: dict[str, dict[str, DecodeRunner[Wide]]], turns: list[Any]
) -> None:
    """Whatever comes after whatever, a runner with shortcuts gives the bytes and makes the decisions of one without."""
    short, plain = pair(backend, runners)
    for rows, seed, without, mode in [*turns, *turns]:  # the second time there are shortcuts
        batch = batch_of(rows, seed, without, backend.device, mode=mode)
        assert torch.equal(short(batch), plain(batch))
    assert short.stats()["steps"] == plain.stats()["steps"]
    assert short.stats()["buckets"] == plain.stats()["buckets"]
    assert short.stats()["eager"] == plain.stats()["eager"]


def test_what_goes_by_shortcut(backend: Backend, runners: dict[str, dict[str, DecodeRunner[Wide]]]) -> None:
    """A field with its default, an absent slot and a slot in host memory do not keep steps off the short way."""
    short, _ = pair(backend, runners)
    for without in (frozenset[str](), frozenset({"lengths"})):
        batch = batch_of(3, 5, without, backend.device)
        short(batch)
        fills = short.parts.tally.by_shortcut()
        short(batch)
        assert short.parts.tally.by_shortcut() == fills + 1


def test_a_limit_on_the_short_way(backend: Backend, runners: dict[str, dict[str, DecodeRunner[Wide]]]) -> None:
    """A request over the limit is refused by name although the step before it was done by shortcut."""
    short, _ = pair(backend, runners)
    batch = dict(batch_of(3, 7, frozenset(), backend.device))
    short(batch)
    right = short(batch).clone()
    with pytest.raises(BatchError, match=r"'lengths': row 1 is 91, over the limit of CONTEXT = 90"):
        short({**batch, "lengths": torch.tensor([1, 91, 2], dtype=torch.int32)})
    assert torch.equal(short(batch), right)


class Apart(Inputs):
    """A slot of another lowering, one that the step advances, and a value that the host computes."""

    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    cpu: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0, placement=HOST)
    number: torch.Tensor = computed(lambda step, factor: factor * step.live(TOKENS), shape=1, dtype=torch.int32)
    factor: Any


def test_a_shortcut_that_breaks_off(backend: Backend) -> None:
    """What a function raises in the middle of a shortcut leaves no view to be replayed, and later steps right."""
    if "in_graph" not in backend.capabilities.lowerings:
        pytest.skip(f"{backend.name} has no in_graph")
    runner = DecodeRunner(
        Apart,
        lambda view: view.ids * 100 + view.number,
        buckets=[4],
        backend=backend,
        lowering="in_graph",
        progress=False,
    )
    runner.capture()

    def batch(seed: int, factor: object) -> dict[str, Any]:
        ids = noise((3,), torch.int64, seed)
        return {"ids": ids.to(backend.device), "cpu": noise((3,), torch.int64, seed + 1), "factor": factor}

    for seed in (1, 2, 3):
        runner(batch(seed, 7))
    view = runner.fill(batch(4, 7))
    with pytest.raises(ComputeError):
        runner(batch(5, "no number"))
    with pytest.raises(ReplayError, match="not filled last"):
        runner.replay(view)
    right = batch(6, 5)
    assert torch.equal(runner(right), right["ids"] * 100 + 15)
