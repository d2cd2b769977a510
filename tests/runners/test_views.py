"""Views: one for each fill, replayed only while it is the last; fields, optional slots and settings in them."""

from typing import Any

import pytest
import torch

from slotgraph import BATCH, TOKENS, Axis, DecodeRunner, EagerRunner, Inputs, computed, copied, staged
from slotgraph.dataflow.errors import CaptureError, DeclarationError, ReplayError
from tests.runners.models import PlainInputs, assert_right, plain_runner, plain_step, random_batch


def test_view_is_an_instance_of_the_declaration(runner: DecodeRunner[PlainInputs]) -> None:
    """A view is of the declaration's class, holds the bucket's padded rows, and knows its live and padded sizes."""
    batch = random_batch(3, seed=1)
    view = runner.fill(batch)
    assert isinstance(view, PlainInputs)
    assert view.ids.tolist() == [*batch["ids"].tolist(), 49]
    assert view.weights.tolist() == [*batch["weights"].tolist(), -7.5]
    assert view.pairs.tolist() == [*batch["pairs"].tolist(), [9, 9]]
    assert view.live.tolist() == [3]


def test_two_views_are_two(runner: DecodeRunner[PlainInputs]) -> None:
    """Each fill gives a view of its own, over the same memory."""
    first = runner.fill(random_batch(3, seed=2))
    second = runner.fill(random_batch(3, seed=3))
    assert first is not second
    assert first.ids.data_ptr() == second.ids.data_ptr()
    assert first.live.data_ptr() == second.live.data_ptr()


@pytest.mark.parametrize(("first", "second"), [(3, 3), (3, 8), (3, 20), (20, 3), (20, 20)])
def test_overwritten_view(runner: DecodeRunner[PlainInputs], first: int, second: int) -> None:
    """A view that a later fill has overwritten is refused, on both paths and across them; the later one is right."""
    view = runner.fill(random_batch(first, seed=4))
    batch = random_batch(second, seed=5)
    later = runner.fill(batch)
    with pytest.raises(ReplayError, match="this view was not filled last: a later fill has overwritten its slots"):
        runner.replay(view)
    assert_right(runner.replay(later), batch)


def test_view_twice(runner: DecodeRunner[PlainInputs]) -> None:
    """The view filled last may be replayed again: the same rows, and what the step changed in between."""
    batch = random_batch(6, seed=6)
    view = runner.fill(batch)
    first = runner.replay(view).clone()
    assert torch.equal(runner.replay(view), first)
    assert_right(first, batch)


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


PATCHES = Axis("PATCHES")


class TwoOptionalInputs(Inputs):
    """Only optional slots tell how many rows their axis has."""

    ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=1)
    images: torch.Tensor | None = copied(PATCHES, dtype=torch.int64, pad=2, default=None)
    videos: torch.Tensor | None = copied(PATCHES, dtype=torch.int64, pad=3, default=None)


@pytest.mark.parametrize("present", [(), ("images",), ("videos",), ("images", "videos")])
def test_axis_of_optional_slots(cpu: str, present: tuple[str, ...]) -> None:
    """An axis that only optional slots have is read from the one that is there, and has no rows where none is."""

    def step(view: TwoOptionalInputs) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        return view.images, view.videos

    runner = EagerRunner(TwoOptionalInputs, step, backend=cpu)
    batch = {"ids": torch.randint(1, 9, (3,)), **{name: torch.randint(1, 9, (5,)) for name in present}}
    for name, seen in zip(("images", "videos"), runner(batch), strict=True):
        assert seen is None if name not in present else torch.equal(seen, batch[name])


class SettingInputs(PlainInputs):
    fancy: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=4, when="model.fancy")
    extra: torch.Tensor = computed(lambda fancy: fancy * 2, shape=BATCH, dtype=torch.int64, when="model.fancy")
    rare: torch.Tensor = staged(BATCH, dtype=torch.int64, pad=0, when=lambda settings: settings["rare"] > 1)


def fancy_step(view: SettingInputs) -> torch.Tensor:
    """The plain step, with what the settings add."""
    plain = plain_step(view)
    return plain if view.fancy is None else plain + 1000 * view.extra[:, None]


@pytest.mark.parametrize("fancy", [False, True])
@pytest.mark.parametrize("rare", [1, 2])
def test_settings(cpu: str, *, fancy: bool, rare: int) -> None:
    """A slot exists where the settings say so: else it is None in the view, asks for no source and has no buffer."""
    settings = {"model": {"fancy": fancy}, "rare": rare}
    runner = DecodeRunner(SettingInputs, fancy_step, buckets=[4, 8], backend=cpu, settings=settings)
    runner.capture()
    names = {buffer.name for buffer in runner.graphs.buffers}
    assert ("fancy" in names, "extra" in names, "rare" in names) == (fancy, fancy, rare > 1)
    for requests in (3, 7, 20):
        batch = random_batch(requests, seed=11)
        more = {"fancy": torch.randint(1, 9, (requests,))} if fancy else {}
        view = runner.fill({**batch, **more})
        assert (view.fancy is None, view.extra is None, view.rare is None) == (not fancy, not fancy, rare == 1)
        outputs = runner.replay(view) - (2000 * more["fancy"][:, None] if fancy else 0)
        torch.testing.assert_close(outputs, plain_answer(batch), rtol=1e-3, atol=1e-2)


def plain_answer(batch: dict[str, Any]) -> torch.Tensor:
    """The plain step's answer, by a runner that has none of the settings."""
    outputs: torch.Tensor = EagerRunner(PlainInputs, plain_step, backend="cpu")(batch)
    return outputs


@pytest.mark.parametrize("settings", [None, {}, {"model": None}, {"model": {}}])
def test_settings_that_lack_the_name(cpu: str, settings: Any) -> None:
    """A slot that hangs on a setting which is not there is refused, not silently left out."""
    with pytest.raises(DeclarationError, match=r"slot 'fancy' exists when 'model\.fancy' is set: give settings"):
        DecodeRunner(SettingInputs, fancy_step, buckets=[4], backend=cpu, settings=settings)


class MovedInputs(Inputs):
    places: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0, restored=True)


def test_a_view_whose_step_raised() -> None:
    """It cannot be replayed: what the step writes on the way may not be as it was filled."""
    fails = [False]

    def step(view: MovedInputs) -> torch.Tensor:
        view.places.add_(1)
        if fails[0]:
            message = "no"
            raise OSError(message)
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
