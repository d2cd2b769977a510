"""Sources that lie in the memory of slots, wherever they begin there."""

import pytest
import torch

from slotgraph import BATCH, DecodeRunner, Inputs, copied
from slotgraph.backends.registry import choose


@pytest.mark.parametrize("lowering", choose("cpu").capabilities.lowerings)
@pytest.mark.parametrize("backend", ["cpu", "cpu-capture"])
def test_wherever_a_source_begins(backend: str, lowering: str) -> None:
    """A source may begin anywhere in the allocation of slots, in gaps behind slots of no bytes, too."""

    class Gaps(Inputs):
        a: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
        b: torch.Tensor = copied(BATCH, 0, dtype=torch.int64, pad=0)
        c: torch.Tensor = copied(BATCH, 0, dtype=torch.int64, pad=0)
        d: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
        e: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)

    rows = 30
    runner = DecodeRunner(
        Gaps,
        lambda view: torch.stack([view.a, view.d, view.e]),
        buckets=[rows],
        backend=backend,
        lowering=lowering,
        output_rows=None,
    )
    runner.capture()
    none = torch.empty(rows, 0, dtype=torch.int64)
    first = {name: torch.arange(rows) + 100 * place for place, name in enumerate("ade", start=1)}
    view = runner.fill({**first, "b": none, "c": none})
    storage = view.a.untyped_storage()
    words = storage.nbytes() // 8
    for begin in range(words - rows + 1):
        view = runner.fill({**first, "b": none, "c": none})
        source = torch.empty(0, dtype=torch.int64).set_(view.a.untyped_storage(), begin, (rows,))  # type: ignore[call-overload]
        right = source.clone()
        for name in "ade":
            brought = {**first, name: source, "b": none, "c": none}
            wanted = torch.stack([right if one == name else first[one] for one in "ade"])
            assert torch.equal(runner(brought), wanted), (begin, name)
            runner.fill({**first, "b": none, "c": none})
            source.copy_(right)
