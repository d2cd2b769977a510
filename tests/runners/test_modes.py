"""Modes: each batch takes the first mode that has a graph for it, and gets what a runner of its own would give."""

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import slotgraph
from slotgraph import (
    BATCH,
    TOKENS,
    Axis,
    BreakableRunner,
    DecodeRunner,
    EagerRunner,
    Inputs,
    PrefillRunner,
    Step,
    computed,
    copied,
    current_view,
    graph_break,
    output,
)
from slotgraph.backends import Backend
from slotgraph.errors import BatchError, CaptureError, ConfigError, ReplayError
from slotgraph.extend import Exclusive, Group, once
from slotgraph.graphs import ModeRunner
from slotgraph.metrics import Collector
from slotgraph.pool import InputPool
from slotgraph.reports import RecordedFile, replay_file
from slotgraph.runners.engine.statistics import Decision

KINDS: Final = Group("full", "sliding")
PAGES: Final = Axis("PAGES", fixed=True)
REQUESTS: Final = 6
"""The most requests of a mixed step."""


class Serving(Inputs):
    """Tokens of requests that may differ in length."""

    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0, then=lambda ids: ids + 1)
    lens: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=1)
    pages: Any = copied(BATCH, PAGES, dtype=torch.int64, pad={"full": 0, "sliding": 9}, group=KINDS)
    flags: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=once(3), default=None)
    bias: torch.Tensor = computed(lambda ids: ids % 7, shape=TOKENS, dtype=torch.int64)
    live: torch.Tensor = computed(lambda step: step.live(BATCH), shape=1, dtype=torch.int32)

    @classmethod
    def placeholder(cls, step: Step) -> Mapping[str, Any]:
        """One request that owns all tokens."""
        return {"lens": [step.live(TOKENS)], "pages": {"full": [[1, 2]]}}


def per_request(view: Serving) -> torch.Tensor:
    """A number for each request."""
    flags = view.lens * 0 if view.flags is None else view.flags
    pages: torch.Tensor = view.pages["full"].sum(1) * 2 + view.pages["sliding"].sum(1) * 3
    return pages + view.lens * 5 + flags


def decode_step(view: Serving) -> torch.Tensor:
    """A whole number for each token, of requests that have one."""
    return view.ids.square() % 97 + view.bias + per_request(view) + view.live


@graph_break
def add_to_tokens(hidden: torch.Tensor) -> torch.Tensor:
    """Add each request's number to its tokens; padded rows get none."""
    view = current_view(Serving)
    rows = torch.repeat_interleave(per_request(view), view.lens)
    added = torch.zeros_like(hidden)
    added[: len(rows)] = rows + view.live
    return hidden + added


def mixed_step(view: Serving) -> torch.Tensor:
    """The same for requests of any length."""
    return add_to_tokens(view.ids.square() % 97 + view.bias)


def batch_of(lens: Sequence[int], seed: int = 1, *, flags: bool = False) -> dict[str, Any]:
    """A batch of requests that have so many tokens."""
    draw, rows = torch.Generator().manual_seed(seed), len(lens)
    pages = {kind: torch.randint(0, 50, (rows, 2), generator=draw) for kind in KINDS.names}
    ids = torch.randint(1, 40, (sum(lens),), generator=draw)
    batch = {"ids": ids, "lens": [*lens], "pages": pages}
    return batch | ({"flags": torch.randint(0, 9, (rows,), generator=draw).int()} if flags else {})


def is_uniform(batch: Any) -> bool:
    """Whether each request has one token."""
    return set(batch["lens"]) == {1}


GIVEN: Final[dict[str, Any]] = {"sizes": {PAGES: 2}, "absent": [{"flags"}]}


def decode_part(**options: Any) -> Any:
    """Whole steps."""
    given: dict[str, Any] = {"buckets": [1, 2, 4], **GIVEN, **options}
    return DecodeRunner(Serving, decode_step, **given)


def mixed_part(**options: Any) -> Any:
    """Graphs around a break."""
    given: dict[str, Any] = {"buckets": [4, 16], "max_batch": REQUESTS, "output_rows": TOKENS, **GIVEN, **options}
    return BreakableRunner(Serving, mixed_step, **given)


PARTS: Final[dict[str, Callable[..., Any]]] = {"decode": decode_part, "mixed": mixed_part}


def parts(backend: Any, **options: Any) -> dict[str, Any]:
    """Runners of both modes."""
    return {mode: make(backend=backend, **options) for mode, make in PARTS.items()}


def of_modes(backend: Any, **options: Any) -> Any:
    """A captured runner of both."""
    runner = ModeRunner(parts(backend, **options), when={"decode": is_uniform})
    runner.capture()
    return runner


def eager_on(backend: Any) -> Any:
    """The mixed step without graphs, which any batch fits."""
    return EagerRunner(Serving, mixed_step, sizes={PAGES: 2}, backend=backend)


UNIFORM: Final = batch_of([1, 1, 1])
MIXED: Final = batch_of([3, 1, 4])


def test_batches_take_the_first_mode_that_has_a_graph(backend: Backend) -> None:
    """In order; the last mode whose `when` is true runs the others, in the same buffers."""
    runner, eager = of_modes(backend), eager_on(backend)
    for lens, mode, bucket, why in (
        ([1, 1, 1], "decode", 4, "decode: bucket 4 fits"),
        ([3, 1, 4], "mixed", 16, "decode: its when= is not true; mixed: bucket 16 fits"),
        ([1] * 5, "mixed", 16, "decode: 5 rows are more than the largest bucket, 4; mixed: bucket 16 fits"),
        ([9, 8], "mixed", None, "mixed: 17 tokens are more than the largest bucket, 16"),
        ([1] * 7, "mixed", None, "mixed: 7 rows on BATCH are more than the 6 of every bucket"),
    ):
        batch = batch_of(lens)
        decision = runner.decide(batch)
        assert (decision.mode, decision.bucket) == (mode, bucket)
        assert decision.reason.endswith(why)
        assert torch.equal(runner(batch), eager(batch))
        assert torch.equal(runner.replay(runner.fill(batch)), eager(batch))
    stats = runner.stats()
    assert stats["decode"]["steps"] == {"graph": 2, "eager": 0}
    assert stats["mixed"]["steps"] == {"breakable": 4, "eager": 4}
    assert runner.decide(UNIFORM) == Decision("graph", 4, "fits", "decode: bucket 4 fits", mode="decode")


def test_one_set_of_buffers_is_as_large_as_the_larger_alone(backend: Backend) -> None:
    """Inputs count once, and all bytes add up."""
    alone = {mode: one.graphs.buffers.nbytes for mode, one in parts(backend).items()}
    runner = of_modes(backend)
    buffers = {id(one.graphs.buffers) for one in runner.modes.values()}
    assert len(buffers) == 1
    assert {id(one.eager.buffers) for one in runner.modes.values()} == buffers
    inputs = [one["memory"]["inputs"] for one in runner.stats().values()]
    assert inputs == [max(alone.values()), 0]
    for one in runner.stats().values():
        memory: Any = one["memory"]
        assert memory["total"] == sum(memory[kind] for kind in ("inputs", "graphs", "outputs", "uploads", "eager"))


def test_modes_give_what_runners_of_their_own_give(backend: Backend) -> None:
    """Step by step, bit for bit."""
    runner, own = of_modes(backend), parts(backend)
    for one in own.values():
        one.capture()
    for seed, lens in enumerate([[1, 1], [2, 5, 1], [1], [4, 4, 4], [1, 1, 1, 1], [1, 2]]):
        batch = batch_of(lens, seed, flags=bool(seed % 2))
        assert torch.equal(runner(batch), own["decode" if is_uniform(batch) else "mixed"](batch))


@st.composite
def stretches(draw: st.DrawFn) -> tuple[str, list[int], int, bool]:
    """What is done with a batch, its requests' tokens, and what its numbers are."""
    act = draw(st.sampled_from(["call", "call", "fill", "poison", "own", "steps", "refused"]))
    uniform = st.integers(1, 7).map(lambda rows: [1] * rows)
    lens = draw(st.one_of(uniform, st.lists(st.integers(1, 6), min_size=1, max_size=8)))
    return act, lens, draw(st.integers(0, 1 << 20)), draw(st.booleans())


def poison(runner: Any, seed: int) -> None:
    """Write garbage to all slots whose tails are not set once, as an interrupted fill may leave them."""
    buffers = runner.modes["decode"].graphs.buffers
    for buffer in buffers:
        if buffer.name != "flags":
            low, high = -100 if buffer.name != "lens" else 1, 100
            buffer.tensor.copy_(torch.randint(low, high, tuple(buffer.tensor.shape)).to(buffer.tensor.dtype))
    buffers.distrust()
    torch.manual_seed(seed)


@settings(max_examples=20)
@given(turns=st.lists(stretches(), min_size=2, max_size=12), lazy=st.booleans())
def test_any_order_of_batches_is_right(backend: Backend, turns: Any, lazy: bool) -> None:
    """Decode, mixed and eager batches over garbage, by calls, fills, loops and the modes themselves."""
    runner, eager = of_modes(backend, lazy=lazy), eager_on(backend)
    for act, lens, seed, flags in turns:
        batch = batch_of(lens, seed, flags=flags)
        right = eager(batch)
        if act == "poison":
            poison(runner, seed)
        if act == "refused":
            with pytest.raises(BatchError):
                runner({**batch, "pages": {"full": batch["pages"]["full"]}})
        mode = runner.decide(batch).mode
        if act == "fill":
            view = runner.fill(batch)
            assert torch.equal(runner.replay(view), right)
            assert torch.equal(runner.replay(view), right)
        elif act == "own":
            assert torch.equal(runner.modes[mode](batch), right)
        elif act == "steps" and mode == "decode":
            for number, step in enumerate(runner.modes["decode"].steps(batch, ahead=1)):
                assert torch.equal(step.outputs.cpu(), eager({**batch, "ids": batch["ids"] + number}).cpu())
                if number == 2:
                    break
        else:
            assert torch.equal(runner(batch), right)


@pytest.mark.slow
@settings(max_examples=100)
@given(turns=st.lists(stretches(), min_size=8, max_size=40), lazy=st.booleans())
def test_any_long_order_of_batches_is_right(backend: Backend, turns: Any, lazy: bool) -> None:
    """The same for longer."""
    test_any_order_of_batches_is_right.hypothesis.inner_test(backend, turns, lazy)  # type: ignore[attr-defined]


def test_a_view_is_refused_after_a_fill_of_another_mode(backend: Backend) -> None:
    """It would be replayed on the other batch."""
    runner = of_modes(backend)
    first = runner.fill(UNIFORM)
    second = runner.fill(MIXED)
    with pytest.raises(ReplayError, match="another runner filled it"):
        runner.replay(first)
    with pytest.raises(ReplayError, match="or another mode, in memory that both use"):
        runner.modes["decode"].replay(first)
    assert torch.equal(runner.replay(second), eager_on(backend)(MIXED))
    loop = iter(runner.modes["decode"].steps(UNIFORM, ahead=1))
    next(loop)
    runner(MIXED)
    with pytest.raises(ReplayError, match=r"another batch was filled in the middle of steps\(\)"):
        _ = [*loop]


def test_all_modes_are_checked_explained_and_reported(backend: Backend) -> None:
    """With the name of the mode; given batches go to the mode that takes them."""
    runner = ModeRunner(parts(backend), when={"decode": is_uniform})
    assert runner.report == {"decode": None, "mixed": None}
    reports = runner.capture()
    assert reports == runner.report
    assert [report.captured for report in reports.values() if report] == [(1, 2, 4), (4, 16)]
    report = slotgraph.check(runner, [UNIFORM, MIXED, (batch_of([2, 2]), {})], only=["poison", "parity"])
    assert report.ok, str(report)
    assert report.steps == {"poison": 3, "parity": 3}
    alone = slotgraph.check(runner, [UNIFORM], only="poison")
    assert (alone.steps, alone.notes) == ({"poison": 1}, ("mixed: not checked, since no batch takes it",))
    titles = [table.title for table in slotgraph.explain(runner).tables()]
    assert {title.partition(":")[0] for title in titles} == {"decode", "mixed"}
    assert "decode" in repr(runner)


def test_a_mode_is_recorded_and_debugged_as_a_runner(backend: Backend, tmp_path: Path) -> None:
    """Its steps alone, also those that the mode runner gives it."""
    runner, path = of_modes(backend), tmp_path / "mixed.safetensors"
    decode, mixed = runner.modes.values()
    with slotgraph.record(mixed, path), slotgraph.debugged(decode, ["poison", "parity"]):
        for batch in (UNIFORM, MIXED, UNIFORM, batch_of([2, 2])):
            assert torch.equal(runner.replay(runner.fill(batch)), eager_on(backend)(batch))
    file = RecordedFile.read(path)
    assert len(file.steps) == 2
    assert "equal" in str(replay_file(file, mixed))


def test_tools_of_one_runner_ask_for_a_mode(cpu: str, tmp_path: Path) -> None:
    """What takes one runner says that it takes a mode, and a file's path is no file that was read."""
    runner, path = of_modes(cpu), tmp_path / "last.safetensors"
    tools: list[Callable[[], Any]] = [
        lambda: slotgraph.record(runner, path),
        lambda: slotgraph.debugged(runner, "parity").__enter__(),
        lambda: Collector(one=runner),
    ]
    for tool in tools:
        with pytest.raises(ConfigError, match="a runner, or of a ModeRunner one of its modes"):
            tool()
    with pytest.raises(ConfigError, match=r"^file: expected a RecordedFile, as RecordedFile.read\(path\) gives it"):
        replay_file(path, runner.modes["decode"])  # type: ignore[arg-type]


def test_a_slot_that_one_mode_reads_is_no_finding(cpu: str) -> None:
    """One that no mode reads is."""

    class Two(Inputs):
        ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
        lens: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
        own: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
        unread: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)

    modes: dict[str, Any] = {
        "decode": DecodeRunner(Two, lambda view: view.ids + view.lens, buckets=[2], backend=cpu),
        "mixed": BreakableRunner(
            Two, lambda view: view.ids + view.own, buckets=[4], output_rows=TOKENS, max_batch=2, backend=cpu
        ),
    }
    runner = ModeRunner(modes)
    runner.capture()
    report = slotgraph.check(runner, only="coverage")
    assert {one.slot for one in report.findings} == {"unread"}


def test_an_output_that_one_mode_leaves_unwritten_is_a_finding(cpu: str) -> None:
    """It is wrong in that mode, whatever the others do, unlike a slot that one of them reads."""

    class Written(Inputs):
        ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
        logits: torch.Tensor = output(TOKENS, dtype=torch.int64)

    def half(view: Any) -> Any:
        view.logits[::2].copy_(view.ids[::2])
        return view.ids * 2

    steps: dict[str, Any] = {"half": half, "whole": lambda view: view.logits.copy_(view.ids)}
    modes = {name: DecodeRunner(Written, step, buckets=[2, 4], backend=cpu) for name, step in steps.items()}
    runner: Any = ModeRunner(modes)
    runner.capture()
    (found,) = slotgraph.check(runner, only="coverage").findings
    assert found.slot == "logits"
    assert found.message.startswith("half: output slot 'logits' is not written by the step")


def test_a_capture_that_fails_leaves_the_other_modes(backend: Backend) -> None:
    """And batches of the failed mode run eagerly, as its runner runs them."""

    def broken(view: Serving) -> torch.Tensor:
        if is_capturing[0]:
            raise ValueError("not today")
        return decode_step(view)

    modes, is_capturing, eager = parts(backend), [True], eager_on(backend)
    modes["decode"] = DecodeRunner(Serving, broken, buckets=[4], backend=backend, **GIVEN)
    runner = ModeRunner(modes, when={"decode": is_uniform, "mixed": lambda batch: not is_uniform(batch)})
    with pytest.raises(CaptureError, match="not today"):
        runner.capture()
    is_capturing[0] = False
    assert runner.decide(UNIFORM).why == "not_captured"
    for batch in (UNIFORM, MIXED):
        assert torch.equal(runner(batch), eager(batch))
    with pytest.raises(CaptureError, match="captured already"):
        runner.capture()


def test_a_mode_may_be_captured_when_a_batch_comes(backend: Backend) -> None:
    """Over what another mode has filled."""
    modes: dict[str, Any] = {
        "decode": PARTS["decode"](backend=backend),
        "mixed": PARTS["mixed"](backend=backend, lazy=True),
    }
    runner, eager = ModeRunner(modes, when={"decode": is_uniform}), eager_on(backend)
    runner.modes["decode"].capture()
    view = runner.modes["decode"].fill(UNIFORM)
    runner.modes["mixed"].capture()
    assert torch.equal(runner.modes["decode"].replay(view), eager(UNIFORM))
    for batch in (MIXED, UNIFORM, MIXED):
        assert torch.equal(runner(batch), eager(batch))


def test_each_mode_is_captured_on_initial_values(backend: Backend) -> None:
    """Whatever a capture before it has left: a step may not bear the placeholder of another."""

    def careful(view: Serving) -> torch.Tensor:
        table = torch.ones(20, dtype=torch.int64, device=view.lens.device)
        return decode_step(view) + table[view.lens] - 1  # a placeholder of all tokens is beyond the table

    modes = parts(backend)
    modes["mixed"] = PARTS["mixed"](backend=backend, buckets=[32])
    modes["decode"] = DecodeRunner(Serving, careful, buckets=[4], backend=backend, **GIVEN)
    order = {mode: modes[mode] for mode in ("mixed", "decode")}
    runner = ModeRunner(order, when={"mixed": lambda batch: not is_uniform(batch)})
    runner.capture()
    for batch in (UNIFORM, MIXED):
        assert torch.equal(runner(batch), eager_on(backend)(batch))


def test_modes_may_not_run_at_once(backend: Backend) -> None:
    """A step of one that calls another is refused, since both write the same memory."""
    runner: Any = None

    def nested(view: Serving) -> torch.Tensor:
        if runner is not None:
            runner.modes["mixed"](MIXED)
        return decode_step(view)

    modes = parts(backend)
    modes["decode"] = DecodeRunner(Serving, nested, buckets=[4], backend=backend, graphs=False, **GIVEN)
    made = ModeRunner(modes, when={"decode": is_uniform, "mixed": lambda batch: not is_uniform(batch)})
    made.capture()
    runner = made
    with pytest.raises(ReplayError, match="this ModeRunner is in the middle of a step"):
        runner(UNIFORM)


def test_bound_tensors_are_every_mode_s(backend: Backend) -> None:
    """At the capacity of all, and with what they hold if that is asked for."""
    own = torch.full((REQUESTS, 2), 5, device=backend.device)
    kept = torch.full((REQUESTS,), 6, dtype=torch.int32, device=backend.device)
    modes = {mode: make(backend=backend) for mode, make in PARTS.items()}
    bind: dict[str, Any] = {"pages.full": own, "flags": Exclusive(kept)}
    runner = ModeRunner(modes, {"decode": is_uniform}, bind=bind, keep_bound=True)
    assert ({*own.flatten().tolist()}, {*kept.tolist()}) == ({5}, {6})
    runner.capture()
    assert torch.equal(runner(MIXED), eager_on(backend)(MIXED))
    assert torch.equal(own[:3].cpu(), MIXED["pages"]["full"])
    assert torch.equal(runner(UNIFORM), eager_on(backend)(UNIFORM))


class Narrower(Serving, drop=["flags"]):
    """Another declaration."""


def test_what_does_not_fit_is_refused(backend: Backend) -> None:
    """With the mode and the reason."""

    def refused(says: str, changed: Any, **options: Any) -> None:
        modes = parts(backend)
        with pytest.raises(ConfigError, match=says):
            ModeRunner(changed(modes) or modes, **options)

    captured = PARTS["decode"](backend=backend)
    captured.capture()
    given: dict[str, Any] = {"buckets": [2], "backend": backend}
    own = torch.zeros(4, dtype=torch.int64, device=backend.device)
    for says, mode, runner in (
        ("mode 'decode': it is captured already", "decode", captured),
        ("mode 'decode': it has tensors of yours", "decode", PARTS["decode"](backend=backend, bind={"lens": own})),
        ("mode 'decode': it shares memory in", "decode", PARTS["decode"](backend=backend, phase=InputPool("a")["a"])),
        ("'other': its declaration", "other", DecodeRunner(Narrower, decode_step, sizes={PAGES: 2}, **given)),
        ("'other': its .* sizes", "other", DecodeRunner(Serving, decode_step, sizes={PAGES: 3}, **given)),
        ("mode 'other': expected a runner that captures", "other", eager_on(backend)),
    ):
        refused(says, lambda modes, mode=mode, runner=runner: modes.update({mode: runner}))
    refused("modes= is empty", lambda modes: modes.clear())
    refused("modes: expected a mapping", lambda _: [1])
    refused(
        "when names 'prefill', which is none of the modes: decode, mixed", lambda _: None, when={"prefill": is_uniform}
    )
    refused("when of mode 'decode': expected a function", lambda _: None, when={"decode": True})
    refused("another mode has the same runner", lambda modes: modes.update(other=modes["decode"]))
    runner = ModeRunner(parts(backend), {"decode": is_uniform, "mixed": lambda _: False})
    runner.capture()
    with pytest.raises(BatchError, match="this batch has no mode"):
        runner(MIXED)
    for when, says in (
        (lambda batch: batch["no"], "KeyError at .*: 'no'"),
        (lambda batch: batch["lens"] == 1, "ambiguous"),
    ):
        runner = ModeRunner(parts(backend), {"decode": when})
        runner.capture()
        for call in (runner, runner.fill, runner.decide):
            with pytest.raises(BatchError, match=f"mode 'decode': its when= raised .*{says}"):
                call({**MIXED, "lens": torch.tensor(MIXED["lens"])})
    with pytest.raises(ReplayError, match="cannot be copied"):
        copy.copy(runner)


def test_pieces_are_a_mode_too(backend: Backend) -> None:
    """Any runners that capture may be modes, in any number and order."""
    modes: dict[str, Any] = {
        "small": PARTS["decode"](backend=backend, buckets=[1]),
        "large": PARTS["decode"](backend=backend, buckets=[4]),
        "pieces": PrefillRunner(
            Serving,
            lambda view: (view.ids * 0.5).sin() + view.bias,
            splits=["sin"],
            buckets=[16],
            max_batch=REQUESTS,
            backend=backend,
            **GIVEN,
        ),
    }
    runner = ModeRunner(modes, when={"small": is_uniform, "large": is_uniform})
    runner.capture()
    taken = [runner.decide(batch_of(lens)).mode for lens in ([1], [1, 1], [1] * 5, [2, 3])]
    assert taken == ["small", "large", "pieces", "pieces"]
    right = (MIXED["ids"] * 0.5).sin() + MIXED["ids"] % 7
    torch.testing.assert_close(runner(MIXED).cpu(), right)


class Ends(Inputs):
    lens: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
    ends: torch.Tensor = computed(lambda lens: lens.cumsum(0), shape=BATCH, dtype=torch.int64, pad=-1)


def test_functions_on_the_device_may_have_tails(backend: Backend) -> None:
    """Modes share a declaration whose computed slots have tails, which read the live rows."""
    modes = {
        str(size): DecodeRunner(Ends, lambda view: view.ends + 0, buckets=[size], output_rows=None, backend=backend)
        for size in (2, 4)
    }
    runner = ModeRunner(modes)
    runner.capture()
    for lens in ([3], [5, 6, 7], [4, 1]):
        ends = torch.tensor(lens).cumsum(0).tolist()
        assert runner({"lens": lens}).tolist() == ends + [-1] * (-len(lens) % 2)
