"""What the host has for device slots: one packet a step, its place in the plan, and what a refusal leaves alone."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from slotgraph import BATCH, CACHE_LOC, Inputs, computed, copied
from slotgraph.backends.cpu import HostUpload
from slotgraph.dataflow.capabilities import Capabilities
from slotgraph.dataflow.errors import ConfigError
from slotgraph.dataflow.fill import bucket as buckets
from slotgraph.dataflow.fill import kinds as all_kinds
from slotgraph.dataflow.fill.bucket import Bucket, hand_over
from slotgraph.dataflow.fill.ways import Chooser
from slotgraph.dataflow.packet import Feed
from slotgraph.dataflow.plan import LARGE_BYTES, FillPlan, Pattern, packet_bytes, plan_fill
from slotgraph.runners.serial import from_data, to_data
from tests.packing import filled
from tests.strategies import declaration_of, noise, poisoned

PACKS = Capabilities(packed_uploads=True, roles={"cache_loc": torch.int32})
SIZES = {BATCH: 4}


class Small(Inputs):
    """Slots that take host data as it is, cast and with gaps, and two that the host computes."""

    rows: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=7)
    places: torch.Tensor = copied(BATCH, dtype=CACHE_LOC, pad=-1)
    weights: torch.Tensor = copied(BATCH, 2, dtype=torch.bfloat16, pad=-1.5, converts=(torch.float32,))
    turned: torch.Tensor = copied(2, BATCH, dtype=torch.int16, pad=-2)
    lens: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=3, placement="host")
    here: torch.Tensor = computed(lambda lens: int(lens.sum()) % 99, shape=1, dtype=torch.int32)
    steps: torch.Tensor = computed(
        lambda step, scale: [scale * row for row in range(step.padded(BATCH))], shape=BATCH, dtype=torch.int64
    )
    scale: int = 2


class Counted(HostUpload):  # type: ignore[misc] # final to users
    """An upload that counts what it sends and moves."""

    sent = moved = 0

    def send(self, data: bytes, kept: object) -> None:
        self.sent += 1
        super().send(data, kept)

    def move(self, source: torch.Tensor) -> torch.Tensor:
        self.moved += 1
        return super().move(source)


class Rig:
    """A bucket of four rows whose memory was full of noise, with its upload."""

    def __init__(self, *, exact: bool = False) -> None:
        slots, self.buffers = Small.slotgraph, poisoned(Small, PACKS, SIZES, 5)
        feed = Feed(Counted, packet_bytes(slots, SIZES, PACKS))
        self.bucket = Bucket(slots, SIZES, PACKS, self.buffers, exact=exact, feed=feed)
        self.upload: Any = feed.upload

    def contents(self) -> dict[str, Any]:
        return {buffer.name: buffer.tensor.tolist() for buffer in self.buffers}

    def assert_fills(self, batch: dict[str, Any], **brought: Any) -> None:
        """A fill leaves what plain Python makes of the batch. brought: the same values in another form, or a scale."""
        right, live = expected(batch, brought.get("scale", 2)), (len(batch["rows"]),)
        filled(self.bucket, {**batch, **brought}, live)
        assert self.contents() == right


def host_batch(seed: int = 1, rows: int = 3) -> dict[str, Any]:
    """A batch of host data: a list, arrays to cast and with gaps, nested lists."""
    return {
        "rows": noise((rows,), torch.int64, seed).tolist(),
        "places": noise((rows,), torch.int64, seed + 1).numpy().copy(),
        "weights": noise((rows, 2), torch.float32, seed + 2).numpy(),
        "turned": noise((rows, 2), torch.int16, seed + 3).numpy().T,
        "lens": noise((rows,), torch.int64, seed + 4),
    }


def expected(batch: dict[str, Any], scale: int = 2) -> dict[str, Any]:
    """What a bucket of four rows holds then, by hand."""
    short = 4 - len(batch["rows"])
    weights = torch.tensor(np.array(batch["weights"])).bfloat16().tolist()
    lens = [*batch["lens"].tolist(), *[3] * short]
    return {
        "rows": [*batch["rows"], *[7] * short],
        "places": [*batch["places"].tolist(), *[-1] * short],
        "weights": [*weights, *[[-1.5, -1.5]] * short],
        "turned": [[*row, *[-2] * short] for row in batch["turned"].tolist()],
        "lens": lens,
        "here": [sum(lens) % 99],
        "steps": [scale * row for row in range(4)],
    }


def test_a_plan_says_what_rides_in_the_packet() -> None:
    """It says what rides, and comes back from JSON; what is large or absent does not, nor anything elsewhere."""
    plan = plan_fill(Small.slotgraph, SIZES, PACKS, Pattern(hosted=["rows", "lens"]))
    assert {"upload  rows, steps, here in one packet", "copy    rows, steps  (int64, device, foreach)"} < {
        *plan.lines()
    }
    assert from_data(to_data(plan), FillPlan) == plan
    large, hosted = {BATCH: LARGE_BYTES // 8}, Pattern(hosted=["rows", "turned"])
    assert plan_fill(Small.slotgraph, large, PACKS, hosted).packed == ("turned", "here")
    for lowering, capabilities in (("slot_by_slot", PACKS), ("in_graph", PACKS), ("foreach", Capabilities())):
        other = plan_fill(Small.slotgraph, large, capabilities, hosted, lowering=lowering)  # type: ignore[arg-type]
        assert other.packed == ()
    more = copied(BATCH, dtype=torch.int64, pad=0, default=None)  # which a batch may come without
    maybe = declaration_of({"rows": copied(BATCH, dtype=torch.int64, pad=0), "more": more}).slotgraph
    assert plan_fill(maybe, SIZES, PACKS, Pattern(absent=["more"], hosted=["rows", "more"])).packed == ("rows",)
    count = computed(lambda step: [step.live(BATCH)], shape=1, dtype=torch.int32)
    counts = ("count_0", "count_1", "count_2")
    few = declaration_of({"more": more, **dict.fromkeys(counts, count)}).slotgraph
    assert set(plan_fill(few, SIZES, PACKS, Pattern(hosted=["more"])).packed) == {"more", *counts}
    assert plan_fill(few, SIZES, PACKS).packed == counts


@pytest.mark.parametrize("kind", [torch.tensor, list, np.array])
def test_steady_steps_plan_nothing(monkeypatch: pytest.MonkeyPatch, kind: Callable[[Any], Any]) -> None:
    """Once a pattern is known, steps of it neither plan nor look at sources one by one, those of host slots neither."""
    rig = Rig()
    for seed in range(8):
        batch = host_batch(seed)
        rig.assert_fills(batch, lens=kind(batch["lens"].tolist()))
        if seed == 3:
            for where, name in ((buckets, "plan_fill"), (Chooser, "choose")):
                monkeypatch.setattr(where, name, lambda *_, **__: pytest.fail("a steady step went the long way"))


def test_a_few_plans_are_kept_whatever_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """However sources change places, kinds and live sizes, a few plans and bound plans are kept; all are right."""
    monkeypatch.setattr(buckets, "PATTERNS", 3)
    monkeypatch.setattr(all_kinds, "KINDS", 2)
    rig = Rig()
    for seed in range(40):
        batch = host_batch(seed, 1 + seed % 4)
        mixed = {
            name: torch.as_tensor(batch[name]) for bit, name in enumerate(("places", "weights")) if seed >> bit & 1
        }
        rig.assert_fills(batch, rows=(list, tuple, np.array)[seed % 3](batch["rows"]), **mixed)
    assert len(rig.bucket._plans) <= 3
    assert len(rig.bucket.table.known) <= 2


def test_handing_over_gives_tensors_of_their_own() -> None:
    """Without copies to slots, host data comes as a tensor of its own, which no later step changes."""
    rig, seen = Rig(exact=True), list[Any]()
    for seed in range(4):
        batch = host_batch(seed, 4)
        seen.append((hand_over(rig.bucket, batch, (4,)), expected(batch)))
        filled(rig.bucket, host_batch(seed + 9, 4), (4,))
    for (views, right), name in itertools.product(seen, host_batch()):
        assert views[name].tolist() == right[name]


def test_a_promised_packet_that_is_not_there_is_told() -> None:
    """A record that promises a packet which the backend does not give is said; so is one that is too small."""
    for feed, why in ((Feed(lambda _: None, 1024), ConfigError), (Feed(HostUpload, 64), ValueError)):
        bucket = Bucket(Small.slotgraph, SIZES, PACKS, poisoned(Small, PACKS, SIZES, 5), feed=feed)
        with pytest.raises(why):
            filled(bucket, host_batch(), (3,))
