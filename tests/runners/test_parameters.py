"""Host parameters: graphs are handed the values of each step's own batch, padded, once in each replay."""

import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, final

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slotgraph import BATCH, SEQ_LEN_FILL, TOKENS, Axis, EagerRunner, Inputs, computed, copied, standard
from slotgraph.backends import NO_PARAMETERS, Backend, Capabilities, Graph, choose
from slotgraph.backends.base import Interruption
from slotgraph.backends.cpu import HostBackend
from slotgraph.dataflow.capabilities import LADDER
from slotgraph.dataflow.errors import BatchError, CaptureError, ConfigError
from slotgraph.extend import HOST
from slotgraph.speculative import MultiLayerDraftExtendRunner
from tests.runners.models import decoder, ready
from tests.runners.prefilled import KINDS, Model, Prefill, batch_of, runner_of

Handed = dict[str, Any]


@final
class HandingGraph(Graph):
    """A graph that reads its parameters once in each replay, before it does anything else."""

    def __init__(self, graph: Graph, parameters: Mapping[str, torch.Tensor], log: list[Handed]) -> None:
        self.graph, self.outputs, self.nbytes = graph, graph.outputs, graph.nbytes
        self.parameters = dict(parameters)
        self._log = log

    def check_addresses(self) -> None:
        self.graph.check_addresses()

    def replay(self) -> None:
        if self.parameters:
            self._log.append({name: tensor.tolist() for name, tensor in self.parameters.items()})
        self.graph.replay()
        self.outputs = self.graph.outputs


@final
class HandingBackend(HostBackend):
    """One of the CPU's backends, said to have host parameters. handed: what graphs were handed, one entry a replay."""

    name: ClassVar[str] = "handing"

    def __init__(self, inner: str) -> None:
        self._inner: Backend = choose(inner)
        self.handed: list[Handed] = []

    @property
    def capabilities(self) -> Capabilities:
        return attrs.evolve(self._inner.capabilities, host_parameters=True, fills={"seq_len_fill": 0})

    def capture(
        self, step: Callable[[], Any], *, parameters: Mapping[str, torch.Tensor] = NO_PARAMETERS, **options: Any
    ) -> Graph:
        return HandingGraph(self._inner.capture(step, **options), parameters, self.handed)

    def interrupt(self, run: Interruption) -> Any:
        return self._inner.interrupt(run)

    def since(self) -> list[Handed]:  # what was handed over since this was last asked
        handed, self.handed[:] = [*self.handed], []
        return handed


CONTEXT = Axis("CONTEXT", fixed=True)
KNOWN: dict[str, Any] = {"sizes": {CONTEXT: 500}, "settings": {"sparse": False}}
BUCKETS = (2, 5)
Batch = dict[str, Any]
each_inner = pytest.mark.parametrize("inner", ["cpu", "cpu-capture"])
LENS = "actual_seq_lengths_kv"
I32, I64 = torch.int32, torch.int64


class Parameters(Inputs):
    """A parameter of each way to get a value: from elsewhere, computed of another, of sizes, absent, switched off."""

    kv_lens: torch.Tensor = copied(
        BATCH, dtype=I32, pad=SEQ_LEN_FILL, source="lens", argument=LENS, converts=(I64,), limit=CONTEXT, placement=HOST
    )
    actual_seq_lengths: torch.Tensor = computed(
        lambda kv_lens: kv_lens.cumsum(0), shape=BATCH, dtype=I64, placement=HOST, argument="actual_seq_lengths"
    )
    rows: torch.Tensor = computed(lambda step: step.live(BATCH), dtype=I32, placement=HOST, argument="num_rows")
    window: torch.Tensor | None = copied(BATCH, dtype=I64, pad=-7, default=None, placement=HOST, argument="window")
    never: torch.Tensor | None = copied(
        BATCH, dtype=I64, pad=0, default=None, when="sparse", placement=HOST, argument="never"
    )


class Decoding(Parameters):  # the same beside what a decode step reads
    input_ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)


def right(batch: Batch, padded: int, pad: int = 0) -> Handed:
    """What a graph must be handed of a batch."""
    lens = torch.as_tensor(batch["lens"]).tolist()
    whole = [*lens, *[pad] * (padded - len(lens))]
    ends = [*itertools.accumulate(whole)]
    found: Handed = {"actual_seq_lengths_kv": whole, "actual_seq_lengths": ends, "num_rows": len(lens)}
    if batch.get("window") is not None:
        found["window"] = [*torch.as_tensor(batch["window"]).tolist(), *[-7] * (padded - len(lens))]
    return found


def seen(view: Parameters) -> torch.Tensor:
    """What operators read of the same slots, a column for each; they are host memory like any other."""
    wide = torch.stack([view.kv_lens.long(), view.actual_seq_lengths, view.rows.long().expand(view.kv_lens.shape)], 1)
    return wide if view.window is None else torch.cat([wide, view.window[:, None]], 1)


def columns(handed: Handed, requests: int) -> list[list[int]]:
    """The same of what was handed over."""
    rows = [[one] * requests if isinstance(one, int) else one[:requests] for one in handed.values()]
    return [list(row) for row in zip(*rows, strict=True)]


@functools.cache
def decoding(inner: str, lowering: str, *, lazy: bool = False) -> tuple[Any, HandingBackend]:
    """A captured runner whose graphs are handed parameters. Its step returns all columns, moved by the tokens."""
    backend = HandingBackend(inner)
    return handing(backend, lambda view: seen(view) + view.input_ids[:, None], lowering=lowering, lazy=lazy), backend


def handing(backend: Any, step: Any, **options: Any) -> Any:
    """A captured runner."""
    return decoder(Decoding, step, buckets=BUCKETS, backend=backend, absent=[{"window"}], **KNOWN, **options)


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """A batch whose parameters are lists, tensors of one dtype or the other; one of them may be missing."""
    requests = draw(st.integers(1, max(BUCKETS)))
    lens, ids, window = (draw(st.lists(st.integers(1, 99), min_size=requests, max_size=requests)) for _ in range(3))
    make: Any = draw(st.sampled_from([list, torch.tensor, lambda rows: torch.tensor(rows, dtype=torch.int32)]))
    return {"input_ids": torch.tensor(ids), "lens": make(lens), "window": window if draw(st.booleans()) else None}


@each_inner
@pytest.mark.parametrize("lowering", LADDER)
@given(steps=st.lists(batches(), min_size=1, max_size=5))
@settings(max_examples=20)
def test_each_replay_is_handed_its_own(inner: str, lowering: str, steps: list[Batch]) -> None:
    """Whatever batches come behind one another, shortcuts and all: one hand-over a replay, of that batch, padded."""
    runner, backend = decoding(inner, lowering)
    backend.since()
    for batch in (one for one in steps for _ in range(2)):
        outputs = runner(batch)
        requests = len(batch["input_ids"])
        expected = right(batch, 2 if requests <= 2 else 5)
        assert backend.since() == [expected]
        assert (outputs - batch["input_ids"][:, None]).tolist() == columns(expected, requests)


@each_inner
@pytest.mark.parametrize("lowering", LADDER)
def test_a_fill_hands_nothing_over_and_each_replay_does(inner: str, lowering: str) -> None:
    """A fill and a refused batch hand nothing over, each replay does; a late capture between changes nothing."""
    runner, backend = decoding(inner, lowering, lazy=True)
    batch: Batch = {"input_ids": torch.tensor([3, 4]), "lens": [7, 9], "window": None}
    backend.since()
    view = runner.fill(batch)
    assert backend.since() == []
    runner.inputs(5)
    for _ in range(2):
        runner.replay(view)
        assert backend.since() == [right(batch, 2)]
    assert view.kv_lens.tolist() == [7, 9]
    wrong = {501: r"slot 'kv_lens': row 1 is 501, over the limit of CONTEXT = 500", 7.5: "slot 'kv_lens'"}
    for length, said in wrong.items():
        with pytest.raises(BatchError, match=said):
            runner({**batch, "lens": [6, length]})
    assert backend.since() == []
    runner(batch)
    assert backend.since() == [right(batch, 2)]


@each_inner
def test_an_eager_step_hands_nothing_over(inner: str) -> None:
    """Where no graph takes a batch nothing is handed over, and the view has the live rows on the host."""
    runner, backend = decoding(inner, "foreach")
    backend.since()
    batch: Batch = {"input_ids": torch.arange(6), "lens": torch.arange(3, 9), "window": [1, 2, 3, 4, 5, 6]}
    assert runner.decide(batch).why == "too_large"
    assert (runner(batch) - batch["input_ids"][:, None]).tolist() == columns(right(batch, 6), 6)
    batch |= {"lens": batch["lens"].int(), "window": torch.tensor(batch["window"])}
    for no_copy in (False, True):
        step: Any = lambda view: (view.kv_lens.tolist(), view.rows.item())
        eager = EagerRunner(Decoding, step, no_copy=no_copy, backend=backend, **KNOWN)
        assert eager(batch) == ([3, 4, 5, 6, 7, 8], 6)
    assert backend.since() == []


class Chaining(standard.MultiLayerDraftExtendInputs, Parameters, drop=("next_token_logits", "seq_lens_cpu")):
    """A draft-extend of one layer a step, with parameters."""

    own: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=0, placement="host", argument="own")


class PrefillParameters(Prefill):
    """Parameters of a prefill: over requests, for its breaks, and over tokens and none, for its graphs."""

    lens: torch.Tensor = copied(BATCH, dtype=I32, pad=0, source="extend_seq_lens", placement=HOST, argument="lens")
    token_lens: torch.Tensor = copied(
        TOKENS, dtype=I64, pad=-1, source="positions", placement=HOST, argument="token_lens"
    )
    num_tokens: torch.Tensor = computed(lambda step: step.live(TOKENS), placement=HOST, dtype=I64, argument="tokens")


def test_parameters_are_host_slots_on_other_devices(backend_name: str) -> None:
    """On a device without host parameters the same declaration is filled, and its parameters are host slots."""
    device = choose(backend_name).device
    if choose(backend_name).capabilities.host_parameters:
        pytest.skip("operators take the parameters of this device: its own tests hold them")
    runner = handing(backend_name, lambda view: view.input_ids + 1)
    for rows in (3, 1, 5, 2):
        batch: Batch = {"input_ids": torch.arange(rows, device=device), "lens": [9 + row for row in range(rows)]}
        view = runner.fill(batch)
        pad = runner.stage.backend.capabilities.fills.get("seq_len_fill", 1)
        expected = right(batch, 2 if rows <= 2 else 5, pad)
        assert (view.kv_lens.device.type, view.window, view.never) == ("cpu", None, None)
        assert view.kv_lens.tolist() == expected["actual_seq_lengths_kv"]
        assert view.actual_seq_lengths.tolist() == expected["actual_seq_lengths"]
        assert view.rows.item() == rows
        assert torch.equal(runner.replay(view), batch["input_ids"] + 1)


@each_inner
def test_a_parameter_is_handed_over_whole(inner: str) -> None:
    """A graph is handed parameters whole: a step that cuts its view is refused at capture, a filled view can be cut."""

    def step(view: Decoding) -> torch.Tensor:
        return torch.cat([seen(view.narrow(BATCH, 0, 1)), seen(view.narrow(BATCH, 1, view.input_ids.shape[0]))])

    with pytest.raises(CaptureError, match=r"slot '(kv_lens|actual_seq_lengths|window)' is a host parameter, and"):
        handing(HandingBackend(inner), step=step)
    runner, backend = decoding(inner, "foreach")
    backend.since()
    view = runner.fill({"input_ids": torch.arange(4), "lens": [4, 3, 2, 1], "window": None})
    assert view.narrow(BATCH, 1, 3).kv_lens.tolist() == [3, 2]
    assert view.narrow(BATCH, 1, 3).actual_seq_lengths.tolist() == [3, 5]


def test_a_parameter_cannot_be_chained() -> None:
    """Steps of one graph have one value: no step has a parameter of its own."""
    options: dict[str, Any] = {"width": 2, "settings": {"sparse": False}, "buckets": BUCKETS, "backend": "cpu"}
    with pytest.raises(ConfigError, match="chained names 'own', which Chaining does not copy"):
        MultiLayerDraftExtendRunner(Chaining, [lambda *_: None], chained=["own"], **options)


def test_a_read_that_would_be_frozen_is_refused() -> None:
    """cpu-capture says of a parameter that is read on the host that its value would stay, and what to do."""
    reads: dict[str, Any] = {
        "Tensor.tolist": lambda view: view.kv_lens.tolist(),
        "Tensor.__int__": lambda view: [int(one) for one in view.kv_lens],
        "Tensor.numpy": lambda view: view.kv_lens.numpy(),
        "Tensor.item": lambda view: view.kv_lens[-1].item(),
    }
    for name, read in reads.items():
        step: Any = lambda view, read=read: [read(view), view.input_ids][1]
        said = f"cannot use {name} of host parameter 'actual_seq_lengths_kv': this device has no host parameters, so"
        with pytest.raises(CaptureError, match=said):
            handing("cpu-capture", step=step)


@pytest.mark.parametrize("kind", KINDS)
def test_a_prefill_is_handed_its_parameters_once(kind: str) -> None:
    """A prefill in parts is handed its values once, padded to the bucket; none of them depends on the requests."""
    backend, (mine, twin) = HandingBackend("cpu-capture"), [Model(named=kind == "piecewise") for _ in range(2)]
    runner: Any = ready(runner_of(kind, mine, backend, inputs=PrefillParameters))
    eager = EagerRunner(PrefillParameters, twin, backend=backend)
    for seed, lengths in enumerate(([1], [4, 4, 1], [2, 2], [3, 1, 1, 4])):
        backend.since()
        batch = batch_of(lengths, seed)
        outputs = runner(batch)
        tokens, padded = sum(lengths), 4 if sum(lengths) <= 4 else 16
        places = [*batch["positions"].tolist(), *[-1] * (padded - tokens)]
        assert backend.since() == [{"token_lens": places, "tokens": tokens}]
        assert torch.equal(outputs, eager(batch))
        assert runner.fill(batch).lens.tolist() == lengths
        assert backend.since() == []
