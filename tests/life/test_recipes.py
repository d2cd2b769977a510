"""The recipes of docs/recipes.md in random games beside plain Python: next ids by row, grammar masks that come late.

A scheduler chooses the requests of each step anew, in any order. It launches a step before it reads the last one's ids.
Between steps there is poison wherever nothing may be read.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slotgraph import BATCH, TOKENS, InputBuffers, Inputs, computed, copied, output
from slotgraph.backends import Backend, Event, Graph
from slotgraph.dataflow.capabilities import LADDER
from slotgraph.errors import BatchError
from tests.packing import NAME, backend_of
from tests.runners.models import decoder

BUCKETS: Final = (1, 2, 4, 6)
ROWS: Final = 8
"""More than the largest bucket holds."""
VOCAB: Final = 96
POISON: Final = 1 << 40
KEYS: Final = range(10)
WAYS: Final = ("runner", "runner, adopted", "graphs", "graphs, in the graph")
Texts = dict[int, list[int]]
Step = Sequence[int]
Launch = Callable[[dict[str, Any]], torch.Tensor]


def steps_of(rows: int) -> st.SearchStrategy[list[list[int]]]:
    """Steps of at most so many requests each, in any order: some were there before, some were not, some are gone."""
    return st.lists(st.lists(st.sampled_from(KEYS), unique=True, max_size=rows), min_size=2, max_size=14)


backends = pytest.mark.parametrize("name", ["cpu", "cpu-capture", NAME, pytest.param("cuda", marks=pytest.mark.cuda)])


@functools.cache
def lowerings(name: str) -> st.SearchStrategy[str]:
    """The lowerings of a backend. The test is skipped where it cannot run."""
    known = backend_of(name).capabilities.lowerings
    return st.sampled_from([one for one in LADDER if one in known])


def on_device(table: torch.Tensor) -> type[Inputs]:
    """The declaration of the page, with a seed for each request. table: What each row of the last step chose."""

    def by_row(new_ids: torch.Tensor, last_rows: torch.Tensor) -> torch.Tensor:
        return torch.where(last_rows < 0, new_ids, table[last_rows])

    class Decode(Inputs):
        new_ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
        last_rows: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=-1)
        seeds: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=3)
        input_ids: torch.Tensor = computed(by_row, shape=TOKENS, dtype=torch.int64)

    return Decode


def likely(token: Any, seed: Any) -> Any:
    """What the model thinks of first, of numbers or of tensors."""
    return (token * 31 + seed) % VOCAB


def prompts() -> Texts:
    """The first id of each request."""
    return {key: [key * 7 % VOCAB] for key in KEYS}


@attrs.define
class Requests:
    """The host's part, as on the page: the ids of each request, and its row in the last step."""

    event: Callable[[], Event]
    ids: Texts = attrs.field(factory=prompts)
    rows: dict[int, int] = attrs.field(factory=dict)
    unread: torch.Tensor = attrs.field(factory=lambda: torch.zeros(0))
    copied: Event | None = None

    def batch(self, chosen: Step) -> dict[str, Any]:
        """What a step takes."""
        return {
            "new_ids": [0 if key in self.rows else self.ids[key][-1] for key in chosen],
            "last_rows": [self.rows.get(key, -1) for key in chosen],
            "seeds": [key * 5 + 1 for key in chosen],
        }

    def read(self) -> None:
        """Read the ids of the last step."""
        if self.copied is not None:
            self.copied.synchronize()
        for key, token in zip(self.rows, self.unread.tolist(), strict=True):
            self.ids[key].append(token)

    def launched(self, chosen: Step, sampled: torch.Tensor) -> None:
        """Note the rows, and begin to copy the ids."""
        self.rows = {key: row for row, key in enumerate(chosen)}
        self.unread = sampled.to("cpu", non_blocking=True, copy=True)
        self.copied = self.event()


def plain_texts(steps: Sequence[Step], allows: Mapping[int, int]) -> Texts:
    """Play it in plain Python. allows: By request, the rest that its grammar goes on by."""
    ids = prompts()
    for chosen in steps:
        for key in chosen:
            last = ids[key][-1]
            wanted = likely(last, key * 5 + 1) + 0.25  # no two tokens are as far from it
            allowed = [one for one in range(VOCAB) if key not in allows or is_allowed(one, last, allows[key])]
            ids[key].append(min(allowed, key=lambda one: abs(one - wanted)))
    return ids


def is_allowed(token: int, last: int, rest: int) -> bool:
    """A grammar: each token says which may follow."""
    return (token + last) % 3 == rest


@attrs.frozen
class ByRow:
    """What runs a batch of the first recipe and returns all padded rows, and what is poisoned between steps.

    Attributes:
        rows: The most in a step.
    """

    backend: Backend
    launch: Launch
    table: torch.Tensor
    adopted: Mapping[str, torch.Tensor]
    rows: int


def next_ids(view: Any) -> torch.Tensor:
    """Model and sampler."""
    chosen: torch.Tensor = likely(view.input_ids, view.seeds)
    return chosen


@functools.cache
def by_row(name: str, lowering: str, way: str) -> ByRow:
    """A way to run the first recipe: by a runner, or by graphs of one's own that gather at their start or before."""
    backend = backend_of(name, lowering)
    table = torch.zeros(ROWS, dtype=torch.int64, device=backend.device)
    inputs = on_device(table)
    largest = BUCKETS[-1]
    names = ("new_ids", "last_rows", "seeds")
    adopted = {one: torch.zeros(largest, dtype=torch.int64, device=backend.device) for one in names}

    def step(view: Any) -> torch.Tensor:
        sampled = next_ids(view)
        table[: len(sampled)] = sampled
        return sampled

    if way.startswith("runner"):
        bind = adopted if "adopted" in way else {}
        options = {"backend": backend, "lowering": lowering, "buckets": BUCKETS, "output_rows": None, "bind": bind}
        runner = decoder(inputs, step, **options)
        return ByRow(backend, runner, table, bind, largest if bind else ROWS)
    buffers = InputBuffers(inputs, {TOKENS: largest, BATCH: largest}, backend=backend, lowering=lowering, bind=adopted)
    graphs = {}
    for size in BUCKETS:
        bucket = buffers.at({TOKENS: size, BATCH: size})
        bucket.fill({name: [] for name in adopted})

        def captured(bucket: Any = bucket) -> torch.Tensor:
            if "in the graph" in way:
                bucket.fill_in_graph()
            return step(bucket.view())

        graphs[size] = bucket, capture(backend, captured)

    def filled(batch: dict[str, Any]) -> torch.Tensor:
        bucket, graph = graphs[next(size for size in BUCKETS if size >= len(batch["new_ids"]))]
        bucket.fill(batch)
        graph.replay()
        sampled: torch.Tensor = graph.outputs
        return sampled

    return ByRow(backend, filled, table, adopted, largest)


def capture(backend: Backend, step: Callable[[], torch.Tensor]) -> Graph:
    """A graph of one's own, on the backend's stream."""
    backend.synchronize()
    with backend.stream():
        return backend.capture(step)


@backends
@given(data=st.data())
def test_next_ids_are_taken_by_the_row_of_the_last_step(name: str, data: st.DataObject) -> None:
    """Each request goes on from its own id, whatever its row and bucket were, also eagerly and behind refused calls."""
    made = by_row(name, data.draw(lowerings(name)), data.draw(st.sampled_from(WAYS)))
    steps, refused = data.draw(steps_of(made.rows)), data.draw(st.sets(st.integers(0, 13), max_size=2))
    requests, tails = Requests(made.backend.event), list[torch.Tensor]()
    for number, chosen in enumerate(steps):
        batch = requests.batch(chosen)
        if number in refused:
            with pytest.raises(BatchError):
                made.launch({**batch, "last_rows": [*batch["last_rows"], -1]})
        sampled = made.launch(batch)
        requests.read()
        requests.launched(chosen, sampled[: len(chosen)])
        tails.append(sampled[len(chosen) :].clone())  # looked at later: it would wait for the device
        made.table[len(chosen) :] = POISON  # rows that were padded, and those of larger steps
        for tensor in made.adopted.values():
            tensor.fill_(POISON)
    requests.read()
    assert requests.ids == plain_texts(steps, {})
    assert {*torch.cat(tails).tolist()} <= {likely(0, 3)}


@attrs.frozen
class Late:
    """The two graphs of the second recipe, and their memory."""

    backend: Backend
    forward: Any
    sampler: Any
    table: torch.Tensor
    logits: torch.Tensor
    mask: torch.Tensor


@functools.cache
def late(name: str, lowering: str) -> Late:
    """Both graphs. The sampler also returns what it saw: the sums of its logits, and whether all tokens are allowed."""
    backend = backend_of(name, lowering)
    device, largest = backend.device, BUCKETS[-1]
    table = torch.zeros(ROWS, dtype=torch.int64, device=device)
    logits = torch.zeros(largest, VOCAB, device=device)
    mask = torch.zeros(largest, VOCAB // 32, dtype=torch.int32, device=device)
    places, bits = torch.arange(VOCAB, device=device), torch.arange(32, dtype=torch.int32, device=device)

    class Forward(on_device(table)):  # type: ignore[misc] # a declaration that was made here
        logits: torch.Tensor = output(BATCH, VOCAB, dtype=torch.float32)

    class Sampling(Inputs):
        logits: torch.Tensor = copied(BATCH, VOCAB, dtype=torch.float32, pad=0)
        grammar_mask: torch.Tensor | None = copied(BATCH, VOCAB // 32, dtype=torch.int32, pad=-1, default=None)

    def model(view: Any) -> torch.Tensor:
        first = likely(view.input_ids, view.seeds)
        made: torch.Tensor = view.logits
        return made.copy_(-(places - first[:, None] - 0.25).abs())

    def sample(view: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        allowed = torch.ones_like(view.logits, dtype=torch.bool)
        if view.grammar_mask is not None:
            allowed = (view.grammar_mask[:, :, None] >> bits & 1).flatten(1).bool()
        sampled = view.logits.masked_fill(~allowed, -torch.inf).argmax(1)
        table[: len(sampled)] = sampled
        return sampled, view.logits.abs().sum(1), allowed.all(1)

    options: dict[str, Any] = {"backend": backend, "lowering": lowering, "buckets": BUCKETS}
    forward = decoder(Forward, model, **options, output_rows=BATCH, bind={"logits": logits})
    bind = {"logits": logits, "grammar_mask": mask}
    sampler = decoder(Sampling, sample, **options, output_rows=None, bind=bind, absent=[{"grammar_mask"}])
    return Late(backend, forward, sampler, table, logits, mask)


def mask_of(chosen: Step, ids: Texts, allows: Mapping[int, int]) -> torch.Tensor | None:
    """One row for each request, with a bit for each token, or None where none of them has a grammar."""
    if not any(key in allows for key in chosen):
        return None
    mask = torch.full((len(chosen), VOCAB // 32), -1, dtype=torch.int32)
    for row, key in enumerate(chosen):
        if key in allows:
            flags = torch.tensor([is_allowed(one, ids[key][-1], allows[key]) for one in range(VOCAB)])
            words = flags.int().view(-1, 32) << torch.arange(32, dtype=torch.int32)
            mask[row] = words.sum(1, dtype=torch.int32)
    return mask


@backends
@given(
    data=st.data(),
    steps=steps_of(BUCKETS[-1]),
    allows=st.dictionaries(st.sampled_from(KEYS), st.integers(0, 2), max_size=4),
)
def test_a_mask_that_comes_after_the_forward_masks_its_own_rows(
    name: str, data: st.DataObject, steps: list[list[int]], allows: dict[int, int]
) -> None:
    """Each request is held to its own grammar or to none, by the logits of its own step; no logits are copied."""
    made = late(name, data.draw(lowerings(name)))
    requests, expected = Requests(made.backend.event), list[bool]()
    tails, free = list[torch.Tensor](), list[torch.Tensor]()
    for chosen in steps:
        scores = made.forward(requests.batch(chosen))
        assert not chosen or scores.data_ptr() == made.logits.data_ptr()
        requests.read()
        mask = mask_of(chosen, requests.ids, allows)
        sampled, total, is_free = made.sampler({"logits": scores, "grammar_mask": mask})
        tails.append(total[len(chosen) :].clone())
        free.append(is_free.clone())
        expected += [key not in allows for key in chosen] + [True] * (len(is_free) - len(chosen))
        requests.launched(chosen, sampled[: len(chosen)])
        if mask is not None:
            mask.fill_(0)  # the memory is the host's again
        made.logits.fill_(torch.nan)
        made.mask.fill_(0)
        made.table[len(chosen) :] = POISON
    requests.read()
    assert requests.ids == plain_texts(steps, allows)
    assert not torch.cat(tails).any()
    assert torch.cat(free).tolist() == expected
