"""A backend of one's own is checked when it is made: its record, and the verbs that the record and runners ask for."""

import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from slotgraph import BATCH, CACHE_LOC, SEQ_LEN_FILL, DecodeRunner, EagerRunner, Inputs, copied
from slotgraph.backends import Backend, Capabilities, choose, load, names
from slotgraph.errors import ConfigError
from slotgraph.extend import FillRole, Role

Cpu: Any = load("cpu")


class Cached(Inputs):
    ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
    locations: torch.Tensor = copied(BATCH, dtype=CACHE_LOC, pad=0)
    lens: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=SEQ_LEN_FILL)


def backend_of(base: Any = Cpu, record: Callable[[], Any] = Capabilities, **verbs: Any) -> Any:
    """A class of backends with this record and these verbs."""
    body = {"name": "own", "capabilities": property(lambda _: record()), **verbs}
    return types.new_class("Own", (base,), {}, lambda space: space.update(body))


WRONG: list[dict[str, Any]] = [
    *({"foreach_chunk": value} for value in (-1, "4", 1.5, None, True)),
    *(
        {"lowerings": value}
        for value in ((), ("foreech",), "foreach", ["foreach"], ("foreach", "foreach"), None, (None,))
    ),
    *({"roles": value} for value in (5, None, ["cache_loc"], {"cache_loc": "int32"}, {"cache_loc": None})),
    *({"roles": {name: torch.int32}} for name in ("cache_lock", "cacheloc", "cache_locs", "Cache_Loc", "cache-loc")),
    *({"fills": {name: 0}} for name in ("seq_len_fil", "seq_len_fills", "SEQ_LEN_FILL", "seqlen_fill")),
    *({"fills": value} for value in (0, {"seq_len_fill": "0"}, {"seq_len_fill": None}, {"seq_len_fill": False})),
    *({"capture_error_modes": value} for value in ("global", ["global"], (1,), None)),
    *({"graphs_hint": value} for value in (0, -1, "many", 1.5, True)),
    *(
        {name: value}
        for name in (
            *("pools_inputs", "foreach_device", "foreach_mixed", "packed_uploads", "arenas"),
            "host_parameters",
        )
        for value in ("no", 1, None)
    ),
]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_a_wrong_value_in_a_record_is_refused_by_its_field(wrong: dict[str, Any]) -> None:
    """A value of another kind, an unknown lowering and a name that is almost a role's are refused by the field."""
    [name] = wrong
    said = rf"Capabilities\({name}=\): "
    with pytest.raises(ConfigError, match=said):
        Capabilities(**wrong)
    kind = backend_of(record=functools.partial(Capabilities, **wrong))
    for make in (lambda: choose(kind), lambda: choose(kind()), lambda: EagerRunner(Cached, print, backend=kind())):
        with pytest.raises(ConfigError, match=said):
            make()


def test_records_that_suit_are_taken() -> None:
    """Every backend here has a record that is taken, and so is one with a role and a fill role of one's own."""
    for name in names():
        if load(name).is_available():
            assert choose(name).name == name
    Role("pages_of_records", torch.int64)
    FillRole("page_of_records", -1)
    record = Capabilities(
        roles={"pages_of_records": torch.int32, "cache_loc": torch.int32, "made_by_others_later": torch.int8},
        fills={"page_of_records": -2, "seq_len_fill": 0},
        foreach_chunk=2,
        graphs_hint=3,
        capture_error_modes=("global",),
        lowerings=("slot_by_slot",),
    )
    runner = DecodeRunner(Cached, lambda view: view.locations, buckets=[4], backend=backend_of(record=lambda: record)())
    assert runner.lowering == "slot_by_slot"
    with pytest.raises(ConfigError, match="there is no role 'pages_of_record': did you mean 'pages_of_records'"):
        Capabilities(roles={"pages_of_record": torch.int32})


def test_what_is_no_record_is_refused() -> None:
    """A backend's record is a Capabilities."""
    records: list[Callable[[], Any]] = [dict, lambda: None, lambda: Capabilities]
    for record in records:
        with pytest.raises(ConfigError, match="backend 'own': expected a Capabilities as its record, got"):
            choose(backend_of(record=record)())


def plain(name: str) -> Any:
    """The base's own verb, as if it were not defined."""
    return getattr(Backend, name)


@pytest.mark.parametrize("lowering", ["in_graph", "fused"])
@pytest.mark.parametrize("missing", ["upload", "fusion"])
def test_a_fused_lowering_needs_an_upload_and_a_fusion(lowering: Any, missing: str) -> None:
    """A record that names a fused lowering asks for an upload and a fusion, one with packed uploads for an upload."""
    record = functools.partial(Capabilities, lowerings=("foreach", lowering))
    with pytest.raises(ConfigError, match=rf"does not define: upload\(\) and fusion\(\), for {lowering}"):
        choose(backend_of(record=record, **{missing: plain(missing)}))
    assert choose(backend_of(record=record)).name == "own"


def test_packed_uploads_need_an_upload() -> None:
    """Likewise for packed uploads."""
    record = functools.partial(Capabilities, packed_uploads=True)
    with pytest.raises(ConfigError, match=r"does not define: upload\(\), for packed_uploads"):
        choose(backend_of(record=record, upload=plain("upload")))
    assert choose(backend_of(record=record, fusion=plain("fusion"))).name == "own"


VERBS: dict[str, list[tuple[Callable[..., Any], str]]] = {
    "capture": [
        (lambda self, step, pool=None, error_mode=None: None, "'parameters'"),
        (lambda self, step, *, pool, parameters: None, "'error_mode'"),
        (lambda self: None, "too many positional"),
        (lambda self, step, other, **_: None, "'other'"),
    ],
    "empty": [(lambda self, shape, dtype: None, "too many positional")],
    "upload": [(lambda self: None, "too many positional")],
    "interrupt": [(lambda self: None, "too many positional"), (lambda self, *, run: None, "")],
    "order": [(lambda self, first: None, "too many positional")],
    "pool": [(lambda self, handle: None, "'handle'")],
}


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_that_takes_something_else_is_refused(verb: str) -> None:
    """A verb that cannot take what runners call it with is refused when the class is defined, mixins included."""
    for function, said in VERBS[verb]:
        with pytest.raises(ConfigError, match=rf"Own\.{verb}: .*{said}.*: runners call {verb}\("):
            backend_of(**{verb: function})
        mixin = type("Mixin", (), {verb: function})
        with pytest.raises(ConfigError, match=rf"Own\.{verb}: "):
            types.new_class("Own", (mixin, Cpu), {})


def test_a_verb_may_take_more() -> None:
    """A verb may take more than runners give, by defaults, or anything at all."""

    def takes_any(self: Any, *args: Any, **given: Any) -> Any:
        return Cpu.capture(self, *args, **given)

    def takes_more(self: Any, step: Any, pool: Any = None, more: Any = 3, **given: Any) -> Any:
        del more
        return Cpu.capture(self, step, pool=pool, **given)

    for capture in (takes_any, takes_more):
        backend = backend_of(capture=capture)()
        runner = DecodeRunner(Cached, lambda view: view.ids * 2, buckets=[4], backend=backend)
        runner.capture()
        given = {"ids": torch.tensor([3, 4]), "locations": torch.tensor([5, 6]), "lens": [1, 2]}
        assert runner(given).tolist() == [6, 8]
