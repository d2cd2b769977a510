"""What the tests of explanations share: runners with something of everything, and names that mean harm."""

from collections.abc import Mapping
from typing import Any

import torch

from slotgraph import (
    BATCH,
    CACHE_LOC,
    SEQ_LEN_FILL,
    TOKENS,
    Axis,
    DecodeRunner,
    Inputs,
    Step,
    computed,
    constant,
    copied,
    keep,
    output,
    staged,
)
from slotgraph.backends import Backend
from slotgraph.extend import once, side
from slotgraph.runners.engine.pool import InputPool
from slotgraph.runners.explained.declared import Explanation
from slotgraph.runners.explained.explanation import RunnerExplanation, SlotPlace
from tests.runners.models import PlainInputs, plain_step

PAGES = Axis("PAGES")
HIDDEN = Axis("HIDDEN", fixed=True)
SIZES = {PAGES: 8, HIDDEN: 16}
HARM = "</style></title><script>alert(1)</script><img src=x onerror=alert(2)>\"'&\x00\x1b\u202e"
"""What no page may take as anything but letters."""


def live_tokens(step: Step) -> int:
    """Computed on the host, for the device."""
    return step.live(TOKENS)


def last_rows(seq_lens: torch.Tensor) -> torch.Tensor:
    """Computed on the device."""
    return seq_lens.cumsum(0, dtype=torch.int64) - 1


def behind(last: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
    """Computed on the device from what is computed there."""
    return last + input_ids.sum()


def ramp(out: torch.Tensor) -> None:
    """Computed on the host, for the host."""
    torch.arange(out.shape[0], out=out)


class FullInputs(Inputs):
    """A slot of every kind."""

    input_ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    seq_lens: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=SEQ_LEN_FILL)
    out_cache_loc: torch.Tensor = copied(TOKENS, dtype=CACHE_LOC, pad=0)
    block_tables: torch.Tensor = copied(BATCH, PAGES, dtype=torch.int32, pad=0, source="tables.decode")
    temperatures: torch.Tensor = copied(BATCH, 1, dtype=torch.float32, pad=once(1.0))
    hidden_states: torch.Tensor | None = copied(
        TOKENS, HIDDEN, dtype=torch.float32, default=None, source=side("proxy.hidden"), pad=keep("no one reads it")
    )
    tokens: torch.Tensor = computed(live_tokens, shape=1, dtype=torch.int32)
    last: torch.Tensor = computed(last_rows, shape=BATCH, dtype=torch.int64)
    after: torch.Tensor = computed(behind, shape=BATCH, dtype=torch.int64)
    rows: torch.Tensor = computed(ramp, shape=BATCH, dtype=torch.int64, placement="host")
    kv_lens: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=0, source="lens", placement="host", argument="kv_lens")
    ones: torch.Tensor = constant(1, shape=(BATCH, 2), dtype=torch.int32)
    embeds: torch.Tensor = staged(TOKENS * 2, HIDDEN, dtype=torch.float32, pad=0)
    logits: torch.Tensor = output(TOKENS, HIDDEN, dtype=torch.float32)
    mode: str = "decode"


def full_step(view: FullInputs) -> torch.Tensor:
    """Writes what it returns to a slot."""
    return view.logits.copy_(view.input_ids[:, None].expand_as(view.logits).float() + view.after[:, None])


def full_runner(backend: str | Backend = "cpu", **options: Any) -> DecodeRunner[FullInputs]:
    """Two buckets and two patterns over a slot of every kind, not captured yet."""
    given: dict[str, Any] = {"buckets": [2, 8], "absent": [{"hidden_states"}], "progress": False, **options}
    return DecodeRunner(FullInputs, full_step, backend=backend, sizes=SIZES, **given)


def full_batch(rows: int) -> dict[str, Any]:
    """A batch of tensors."""
    short = torch.randint(1, 9, (rows, 3), dtype=torch.int32)
    batch = {"input_ids": torch.randint(1, 50, (rows,)), "out_cache_loc": torch.randint(1, 99, (rows,))}
    beside = {"tables": {"decode": short}, "temperatures": torch.rand(rows, 1)}
    return {**batch, **beside, "seq_lens": short[:, 0].clone(), "lens": short[:, 1].clone()}


def proxy(rows: int) -> dict[str, Any]:
    """The side argument of a batch."""
    return {"proxy": {"hidden": torch.rand(rows, 16)}}


def harmful_runner() -> DecodeRunner[Any]:
    """A runner whose names, rules and failures all mean harm."""

    def count(step: Step) -> int:
        return step.live(TOKENS)

    def failing(_: Any) -> torch.Tensor:
        raise RuntimeError(HARM)

    def allowed(_: object) -> bool:
        return True

    count.__qualname__ = allowed.__qualname__ = HARM
    names: dict[str, Any] = {
        "__module__": __name__,
        "__annotations__": {"ids": torch.Tensor, "kept": torch.Tensor, "counted": torch.Tensor},
        "ids": copied(TOKENS, dtype=torch.int64, pad=0),
        "kept": copied(BATCH, dtype=torch.int32, pad=keep(HARM), when=allowed),
        "counted": computed(count, shape=1, dtype=torch.int32),
    }
    inputs: type[Inputs] = type(HARM.replace("\x00", ""), (Inputs,), names)  # which Python bears in no name
    return DecodeRunner(inputs, failing, backend="cpu", settings=object(), buckets=[2], progress=False)


def many_runner(lowering: str = "in_graph") -> DecodeRunner[Any]:
    """A runner over 44 slots, in nine buckets, of which the largest needs copies apart from the others."""
    names: dict[str, Any] = {"rows": computed(ramp, shape=BATCH, dtype=torch.int64, placement="host")}
    names["count"] = computed(live_tokens, shape=1, dtype=torch.int32)
    for at in range(42):
        dtype = (torch.bfloat16, torch.int32, torch.int64)[at % 3]
        names[f"a_slot_with_a_name_{at:02}"] = copied(*((TOKENS, HIDDEN), (BATCH,))[at % 2], dtype=dtype, pad=0)
    body = {"__module__": __name__, "__annotations__": dict.fromkeys(names, torch.Tensor), **names}
    inputs: type[Inputs] = type("ManyInputs", (Inputs,), body)
    buckets = [1 << power for power in range(9)]
    options: dict[str, Any] = {"backend": "cpu", "sizes": {HIDDEN: 512}, "lowering": lowering}
    return DecodeRunner(inputs, lambda view: view.a_slot_with_a_name_01, buckets=buckets, **options)


def printed(explanation: Explanation | RunnerExplanation) -> str:
    """The tables as a wide terminal has them."""
    return "\n".join(table.lines(400) for table in explanation.tables())


def places(explanation: RunnerExplanation) -> Mapping[str, SlotPlace]:
    """Each slot's place."""
    return {place.slot: place for one in explanation.memory for place in one.slots}


def pooled_runner() -> DecodeRunner[FullInputs]:
    """A runner that shares its memory with two others."""
    pool = InputPool("draft", "verify", "extend", overlaps=[("verify", "extend")])
    options: dict[str, Any] = {"backend": "cpu", "buckets": [4], "progress": False}
    others = [DecodeRunner(PlainInputs, plain_step, phase=pool[phase], **options) for phase in ("draft", "extend")]
    runner = full_runner(phase=pool["verify"])
    for one in others:
        one.capture()
    runner.capture()
    return runner
