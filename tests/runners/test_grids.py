"""Buckets on several axes, and variants: the choice and its reasons, what runners say of them, and what is refused."""

import itertools
import json
from pathlib import Path
from typing import Any, Final

import pytest
import torch

import slotgraph
from slotgraph import BATCH, TOKENS, Axis, DecodeRunner, Inputs, computed, copied
from slotgraph.config import RunnerConfig
from slotgraph.errors import BatchError, BindError, CaptureError, ConfigError, DeclarationError, ReplayError
from slotgraph.graphs import GraphRunner, variant
from slotgraph.metrics import Collector
from slotgraph.pool import InputPool
from slotgraph.reports import RecordedFile, replay_file
from slotgraph.runners.engine import statistics
from slotgraph.runners.engine.statistics import Counts
from slotgraph.runners.metrics import _samples
from slotgraph.runners.serial import from_data, to_data
from tests.runners.models import ready

KV, HIDDEN, OTHER = Axis("KV"), Axis("HIDDEN", fixed=True), Axis("OTHER")
BACKEND: Final = "cpu-capture"


class Lengths(Inputs):  # rows of a context, and what an engine tells its kernel
    ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
    table: torch.Tensor = copied(BATCH, KV, dtype=torch.int64, pad=0, poison=())
    bias: torch.Tensor | None = copied(BATCH, dtype=torch.int64, pad=0, default=None)
    half: torch.Tensor = computed(lambda most: most // 2, dtype=torch.int64)
    most: int = 8
    mode: str = "decode"
    flag: bool = False


def step(view: Lengths) -> torch.Tensor:
    """[BATCH]."""
    places = torch.arange(view.table.shape[1], device=view.table.device)
    total = view.ids * 100 + torch.where(places < view.most, view.table, 0).sum(1)
    return total if view.bias is None else total + view.bias


def batch(requests: int, context: int, **more: Any) -> dict[str, Any]:
    """Of these sizes."""
    return {"ids": torch.arange(requests), "table": torch.ones(requests, context, dtype=torch.int64), **more}


GRID: Final = {BATCH: [1, 4], KV: [2, 8]}


def made(**options: Any) -> Any:
    """A runner, not captured yet."""
    usual: dict[str, Any] = {"buckets": GRID, "backend": BACKEND, "progress": False, "absent": [{"bias"}]}
    return GraphRunner(Lengths, step, **{**usual, **options})


def test_the_least_product_is_taken_and_said() -> None:
    """The bucket of the least product, then of the least sum; the decision says which, of which sizes, and why."""
    runner = ready(made(buckets=[{BATCH: 4, KV: 4}, {BATCH: 2, KV: 8}, {BATCH: 8, KV: 2}, {BATCH: 8, KV: 8}]))
    assert [*runner.sizes] == [(4, 4), (2, 8), (8, 2), (8, 8)]
    wanted = {(2, 2): (4, 4), (2, 5): (2, 8), (5, 2): (8, 2), (5, 3): (8, 8), (1, 1): (4, 4)}
    assert {sizes: runner.decide(batch(*sizes)).bucket for sizes in wanted} == wanted
    decision = runner.decide(batch(3, 3))
    assert decision.reason == "bucket (4, 4) fits: it has the least BATCH x KV of those that hold the batch"
    assert (decision.path, decision.why, decision.variant) == ("graph", "fits", "")
    for sizes, why in (((9, 2), "9 rows on BATCH are more than the 8 of every"), ((2, 9), "9 rows on KV are more")):
        assert why in runner.decide(batch(*sizes)).reason
    pairs = ready(made(buckets=[{BATCH: 1, KV: 8}, {BATCH: 4, KV: 2}]))
    assert pairs.decide(batch(2, 3)).reason == "no bucket holds 2 rows on BATCH and 3 rows on KV together"
    assert pairs(batch(2, 3)).tolist() == [3, 103]


def test_a_cost_decides() -> None:
    """The function sees the padded sizes of every axis once a bucket, and what costs least is taken, whatever it is."""
    seen = []

    def cost(sizes: Any) -> float:
        seen.append(dict(sizes))
        return 1.0 if sizes[KV] == 8 else 2.0

    runner = ready(made(cost=cost))
    assert len(seen) == 4
    assert {BATCH: 1, KV: 2} in seen
    assert runner.decide(batch(1, 1)).bucket == (1, 8)
    assert "costs least" in runner.decide(batch(1, 1)).reason


class Tokens(Inputs):
    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)


def test_buckets_on_an_axis_that_a_relation_alone_has() -> None:
    """Requests have buckets, though each slot has rows for tokens."""
    options: Any = {"relations": {TOKENS: BATCH * 2}, "backend": BACKEND, "progress": False, "output_rows": TOKENS}
    runner = ready(GraphRunner(Tokens, lambda view: view.ids * 2, buckets={BATCH: [1, 4]}, **options))
    assert runner({"ids": torch.arange(6)}).tolist() == [0, 2, 4, 6, 8, 10]
    assert runner.decide({"ids": torch.arange(6)}).bucket == 4


def test_rows_of_outputs_are_padded_rows() -> None:
    """At capture outputs must have the padded rows of the axis that they follow."""
    runner = made(output_rows=KV)
    with pytest.raises(CaptureError, match=r"returned a tensor of shape \[4\], expected 8 rows, .* bucket \(4, 8\)"):
        runner.capture()


@pytest.mark.parametrize("axis", [BATCH, KV, None])
def test_outputs_are_cut(axis: Axis | None) -> None:
    """To the live rows of the axis, or not at all."""
    runner = ready(
        GraphRunner(
            Lengths,
            lambda view: view.table.sum(0 if axis == KV else 1),
            buckets=GRID,
            absent=[{"bias"}],
            output_rows=axis,
            backend=BACKEND,
            progress=False,
        )
    )
    rows = {BATCH: 3, KV: 5, None: 4}[axis]
    assert runner(batch(3, 5)).shape == (rows,)


def test_what_a_runner_says() -> None:
    """Reports, statistics, plans, inputs, explanations, metrics and events name buckets by their sizes."""
    runner = made(variants=[variant("most", at_least=[4, 8])])
    report = runner.capture()
    assert report.captured == ((1, 2), (1, 8), (4, 2), (4, 8))
    assert (report.graphs, len(runner.graphs.captured)) == (16, 16)
    assert str(report).startswith("4 buckets captured in 16 graphs, 0 failed")
    for sizes, most in (((1, 1), 4), ((3, 5), 7), ((3, 5), 3), ((3, 5), 9)):
        runner(batch(*sizes, most=most))
    stats = runner.stats()
    assert stats["rows"] == {(1, 1): 1, (3, 5): 2}
    assert stats["buckets"][4, 8] == {"path": "graph", "steps": 2, "live": 30, "padded": 64, "waste": 34 / 64}
    assert stats["eager"] == {"field_differs": {"steps": 1, "live": 3}}
    assert stats["capture"]["graphs"] == 16
    assert runner.plan((4, 8)).lines()
    view = runner.inputs((4, 2), absent=["bias"])
    assert (view.table.shape, view.bias) == ((4, 2), None)
    found = slotgraph.explain(runner)
    assert "most at least 4, 8: each bucket has a graph for each combination" in str(found)
    assert [one.rows for one in found.buckets] == [*runner.sizes]
    assert found.buckets[0].launches == {"most=4": 1, "most=8": 1, "bias, most=4": 1, "bias, most=8": 1}
    assert from_data(json.loads(json.dumps(to_data(found), allow_nan=False)), type(found)) == found
    assert found.statistics["rows"] == {"(1, 1)": 1, "(3, 5)": 2}
    labels = {way for name, way, *_ in _samples(stats) if name == "steps"}
    assert {("graph", "(4, 8)", "fits"), ("eager", "", "field_differs")} <= labels
    assert isinstance(Collector(decode=runner), Collector)
    assert "(1, 2), (4, 2), (1, 8), (4, 8)" in repr(runner)
    runner.log_stats()


def test_statistics_stay_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that never come again are merged into the largest of similar ones; no step is lost, and no size shrinks."""
    monkeypatch.setattr(statistics, "MOST_SIZES", 64)
    counts, live = Counts(), 0
    for size in range(1, 3000):
        counts.replayed((1 + size % 7, size))
        live += (1 + size % 7) * size
        assert len(counts.rows) <= 64
    assert (sum(counts.rows.values()), counts.live) == (2999, live)
    assert max(counts.rows)[1] >= 2990


def test_lazy_graphs_and_refused_captures() -> None:
    """A bucket and all its variants are captured when the first batch comes; one that fails runs eagerly, by reason."""
    runner = ready(made(lazy=True, variants=[variant("most", at_least=[4, 8])]))
    assert runner.report.captured == ()
    assert runner(batch(2, 2, most=3)).tolist() == [2, 102]
    assert (runner.report.captured, runner.report.graphs) == (((4, 2),), 4)

    def failing(view: Lengths) -> torch.Tensor:
        if view.table.shape == (4, 8):
            raise ValueError("no room")
        return step(view)

    refused = GraphRunner(Lengths, failing, buckets=GRID, absent=[{"bias"}], backend=BACKEND, progress=False)
    with pytest.raises(CaptureError, match=r"1 of 4 buckets .*bucket \(4, 8\): .*no room"):
        refused.capture()
    assert refused.decide(batch(4, 2)).bucket == (4, 2)
    assert refused.decide(batch(4, 8)).why == "not_captured"


def test_absent_slots_waste_and_copies() -> None:
    """Patterns of absent slots, the limit of padding over the product, copies, and switched-off graphs."""
    runner = ready(made(max_waste=0.5, outputs="copy"))
    decision = runner.decide(batch(2, 5, bias=torch.ones(2, dtype=torch.int64)))
    assert decision.reason == "bucket (4, 8) would be 69% padding, over the limit of 50%"
    assert runner.decide(batch(4, 5, bias=None)).bucket == (4, 8)
    first, second = runner(batch(4, 5)), runner(batch(4, 6))
    assert [first.tolist(), second.tolist()] == [[5, 105, 205, 305], [6, 106, 206, 306]]
    assert ready(made(absent=[])).decide(batch(1, 1)).why == "absent"
    assert ready(made(graphs=False)).decide(batch(1, 1)).why == "disabled"
    with pytest.raises(ReplayError, match="nothing is captured yet"):
        made().decide(batch(1, 1))


def test_own_memory_and_pools() -> None:
    """Tensors that are bound have the largest size on each axis; a pool's phase lays them out."""
    own = torch.full((4, 8), 7)
    runner = ready(made(bind={"table": own}))
    assert runner(batch(2, 3)).tolist() == [3, 103]
    assert own[0].tolist() == [1, 1, 1, 0, 0, 0, 0, 0]
    with pytest.raises(BindError, match="slot 'table'"):
        made(bind={"table": torch.zeros(2, 8, dtype=torch.int64)})
    pool = InputPool("one", "two")
    pair = [made(phase=pool[name]) for name in ("one", "two")]
    for member in pair:
        member.capture()
    assert [member(batch(3, 2)).tolist() for member in pair] == [[2, 102, 202]] * 2


def test_debug_modes_and_recordings(tmp_path: Path) -> None:
    """Debug modes watch steps of any bucket, and a recording is read back and replayed, its decisions with it."""
    runner = ready(
        made(
            debug=["generations", "addresses", "keys", "poison", "parity"],
            variants=[variant("most", at_least=[8])],
        )
    )
    with slotgraph.record(runner, tmp_path / "steps.safetensors") as recording:
        for sizes in ((1, 1), (3, 5), (4, 8)):
            runner(batch(*sizes, most=8))
        recording.save()
    report = replay_file(RecordedFile.read(tmp_path / "steps.safetensors"), runner)
    assert report.ok, str(report)


def test_a_configuration_names_axes(tmp_path: Path) -> None:
    """A file has a grid by the axes' names, and comes back from data."""
    file = tmp_path / "runner.toml"
    file.write_text("[buckets]\nBATCH = [4, 1]\nKV = [2, 8]\n", encoding="utf-8")
    config = RunnerConfig.load(file)
    runner = GraphRunner(Lengths, step, config=config, backend=BACKEND)
    assert {*runner.sizes} == {*itertools.product((1, 4), (2, 8))}
    assert RunnerConfig.of(config.as_data()) == config
    assert RunnerConfig.of({"buckets": [{"BATCH": 1, "KV": 2}]}).as_data() == {"buckets": [{"BATCH": 1, "KV": 2}]}


def test_variants_of_decode_runners() -> None:
    """The step, the view of the call and functions on the host see the graph's number; steps() keeps equal values."""
    runner = ready(
        DecodeRunner(
            Lengths,
            step,
            buckets=[4],
            sizes={KV: 8},
            backend=BACKEND,
            absent=[{"bias"}],
            variants=[variant("most", at_least=[4, 8]), variant("mode", ("decode", "verify"))],
        )
    )
    view = runner.fill(batch(2, 3, most=3, mode="verify"))
    assert (view.most, view.mode, int(view.half)) == (4, "verify", 2)
    assert runner.decide(batch(2, 3, most=5)).reason == "bucket 4 fits, with most=8, mode='decode'"
    for most in (9, float("nan"), "8", True, torch.tensor(4), None):
        decision = runner.decide(batch(2, 3, most=most))
        assert decision.path == ("graph" if most is None else "eager")  # the default is 8
    assert (
        "field 'mode' is 'draft', and graphs were captured for mode 'decode', 'verify'"
        in runner.decide(batch(2, 3, mode="draft")).reason
    )


class Counted(Inputs):
    ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0, then=lambda ids: ids + 1)
    plus: int = 0
    most: int = 8


@pytest.mark.parametrize("chunk", [1, 2])
def test_steps_keep_equal_values_alone(chunk: int) -> None:
    """steps() runs the graphs of its first batch's values; a number that later steps may outgrow is refused."""
    count: Any = lambda view: view.ids * 10 + view.plus
    options: Any = {"buckets": [2, 4], "backend": BACKEND, "progress": False, "chunks": [chunk]}
    runner = ready(DecodeRunner(Counted, count, variants=[variant("plus", (0, 3))], **options))
    found = []
    for number, one in enumerate(runner.steps({"ids": [1, 2, 5], "plus": 3}, chunk=chunk)):
        found.append(one.outputs.tolist())
        if number == 2:
            one.leave([0])
        if number == 3:
            break
    assert found == [[13, 23, 53], [23, 33, 63], [33, 43, 73], [83, 53]]
    with pytest.raises(BatchError, match="field 'plus' is 4, and graphs were captured for plus 0, 3"):
        runner.steps({"ids": [1], "plus": 4})
    outgrown = ready(DecodeRunner(Counted, count, variants=[variant("most", at_least=[4, 8])], **options))
    with pytest.raises(ConfigError, match="later steps may outgrow 'most'"):
        outgrown.steps({"ids": [1], "most": 3})


class Fixed(Inputs):
    ids: torch.Tensor = copied(BATCH, HIDDEN, dtype=torch.int64, pad=0)


class Odd(Inputs):
    ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
    wide: torch.Tensor = computed(lambda step: [*range(step.padded(KV))], shape=KV, dtype=torch.int64)


NAN: Final = float("nan")
BUCKETS: list[tuple[Any, str]] = [
    (None, "option 'buckets': expected padded sizes by axis, such as"),
    ([1, 2, 4], "option 'buckets': expected padded sizes by axis, such as .* got \\(1, 2, 4\\)"),
    ({}, "option 'buckets': expected a mapping of at least one axis"),
    ([], "option 'buckets': expected a list or tuple of at least one int"),
    ({3: [1]}, "option 'buckets': expected a mapping of at least one axis"),
    ({BATCH: []}, "option 'buckets' of BATCH: expected a list or tuple of at least one int"),
    ({BATCH: 4}, "option 'buckets' of BATCH: expected a list .* got 4"),
    ({BATCH: [0]}, "option 'buckets' of BATCH: expected"),
    ({BATCH: [-1]}, "option 'buckets' of BATCH: expected"),
    ({BATCH: [1.5]}, "option 'buckets' of BATCH: expected"),
    ({BATCH: [True]}, "option 'buckets' of BATCH: expected"),
    ({BATCH: ["2"]}, "option 'buckets' of BATCH: expected"),
    ({BATCH: "12"}, "option 'buckets' of BATCH: expected .* got '12'"),
    ({BATCH: [2, 2]}, "option 'buckets' of BATCH: expected .* each once"),
    ({BATCH: [1 << 25]}, "option 'buckets' of BATCH: expected"),
    ({BATCH: [1], KV: [None]}, "option 'buckets' of KV: expected"),
    ({BATCH: [1], "BATCH": [2]}, "option 'buckets': expected a mapping of at least one axis, each once"),
    ([{BATCH: 1, KV: 2}, {BATCH: 2}], "option 'buckets': expected sizes on the same axes for each bucket"),
    ([{BATCH: 1, KV: 2}, {BATCH: 1, KV: 2}], "option 'buckets': expected .* each bucket once"),
    ([{BATCH: 1, KV: 2}, 3], "option 'buckets': expected a mapping of at least one axis"),
    ([3, {BATCH: 1, KV: 2}], "option 'buckets': expected a mapping of at least one axis"),
    ([{BATCH: 1, KV: "2"}], "option 'buckets' of KV: expected"),
    ([{BATCH: [1], KV: [2]}], "option 'buckets' of BATCH: expected"),
    ([{}], "option 'buckets': expected a mapping of at least one axis"),
    ({BATCH: [1], OTHER: [2]}, "option 'buckets' names 'OTHER', an axis that no slot of Lengths has"),
    ({BATCH: [1], "KVS": [2]}, "option 'buckets' names 'KVS', .*; did you mean 'KV'"),
]
OTHERS: list[tuple[dict[str, Any], str]] = [
    ({"sizes": {KV: 4}}, "sizes of BATCH and KV follow from buckets=: give those"),
    ({"buckets": {BATCH: [1]}}, "Lengths needs sizes= for KV: the most rows that a batch has"),
    ({"inputs": Fixed, "buckets": {HIDDEN: [1]}, "sizes": {HIDDEN: 3}}, "sizes on HIDDEN, and a runner has one size"),
    ({"relations": {KV: BATCH * 2}}, "option 'buckets' has sizes on KV, and it follows from BATCH \\* 2: leave it out"),
    ({"relations": {"KV": BATCH}}, "relations: expected"),
    ({"relations": 3}, "relations: expected a mapping"),
    ({"cost": 3}, "cost: expected a function of a bucket's padded sizes by axis, or None, got 3"),
    ({"cost": lambda _: NAN}, "cost: expected a number for each bucket, not NaN, got nan"),
    ({"cost": lambda _: "much"}, "cost: expected a number for each bucket"),
    ({"cost": lambda _: True}, "cost: expected a number for each bucket"),
    ({"output_rows": TOKENS}, "output_rows is BATCH, KV or None, got TOKENS"),
    ({"output_rows": "KV"}, "output_rows is BATCH, KV or None, got 'KV': give the axis itself"),
    ({"max_batch": 4}, "GraphRunner does not use option 'max_batch'"),
    ({"width": 4}, "GraphRunner does not use option 'width'"),
    ({"variants": variant("most")}, "variants: expected a list of variants"),
    ({"variants": "most"}, "variants: expected a list of variants"),
    ({"variants": ["most"]}, "variants: expected what variant\\(\\) returns, got 'most'"),
    ({"variants": [variant("mots")]}, "variants names 'mots', which is no field, of Lengths; did you mean 'most'"),
    ({"variants": [variant("ids")]}, "variants names 'ids', which is a slot, whose values no graph freezes"),
    ({"variants": [variant("most"), variant("most", (3,))]}, "variants names field 'most' twice"),
    ({"absent": [{"table"}]}, "absent names 'table'"),
]
VARIANTS: list[tuple[dict[str, Any], str]] = [
    ({"field": 3}, "variant: expected the name of a field, got 3"),
    ({"field": "most", "values": ()}, "variant 'most': expected a list or tuple of at least one value"),
    ({"field": "most", "values": "abc"}, "variant 'most': expected a list or tuple of at least one value"),
    ({"field": "most", "values": 3}, "variant 'most': expected a list or tuple"),
    ({"field": "most", "values": (1, 1)}, "variant 'most': expected each value once"),
    ({"field": "most", "values": (None,)}, "variant 'most': expected values that equal themselves and have a hash"),
    ({"field": "most", "values": (NAN,)}, "variant 'most': expected values that equal themselves"),
    ({"field": "most", "values": ([1],)}, "variant 'most': expected values that equal themselves"),
    ({"field": "most", "values": (torch.tensor(1),)}, "variant 'most': expected values that equal themselves"),
    ({"field": "most", "values": (1,), "at_least": [2]}, "variant 'most': give values, or at_least=, not both"),
    ({"field": "most", "at_least": []}, "variant 'most': expected a list or tuple of at least one value"),
    ({"field": "most", "at_least": 512}, "variant 'most': expected a list"),
    ({"field": "most", "at_least": ["512"]}, "variant 'most': at_least: expected finite numbers"),
    ({"field": "most", "at_least": [True]}, "variant 'most': at_least: expected finite numbers, got True"),
    ({"field": "most", "at_least": [NAN]}, "variant 'most': at_least: expected finite numbers, got nan"),
    ({"field": "most", "at_least": [float("inf")]}, "variant 'most': at_least: expected finite numbers, got inf"),
    ({"field": "most", "at_least": [4, 4]}, "variant 'most': expected each value once"),
]


@pytest.mark.parametrize(("buckets", "says"), BUCKETS)
def test_malformed_buckets(buckets: Any, says: str) -> None:
    """The error names the axis, what was expected, and what came."""
    with pytest.raises(ConfigError, match=says):
        made(buckets=buckets)


@pytest.mark.parametrize(("options", "says"), OTHERS)
def test_malformed_arguments(options: dict[str, Any], says: str) -> None:
    """The error names the axis, the field or the option."""
    given = {"inputs": Lengths, "buckets": GRID, "backend": BACKEND, **options}
    with pytest.raises(ConfigError, match=says):
        GraphRunner(given.pop("inputs"), step, **given)


@pytest.mark.parametrize(("given", "says"), VARIANTS)
def test_malformed_variants(given: dict[str, Any], says: str) -> None:
    """The error names the field."""
    with pytest.raises(ConfigError, match=says):
        variant(**given)


def test_malformed_batches_lose_nothing() -> None:
    """A batch that does not fit its declaration is refused by slot, and the view before it is still the last one."""
    runner = ready(made(variants=[variant("most", at_least=[8])]))
    view = runner.fill(batch(3, 5))
    wrong: list[tuple[dict[str, Any], str]] = [
        (batch(3, 5) | {"ids": torch.arange(2)}, "'ids' says BATCH=2"),
        (batch(3, 5) | {"table": torch.ones(3, dtype=torch.int64)}, "slot 'table'"),
        (batch(3, 5) | {"table": torch.ones(3, 5)}, "slot 'table': expected int64"),
        ({"ids": torch.arange(3)}, "slot 'table': .* missing"),
        (batch(3, 5, bias=torch.ones(3)), "slot 'bias': expected int64"),
    ]
    for one, says in wrong:
        with pytest.raises(BatchError, match=says):
            runner(one)
    assert runner.replay(view).tolist() == [5, 105, 205]


def test_malformed_names_of_buckets() -> None:
    """Nothing but a bucket's sizes, in the order of its axes, names it."""
    runner = ready(made())
    for wrong in (4, (4,), (8, 4), (4, 2, 1), "4"):
        with pytest.raises(ConfigError, match=r"there is no bucket .*: buckets are \(1, 2\), "):
            runner.plan(wrong)
        with pytest.raises(ConfigError, match="there is no graph of bucket"):
            runner.inputs(wrong)
    with pytest.raises(
        ConfigError, match="option 'buckets': expected numbers of rows, as only a GraphRunner takes sizes"
    ):
        DecodeRunner(Lengths, step, buckets=GRID, sizes={KV: 8}, backend=BACKEND)  # type: ignore[arg-type]
    with pytest.raises(DeclarationError, match="no copied slot determines the size of KV"):
        GraphRunner(Odd, lambda view: view, buckets={BATCH: [1], KV: [2]}, backend=BACKEND)
