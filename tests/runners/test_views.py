"""Views: one for each fill, replayed only while it is the last; fields, optional slots and settings in them."""

import itertools
from typing import Any

import pytest
import torch

from slotgraph import BATCH, TOKENS, Axis, DecodeRunner, EagerRunner, Inputs, computed, copied, staged
from slotgraph.dataflow.capabilities import LADDER
from slotgraph.dataflow.errors import CaptureError, DeclarationError, ReplayError
from tests.runners.models import PlainInputs, assert_right, plain_runner, plain_step, random_batch


def test_view_of_another_runner(cpu: str, runner: DecodeRunner[PlainInputs]) -> None:
    """A view of another runner, one that was narrowed, and a batch are not what was filled last."""
    batch = random_batch(4, seed=7)
    view = runner.fill(batch)
    strangers: list[Any] = [plain_runner(cpu).fill(batch), view.narrow(BATCH, 0, 4), PlainInputs(**batch), batch, None]
    for stranger in strangers:
        with pytest.raises(ReplayError, match="not filled last"):
            runner.replay(stranger)
    assert_right(runner.replay(view), batch)


def test_batch_of_any_kind(runner: DecodeRunner[PlainInputs]) -> None:
    """A batch is a mapping, an instance of the declaration, or any object with the names."""

    class Anything:
        def __init__(self, **values: Any) -> None:
            self.__dict__.update(values)

    for requests in (5, 20):
        batch = random_batch(requests, seed=8)
        for made in (batch, PlainInputs(**batch), Anything(**batch, more=1)):
            assert_right(runner(made), batch)


class FieldInputs(PlainInputs):
    scale: int
    mode: str = "decode"
    notes: Any = None


def test_field_without_default_in_capture(cpu: str) -> None:
    """A step that reads a field without a default while it is captured is refused by name, with the way out."""

    def step(view: FieldInputs) -> torch.Tensor:
        return view.ids * view.scale

    runner = DecodeRunner(FieldInputs, step, buckets=[4], backend=cpu)
    with pytest.raises(CaptureError, match=r"'scale' is carried from the batch and has no default.*Make it a slot"):
        runner.capture()


def test_fields_in_views(cpu: str) -> None:
    """A view carries the batch's fields, and the defaults of those that it lacks; a name that is none says so."""
    runner = DecodeRunner(FieldInputs, plain_step, buckets=[4], backend=cpu)
    runner.capture()
    for requests in (3, 20):
        batch = random_batch(requests, seed=9)
        view = runner.fill({**batch, "scale": requests, "notes": ["note"]})
        assert (view.scale, view.mode, view.notes) == (requests, "decode", ["note"])
        assert_right(runner.replay(view), batch)
        without = runner.fill(batch)
        assert (without.mode, without.notes) == ("decode", None)
        with pytest.raises(AttributeError, match="'FieldInputs' has no slot or field 'scales'"):
            getattr(without, "scales")  # noqa: B009 - type checkers would refuse the name


def test_default_in_capture(cpu: str) -> None:
    """A step may read a field with a default while it is captured; a batch with another value runs eagerly, with it."""

    def step(view: FieldInputs) -> torch.Tensor:
        return view.ids * (2 if view.mode == "decode" else 3)

    runner = DecodeRunner(FieldInputs, step, buckets=[4], backend=cpu)
    runner.capture()
    for mode, factor in (("decode", 2), ("verify", 3), ("decode", 2)):
        batch = random_batch(3, seed=10)
        assert torch.equal(runner({**batch, "mode": mode}), batch["ids"] * factor)


class OptionalInputs(Inputs):
    ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=1)
    bias: torch.Tensor | None = copied(BATCH, dtype=torch.int64, pad=2, default=None)


def optional_step(view: OptionalInputs) -> torch.Tensor:
    """[BATCH] int64."""
    return view.ids if view.bias is None else view.ids + 100 * view.bias


@pytest.mark.parametrize("patterns", [[], [{"bias"}]], ids=["present only", "both"])
def test_optional_slot(cpu: str, patterns: list[set[str]]) -> None:
    """An absent optional slot is None in the view, never the rows of an earlier step, whatever came before."""
    runner = DecodeRunner(OptionalInputs, optional_step, buckets=[4, 8], backend=cpu, absent=patterns)
    runner.capture()
    for step, requests in enumerate((3, 3, 5, 2, 8, 8, 20, 3)):
        ids, bias = torch.randint(1, 99, (requests,)), torch.randint(1, 99, (requests,))
        if step % 2:
            view = runner.fill({"ids": ids, "bias": bias})
            assert view.bias is not None
            assert torch.equal(view.bias[:requests], bias)
            assert torch.equal(runner.replay(view), ids + 100 * bias)
        else:
            view = runner.fill({"ids": ids} if step % 4 else {"ids": ids, "bias": None})
            assert view.bias is None
            assert torch.equal(runner.replay(view), ids)


class MovedInputs(Inputs):
    places: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0, restored=True)


def test_a_view_whose_step_raised() -> None:
    """It cannot be replayed: what the step writes on the way may not be as it was filled."""
    fails = [False]

    def step(view: MovedInputs) -> torch.Tensor:
        view.places.add_(1)
        if fails[0]:
            raise OSError("no")
        return view.places * 10

    runner = DecodeRunner(MovedInputs, step, buckets=[2], backend="cpu", progress=False)
    runner.capture()
    view = runner.fill({"places": torch.tensor([5, 6])})
    assert runner.replay(view).tolist() == [60, 70]
    assert runner.replay(view).tolist() == [60, 70]
    fails[0] = True
    with pytest.raises(ReplayError, match="OSError: no"):
        runner.replay(view)
    fails[0] = False
    with pytest.raises(ReplayError, match="not filled last"):
        runner.replay(view)
    assert runner({"places": torch.tensor([7])}).tolist() == [80]


def test_overwritten_view(runner: DecodeRunner[PlainInputs]) -> None:
    """A view that a later fill has overwritten is refused, on both paths and across them; the later one is right."""
    for first, second in ((3, 3), (3, 8), (3, 20), (20, 3), (20, 20)):
        view = runner.fill(random_batch(first, seed=4))
        batch = random_batch(second, seed=5)
        later = runner.fill(batch)
        with pytest.raises(ReplayError, match="this view was not filled last: a later fill has overwritten its slots"):
            runner.replay(view)
        for _ in range(2):
            assert_right(runner.replay(later), batch)


PATCHES = Axis("PATCHES")


class Switched(Inputs):
    """Slots that settings switch off or batches lack, those that alone tell an axis, and what is computed of them."""

    ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
    swa: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0, placement="host", when="model.sliding", default=None)
    extra: torch.Tensor | None = copied(PATCHES, dtype=torch.int64, pad=0, placement="host", default=None)
    rare: torch.Tensor = staged(BATCH, dtype=torch.int64, pad=0, when=lambda settings: settings["rare"] > 1)
    twice: torch.Tensor = computed(lambda ids: ids * 2, shape=BATCH, dtype=torch.int64, when="model.sliding")
    length: torch.Tensor = computed(
        lambda swa, extra: (0 if swa is None else 10 + int(swa.sum())) + (0 if extra is None else 1000),
        shape=1,
        dtype=torch.int64,
    )


def test_what_is_switched_off_or_absent(cpu: str) -> None:
    """A slot exists where the settings say so; a function, a step and a view get None for what is not there."""
    two = torch.tensor([3, 4])
    for sliding, lowering in itertools.product((True, False), ("eager", *LADDER)):
        settings: Any = {"model": {"sliding": sliding}, "rare": 1 + sliding}
        options: dict[str, Any] = {"settings": settings, "backend": cpu}
        runner: Any = EagerRunner(Switched, lambda view: view.length * 1, **options)
        if lowering != "eager":
            absent = [{"extra"}, {"swa"}, {"extra", "swa"}] if sliding else [{"extra"}]
            options |= {"absent": absent, "lowering": lowering, "output_rows": None, "sizes": {PATCHES: 5}}
            runner = DecodeRunner(Switched, lambda view: view.length * 1, buckets=[4], **options)
            runner.capture()
            names = {buffer.name for buffer in runner.graphs.buffers}
            assert ("swa" in names, "twice" in names, "rare" in names) == (sliding,) * 3
        for brought in ({}, {"extra": two}, {"swa": two}, {"swa": two, "extra": two}):
            batch = {"ids": torch.tensor([1, 2]), **brought}
            right = (17 if sliding and "swa" in brought else 0) + (1000 if "extra" in brought else 0)
            assert runner(batch).tolist() == [right]
            view = runner.fill(batch)
            assert (view.swa is None, view.extra is None) == (
                not sliding or "swa" not in brought,
                "extra" not in brought,
            )
            assert (view.rare is None, view.twice is None) == (not sliding, not sliding)
    lacks: tuple[Any, ...] = (None, {}, {"model": None}, {"model": {}})
    for lacking in lacks:
        with pytest.raises(DeclarationError, match=r"slot '\w+' exists when 'model\.sliding' is set: give settings"):
            DecodeRunner(Switched, lambda view: view.ids, buckets=[4], backend=cpu, settings=lacking)
