"""Debug mode: an output that a later replay has overwritten is refused, whichever way it is read."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from slotgraph import TOKENS, DecodeRunner, output
from slotgraph.dataflow.errors import ReplayError, StaleOutputError
from tests.runners.models import PlainInputs, assert_right, expected, plain_runner, plain_step, random_batch

VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "itself": lambda out: out,
    "slice": lambda out: out[1:],
    "element": lambda out: out[0, 1],
    "transposed": lambda out: out.t(),
    "reshaped": lambda out: out.view(-1),
    "detached": lambda out: out.detach(),
    "of a view": lambda out: out[1:].T[0],
    "split": lambda out: torch.chunk(out, 2)[1],
    "unbound": lambda out: torch.unbind(out)[2],
    "iterated": lambda out: next(iter(out)),
    "expanded": lambda out: out[None].expand(5, -1, -1),
    "to the same": lambda out: out.to(torch.float32),
    "contiguous": lambda out: out.contiguous(),
    "as strided": lambda out: out.as_strided((2,), (1,)),
}
READS: dict[str, Callable[[torch.Tensor], object]] = {
    "sum": lambda out: out.sum(),
    "add": lambda out: out + 1,
    "function": torch.relu,
    "in a list": lambda out: torch.cat([out.reshape(-1), out.reshape(-1)]),
    "as a keyword": lambda out: torch.add(input=torch.zeros(()), other=out),
    "to a list": lambda out: out.tolist(),
    "to numpy": lambda out: out.numpy(),
    "copied from": lambda out: torch.zeros(out.shape).copy_(out),
    "assigned": lambda out: torch.zeros(out.shape).__setitem__(..., out),
    "cloned": lambda out: out.clone(),
    "printed": repr,
    "compared": lambda out: out == 0,
    "written": lambda out: out.zero_(),
}


@pytest.fixture(scope="module")
def debugged(cpu: str) -> DecodeRunner[PlainInputs]:
    """A captured runner in debug mode."""
    return plain_runner(cpu, debug=True)


@pytest.mark.parametrize("view", VIEWS)
def test_stale_view(debugged: DecodeRunner[PlainInputs], view: str) -> None:
    """An output, or any view of it, is good until the next replay and refused after it."""
    batch = random_batch(4, seed=1)
    out = VIEWS[view](debugged(batch))
    assert (
        torch.equal(out.clone(), VIEWS[view](expected(batch)).clone())
        or out.shape == VIEWS[view](expected(batch)).shape
    )
    torch.testing.assert_close(out.clone(), VIEWS[view](expected(batch)).clone())
    debugged(random_batch(3, seed=2))
    with pytest.raises(StaleOutputError, match=r"of generation \d+ and overwritten since .* or keep a clone"):
        out.sum()


@pytest.mark.parametrize("read", READS)
def test_stale_read(debugged: DecodeRunner[PlainInputs], read: str) -> None:
    """Whatever reads a stale output is refused."""
    out = debugged(random_batch(4, seed=3))
    if read != "written":
        READS[read](out)
    debugged(random_batch(4, seed=4))
    with pytest.raises(StaleOutputError):
        READS[read](out)


def test_every_tensor_of_a_structure(cpu: str) -> None:
    """Each tensor of a structure is stamped, and a stale one says which replays it lies between."""
    runner = DecodeRunner(
        PlainInputs, lambda view: {"a": (plain_step(view), view.ids * 2)}, buckets=[4], backend=cpu, debug=True
    )
    runner.capture()
    outputs = runner(random_batch(3, seed=5))["a"]
    runner(random_batch(3, seed=6))
    runner(random_batch(3, seed=7))
    for out in outputs:
        with pytest.raises(StaleOutputError, match=r"of generation 1 and overwritten since \(the runner is at 3\)"):
            out.sum()


def test_copies_live_on(debugged: DecodeRunner[PlainInputs]) -> None:
    """A clone, and any result computed from an output, is an ordinary tensor that outlives the next replay."""
    batch = random_batch(4, seed=8)
    out = debugged(batch)
    kept = [out.clone(), out + 0, out[1:].clone(), out.double(), torch.cat([out, out]), out.argmax(-1)]
    assert [type(tensor) for tensor in kept] == [torch.Tensor] * len(kept)
    debugged(random_batch(4, seed=9))
    answer = expected(batch)
    for got, want in zip(
        kept,
        [answer, answer, answer[1:], answer.double(), torch.cat([answer, answer]), answer.argmax(-1)],
        strict=True,
    ):
        torch.testing.assert_close(got, want)


def test_eager_step_makes_nothing_stale(debugged: DecodeRunner[PlainInputs]) -> None:
    """A batch that falls back overwrites no graph's outputs, and neither does a refused one."""
    batch = random_batch(4, seed=10)
    out = debugged(batch)
    debugged(random_batch(30, seed=11))
    with pytest.raises(ValueError, match="'places'"):
        debugged({**random_batch(4, seed=12), "places": [1.0, 2.0, 3.0, 4.0]})
    assert_right(out.clone(), batch)


def test_other_runner_makes_nothing_stale(cpu: str, debugged: DecodeRunner[PlainInputs]) -> None:
    """Each runner counts its own replays."""
    batch = random_batch(4, seed=13)
    out = debugged(batch)
    plain_runner(cpu, debug=True)(random_batch(4, seed=14))
    assert_right(out.clone(), batch)


def test_output_as_the_next_input(debugged: DecodeRunner[PlainInputs]) -> None:
    """An output may be the next batch's source while it is fresh, and not a step later."""
    batch = random_batch(4, seed=15)
    weights = debugged(batch)[:, 0].contiguous()
    following = {**random_batch(4, seed=16), "weights": weights}
    answer = expected({**following, "weights": weights.clone()})
    torch.testing.assert_close(debugged(following).clone(), answer)
    stale = debugged(batch)
    debugged(batch)
    with pytest.raises(StaleOutputError):
        debugged({**batch, "weights": stale[:, 0]})


def test_write_into_a_plain_tensor(debugged: DecodeRunner[PlainInputs]) -> None:
    """A tensor of the caller's own that an output is copied or added into stays the same object, and lives on."""
    batch = random_batch(4, seed=17)
    mine = torch.zeros(4, 4)
    for same in (mine.copy_(debugged(batch)), mine.add_(debugged(batch)), torch.add(mine, debugged(batch), out=mine)):
        assert same is mine
    debugged(random_batch(4, seed=18))
    torch.testing.assert_close(mine, 3 * expected(batch))


def test_deep_copy(debugged: DecodeRunner[PlainInputs]) -> None:
    """A deep copy of an output is an ordinary tensor, as a clone is."""
    batch = random_batch(4, seed=19)
    kept = copy.deepcopy(debugged(batch))
    debugged(random_batch(4, seed=20))
    assert_right(kept, batch)


def test_output_that_is_an_input(cpu: str) -> None:
    """A step that returns one of its inputs gives memory that the next fill overwrites: reading it then is refused."""
    runner = DecodeRunner(PlainInputs, lambda view: view.ids, buckets=[4], backend=cpu, debug=True)
    runner.capture()
    out = runner(random_batch(3, seed=25))
    runner.fill(random_batch(3, seed=26))
    with pytest.raises(StaleOutputError):
        out.sum()


class OutputInputs(PlainInputs):
    result: torch.Tensor = output(TOKENS, 4, dtype=torch.float32)


def test_eager_step_into_the_same_output_slot(cpu: str) -> None:
    """An eager step that writes the output slot of the graph before makes that graph's output stale."""
    runner = DecodeRunner(
        OutputInputs,
        lambda view: view.result.copy_(plain_step(view)),
        buckets=[4],
        backend=cpu,
        debug=True,
        max_waste=0.5,
    )
    runner.capture()
    batch = random_batch(4, seed=27)
    out = runner(batch)
    small = random_batch(1, seed=28)
    assert_right(runner(small), small)
    try:
        still = out.clone()
    except StaleOutputError:
        return
    assert_right(still, batch)


def test_not_in_debug(cpu: str) -> None:
    """Outside debug mode outputs are ordinary tensors, which cost nothing to read."""
    assert type(plain_runner(cpu)(random_batch(4, seed=21))) is torch.Tensor


@pytest.mark.parametrize("debug", [False, True])
def test_moved_addresses(cpu: str, *, debug: bool) -> None:
    """A buffer that moved is refused at the first replay, and in debug mode at any; the message names it."""
    runner = plain_runner(cpu, debug=debug)
    buffer: Any = runner.graphs.buffers["weights"]
    where = buffer.tensor
    for replays in (0, 2):
        for _ in range(replays):
            runner(random_batch(3, seed=22))
        buffer.tensor = where.clone()
        if replays and not debug:
            runner(random_batch(3, seed=23))
        else:
            with pytest.raises(ReplayError, match="'weights' moved since capture"):
                runner(random_batch(3, seed=23))
        buffer.tensor = where
        batch = random_batch(2, seed=24)
        assert_right(runner(batch).clone(), batch)
