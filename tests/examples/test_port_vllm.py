"""The contract of the page on vLLM's runner: its slots hold what vLLM's kernels make, padded rows included.

The reference follows the kernels of vLLM 0.33.0, a request at a time: `prepare_prefill_inputs`, `prepare_pos_seq_lens`,
`combine_sampled_and_draft_tokens`, `gather_block_tables` and `compute_slot_mappings`, and the host's code around them.
"""

import random
import re
import sys
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any, Final

import attrs
import numpy as np
import pytest
import torch

from slotgraph import BATCH, TOKENS, InputBuffers
from slotgraph.backends import Backend
from tests.examples.demo import EXAMPLES, stale
from tests.packing import backend_of

PAGE: Final = EXAMPLES.parent / "port-vllm.md"
Slots = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def page() -> Iterator[Any]:
    """What the page's blocks define, as they stand there."""
    made = ModuleType("page_of_vllm")
    sys.modules[made.__name__] = made  # where the declaration looks its annotations up
    for block in re.findall(r"^```python\n(.*?)^```", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL):
        if not block.startswith(">>>"):
            exec(compile(block, PAGE, "exec"), vars(made))  # noqa: S102 - it is ours
    yield made
    del sys.modules[made.__name__]


@attrs.frozen
class Batch:
    """A batch of vLLM's scheduler, and the sizes that it is padded to."""

    arrays: Mapping[str, np.ndarray]
    num_tokens: int
    padded: tuple[int, int]
    """Requests, and tokens."""

    def scheduled(self) -> list[tuple[int, int]]:
        """The requests' rows of the tables, with their new tokens."""
        return [*zip(self.arrays["idx_mapping"].tolist(), self.arrays["num_scheduled_tokens"].tolist(), strict=True)]


class World:
    """An engine of random sizes: tables full of numbers, of which a batch's rows are in order."""

    def __init__(self, page: Any, seed: int) -> None:
        self.draw = draw = random.Random(seed)
        self.reqs, self.length = draw.randint(2, 7), draw.randint(8, 40)
        requests, tokens = draw.randint(1, self.reqs), draw.randint(8, 24)
        self.buckets = [(min(size, requests), size) for size in (tokens, *(draw.randint(1, tokens) for _ in range(2)))]
        self.groups = [(draw.randint(1, 5), draw.choice([0, draw.randint(1, 9)])) for _ in range(2)]
        columns = [-(-self.length // size) for size, _ in self.groups]
        self.sizes = {
            BATCH: requests,
            TOKENS: tokens,
            page.REQS: self.reqs,
            page.LENGTH: self.length,
            page.BLOCKS_0: columns[0],
            page.BLOCKS_1: columns[1],
        }
        self.tables = page.Tables(self.reqs, self.length, columns)
        self.num_blocks = [[0] * self.reqs for _ in self.groups]
        self.prefill_len, self.computed = [0] * self.reqs, [0] * self.reqs
        for row in range(self.reqs):
            self.renew(row)

    def renew(self, row: int) -> None:
        """Stage a request of random ids, blocks and lengths in this row. Behind its blocks others' are left."""
        draw, tables = self.draw, self.tables
        self.prefill_len[row] = draw.randint(1, self.length - 1)
        self.computed[row] = draw.randint(0, self.length - 1)
        tables.all_token_ids.stage_write(row, 0, [draw.randint(1, 900) for _ in range(self.length)])
        tables.num_computed_tokens.stage_write(row, 0, [self.computed[row]])
        tables.last_sampled_tokens[row] = draw.randint(1000, 2000)
        for group, (size, _) in enumerate(self.groups):
            columns = tables.block_tables[group].gpu.shape[1]
            needed = -(-max(self.prefill_len[row], self.computed[row] + 1) // size)
            self.num_blocks[group][row] = count = draw.randint(needed, columns)
            tables.block_tables[group].stage_write(row, 0, [draw.randint(1, 99) for _ in range(count)])

    def batch(self) -> Batch:
        """Draw requests: some new, some in a chunk of their prompt, some decoding."""
        draw = self.draw
        bucket = draw.choice(self.buckets)
        rows, new, left = draw.sample(range(self.reqs), draw.randint(1, bucket[0])), list[int](), bucket[1]
        for place, row in enumerate(rows):
            if draw.random() < 0.5:
                self.renew(row)
            most = max(1, min(self.prefill_len[row] - self.computed[row], left - (len(rows) - place - 1)))
            new.append(draw.choice([1, most, draw.randint(1, most)]))
            left -= new[-1]
        self.tables.apply_staged_writes()
        lens = np.array([self.prefill_len[row] for row in rows], np.int32)
        arrays = {"idx_mapping": np.array(rows), "num_scheduled_tokens": np.array(new, np.int32), "prefill_len": lens}
        arrays |= {f"{name}_np": arrays[name] for name in ("idx_mapping", "prefill_len")}
        return Batch(arrays, sum(new), bucket)


def right(world: World, batch: Batch) -> Slots:
    """The padded slots, as vLLM's kernels fill them. Where these write nothing it is 0, as the page says."""
    requests, tokens = batch.padded
    state, groups = world.tables, [*zip(world.tables.block_tables, world.groups, world.num_blocks, strict=True)]
    slots = {
        "query_start_loc": torch.full((requests + 1,), batch.num_tokens, dtype=torch.int32),
        "seq_lens": torch.zeros(requests, dtype=torch.int32),
        "positions": torch.zeros(tokens, dtype=torch.int64),
        "input_ids": torch.zeros(tokens, dtype=torch.int32),
        "is_padding": torch.arange(tokens) >= batch.num_tokens,
        "logits_indices": torch.full((requests,), batch.num_tokens - 1, dtype=torch.int64),
        "slot_mappings": torch.full((len(groups), tokens), -1, dtype=torch.int64),
    }
    for group, (table, *_) in enumerate(groups):
        slots[f"input_block_table_{group}"] = torch.zeros(requests, table.gpu.shape[1], dtype=torch.int32)
    token = 0
    for request, (row, new) in enumerate(batch.scheduled()):
        done = int(state.num_computed_tokens.gpu[row])
        slots["query_start_loc"][request] = token
        slots["seq_lens"][request] = done + new
        slots["logits_indices"][request] = token + new - 1
        for group, (table, (size, reach), num_blocks) in enumerate(groups):
            gone, known = max(done - reach, 0) // size if reach else 0, num_blocks[row]
            slots[f"input_block_table_{group}"][request, gone:known] = table.gpu[row, gone:known]
        for position in range(done, done + new):
            prompt, sampled = state.all_token_ids.gpu[row, position], state.last_sampled_tokens[row, 0]
            slots["positions"][token] = position
            slots["input_ids"][token] = prompt if done < world.prefill_len[row] else sampled
            for group, (table, (size, _), _) in enumerate(groups):
                slots["slot_mappings"][group, token] = table.gpu[row, position // size] * size + position % size
            token += 1
    return slots


def ours(world: World, batch: Batch, view: Any) -> Slots:
    """The slots of a view. Columns behind a request's blocks are 0 here: their kernel does not write them."""
    slots = {name: getattr(view, name).cpu().clone() for name in right(world, batch)}
    for group, known in enumerate(world.num_blocks):
        for request, (row, _) in enumerate(batch.scheduled()):
            slots[f"input_block_table_{group}"][request, known[row] :] = 0
    return slots


class Filled:
    """Buffers of a declaration over one world's tables; all other slots are poisoned before each fill."""

    def __init__(self, world: World, inputs: Any, backend: Backend) -> None:
        self.backend = backend
        settings = {"groups": world.groups}
        tables = world.tables.bound()
        whole = InputBuffers(inputs, world.sizes, settings=settings, backend=backend).view()
        slots = {name: getattr(whole, name) for name in inputs.slotgraph.slots if name not in tables}
        self.poisoned = {name: torch.empty_like(one) for name, one in slots.items()}
        self.buffers = InputBuffers(
            inputs,
            world.sizes,
            bind={**self.poisoned, **tables},
            keep_bound=True,
            settings=settings,
            backend=backend,
        )
        self.graphs = dict[tuple[int, int], Any]()

    def fill(self, batch: Batch, *, in_graph: bool) -> Any:
        """Fill over garbage, at once or by a graph that begins with the fill, and return the view."""
        for one in self.poisoned.values():
            one.copy_(torch.randint(0, 2, one.shape))
        requests, tokens = batch.padded
        bucket, live = self.buffers.at({BATCH: requests, TOKENS: tokens}), {TOKENS: batch.num_tokens}
        if in_graph and batch.padded not in self.graphs:
            bucket.fill(batch.arrays, live=live)
            with self.backend.stream():
                self.backend.synchronize()
                self.graphs[batch.padded] = self.backend.capture(bucket.fill_in_graph)
        view = bucket.fill(batch.arrays, live=live)
        if in_graph:
            self.graphs[batch.padded].replay()
        return view


def differences(page: Any, inputs: Any, backend: Backend, seed: int, batches: int) -> Iterator[str]:
    """Yield each slot that differs in so many random batches."""
    world = World(page, seed)
    filled = Filled(world, inputs, backend)
    for number in range(batches):
        batch = world.batch()
        view = filled.fill(batch, in_graph=backend.name != "cpu" and seed % 2 == 0)
        expected, got = right(world, batch), ours(world, batch, view)
        for name, tensor in expected.items():
            if tensor.dtype != got[name].dtype or not tensor.equal(got[name]):
                yield f"batch {number}: {name!r} holds {got[name].tolist()}, and vLLM's {tensor.tolist()}"


@pytest.mark.parametrize("backend", ["cpu", "cpu-capture"])
def test_each_slot_holds_what_vllm_prepares(page: Any, backend: str) -> None:
    """400 random batches of ten engines, padded rows included. With cpu-capture every second one fills by graphs."""
    made = backend_of(backend)
    for seed in range(10):
        assert list(differences(page, page.VllmInputs, made, seed, 40)) == []


@pytest.mark.parametrize(("name", "dtype"), [("idx_mapping", torch.int64), ("num_scheduled_tokens", torch.int32)])
def test_stale_padding_is_found(page: Any, name: str, dtype: torch.dtype) -> None:
    """A declaration that forgets the tail of one of the scheduler's arrays differs."""
    assert list(differences(page, stale(page.VllmInputs, dtype, name, axes=(BATCH,)), backend_of("cpu"), 1, 40))
