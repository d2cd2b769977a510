"""Fields that are no slots: a batch of any kind has its values converted and validated as an object of the class."""

import types
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import attrs
import pytest
import torch

from slotgraph import (
    BATCH,
    TOKENS,
    DecodeRunner,
    EagerRunner,
    InputBuffers,
    Inputs,
    Step,
    computed,
    copied,
    graph_break,
)
from slotgraph.errors import BatchError, CaptureError
from tests.runners.models import ready
from tests.runners.prefilled import Prefill, around, batch_of


def doubled(value: Any, field: Any) -> int:
    """Convert a number or a text, and note which field it is of; what it made is left as it is."""
    assert field.name == "scale"
    return value if isinstance(value, int) else int(value)


def not_over(self: Any, attribute: Any, value: Any) -> None:
    """Refuse a scale over another field's limit: a validator that looks at the object."""
    if value > self.limit:
        raise ValueError(f"{attribute.name} {value} is over {self.limit}, with {len(self.ids)} ids")


class Scaled(Inputs):
    ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
    scale: Any = attrs.field(default="1", converter=attrs.Converter(doubled, takes_field=True), validator=not_over)
    limit: int = attrs.field(default=100, converter=int, validator=attrs.validators.ge(0))
    tag: str | None = attrs.field(default=None, validator=attrs.validators.optional(attrs.validators.in_(["a", "b"])))
    name: str = attrs.field(validator=attrs.validators.instance_of(str))
    plus: torch.Tensor = computed(lambda scale, tag: scale + len(tag or ""), dtype=torch.int64)


def step(view: Scaled) -> torch.Tensor:
    """What the step sees of fields that hold for every graph, and what the host computes of all."""
    scale: int = view.scale
    return view.ids * scale + view.plus


def mapping(**given: Any) -> Any:
    """A batch as a mapping."""
    return given


KINDS: dict[str, Callable[..., Any]] = {"mapping": mapping, "object": types.SimpleNamespace}
MAKERS: dict[str, Callable[[], Any]] = {
    "eager": lambda: EagerRunner(Scaled, step, backend="cpu"),
    "no_copy": lambda: EagerRunner(Scaled, step, backend="cpu", no_copy=True),
    "graph": lambda: ready(DecodeRunner(Scaled, step, buckets=[4], backend="cpu-capture", max_waste=0.5)),
    "fused": lambda: ready(DecodeRunner(Scaled, step, buckets=[4], backend="cpu-capture", lowering="in_graph")),
    "by slot": lambda: ready(DecodeRunner(Scaled, step, buckets=[4], backend="cpu-capture", lowering="slot_by_slot")),
}
WRONG: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"scale": "many"}, ("field 'scale': invalid literal",)),
    ({"scale": 101}, ("field 'scale': scale 101 is over 100, with 3 ids",)),
    ({"limit": "-1"}, ("field 'limit': 'limit' must be >= 0", "field 'scale': scale 1 is over -1")),
    ({"tag": "c", "scale": "200", "limit": 150}, ("field 'tag'", "field 'scale': scale 200 is over 150")),
    ({"name": 3}, ("field 'name'",)),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("maker", MAKERS)
def test_values_are_converted(kind: str, maker: str) -> None:
    """A step sees what the class would have made of the batch's values, whichever way the fill goes."""
    runner, make, ids = MAKERS[maker](), KINDS[kind], torch.tensor([7, 8, 9])
    for given in ({}, {"scale": "1"}, {"scale": "3"}, {}, {"scale": 3, "limit": "5"}, {"tag": "b"}, {"scale": "1"}):
        values: dict[str, Any] = {"ids": ids, "name": "x", **given}
        for _ in range(3):  # the long way, then the short one
            due = Scaled(**values)
            expected = (ids * due.scale + due.scale + len(due.tag or "")).tolist()
            assert runner(make(ids=ids, **given)).tolist() == expected
            assert runner(due).tolist() == expected
            view = runner.fill(make(ids=ids, **given))
            assert (view.scale, view.limit, view.tag) == (due.scale, due.limit, due.tag)
            assert not hasattr(view, "name")
            assert runner.fill(make(ids=ids, name="n", **given)).name == "n"
            if maker in ("graph", "fused", "by slot"):
                path = "graph" if (due.scale, due.limit, due.tag) == (1, 100, None) else "eager"
                assert runner.decide(make(ids=ids, **given)).path == path


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("maker", MAKERS)
def test_values_are_validated(kind: str, maker: str) -> None:
    """What the class refuses is a BatchError with each field, before anything is written; the next batch goes on."""
    runner, make, ids = MAKERS[maker](), KINDS[kind], torch.tensor([7, 8, 9])
    for wrong, said in WRONG:
        view = runner.fill(make(ids=ids))  # the short way is bound now
        before = view.ids.clone()
        for call in (runner, runner.fill):
            with pytest.raises(BatchError) as found:
                call(make(ids=ids + 100, **wrong))
            assert all(part in str(found.value) for part in said)
            assert str(found.value).count("field ") == len(said)
        assert torch.equal(view.ids, before)
        assert runner.replay(view).tolist() == (ids + 1).tolist()
        assert runner(make(ids=ids)).tolist() == (ids + 1).tolist()


def test_the_switch_of_attrs_holds_for_mappings() -> None:
    """The switch of attrs holds for mappings, too; values are converted nevertheless."""
    runner = MAKERS["graph"]()
    with attrs.validators.disabled():
        assert runner({"ids": [7], "scale": "500"}).tolist() == [4000]
    with pytest.raises(BatchError, match="scale 500 is over 100"):
        runner({"ids": [7], "scale": "500"})


@pytest.mark.parametrize("kind", KINDS)
def test_input_buffers_convert_and_validate_fields(kind: str) -> None:
    """Buffers for graphs of one's own take the same values, and refuse the same."""
    buffers, make = InputBuffers(Scaled, {BATCH: 4}, backend="cpu"), KINDS[kind]
    batch = make(ids=[7, 8], scale="3", tag="a")
    for _ in range(3):
        made = buffers.fill(batch)
        assert (made.scale, made.plus.item()) == (3, 4)
    view = buffers.fill(batch)
    with pytest.raises(BatchError, match="field 'tag'"):
        buffers.fill(make(ids=[1, 2], tag="z"))
    assert view.ids.tolist() == [7, 8, 0, 0]


def test_objects_of_the_class_are_checked_once() -> None:
    """The constructor has converted and validated an object's values: a fill calls nothing of it again."""
    calls = list[str]()

    def convert(value: Any) -> Any:
        calls.append("c")
        return value

    class Counted(Inputs):
        ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
        tag: str = attrs.field(default="a", converter=convert, validator=lambda *_: calls.append("v"))

    runner = EagerRunner(Counted, lambda view: view.tag, backend="cpu")
    batch = Counted(ids=torch.tensor([1]), tag="b")
    calls.clear()
    assert [runner(batch) for _ in range(3)] == ["b"] * 3
    assert not calls
    assert runner({"ids": [1], "tag": "b"}) == "b"
    assert {*calls} == {"c", "v"}


def test_factories_are_converted() -> None:
    """A default that is made for each batch is converted like any other value."""

    class Made(Inputs):
        ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
        tags: Any = attrs.field(factory=list, converter=tuple)

    runner = ready(DecodeRunner(Made, lambda view: view.ids, buckets=[4], backend="cpu-capture"))
    for batch in ({"ids": [1]}, {"ids": [1], "tags": []}, Made(ids=torch.tensor([1]))):
        assert runner.decide(batch).path == "graph"
        assert runner.fill(batch).tags == ()
    assert runner.fill({"ids": [1], "tags": ["x"]}).tags == ("x",)


class Stacked(Prefill):  # its placeholder gives texts, which the class makes numbers of
    scale: Any = attrs.field(converter=int, validator=attrs.validators.ge(0))
    given: ClassVar[str] = "5"

    @classmethod
    def placeholder(cls, step: Step) -> Mapping[str, Any]:
        """One request that owns all tokens."""
        return {"extend_seq_lens": [step.live(TOKENS)], "scale": cls.given}


def test_converted_defaults_are_made_for_each_batch() -> None:
    """What a converter makes of a default belongs to one batch: changed in place, no other batch sees it."""

    class Made(Inputs):
        ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
        tags: Any = attrs.field(default="a b", converter=lambda tags: tags.split() if isinstance(tags, str) else tags)

    runner = ready(DecodeRunner(Made, lambda view: view.ids * len(view.tags), buckets=[4], backend="cpu-capture"))
    for batch in ({"ids": [5]}, {"ids": [5], "tags": "a b"}, Made(ids=torch.tensor([5]))):
        view = runner.fill(batch)
        if isinstance(batch, dict):  # else the object's own
            view.tags.append("c")
        assert runner(batch).tolist() == [10]
        assert runner.decide(batch).path == "graph"
    assert runner({"ids": [5], "tags": "a"}).tolist() == [5]


def test_a_placeholders_values_are_converted_and_validated() -> None:
    """A break sees a placeholder's values, and a batch's, as the class makes them; a wrong one is refused."""
    seen = list[Any]()

    @graph_break
    def noted(hidden: torch.Tensor, view: Stacked) -> torch.Tensor:
        seen.append(view.scale)
        scaled: torch.Tensor = hidden * view.scale
        return scaled

    runner, eager = around(noted, "cpu-capture", inputs=Stacked)
    assert {*seen} == {5}
    batch = batch_of([2, 1], seed=4)
    outputs = runner({**batch, "scale": "7"})
    assert seen[-1] == 7
    assert torch.equal(outputs, eager({**batch, "scale": 7}))
    with pytest.raises(BatchError, match="field 'scale': 'scale' must be >= 0"):
        runner({**batch, "scale": "-7"})

    class Wrong(Stacked):
        given = "-1"

    with pytest.raises(CaptureError, match="field 'scale': 'scale' must be >= 0"):
        around(noted, "cpu-capture", inputs=Wrong)


def test_a_field_that_a_batch_lacks_is_told_by_its_name() -> None:
    """A capture says that no graph may depend on it, and how breaks may; a step, that the batch has none."""

    class Named(Prefill):
        level: int

    @graph_break
    def raised(hidden: torch.Tensor, view: Named) -> torch.Tensor:
        leveled: torch.Tensor = hidden * view.level
        return leveled

    with pytest.raises(CaptureError, match=r"'level' is carried from .* give it a value in placeholder\(\)"):
        around(raised, "cpu-capture", inputs=Named)
    runner: EagerRunner[Named] = EagerRunner(Named, lambda view: view.positions * view.level, backend="cpu")
    with pytest.raises(AttributeError, match="the batch has no 'level', a field without a default: give it one"):
        runner(batch_of([2, 1], seed=4))

    class Listed(Prefill):
        @classmethod
        def placeholder(cls, step: Step) -> Any:
            return [step.live(TOKENS)]

    with pytest.raises(CaptureError, match=r"Listed.placeholder\(\) returned list: return a mapping"):
        around(raised, "cpu-capture", inputs=Listed)
