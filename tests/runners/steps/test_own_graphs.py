"""Steps over `InputBuffers`, by graphs of one's own or none. The game of tests/life/test_ahead.py plays them, too."""

from typing import Any, Final

import pytest
import torch

from slotgraph import BATCH, TOKENS, InputBuffers, Inputs, computed, copied, output
from slotgraph.backends import Backend
from slotgraph.errors import BatchError, ConfigError, ReplayError
from slotgraph.extend import HOST

SIZES: Final = [{BATCH: rows, TOKENS: 2 * rows} for rows in (1, 2, 4)]


class Own(Inputs):
    """Two tokens a request."""

    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0, then=lambda next_ids: next_ids)
    lens: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=1, then=lambda lens: lens + 1)
    biases: torch.Tensor | None = copied(BATCH, dtype=torch.int64, pad=0, default=None)
    ends: torch.Tensor = computed(lambda lens: lens.cumsum(0), shape=BATCH, dtype=torch.int64)
    next_ids: torch.Tensor = output(TOKENS, dtype=torch.int64)
    factor: int = 10


def step(view: Any) -> torch.Tensor:
    """The next ids: of the slots, and of the field."""
    added = view.ends if view.biases is None else view.ends + view.biases
    made: torch.Tensor = view.next_ids.copy_(view.ids * view.factor + added.repeat_interleave(2))
    return made


def batch(*ids: int, **others: Any) -> dict[str, Any]:
    """One request for each id, which both of its tokens have."""
    return {"ids": [one for one in ids for _ in range(2)], "lens": [1] * len(ids), **others}


@pytest.fixture(params=["in_graph", "fused", "foreach"])
def buffers(backend: Backend, request: pytest.FixtureRequest) -> InputBuffers[Own]:
    """For more tokens than any graph has."""
    if request.param not in backend.capabilities.lowerings:
        pytest.skip(f"{backend.name} has no lowering {request.param!r}")
    return InputBuffers(Own, {BATCH: 8, TOKENS: 64}, backend=backend, lowering=request.param)


def test_a_launch_may_run_the_step_itself(buffers: InputBuffers[Own]) -> None:
    """The view has the padded sizes that hold the requests, and the fields of the first batch."""
    sizes = list[tuple[int, int]]()

    def launch(view: Own) -> torch.Tensor:
        sizes.append((len(view.lens), len(view.ids)))
        return step(view)

    loop = buffers.steps(launch, batch(1, 2, factor=3), padded=SIZES, keys=["a", "b"])
    assert next(loop).tokens() == [("a", [4, 4]), ("b", [8, 8])]
    last = next(loop)
    assert last.tokens() == [("a", [14, 14]), ("b", [28, 28])]
    last.join(batch(5), ["c"])
    last.leave(["a"])
    last.edit(["b"], ids=[0, 1])
    assert next(loop).tokens() == [("c", [16, 16]), ("b", [4, 7])]
    assert sizes == [(2, 4)] * 3
    last = next(loop)
    last.join(batch(7, 8), ["d", "e"])
    assert len(next(loop).keys) == 4
    assert sizes[-1] == (4, 8)
    with pytest.raises(BatchError, match="cannot take 5 requests: the largest bucket holds 4"):
        last.join(batch(9), ["f"])


def test_fills_and_loops_take_turns(buffers: InputBuffers[Own]) -> None:
    """A fill ends the loop. Other fills, sizes and optional slots follow as if there had been none."""
    for sizes in (SIZES[:1], SIZES, [{BATCH: 8, TOKENS: 8}]):
        width = sizes[0][TOKENS] // sizes[0][BATCH]
        first = {"ids": [3] * width, "lens": [1]}
        for others in ({}, {"biases": [100]}):
            loop = buffers.steps(step_of(width), {**first, **others}, padded=sizes, ahead=1, read=lambda made: made)
            added = 100 if others else 0
            assert next(loop).outputs.tolist() == [31 + added] * width
            assert next(loop).outputs.tolist() == [312 + 11 * added] * width
            view = buffers.fill(batch(4), {BATCH: 3, TOKENS: 6})
            assert view.lens.tolist() == [1, 1, 1]
            assert view.ids.tolist() == [4, 4, 0, 0, 0, 0]
            assert view.ends.tolist() == [1, 2, 3]
            with pytest.raises(ReplayError, match="another batch was filled in the middle of steps"):
                next(loop)


def step_of(width: int) -> Any:
    """The step of a width."""

    def run(view: Any) -> torch.Tensor:
        added = view.ends if view.biases is None else view.ends + view.biases
        made: torch.Tensor = view.next_ids.copy_(view.ids * 10 + added.repeat_interleave(width))
        return made

    return run


def test_outputs_are_cut_or_whole(buffers: InputBuffers[Own]) -> None:
    """By the axis that their rows follow."""
    sums: dict[str, Any] = {
        "launch": lambda view: step(view).view(-1, 2).sum(1),
        "batch": batch(1, 2, 3),
        "padded": SIZES,
    }
    assert [token for _, token in next(buffers.steps(**sums, output_rows=BATCH)).tokens()] == [22, 44, 66]
    whole = next(buffers.steps(**sums, output_rows=None))
    assert whole.outputs.tolist() == [22, 44, 66, 8]
    with pytest.raises(ConfigError, match="outputs are whole"):
        whole.tokens()


@pytest.mark.parametrize("turns", ["aaaaaa", "aabbab", "abcdef", "aaabbb"])
@pytest.mark.parametrize("form", ["tensor", "list"])
def test_a_launch_may_return_any_tensors(buffers: InputBuffers[Own], turns: str, form: str) -> None:
    """The same in each step, as a graph does, others in turn, or others in a list that is always the same."""
    made, rows = dict[str, torch.Tensor](), [torch.zeros(0)]
    turn = iter(turns)

    def launch(view: Own) -> Any:
        ids = step(view)
        rows[0] = made.setdefault(next(turn), torch.empty_like(ids))
        rows[0].copy_(ids)
        return rows[0] if form == "tensor" else rows

    numbers = list[int]()
    for one in buffers.steps(launch, batch(1), padded=SIZES):
        outputs = one.outputs if form == "tensor" else one.outputs[0]
        numbers.append(int(outputs[0]))
        if one.number == len(turns) - 1:
            one.leave([0])
    assert numbers == [11, 112, 1123, 11234, 112345, 1123456]


def test_wrong_arguments_are_refused(buffers: InputBuffers[Own], cpu: str) -> None:
    """Before anything is run."""
    with pytest.raises(BatchError, match=r"this batch has none: 5 requests .* at most 4"):
        buffers.steps(step, batch(1, 2, 3, 4, 5), padded=SIZES)
    with pytest.raises(ConfigError, match="launch: expected a function of the view"):
        buffers.steps("launch", batch(1), padded=SIZES)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="padded size 99 of BATCH is more than its capacity"):
        buffers.steps(step, batch(1), padded=[{BATCH: 99}])
    with pytest.raises(ConfigError, match="output_rows is TOKENS, BATCH or None"):
        buffers.steps(step, batch(1), padded=SIZES, output_rows="BATCH")  # type: ignore[arg-type]
    with pytest.raises(BatchError, match="1 keys for a batch of 2 requests"):
        buffers.steps(step, batch(1, 2), padded=SIZES, keys=["a"])

    class Still(Inputs):
        ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)

    with pytest.raises(ConfigError, match="no slot of Still advances"):  # nor does one know of requests
        InputBuffers(Still, {TOKENS: 4}, backend=cpu).steps(lambda view: view.ids, {"ids": [1]})


def test_padded_sizes_hold_all_tokens_of_their_requests(buffers: InputBuffers[Own]) -> None:
    """Two requests of two tokens never go to a bucket of two tokens, not even when others have left."""
    narrow = [{BATCH: 2, TOKENS: 2}, {BATCH: 4, TOKENS: 8}]
    with pytest.raises(ConfigError, match=r"padded= has 2 tokens for 2 requests, and needs 4: a request has 2 tokens"):
        buffers.steps(step, batch(1, 2, 3), padded=narrow)
    with pytest.raises(ConfigError, match="padded= has 2 tokens for 4 requests, and needs 4"):
        buffers.steps(step, batch(1), padded=[{BATCH: 4, TOKENS: 2}])
    with pytest.raises(ConfigError, match=r"two padded sizes for 4 requests, .*TOKENS 6.* and .*TOKENS 8.*: give one"):
        buffers.steps(step, batch(1), padded=[{BATCH: 4, TOKENS: 8}, {BATCH: 4, TOKENS: 6}])
    with pytest.raises(ConfigError, match="padded: expected padded sizes of at least one request"):
        buffers.steps(step, batch(1), padded=[])
    with pytest.raises(ConfigError, match="padded: expected a list of padded sizes"):
        buffers.steps(step, batch(1), padded={BATCH: 4, TOKENS: 8})  # type: ignore[dict-item]
    wider = [{BATCH: 2, TOKENS: 8}, {BATCH: 4, TOKENS: 8}]
    assert next(buffers.steps(lambda view: view.ids * 1, batch(1, 2), padded=wider)).tokens() == [
        (0, [1, 1]),
        (1, [2, 2]),
    ]
    with pytest.raises(BatchError, match=r"BATCH \* 2 = 1: pass the same number of rows for all of them"):
        buffers.steps(step, {"ids": [1], "lens": [1]}, padded=SIZES)


def test_outputs_of_a_launch_have_all_padded_rows(buffers: InputBuffers[Own]) -> None:
    """One output row a request is not cut as if it were one a token, and the other way round."""
    for launch, axis, shape in (
        (lambda view: view.lens * 1, TOKENS, r"\[4\], expected 8"),
        (lambda view: view.ids * 1, BATCH, r"\[8\], expected 4"),
        (lambda view: view.ids.sum(), BATCH, r"\[\], expected 4"),
    ):
        loop = buffers.steps(launch, batch(1, 2, 3), padded=SIZES, output_rows=axis)
        with pytest.raises(ReplayError, match=f"a tensor of shape {shape} rows, one for each padded row of its view"):
            next(loop)
    made = iter((4, 4, 3))
    loop = buffers.steps(lambda _: torch.zeros(next(made)), batch(1, 2, 3), padded=SIZES, output_rows=BATCH)
    assert len(next(loop).outputs) == len(next(loop).outputs) == 3
    with pytest.raises(ReplayError, match=r"of shape \[3\], expected 4 rows"):
        next(loop)


class OnHost(Own):
    """A slot in host memory that advances, so that each step waits for the one before."""

    lens_cpu: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=1, placement=HOST, then=lambda lens_cpu: lens_cpu + 1)
    total: torch.Tensor = computed(lambda lens_cpu: lens_cpu.sum().view(1), shape=1, dtype=torch.int64, placement=HOST)


def test_slots_in_host_memory_advance(backend: Backend) -> None:
    """One step at a time, whatever `ahead` says."""
    buffers, seen = InputBuffers(OnHost, {BATCH: 4, TOKENS: 8}, backend=backend), list[tuple[int, int]]()

    def launch(view: OnHost) -> torch.Tensor:
        seen.append((int(view.lens_cpu[0]), int(view.total)))
        return step(view)

    loop = buffers.steps(launch, batch(1, 2, lens_cpu=[5, 6]), padded=SIZES, keys=["a", "b"], ahead=3)
    last = [next(loop) for _ in range(3)][-1]
    last.leave(["a"])
    next(loop)
    assert seen == [(5, 11), (6, 13), (7, 15), (9, 9)]
