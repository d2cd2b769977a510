"""Class G: one list of inputs that is kept many times."""

import torch

from slotgraph import BATCH, TOKENS, DecodeRunner, Inputs, Step, computed, copied, standard
from tests.regressions.engines import BACKEND, ByHand, Views, draw

TABLE = torch.arange(16, dtype=torch.int64) ** 2


def extended(views: Views) -> torch.Tensor:
    """Looks up each request's row, and adds up what all rows find."""
    return TABLE[views["requests"]] + TABLE[views["requests"]].sum()


def live(step: Step) -> int:
    """Live requests."""
    return step.live(BATCH)


class Shared(Inputs):
    """What the runner of one layer and that of several layers both read."""

    requests: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
    live: torch.Tensor = computed(live, shape=1, dtype=torch.int64)


class Layered(Shared):
    """What only the second reads beside that."""

    depths: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)


def test_sglang_22958_a_twin_without_padding() -> None:
    """The runner of one layer resets its tails; the one of several layers, written after it, does not."""
    engines = {name: ByHand(extended, 4, requests=torch.zeros(4, dtype=torch.int64)) for name in ("one", "several")}
    found = {}
    for name, engine in engines.items():
        engine(requests=draw(3, 15, (4,), 1))
        if name == "one":
            engine.buffers["requests"][1:].zero_()
        found[name] = engine(requests=torch.tensor([5])).tolist()
    assert found == {"one": [50], "several": found["several"]}
    assert found["several"] != [50]

    for inputs in (Shared, Layered):
        runner = DecodeRunner(
            inputs,
            lambda view: extended({"requests": view.requests}),
            buckets=[4],
            backend=BACKEND,
            progress=False,
            output_rows=BATCH,
        )
        runner.capture()
        more = {"depths": [1, 2, 3, 4]} if inputs is Layered else {}
        runner({"requests": draw(3, 15, (4,), 1), **more})
        one = {"depths": [1]} if inputs is Layered else {}
        assert runner({"requests": [5], **one}).tolist() == [50]


def test_sglang_22958_the_standard_twins() -> None:
    """The standard declarations of both runners say the same of the tail of each slot that reaches the cache."""
    one, several = standard.DraftExtendInputs.slotgraph.slots, standard.MultiLayerDraftExtendInputs.slotgraph.slots
    for name in ("req_pool_indices", "seq_lens", "positions", "out_cache_loc"):
        assert one[name].rule() is not None
        assert one[name].rule() == several[name].rule()
