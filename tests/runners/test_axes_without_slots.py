"""Sizes of axes that no slot has: told by a relation or refused, never the bucket's in place of the batch's."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

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
from slotgraph.dataflow.capabilities import LADDER
from slotgraph.extend import DEVICE, HOST
from tests.packing import NAME, backend_of
from tests.runners.models import decoder
from tests.runners.prefilled import Inner
from tests.strategies import asked, declaration_of, one_sided

BUCKETS = [2, 5]
PAGES = Axis("PAGES")
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


def asking(inputs: type[Inputs]) -> dict[str, Any]:
    """The slots that say what functions were told."""
    return {name: slot for name, slot in inputs.slotgraph.slots.items() if name.startswith("asked")}


def seen(view: Inputs) -> dict[str, list[int]]:
    """What they say."""
    return {name: getattr(view, name).flatten().tolist() for name in asking(type(view))}


def told(inputs: type[Inputs], live: Sizes, padded: Sizes) -> dict[str, list[int]]:
    """What they must be told, worked out from the batch alone."""
    return {name: asked(name, live, padded, slot.shape[0].at(padded)) for name, slot in asking(inputs).items()}


@settings(max_examples=settings().max_examples // 2)
@given(data=st.data(), width=st.integers(1, 3), packs=st.booleans())
def test_live_sizes_are_the_batchs(backend: Backend, data: st.DataObject, width: int, *, packs: bool) -> None:
    """Slots over one of BATCH and TOKENS tell both, in each lowering, in graphs, on the eager path and in parts."""
    inputs = data.draw(one_sided())
    backend = backend_of(NAME) if packs and backend.name == "cpu-capture" else backend
    on_device = [name for name, slot in asking(inputs).items() if slot.placement == DEVICE]
    step: Any = lambda view: torch.cat([getattr(view, name).flatten() for name in on_device]) + 0  # noqa: E731
    lowering = data.draw(st.sampled_from(backend.capabilities.lowerings))
    options: dict[str, Any] = {"backend": backend, "width": width, "lowering": lowering, "buckets": BUCKETS}
    runner = decoder(inputs, step, output_rows=None, **options)
    for requests in data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=6)):
        rows = next((bucket for bucket in BUCKETS if requests <= bucket), requests)  # their own where they run eagerly
        live, padded = sizes_of(requests, width), sizes_of(rows, width)
        batch = batch_of(inputs, live, requests, backend.device)
        right = told(inputs, live, padded)
        assert seen(runner.fill(batch)) == right
        assert runner(batch).tolist() == [number for name in on_device for number in right[name]]
        assert_parts(runner.fill(batch), live, padded, width, data)


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


SAID = (
    r"slot 'requests': its function asks for the size of {}, which this step does not know \(it knows {}\): declare a"
)


def test_an_axis_of_nothing_is_refused_at_capture(cpu: str) -> None:
    """Of an axis that no slot and no relation has, each lowering says so at capture, before anything is written."""
    placements: tuple[Any, ...] = ("device", HOST)
    for placement, lowering, live in itertools.product(placements, LADDER, (True, False)):
        inputs = of_issue(BATCH, PAGES, live=live, placement=placement)
        said = SAID.format("PAGES", "BATCH, TOKENS")
        options: dict[str, Any] = {"buckets": [2], "backend": cpu, "lowering": lowering}
        runner: Any = DecodeRunner(inputs, lambda view: view.ids + 0, **options)
        with pytest.raises((errors.CaptureError, errors.DeclarationError), match=said):
            runner.capture()
        eager = decoder(inputs, lambda view: view.ids + 0, graphs=False, **options)
        before = {buffer.name: buffer.tensor.clone() for buffer in eager.graphs.buffers}
        with pytest.raises(errors.DeclarationError, match=said):
            eager({"ids": torch.tensor([5, 6])})
        assert all(torch.equal(before[buffer.name], buffer.tensor) for buffer in eager.graphs.buffers)


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
    lowering = data.draw(st.sampled_from(LADDER))
    options: dict[str, Any] = {"buckets": [4, 8], "max_batch": 3, "backend": "cpu-capture", "stack": "inner"}
    step: Any = Inner(lambda view: step.inner(view.ids.double()[:, None]))
    step.inner = Inner(lambda hidden: hidden * 3)
    runner = BreakableRunner(declaration_of(fields), step, output_rows=TOKENS, lowering=lowering, **options)
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
    refused = BreakableRunner(of_issue(TOKENS, BATCH, live=True), step, output_rows=TOKENS, **options)
    with pytest.raises(errors.CaptureError, match=SAID.format("BATCH", "TOKENS")):
        refused.capture()
