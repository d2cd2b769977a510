"""Groups: one declaration for several slots, each like any other wherever slots are filled, changed or shown."""

import functools
import pickle
import types
from collections.abc import Mapping
from typing import Any, Final, cast

import pytest
import torch

import slotgraph
from slotgraph import (
    BATCH,
    TOKENS,
    Axis,
    BreakableRunner,
    EagerRunner,
    InputBuffers,
    Inputs,
    Step,
    computed,
    constant,
    copied,
    graph_break,
    staged,
)
from slotgraph.backends import Backend
from slotgraph.errors import BatchError, BindError, ConfigError, DeclarationErrors
from slotgraph.extend import Group, side
from slotgraph.reports import RecordedFile, replay_file
from tests.runners.models import decoder

KINDS: Final = Group("full", "sliding")
PAGES: Final = Axis("PAGES", fixed=True)
WINDOW: Final = Axis("WINDOW", fixed=True)
SIZES: Final[dict[Axis, int]] = {PAGES: 3, WINDOW: 2}
Tables = Mapping[str, torch.Tensor]


def first_key(tables: torch.Tensor, window: torch.Tensor) -> torch.Tensor:
    """The first page of each request and the window of its kind of layers."""
    return tables[:, 0] * 100 + window


class Layered(Inputs):
    """What two kinds of layers read, which have tables of different widths and tails."""

    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0, then=lambda ids: ids + 1)
    tables: Tables = copied(
        BATCH, {"full": PAGES, "sliding": WINDOW}, dtype=torch.int64, pad={"full": 0, "sliding": -1}, group=KINDS
    )
    window: Tables = constant({"full": 90, "sliding": 2}, dtype=torch.int64, group=KINDS)
    first: Tables = computed(first_key, shape=BATCH, dtype=torch.int64, group=KINDS)
    seen: Mapping[str, torch.Tensor | None] = copied(
        BATCH, dtype=torch.int64, pad=7, then=lambda seen, tables: seen + tables[:, 0], group=KINDS, default=None
    )


def layers(view: Layered) -> torch.Tensor:
    """[BATCH, 6], in which each member of each group has a column."""
    seen = [one if one is not None else torch.zeros_like(view.ids) for one in view.seen.values()]
    tables = [view.tables[kind].sum(1) for kind in KINDS.names]
    return torch.stack([*tables, *[view.first[kind] for kind in KINDS.names], *seen], 1) * 10 + view.ids[:, None]


def batch_of(rows: int, seen: Any = None, start: int = 1) -> dict[str, Any]:
    """A batch in which all numbers differ."""
    numbers = torch.arange(start, start + 9 * rows)
    tables = {"full": numbers[: 3 * rows].view(rows, 3), "sliding": numbers[3 * rows : 5 * rows].view(rows, 2)}
    return {"ids": [*range(rows)], "tables": tables} | ({} if seen is None else {"seen": seen})


def by_hand(batch: Mapping[str, Any]) -> torch.Tensor:
    """What `layers` gives for a batch."""
    tables, seen = batch["tables"], batch.get("seen") or {}
    ids = torch.as_tensor(batch["ids"])
    rows = [torch.as_tensor(tables[kind]) for kind in KINDS.names]
    found = [one.sum(1) for one in rows] + [one[:, 0] * 100 + add for one, add in zip(rows, (90, 2), strict=True)]
    found += [torch.as_tensor(seen[kind]) if kind in seen else torch.zeros_like(ids) for kind in KINDS.names]
    return torch.stack(found, 1) * 10 + ids[:, None]


ABSENT: Final = [{"seen.full", "seen.sliding"}, {"seen.sliding"}]


def layered(backend: Backend, *buckets: int, **options: Any) -> Any:
    """A captured runner."""
    given: dict[str, Any] = {"sizes": SIZES, "output_rows": BATCH, "absent": ABSENT, **options}
    return decoder(Layered, layers, backend=backend, buckets=buckets, **given)


def test_each_name_of_a_group_is_a_slot() -> None:
    """With a name, parameters and needs of its own, in plans and explanations, too."""
    slots = Layered.slotgraph.slots
    assert [*slots][1:7] == [f"{group}.{kind}" for group in ("tables", "window", "first") for kind in KINDS.names]
    assert str(slots["tables.full"].shape) != str(slots["tables.sliding"].shape)
    assert slots["first.sliding"].needs == ("tables.sliding", "window.sliding")
    assert str(slots["tables.full"].reads("tables.full")) == "batch.tables.full"
    text = slotgraph.explain(EagerRunner(Layered, layers, sizes=SIZES, backend="cpu")).text(200)
    assert "tables.sliding" in text
    assert "first_key(tables.full, window.full)" in text


@pytest.mark.parametrize("lowering", [None, "slot_by_slot"])
def test_a_step_reads_each_slot_by_its_name(backend: Backend, lowering: str | None) -> None:
    """Whatever came before, with each pattern of absent members, and with the tail of each."""
    runner = layered(backend, 2, 4, **({} if lowering is None else {"lowering": lowering}))
    seens: list[Any] = [None, {"full": [3, 4, 5]}, {"full": [1, 1, 1], "sliding": [8, 9, 10]}]
    for seen in (*seens, *seens[::-1]):
        batch = batch_of(3, seen)
        assert torch.equal(runner(batch).cpu(), by_hand(batch))
        view = runner.fill(batch)
        assert [*view.tables] == [*view.seen] == ["full", "sliding"]
        assert (view.tables["full"][3].tolist(), view.tables["sliding"][3].tolist()) == ([0, 0, 0], [-1, -1])
        assert {kind for kind, one in view.seen.items() if one is not None} == {*(seen or {})}
        assert torch.equal(runner.replay(view).cpu(), by_hand(batch))


@pytest.mark.parametrize("form", ["objects", "the class", "a view", "a pickle"])
def test_a_batch_has_a_mapping_or_an_object(backend: Backend, form: str) -> None:
    """By the names of the group."""
    runner, batch = layered(backend, 4), batch_of(3, {"full": [1, 2, 3], "sliding": [4, 5, 6]})
    given: Any = batch
    if form == "objects":
        given = types.SimpleNamespace(**{**batch, "tables": types.SimpleNamespace(**batch["tables"])})
    elif form != "the class":
        view = runner.fill(batch)
        given = view if form == "a view" else pickle.loads(pickle.dumps(view))  # noqa: S301 - its own
    else:
        given = Layered(**batch)
        assert given.tables is batch["tables"]
    if form == "a view":
        assert torch.equal(runner.replay(given).cpu(), by_hand(batch))
    else:
        assert torch.equal(runner(given).cpu(), by_hand(batch))


def test_errors_name_the_slot(backend: Backend) -> None:
    """The member of the group, and nothing is written."""
    runner, batch = layered(backend, 4), batch_of(3)
    view = runner.fill(batch)
    wrong = {"full": batch["tables"]["full"], "sliding": batch["tables"]["full"]}
    for tables, says in (
        ({"full": batch["tables"]["full"]}, "tables.sliding"),
        (wrong, "slot 'tables.sliding'"),
        (None, "tables.full"),
        (batch["tables"]["full"], "tables.full"),
    ):
        with pytest.raises(BatchError, match=says):
            runner({**batch, "tables": tables})
    assert torch.equal(runner.replay(view).cpu(), by_hand(batch))
    with pytest.raises(AttributeError, match=r"no slot or field 'table'.*tables"):
        _ = view.table
    with pytest.raises(AttributeError, match="not in a batch"):
        _ = Layered(**batch).first


def test_members_advance_and_are_edited(backend: Backend) -> None:
    """A rule takes the slots of its own name; an edit gives a mapping, of all names or of some."""
    runner = layered(backend, 2)
    seen = {"full": [100, 200], "sliding": [300, 400]}
    batch = batch_of(2, seen)
    state = {kind: torch.tensor(one) for kind, one in seen.items()}
    tables = {kind: one.clone() for kind, one in batch["tables"].items()}
    ids, edited = torch.tensor([0, 1]), 0
    for one in runner.steps(batch, keys=["a", "b"], ahead=1):
        if one.number == edited and edited:
            tables["full"][1] = torch.tensor([50, 60, 70])
            state["sliding"] = torch.tensor([5, int(state["sliding"][1])])
        assert torch.equal(one.outputs.cpu(), by_hand({"ids": ids, "tables": tables, "seen": state})), one.number
        ids = ids + 1
        state = {kind: state[kind] + tables[kind][:, 0] for kind in KINDS.names}
        if one.number == 1:
            edited = one.lands
            one.edit(["b"], tables={"full": [[50, 60, 70]]})
            one.edit(["a"], seen={"sliding": [5]})
            with pytest.raises(BatchError, match=r"'tables.slding'.*did you mean 'tables.sliding'"):
                one.edit(["a"], tables={"slding": [[1, 2]]})
            with pytest.raises(BatchError, match="edit names 'tables'"):
                one.edit(["a"], tables=[[1, 2]])
        if one.number == 6:
            break
    assert edited


def test_buffers_bind_skip_and_recordings_take_members(backend: Backend, tmp_path: Any) -> None:
    """By the slots' names."""
    own = torch.full((4, 3), 5, device=backend.device)
    buffers = InputBuffers(Layered, {BATCH: 4, TOKENS: 4, **SIZES}, bind={"tables.full": own}, backend=backend)
    view = buffers.fill(batch_of(2), {BATCH: 4, TOKENS: 4})
    before = own.clone()
    assert own.data_ptr() == view.tables["full"].data_ptr()
    assert own[:2].tolist() == [[1, 2, 3], [4, 5, 6]]
    view = buffers.fill(batch_of(2, start=20), {BATCH: 4, TOKENS: 4}, only=["tables.sliding"])
    assert torch.equal(own, before)
    assert view.tables["sliding"][:2].tolist() == [[26, 27], [28, 29]]
    with pytest.raises(ConfigError, match=r"only names 'tables'.*'tables.full'"):
        buffers.fill(batch_of(2), only=["tables"])
    with pytest.raises(BindError, match=r"bind names 'tables'.*did you mean 'tables.full'"):
        InputBuffers(Layered, {BATCH: 4, TOKENS: 4, **SIZES}, bind={"tables": own}, backend=backend)
    runner, path = layered(backend, 4), tmp_path / "steps.safetensors"
    with slotgraph.record(runner, path):
        runner(batch_of(3))
        runner(batch_of(2, {"full": [1, 2]}))
    assert "equal" in str(replay_file(RecordedFile.read(path), runner))
    assert slotgraph.check(runner, only=["poison", "parity", "addresses", "coverage"]).ok


class Sided(Inputs):
    """Sources of a group: a path, a side argument, and functions."""

    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    masks: Tables = copied(BATCH, dtype=torch.int64, pad=0, source="meta.masks", group=KINDS)
    bias: Tables = copied(BATCH, dtype=torch.int64, pad=0, source=side("extra.bias"), group=KINDS)
    called: Tables = copied(
        BATCH,
        dtype=torch.int64,
        pad=0,
        source={"full": lambda batch: batch["pair"][0], "sliding": lambda batch: batch["pair"][1]},
        group=KINDS,
    )
    made: Tables = staged(BATCH, dtype=torch.int64, pad=0, group=KINDS)

    @classmethod
    def placeholder(cls, step: Step) -> Mapping[str, Any]:
        """A request that owns all tokens; a group's value is a mapping, too."""
        del step
        return {"masks": {"full": [4], "sliding": [5]}}


def test_sources_placeholders_and_named_steps_know_groups(backend: Backend) -> None:
    """A path leads to what the names are looked up in. A parameter of the step, or of a break, gets all of a group."""

    @graph_break
    def numbered(ids: torch.Tensor, *groups: Tables) -> torch.Tensor:
        columns = [group[kind].sum() for group in groups for kind in KINDS.names]
        return ids + sum(number * column for number, column in enumerate(columns, 1))

    def step(ids: Any, masks: Any, bias: Any, called: Any) -> torch.Tensor:
        return numbered(ids * 2, masks, bias, called) + 1

    runner = BreakableRunner(Sided, step, buckets=[4], max_batch=4, output_rows=TOKENS, backend=backend)
    eager = EagerRunner(Sided, step, backend=backend)
    runner.capture()
    for start in (0, 50):
        batch = {
            "ids": [1, 2, 3],
            "meta": {"masks": {"full": [start + 1, 2], "sliding": [3, 4]}},
            "pair": ([5, 6], [start + 7, 8]),
        }
        given: Any = {"extra": {"bias": {"full": [9, 10], "sliding": [11, 12]}}}
        assert torch.equal(runner(batch, **given), eager(batch, **given))


BY_KIND: Final[Any] = {"full": "wanted", "sliding": "windows"}


class Switched(Inputs):
    """Members that settings switch on, all at once or one by one."""

    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    both: Any = copied(BATCH, dtype=torch.int64, pad=0, when="wanted", group=KINDS)
    some: Any = copied(BATCH, dtype=torch.int64, pad=0, when=BY_KIND, group=KINDS)


def test_settings_switch_members_off(backend: Backend) -> None:
    """They are None in the view, and no batch needs them."""
    seen = list[Any]()

    def step(view: Switched) -> torch.Tensor:
        seen.append({name: {k for k, one in getattr(view, name).items() if one is None} for name in ("both", "some")})
        return view.ids + 1

    settings = {"wanted": False, "windows": True}
    runner = EagerRunner(Switched, step, settings=settings, backend=backend)
    runner({"ids": [1, 2], "some": {"sliding": [3, 4]}})
    assert seen == [{"both": {"full", "sliding"}, "some": {"full"}}]


def test_nothing_is_copied_if_that_is_asked_for() -> None:
    """The view has the batch's own tensors of each name."""
    runner = EagerRunner(Layered, lambda view: view, sizes=SIZES, backend="cpu", no_copy=True)
    batch = {**batch_of(3), "ids": torch.arange(3)}
    view: Any = runner(batch)
    for kind in KINDS.names:
        assert view.tables[kind].data_ptr() == batch["tables"][kind].data_ptr()
        assert (
            view.first[kind].tolist() == (batch["tables"][kind][:, 0] * 100 + {"full": 90, "sliding": 2}[kind]).tolist()
        )


def test_a_micro_batch_has_its_part_of_each(backend: Backend) -> None:
    """Computed members, too."""
    runner, batch = layered(backend, 4), batch_of(4)
    part = runner.fill(batch).narrow(BATCH, 1, 3)
    assert torch.equal(layers(part).cpu(), by_hand(batch)[1:3])


class Counted(Inputs):
    """Numbers that the host computes, which a captured micro-batch cannot have."""

    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    counts: Any = computed(lambda step: step.live(BATCH), shape=1, dtype=torch.int64, group=KINDS)


def test_a_captured_micro_batch_lacks_what_the_host_computes(backend: Backend) -> None:
    """The error says why, and a part of the part lacks it, too."""
    said = list[str]()

    def step(view: Counted) -> torch.Tensor:
        part = view.narrow(BATCH, 0, 2).narrow(BATCH, 1, 2)
        try:
            _ = part.counts["full"]
        except AttributeError as error:
            said.append(str(error))
        found: torch.Tensor = view.ids + view.counts["sliding"] + part.ids[0]
        return found

    runner = decoder(Counted, step, backend=backend, buckets=[4])
    assert runner({"ids": [1, 2, 3]}).tolist() == [6, 7, 8]
    assert "slot 'counts' follows from what the host computes" in said[0]


def test_a_compiled_step_reads_groups() -> None:
    """In one graph of torch.compile."""
    compiled = torch.compile(layers, backend="eager", fullgraph=True)
    runner, batch = EagerRunner(Layered, compiled, sizes=SIZES, backend="cpu"), batch_of(3, {"full": [1, 2, 3]})
    assert torch.equal(runner(batch), by_hand(batch))


def _declare(**fields: Any) -> type[Inputs]:
    def body(namespace: dict[str, Any]) -> None:
        namespace.update({**fields, "__annotations__": dict.fromkeys(fields, torch.Tensor)})

    return types.new_class("Faulty", (Inputs,), {}, body)


OTHERS: Final = Group("full", "linear")
column = functools.partial(copied, BATCH, dtype=torch.int64)
FAULTY: Final[dict[str, dict[str, Any]]] = {
    "slot 'tables.full': no tail rule": {"tables": column(group=KINDS)},
    "group=3: expected a Group": {"tables": column(pad=0, group=cast("Any", 3))},
    "pad={'full': 0}": {"tables": column(pad={"full": 0}, group=KINDS)},
    "it needs 'tables', a group of slots": {
        "tables": column(pad=0, group=KINDS),
        "sums": computed(lambda tables: tables, shape=BATCH, dtype=torch.int64),
    },
    "it needs 'tables.linear', which is neither": {
        "tables": column(pad=0, group=KINDS),
        "sums": computed(lambda tables: tables, shape=BATCH, dtype=torch.int64, group=OTHERS),
    },
    "takes the value of slot 'tables.full'": {
        "tables": copied(BATCH, dtype=torch.int64, pad=0, placement="host", argument="lens", group=KINDS)
    },
}


@pytest.mark.parametrize("says", FAULTY)
def test_faults_of_groups_are_reported(says: str) -> None:
    """With the name of the slot."""
    with pytest.raises(DeclarationErrors) as refused:
        _declare(**FAULTY[says])
    assert any(says in str(one) for one in refused.value.exceptions)


@pytest.mark.parametrize("names", [(), ("full", "full"), ("full", "a b"), (3,)])
def test_names_of_a_group_are_different_identifiers(names: Any) -> None:
    """A path of a source could not lead to others."""
    with pytest.raises(ValueError, match="a group has names of slots"):
        Group(*names)


def test_bases_that_differ_in_one_member_conflict() -> None:
    """As bases do that differ in a slot; dropping and overriding take the whole group."""
    one, other = (_declare(tables=column(pad={"full": 0, "sliding": pad}, group=KINDS)) for pad in (1, 2))
    with pytest.raises(DeclarationErrors) as refused:
        types.new_class("Both", (one, other))
    assert "both declare it" in str(refused.value.exceptions[0])
    assert not types.new_class("Without", (one,), {"drop": ["tables"]}).slotgraph.slots  # type: ignore[attr-defined]
