"""`slotgraph.check` finds what goes wrong with sets by hand: one of last step's lengths, and one without its tail."""

import random
import re
import types
from typing import Any, Final

import pytest
import torch

import slotgraph
from slotgraph import BATCH, SEQ_LEN_FILL, DecodeRunner, Inputs, attention, computed, copied
from slotgraph.backends import Backend
from slotgraph.runners.attention import layouts
from slotgraph.runners.check.trial import Finding
from tests.runners.attention import kinds
from tests.runners.attention.attended import flashinfer
from tests.runners.attention.test_attention import cache_on
from tests.runners.models import recording

PAGE: Final = 4


HELD: Final = dict[str, torch.Tensor]()
"""What builders keep between steps."""


def one_late(lens: torch.Tensor) -> torch.Tensor:
    """Return what the call before has built, as a builder that works ahead does."""
    last, HELD["offsets"] = HELD.get("offsets"), layouts.offsets((lens + PAGE - 1) // PAGE)
    return HELD["offsets"] if last is None or last.shape != HELD["offsets"].shape else last


class Lists(kinds.Tokens, attention.PagedCache):
    """What FlashInfer's decode reads, by a function for each slot."""

    kv_indptr: torch.Tensor = computed(layouts.page_offsets, shape=BATCH + 1, dtype=torch.int32)
    kv_indices: torch.Tensor = computed(layouts.packed_pages, shape=BATCH * attention.PAGES, dtype=torch.int32)
    kv_last_page_len: torch.Tensor = computed(layouts.last_page_lengths, shape=BATCH, dtype=torch.int32)


class Late(Lists):
    """Offsets that the host has made of last step's lengths."""

    lens: torch.Tensor = copied(
        BATCH, dtype=torch.int32, pad=SEQ_LEN_FILL, placement="host", source="seq_lens", converts=(torch.int64,)
    )
    kv_indptr: torch.Tensor = computed(one_late, shape=BATCH + 1, dtype=torch.int32)


class Planned(Lists):
    """Offsets that the host makes, only if the number of requests is another one."""

    lens: torch.Tensor = copied(
        BATCH, dtype=torch.int32, pad=SEQ_LEN_FILL, placement="host", source="seq_lens", converts=(torch.int64,)
    )
    kv_indptr: torch.Tensor = computed(
        lambda lens: layouts.offsets((lens + PAGE - 1) // PAGE), shape=BATCH + 1, dtype=torch.int32, again=()
    )


def pages_alone(page_table: torch.Tensor, kv_indptr: torch.Tensor, out: torch.Tensor) -> None:
    """Write the list up to its last page, as a kernel with a block a request does."""
    in_use, requests, pages = layouts.packed(kv_indptr, out.shape[0])
    out.copy_(torch.where(in_use, page_table[requests, pages], out))


class WithoutTail(Lists):
    """A list whose last part is whatever lay there."""

    kv_indices: torch.Tensor = computed(pages_alone, shape=BATCH * attention.PAGES, dtype=torch.int32)


def found(inputs: type[Inputs], backend: Backend, *, bounded: bool) -> list[Finding]:
    """What a check of attention with this declaration finds; bounded: whether the kernel reads only pages there are."""
    cache = cache_on(backend.device)

    def step(view: Any) -> torch.Tensor:
        if not bounded:
            return flashinfer(view, cache, PAGE)
        read = {name: getattr(view, name) for name in ("kv_indptr", "kv_last_page_len", "queries", "seq_lens")}
        pages = view.kv_indices.clamp(0, cache.shape[0] // PAGE - 1)
        return flashinfer(types.SimpleNamespace(kv_indices=pages, **read), cache, PAGE)

    HELD.clear()
    given: dict[str, Any] = {"buckets": kinds.BUCKETS, "sizes": kinds.sizes_of(inputs, PAGE), "progress": False}
    runner: DecodeRunner[Any] = DecodeRunner(inputs, step, backend=backend, **given)
    runner.capture()

    def draw(rows: int, generator: torch.Generator) -> Any:
        seed = int(torch.randint(1 << 30, (1,), generator=generator))
        one = kinds.random_requests(random.Random(seed), "FlashInferDecode", PAGE, 1, rows, 1)
        return kinds.batch_of(one, "FlashInferDecode", backend.device)

    return [*slotgraph.check(runner, draw, rounds=2, progress=False).findings]


@recording
@pytest.mark.parametrize("bounded", [True, False])
@pytest.mark.parametrize(
    ("inputs", "check", "says"),
    [
        (Late, "parity", "slot 'kv_indptr' row 1: graph"),
        (Planned, "poison", "slot 'kv_indptr', row 1 .a live row.: it holds"),
        (WithoutTail, "coverage", "slot 'kv_indices'.*(still hold what lay there before|nothing has written)"),
    ],
)
def test_check_finds_it_by_its_slot(
    inputs: type[Inputs], check: str, says: str, *, bounded: bool, backend: Backend
) -> None:
    """The message names the slot, by the check whose promise it is."""
    if not bounded and backend.device.type != "cpu":
        pytest.skip("a device that reads past its memory runs nothing more")
    findings = [one for one in found(inputs, backend, bounded=bounded) if one.check == check]
    assert findings
    assert re.search(says, findings[0].message)
