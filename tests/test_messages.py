"""Messages: what came, and the way out, for the mistakes that users make first, in every entry point."""

import functools
import pickle
import re
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from structlog.testing import capture_logs

from slotgraph import BATCH, TOKENS, Axis, BreakableRunner, EagerRunner, InputBuffers, Inputs, copied
from slotgraph.backends import load
from slotgraph.config import RunnerConfig
from slotgraph.dataflow import errors
from slotgraph.dataflow.capabilities import dtype_from_text
from slotgraph.dataflow.errors import BatchError, CaptureError, MissingSourceError, ReplayError, SlotGraphError, hint
from slotgraph.pool import InputPool
from slotgraph.runners.engine.hooks import Watcher
from tests.runners.kinds import RUNNERS, Drafted, Fed, batch_of, captured, make
from tests.runners.models import decoder

HERE = Path(__file__).name
FACTORS = {
    "DecodeRunner": ("width", 1),
    "DraftRunner": ("topk", 2),
    "DraftExtendRunner": ("width", 1),
    "MultiLayerDraftExtendRunner": ("width", 1),
}
"""By runner whose TOKENS follow BATCH, the option that says how many, and what it is here."""


class Placed(Fed):  # two slots over tokens, and one over requests
    places: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)


class PlacedDraft(Drafted):
    places: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)


def inputs_of(name: str) -> type[Inputs]:
    """The declaration that a runner of the tests here has."""
    return PlacedDraft if name == "DraftRunner" else Placed


def placed_batch(name: str, requests: int = 3) -> dict[str, Any]:
    """A random batch that the runner takes."""
    batch = batch_of(name, requests, seed=requests)
    return {**batch, "places": batch["tokens"] + torch.arange(len(batch["tokens"]))}


@functools.cache
def runner_of(name: str) -> Any:
    """One of each, captured."""
    return captured(name, inputs=inputs_of(name))


@functools.cache
def buffers() -> Any:
    """The same slots without a runner."""
    return InputBuffers(Placed, {BATCH: 4, TOKENS: 8}, settings={"window": False}, backend="cpu-capture")


@attrs.frozen
class Entry:
    """One way in for a batch.

    Attributes:
        name: Of the runner, for batches that suit it.
        take: Hands it a batch.
    """

    name: str
    take: Callable[[Any], Any]


def _entries() -> dict[str, Entry]:
    found = {
        "InputBuffers.fill": Entry("EagerRunner", lambda batch: buffers().fill(batch)),
        "InputBuffers.fill live=": Entry("EagerRunner", lambda batch: buffers().fill(batch, live={BATCH: 3})),
    }
    for name in RUNNERS:
        found[name] = Entry(name, lambda batch, name=name: runner_of(name)(batch))  # type: ignore[misc]
        for way in ("fill", "decide"):
            found[f"{name}.{way}"] = Entry(
                name,
                lambda batch, name=name, way=way: getattr(runner_of(name), way)(batch),  # type: ignore[misc]
            )
    return found


ENTRIES = _entries()


def said_by(take: Callable[[Any], Any], batch: Any, kind: type[Exception] = BatchError) -> str:
    """What the refusal of a batch says."""
    with pytest.raises(kind) as caught:
        take(batch)
    return str(caught.value)


@pytest.mark.parametrize("entry", ENTRIES)
def test_what_is_no_batch_is_told_what_a_batch_is(entry: str) -> None:
    """A tensor, a list, a number, nothing, a class: the message says what a batch is, and names no slot as missing."""
    take, batch = ENTRIES[entry].take, placed_batch(ENTRIES[entry].name)
    given: list[tuple[Any, str]] = [
        (batch["tokens"], "Tensor"),
        (batch["tokens"].numpy(), "ndarray"),
        ([*batch.values()], "list"),
        ((batch["tokens"], batch["lens"]), "tuple"),
        (3, "int"),
        ("tokens", "str"),
        (None, "None"),
        (Placed, "the class Placed"),
        (torch.nn.Linear(2, 2), "Linear"),
        (iter([batch]), "list_iterator"),
    ]
    for value, came in given:
        said = said_by(take, value, MissingSourceError)
        assert said.startswith(f"a batch is a mapping or an object with a value for each slot, got {came}: pass {{")
        assert "': ..., ...}" in said
        assert "is missing" not in said
        assert "did you mean" not in said
    take(SimpleNamespace(**batch))


def test_attributes_of_what_is_no_batch_are_no_keys() -> None:
    """A runner that names the keys that no slot reads says nothing of a tensor's attributes."""

    class Graded(Inputs):
        grads: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
        names: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)

    runner = decoder(Graded, lambda view: view.grads, buckets=[2], backend="cpu-capture", debug=True)
    for value in (torch.ones(2), [1, 2], "grads", None, torch.nn.Linear(2, 2)):
        with capture_logs() as events:
            assert said_by(runner, value).startswith("a batch is a mapping or an object")
        assert events == []


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_misspelt_name_is_told_which_was_meant(entry: str) -> None:
    """A mapping and an object that lack one source, or have all under other names, are told which name was meant."""
    take, batch = ENTRIES[entry].take, placed_batch(ENTRIES[entry].name)
    for wrong in ({"lens": "len"}, {"tokens": "token", "lens": "len", "places": "place"}):
        renamed = {wrong.get(name, name): value for name, value in batch.items()}
        for made in (renamed, SimpleNamespace(**renamed)):
            said = said_by(take, made, MissingSourceError)
            assert "is missing" in said
            assert all(f"the batch has {one!r}: did you mean {meant!r}?" in said for meant, one in wrong.items())


@pytest.mark.parametrize("as_what", ["tensor", "list", "array", "attribute"])
@pytest.mark.parametrize("entry", ENTRIES)
def test_the_source_that_is_shorter_comes_first(entry: str, as_what: str) -> None:
    """The slot that differs comes first, and each slot says one size: none is told what another should have been."""
    name, take = ENTRIES[entry].name, ENTRIES[entry].take
    factor, batch = FACTORS.get(name, ("", 0))[1], placed_batch(ENTRIES[entry].name)
    for slot in ("places", "tokens"):
        short: Any = batch[slot][:-1]
        rows = len(short)
        short = {"list": short.tolist(), "array": short.numpy()}.get(as_what, short)
        wrong = {**batch, slot: short}
        said = said_by(take, SimpleNamespace(**wrong) if as_what == "attribute" else wrong)
        other = "tokens" if slot == "places" else "places"
        if not factor:
            sizes = {slot: rows, other: rows + 1}
            expected = f"'places' says TOKENS={sizes['places']}; 'tokens' says {sizes['tokens']}"
        elif factor == 1:
            expected = f"{slot!r} says BATCH={rows}; 'lens' and {other!r} say {rows + 1}"
        else:
            expected = f"{slot!r} says BATCH * {factor} = {rows}; "
            assert f"; {other!r} says BATCH * {factor} = {rows + 1}" in said
            assert "'lens', 'topk_index' and 'topk_p' say BATCH=3" in said
        assert said.startswith(expected)
        assert said.endswith(": pass the same number of rows for all of them")
        assert all(said.count(repr(one)) <= 1 for one in batch)
    take(batch)


@pytest.mark.parametrize("entry", [entry for entry in ENTRIES if ENTRIES[entry].name in FACTORS])
def test_more_tokens_a_request_name_the_option(entry: str) -> None:
    """TOKENS is some whole number x BATCH: the option that says so is named, and who says which size."""
    name, take = ENTRIES[entry].name, ENTRIES[entry].take
    option, factor = FACTORS[name]
    batch = placed_batch(name)
    for times in (2, 3):
        many = {**batch, **{slot: batch[slot].repeat(times) for slot in ("tokens", "places")}}
        said = said_by(take, many)
        assert f"say TOKENS={3 * factor * times}" in said
        assert "BATCH=3" in said
        assert said.endswith(f"; TOKENS is {factor * times} x BATCH: did you mean {option}={factor * times}?")
    take(batch)


def test_too_few_tokens_a_request_name_the_option() -> None:
    """The other way round, with width=2 where one token comes; seven tokens of three requests fit no width."""
    runner = captured("DecodeRunner", inputs=Placed, width=2)
    few, odd = placed_batch("DecodeRunner"), placed_batch("DecodeRunner")
    assert "; TOKENS is 1 x BATCH: did you mean width=1?" in said_by(runner, few)
    odd.update(tokens=torch.arange(7), places=torch.arange(7))
    for take in (runner, runner.decide, runner.fill):
        said = said_by(take, odd)
        assert "'lens' says BATCH=3; 'places' and 'tokens' say BATCH * 2 = 7" in said
        assert "did you mean" not in said


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_source_of_another_rank_is_named_alone(entry: str) -> None:
    """It alone is named, whatever else its first dim seems to say of the others."""
    take, batch = ENTRIES[entry].take, placed_batch(ENTRIES[entry].name)
    for slot, value in [(slot, batch[slot]) for slot in ("tokens", "lens", "places")]:
        shapes = (value[None], value[:, None], value[None, :, None])
        for wrong in (*shapes, shapes[0].tolist(), shapes[1].tolist(), shapes[0].numpy()):
            dims = np.asarray(wrong).ndim
            said = said_by(take, {**batch, slot: wrong})
            assert said.startswith(f"slot {slot!r}: expected 1 dimension, got {dims}: shape [")
            assert not any(repr(other) in said for other in batch if other != slot)
        assert "expected 1 dimension, got 0" in said_by(take, {**batch, slot: value[0]})
    take(batch)


def test_other_faults_stay_beside_sizes() -> None:
    """Every fault of a batch is in one message, but for those that only follow from a size that another slot has."""
    batch = placed_batch("DecodeRunner")
    wrong = {**batch, "places": batch["places"][:-1], "lens": batch["lens"].float()}
    for take in (runner_of("DecodeRunner"), runner_of("DecodeRunner").fill):
        said = said_by(take, wrong)
        assert said.startswith("'places' says BATCH=2; 'lens' and 'tokens' say 3: pass")
        assert "slot 'lens': expected int64 of shape [3] on cpu, got float32; round it yourself" in said
    said = said_by(runner_of("DecodeRunner"), wrong, ValueError)
    assert said.count("places") == 1
    fixed = {"hidden": torch.rand(3, 5)}
    said = said_by(lambda batch: runner_of("DecodeRunner")(batch, proxies=fixed), wrong)
    assert "slot 'hidden': expected float32 of shape" in said  # its other dim is wrong by itself


class Advancing(Inputs):
    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0, then=lambda ids: ids + 1)
    lens: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=1, then=lambda lens: lens + 1)


def test_batches_of_loops_are_looked_at_as_those_of_calls() -> None:
    """What begins `steps`, and what joins them, is looked at as the batch of a call is."""
    runner = decoder(Advancing, lambda view: view.ids * 3, buckets=[8], backend="cpu-capture")
    batch: dict[str, Any] = {"ids": torch.tensor([5, 7, 9]), "lens": torch.tensor([2, 4, 6])}
    loop = runner.steps(batch)
    step = next(loop)
    ways: list[Callable[[Any], Any]] = [runner.steps, lambda one: step.join(one, [11, 12, 13])]
    for way in ways:
        assert "got Tensor" in said_by(way, batch["ids"])
        assert "'ids' says BATCH=2; 'lens' says 3" in said_by(way, {**batch, "ids": batch["ids"][:2]})
        assert "did you mean width=2?" in said_by(way, {**batch, "ids": batch["ids"].repeat(2)})
        assert "slot 'lens': expected 1 dimension, got 2" in said_by(way, {**batch, "lens": batch["lens"][None]})
    step.join(batch, [11, 12, 13])


ROWS, PAGES = Axis("ROWS"), Axis("PAGES")


class Paged(Inputs):
    ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
    pages: torch.Tensor = copied(ROWS * 2, dtype=torch.int64, pad=0)
    held: torch.Tensor = copied(PAGES * 2 + ROWS, dtype=torch.int64, pad=0)


def test_live_rows_that_no_source_tells_may_be_given() -> None:
    """`live=` gives what sources do not tell; those that they tell are read, and compared, as ever."""
    made = InputBuffers(Paged, {BATCH: 8, ROWS: 8, PAGES: 8}, backend="cpu-capture")
    batch = {"ids": torch.tensor([4, 5, 6]), "pages": torch.arange(4), "held": torch.arange(1, 9)}
    view = made.fill(batch, live={PAGES: 3})
    assert view.held[:9].tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 0]
    assert (view.ids[:4].tolist(), view.pages[:5].tolist()) == ([4, 5, 6, 0], [0, 1, 2, 3, 0])
    with pytest.raises(SlotGraphError, match=r"no copied slot determines the size of PAGES: .*, or give live="):
        made.fill(batch)
    said = said_by(lambda one: made.fill(one, live={PAGES: 3, ROWS: 2, BATCH: 3}), torch.arange(3))
    assert "got Tensor: pass {'ids': ..., ...}" in said


class Tabled(Advancing):
    table: torch.Tensor = copied(BATCH, PAGES, dtype=torch.int32, pad=0)
    owners: torch.Tensor = copied(PAGES, dtype=torch.int32, pad=0)


def test_each_axis_on_which_sources_differ_has_its_sentence() -> None:
    """Each axis has its own sentence; a slot over two of them is named in both if it differs in both."""
    sizes = {BATCH: 4, TOKENS: 8, PAGES: 6}
    made = InputBuffers(Tabled, sizes, backend="cpu-capture")
    runner = decoder(Tabled, lambda view: view.ids * 2, buckets=[4], sizes={PAGES: 6}, backend="cpu-capture")
    eager = EagerRunner(Tabled, lambda view: view.ids * 2, backend="cpu")
    integers = functools.partial(torch.ones, dtype=torch.int32)
    batch = {"ids": torch.ones(3).long(), "lens": torch.ones(3).long(), "table": integers(3, 5), "owners": integers(5)}
    wrong = {**batch, "table": integers(2, 4)}
    for take in (made.fill, runner, runner.fill, runner.decide, eager, eager.fill, eager.decide):
        said = said_by(take, wrong)
        assert re.search(r"'table' says (BATCH=)?2", said)
        assert re.search(r"'owners' says PAGES=5; 'table' says 4: pass", said)
        assert said.count(": pass the same number of rows for all of them") == 2
        assert "expected" not in said
        take(batch)


@pytest.mark.parametrize("debug", [None, True, "poison,parity"])
@pytest.mark.parametrize("name", RUNNERS)
def test_a_replay_of_what_is_no_view_names_what_came(name: str, debug: Any) -> None:
    """`replay` takes what `fill` returned: a batch, a tensor and nothing are named, whoever watches."""
    if name == "EagerRunner":
        runner, watcher = captured(name, inputs=inputs_of(name)), Watcher()
        for _ in [debug] if debug else []:
            runner.watch.add(watcher)
    else:
        runner = captured(name, inputs=inputs_of(name), **({"debug": debug} if debug else {}))
    batch = placed_batch(name)
    own = inputs_of(name)(**batch, window=None)  # type: ignore[call-arg] # of a declaration that a function chose
    given = [(batch, "dict"), (batch["tokens"], "Tensor"), (None, "None"), (own, f"a batch, {type(own).__name__}")]
    for filled in (False, True):
        view = runner.fill(batch) if filled else None
        for value, came in given:
            said = said_by(runner.replay, value, ReplayError)
            assert said.startswith(f"replay() takes what fill() returned, got {came}: call runner(batch)")
        stranger = runner_of(name).fill(batch)
        assert "another runner filled it" in said_by(runner.replay, stranger, ReplayError)
        if view is not None:
            runner.replay(view)
            runner.fill(batch)
            assert "was not filled last: a later fill" in said_by(runner.replay, view, ReplayError)


DECODE = functools.partial(make, "DecodeRunner", buckets=[2])
NAMES: dict[str, tuple[Callable[[], Any], str]] = {
    **{
        f"backend {name}": (lambda name=name: load(name), f"there is no backend '{name}' (did you mean '{meant}'?)")  # type: ignore[misc]
        for name, meant in {
            **dict.fromkeys(("gpu", "GPU", "nvidia", "rocm", "hip", "Cuda", "cuda:0"), "cuda"),
            **dict.fromkeys(("ascend", "NPU"), "npu"),
            **dict.fromkeys(("xpu", "mps"), "accelerator"),
            **dict.fromkeys(("cpu_capture", "cpucapture"), "cpu-capture"),
            "CPU": "cpu",
        }.items()
    },
    "backend of a runner": (lambda: DECODE(backend="gpu"), "did you mean 'cuda'?"),
    "lowering": (lambda: DECODE(lowering="foreech"), "or say 'auto'; did you mean 'foreach'?"),
    "lowering of buffers": (
        lambda: InputBuffers(Advancing, {BATCH: 2, TOKENS: 2}, lowering="slotbyslot", backend="cpu"),
        "did you mean 'slot_by_slot'?",
    ),
    "lowering in capitals": (lambda: DECODE(lowering="FOREACH"), "did you mean 'foreach'?"),
    "error_mode": (lambda: DECODE(error_mode="threadlocal"), "did you mean 'thread_local'?"),
    "option": (lambda: RunnerConfig.of({"bucket": [1]}), "did you mean 'buckets'?"),
    "axis of sizes": (lambda: DECODE(sizes={Axis("TOKEN"): 3}), "sizes names 'TOKEN', an axis that no slot of Fed"),
    "axis of sizes, near": (lambda: DECODE(sizes={Axis("TOKEN"): 3}), "; did you mean 'TOKENS'?"),
    "axis by its name": (lambda: DECODE(output_rows="TOKENS"), "got 'TOKENS': give the axis itself, TOKENS, not its"),
    "axis misspelt": (lambda: DECODE(output_rows=Axis("BACH")), "got BACH; did you mean 'BATCH'?"),
    "axis of padded=": (
        lambda: buffers().fill(placed_batch("EagerRunner"), {Axis("TOKEN"): 8}),
        "padded names TOKEN: it takes the axes of slots that vary, and these are BATCH, TOKENS; did you mean 'TOKENS'?",
    ),
    "axis of live=": (
        lambda: buffers().fill(placed_batch("EagerRunner"), live={Axis("TOKEN"): 3}),
        "live names TOKEN: it takes the axes of slots that vary, and these are BATCH, TOKENS; did you mean 'TOKENS'?",
    ),
    "live= of another kind": (lambda: buffers().fill({}, live=None), "live: expected a mapping of axes to their"),
    "padded= by name": (lambda: buffers().fill({}, {"TOKENS": 8}), "padded: expected a mapping of axes to their sizes"),
    "live= by name": (lambda: buffers().fill({}, live={"TOKENS": 8}), "live: expected a mapping of axes to their"),
    "axis of narrow": (
        lambda: buffers().fill(placed_batch("EagerRunner")).narrow(Axis("BACH"), 0, 1),
        "narrow another axis; did you mean 'BATCH'?",
    ),
    "phase": (lambda: InputPool("decode", "verify")["verfy"], "'decode', 'verify'; did you mean 'verify'?"),
    "dtype in a file": (lambda: dtype_from_text("flaot32"), "no dtype 'flaot32'; did you mean 'float32'?"),
    "setting": (lambda: DECODE(settings={"windows": True}), "true or false; did you mean 'windows'?"),
    "absent": (lambda: DECODE(absent=[{"Hidden"}]), "did you mean 'hidden'?"),
    "drop": (lambda: type("Less", (Placed,), {}, drop=["place"]), "which no base declares; did you mean 'places'?"),
    "slot of a view": (
        lambda: getattr(buffers().fill(placed_batch("EagerRunner")), "token"),  # noqa: B009 - checkers refuse the name
        "'Placed' has no slot or field 'token'; did you mean 'tokens'?",
    ),
}


@pytest.mark.parametrize("what", NAMES)
def test_a_refused_name_comes_with_the_one_meant(what: str) -> None:
    """A misspelt name, or the name of a device that a backend has under another, is refused with the one meant."""
    do, words = NAMES[what]
    with pytest.raises(Exception) as caught:  # noqa: PT011 - the words are looked at
        do()
    told = [str(caught.value), *map(str, getattr(caught.value, "exceptions", ()))]
    assert any(words in one for one in told), told


def test_no_name_is_near() -> None:
    """Nothing is guessed where no known name is near; case alone never makes two names differ."""
    assert hint("quantum", ["cpu", "cuda"]) == ""
    assert hint("quantum", ["cpu", "cuda"], "known are cpu, cuda") == "known are cpu, cuda"
    assert hint("BATCH", ["batch", "tokens"]) == "did you mean 'batch'?"


def raising(view: Any, *_: Any) -> Any:
    """A step that calls a function which raises: by how much differs from bucket to bucket."""
    return out_of_shape(view.tokens)


def out_of_shape(tokens: torch.Tensor) -> torch.Tensor:
    """Never right."""
    return tokens.view(7, 11, -1)  # the user's line


def reading(view: Any, *_: Any) -> Any:
    """A step that reads the device back, which a graph cannot."""
    if view.tokens.sum().item() > 3:  # the user's line
        return view.tokens
    return -view.tokens


class Bare(Placed, drop=["hidden"]):
    """No slot that a batch may lack."""


class BareDraft(PlacedDraft, drop=["hidden"]):
    """Likewise."""


STEPS = {"raises": raising, "reads back": reading}
CAPTURING = [(name, how) for name in RUNNERS for how in STEPS if name != "EagerRunner"]
CAPTURING.remove(("DraftRunner", "reads back"))  # its forward must return logits first of all


def failing(name: str, step: Any, **options: Any) -> Any:
    """A runner of three buckets whose captures all fail."""
    own = {"step": [step]} if name == "MultiLayerDraftExtendRunner" else {"step": step}
    graphs = {"graphs": True} if name == "PrefillRunner" else {}
    stack = {"stack": None} if name == "BreakableRunner" else {}
    grid = [{"BATCH": rows, "TOKENS": rows} for rows in (2, 4, 8)]
    given: dict[str, Any] = {"inputs": Bare if name != "DraftRunner" else BareDraft}
    given |= {"buckets": grid if name == "GraphRunner" else [2, 4, 8]}
    return make(name, **{**given, **own, **graphs, **stack, **options})


def shown(error: BaseException) -> str:
    """What Python shows of an error."""
    return "".join(traceback.format_exception(error))


@pytest.mark.parametrize(("name", "how"), CAPTURING)
def test_a_failing_capture_says_each_reason_once(name: str, how: str) -> None:
    """One message, which says each reason once, and one traceback, whose last line is the user's own."""
    runner = failing(name, STEPS[how])
    with pytest.raises(CaptureError) as caught, capture_logs() as events:
        runner.capture()
    said, text = str(caught.value), shown(caught.value)
    assert said.startswith("3 of 3 buckets were not captured and run eagerly: bucket ")
    assert said.count("bucket ") == 1
    assert all(str(rows) in said.split(": ")[1] for rows in (2, 4, 8))
    assert text.count("Traceback (most recent call last)") == 1
    assert [one["reason"] for one in events if one["event"] == "capture_failed"] == [said.partition("eagerly: ")[2]]
    if name == "PrefillRunner":  # its step is traced, not run: the place is in the message alone
        assert re.search(rf"{HERE}.*(line |:)\d+", said)
        return
    line = "return tokens.view(7, 11, -1)  # the user's line" if how == "raises" else ".sum().item() > 3"
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert Path(frames[-1].filename).name == HERE
    assert line in str(frames[-1].line)
    assert f"(at {HERE}:{frames[-1].lineno}, `" in said
    library = [frame for frame in frames if "slotgraph" in Path(frame.filename).parts]
    assert 1 <= len(library) <= 2  # `capture` itself
    cause = caught.value.__context__
    assert isinstance(cause, CaptureError)
    assert isinstance(cause.__cause__, RuntimeError) == (how == "raises")


@pytest.mark.parametrize(("name", "how"), CAPTURING)
def test_a_capture_that_fails_within_a_call_names_the_line(name: str, how: str) -> None:
    """With `lazy` the batch runs eagerly, or raises what its step does; the decision and the event name the line."""
    runner = failing(name, STEPS[how], lazy=True)
    runner.capture()
    batch = placed_batch(name)
    with capture_logs() as events:
        try:
            runner(batch)
        except (RuntimeError, CaptureError):
            assert how == "raises" or name == "DraftRunner"
    reason = runner.decide(batch).reason
    assert reason in [one["reason"].partition(": ")[2] for one in events if one["event"] == "capture_failed"]
    assert re.search(rf"{HERE}(:|, line )\d+", reason)


def test_each_reason_of_failed_captures_has_its_buckets() -> None:
    """Each reason is said with its buckets; numbers alone do not make two of one."""

    def picky(view: Any) -> Any:
        if len(view.tokens) == 4:
            raise KeyError("four rows have no kernel")
        return out_of_shape(view.tokens) if len(view.tokens) > 4 else view.tokens

    runner = failing("DecodeRunner", picky, buckets=[2, 4, 8, 16])
    with pytest.raises(CaptureError) as caught:
        runner.capture()
    said = str(caught.value)
    assert said.startswith("3 of 4 buckets were not captured")
    assert said.count("bucket 4: the step raised KeyError: 'four rows have no kernel' (at ") == 1
    assert "bucket 16 (and likewise 8): the step raised RuntimeError: shape '[7, 11, -1]' is invalid for input" in said
    assert set(runner.report.failed) == {4, 8, 16}
    assert "size 8" in runner.report.failed[8]


def test_a_step_that_raises_itself_is_the_last_line() -> None:
    """Its line is the last where a capture fails; an eager step passes on what it raises."""

    def broken(_: Any) -> Any:
        raise LookupError("no such table")  # the user's line

    runner = BreakableRunner(Placed, broken, buckets=[4], settings={"window": False}, backend="cpu-capture")
    with pytest.raises(CaptureError) as caught:
        runner.capture()
    assert 'raise LookupError("no such table")' in str(traceback.extract_tb(caught.value.__traceback__)[-1].line)
    eager = EagerRunner(Placed, broken, settings={"window": False}, backend="cpu")
    with pytest.raises(LookupError, match=r"^'?no such table"):
        eager(placed_batch("EagerRunner"))


@pytest.mark.parametrize("name", errors.__all__)
def test_a_traceback_names_an_error_as_users_import_it(name: str) -> None:
    """It prints the public name, under which pickle finds it, too."""
    kind = getattr(errors, name)
    assert (kind.__module__, kind.__qualname__) == ("slotgraph.errors", name)
    assert pickle.loads(pickle.dumps(kind)) is kind  # noqa: S301 - our own
