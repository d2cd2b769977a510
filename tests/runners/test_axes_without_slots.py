"""Sizes of axes that no slot has: told by a relation or refused, never the bucket's in place of the batch's."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from slotgraph import (
    BATCH,
    TOKENS,
    Axis,
    BreakableRunner,
    DecodeRunner,
    Inputs,
    Step,
    computed,
    copied,
    errors,
)
from slotgraph.backends import Backend
from slotgraph.extend import DEVICE, HOST
from tests.packing import NAME, backend_of
from tests.runners.prefilled import Inner
from tests.strategies import asked, declaration_of, one_sided

BUCKETS = [2, 5]

PAGES = Axis("PAGES")

LOWERINGS = ("foreach", "slot_by_slot", "in_graph", "fused")

Sizes = dict[Axis, int]


def sizes_of(requests: int, width: int) -> Sizes:
    """What a batch of so many requests has on each axis."""
    return {BATCH: requests, TOKENS: requests * width}


def batch_of(inputs: type[Inputs], live: Sizes, seed: int, device: Any = "cpu") -> dict[str, torch.Tensor]:
    """Random rows for each copied slot, all of which are on the device."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, slot in inputs.slotgraph.slots.items():
        if slot.reads(name) is not None:
            shape = [dim.at(live) for dim in slot.shape]
            dtype = slot.dtype if isinstance(slot.dtype, torch.dtype) else torch.int64
            found[name] = torch.randint(1, 99, shape, generator=generator).to(device, dtype)
    return found


def seen(view: Inputs) -> dict[str, list[int]]:
    """Every slot of a view that says what functions were told."""
    return {name: getattr(view, name).flatten().tolist() for name in type(view).slotgraph.slots if name[:5] == "asked"}


def told(inputs: type[Inputs], live: Sizes, padded: Sizes) -> dict[str, list[int]]:
    """What they must be told, worked out from the batch alone."""
    return {
        name: asked(name, live, padded, slot.shape[0].at(padded))
        for name, slot in inputs.slotgraph.slots.items()
        if name[:5] == "asked"
    }


@settings(max_examples=settings().max_examples // 2)
@given(data=st.data(), width=st.integers(1, 3), packs=st.booleans())
def test_live_sizes_are_the_batchs(backend: Backend, data: st.DataObject, width: int, *, packs: bool) -> None:
    """Slots over one of BATCH and TOKENS tell both, in each lowering, in graphs, on the eager path and in parts."""
    inputs = data.draw(one_sided())
    backend = backend_of(NAME) if packs and backend.name == "cpu-capture" else backend
    lowering = data.draw(st.sampled_from(backend.capabilities.lowerings))
    options: dict[str, Any] = {"backend": backend, "width": width, "lowering": lowering, "buckets": BUCKETS}
    runner = DecodeRunner(inputs, all_asked, output_rows=None, progress=False, **options)
    runner.capture()
    for requests in data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=6)):
        rows = next((bucket for bucket in BUCKETS if requests <= bucket), requests)  # their own where they run eagerly
        live, padded = sizes_of(requests, width), sizes_of(rows, width)
        batch = batch_of(inputs, live, requests, backend.device)
        assert seen(runner.fill(batch)) == told(inputs, live, padded)
        assert runner(batch).tolist() == outputs_of(inputs, live, padded)
        assert_parts(runner.fill(batch), live, padded, width, data)


def on_device(inputs: type[Inputs]) -> list[str]:
    """Slots on the device that say what functions were told."""
    return [name for name, slot in inputs.slotgraph.slots.items() if name[:5] == "asked" and slot.placement == DEVICE]


def all_asked(view: Inputs) -> torch.Tensor:
    """A step whose outputs are what functions were told."""
    return torch.cat([getattr(view, name).flatten() for name in on_device(type(view))]) + 0


def outputs_of(inputs: type[Inputs], live: Sizes, padded: Sizes) -> list[int]:
    """What it must return."""
    right = told(inputs, live, padded)
    return [number for name in on_device(inputs) for number in right[name]]


def assert_parts(view: Any, live: Sizes, padded: Sizes, width: int, data: st.DataObject) -> None:
    """A micro-batch's functions are told its own sizes; one beyond the view's rows is refused."""
    start = data.draw(st.integers(0, padded[BATCH]))
    stop = data.draw(st.integers(start, padded[BATCH]))
    part = view.narrow(BATCH, start, stop)
    rows = min(max(live[BATCH] - start, 0), stop - start)
    assert seen(part) == told(type(view), sizes_of(rows, width), sizes_of(stop - start, width))
    with pytest.raises(errors.BatchError, match=f"do not lie within the {padded[BATCH]} rows of BATCH"):
        view.narrow(BATCH, 0, padded[BATCH] + 1)


def of_issue(axis: Axis, other: Axis, *, live: bool, placement: Any = "device") -> type[Inputs]:
    """A declaration over one axis whose function asks for another."""

    def ask(step: Step) -> int:
        return step.live(other) if live else step.padded(other * 2)

    ids = copied(axis, dtype=torch.int64, pad=0)
    return declaration_of({"ids": ids, "requests": computed(ask, shape=1, dtype=torch.int64, placement=placement)})


def ids_of(view: Any) -> torch.Tensor:
    """A step."""
    ids: torch.Tensor = view.ids
    return ids + 0


SAID = (
    r"slot 'requests': its function asks for the size of {}, which this step does not know \(it knows {}\): declare a"
)


@pytest.mark.parametrize("backend", ["cpu", "cpu-capture"])
def test_an_axis_of_nothing_is_refused_at_capture(backend: str) -> None:
    """Of an axis that no slot and no relation has, each lowering says so at capture, before anything is written."""
    placements: tuple[Any, ...] = ("device", HOST)
    for placement, lowering, live in itertools.product(placements, LOWERINGS, (True, False)):
        inputs = of_issue(BATCH, PAGES, live=live, placement=placement)
        said = SAID.format("PAGES", "BATCH, TOKENS")
        runner = DecodeRunner(inputs, ids_of, buckets=[2], backend=backend, lowering=lowering)
        with pytest.raises((errors.CaptureError, errors.DeclarationError), match=said):
            runner.capture()
        eager = DecodeRunner(inputs, ids_of, buckets=[2], backend=backend, graphs=False, lowering=lowering)
        eager.capture()
        before = {buffer.name: buffer.tensor.clone() for buffer in eager.graphs.buffers}
        with pytest.raises(errors.DeclarationError, match=said):
            eager({"ids": torch.tensor([5, 6])})
        assert all(torch.equal(before[buffer.name], buffer.tensor) for buffer in eager.graphs.buffers)


class Around(nn.Module):
    """A step around a stack."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner(lambda hidden: hidden * 3)

    def forward(self, view: Any) -> Any:
        """One row a token."""
        return self.inner(view.ids.double()[:, None])


@settings(max_examples=settings().max_examples // 16)
@given(data=st.data())
def test_prefill_tells_what_slots_tell(data: st.DataObject) -> None:
    """Tokens are the batch's; so are requests where a slot is over them; else nobody may cut a view along them."""
    requested = data.draw(st.booleans())
    fields: dict[str, Any] = {
        "ids": copied(TOKENS, dtype=torch.int64, pad=0),
        "tokens": computed(lambda step: [step.live(TOKENS), step.padded(TOKENS)], shape=2, dtype=torch.int64),
    }
    if requested:
        fields["lens"] = copied(BATCH, dtype=torch.int64, pad=0)
        fields["requests"] = computed(lambda step: [step.live(BATCH), step.padded(BATCH)], shape=2, dtype=torch.int64)
    lowering = data.draw(st.sampled_from(LOWERINGS))
    options: dict[str, Any] = {"buckets": [4, 8], "max_batch": 3, "backend": "cpu-capture", "stack": "inner"}
    runner = BreakableRunner(declaration_of(fields), Around(), output_rows=TOKENS, lowering=lowering, **options)
    runner.capture()
    for tokens in data.draw(st.lists(st.integers(1, 10), min_size=1, max_size=4)):
        bucket, requests = (4 if tokens <= 4 else max(8, tokens)), min(tokens, 1 + tokens % 3)
        batch = {"ids": torch.arange(1, tokens + 1), "lens": torch.arange(1, requests + 1)}
        view: Any = runner.fill(batch)
        assert view.tokens.tolist() == [tokens, bucket]
        if requested:
            assert view.requests.tolist() == [requests, 3 if tokens <= 8 else requests]
        else:
            with pytest.raises(errors.BatchError, match="no rows on BATCH, which no slot of Drawn tells"):
                view.narrow(BATCH, 0, 1, tokens=(0, 1))
        assert torch.equal(runner(batch)[:, 0], batch["ids"].double() * 3)
    refused = BreakableRunner(of_issue(TOKENS, BATCH, live=True), Around(), output_rows=TOKENS, **options)
    with pytest.raises(errors.CaptureError, match=SAID.format("BATCH", "TOKENS")):
        refused.capture()
