"""Sources: the same values give the same outputs, in whatever tensors they come, and whatever came before."""

import random
from collections.abc import Callable
from typing import Any

import torch

from slotgraph.backends import Backend
from tests.invariants.steps import (
    BEYOND,
    EITHER,
    Quick,
    Slots,
    Values,
    drawn,
    each_lowering,
    on,
    runner_of,
    taken,
    wrong,
)

Form = Callable[[torch.Tensor], Any]


FORMS: dict[str, Form] = {
    "plain": torch.clone,
    "list": torch.Tensor.tolist,
    "tuple": lambda one: tuple(one.tolist()),
    "array": lambda one: one.cpu().numpy().copy(),
    "host": lambda one: one.cpu().clone(),
    "strided": lambda one: torch.stack([one, one + 1], -1)[..., 0],
    "shifted": lambda one: torch.cat([one.flatten()[:1], one.flatten()])[len(one[:1]) :].view(one.shape),
    "double": torch.Tensor.double,
    "gradient": lambda one: one.clone().requires_grad_(),
    "inference": torch.inference_mode()(torch.clone),
}
SPECIAL = {"strided": ["weights"], "double": ["weights"], "gradient": ["weights", "extra"], "host": ["here"]}
"""Forms that not every slot takes; a CPU's tensors are the device's there."""


class Bringing:  # brings values in forms at random: new tensors, static ones, rows of slots, the last outputs
    def __init__(self, runner: Any, backend: Backend, seed: int) -> None:
        self.runner, self.backend = runner, backend
        self.draw = random.Random(seed)
        self.static = on(backend, drawn(BEYOND, 0))
        self.last: Any = None

    def __call__(self, values: Values) -> tuple[dict[str, Any], Values]:
        """A batch, and what it means: some of its sources are other slots, or outputs, with the values of those."""
        means, batch, rows = dict(values), dict[str, Any](), len(values["ids"])
        for name, value in on(self.backend, values).items():
            form = self.draw.choice([*FORMS, "static", "static"])
            if name == "table" or name not in SPECIAL.get(form, [name]):
                batch[name] = value
            elif form == "static":
                batch[name] = self.static[name][:rows].copy_(value)
            else:
                batch[name] = FORMS[form](value)
        return (batch, means) if rows > 6 or self.draw.random() < 0.6 else self.aliased(batch, means, rows)

    def aliased(self, batch: dict[str, Any], means: Values, rows: int) -> tuple[dict[str, Any], Values]:
        """The same with sources that lie in slots: a producer's own rows, another slot's, the last step's outputs."""
        shown = self.runner.inputs(2 if rows <= 2 else 6, () if "extra" in batch else ("extra",))
        match self.draw.choice(("own", "shifted", "other", "outputs")):
            case "own":
                shown.weights.fill_(77)  # a producer may write rows behind the live ones, too
                batch["weights"] = shown.weights[:rows].copy_(means["weights"])
            case "shifted" if len(shown.ids) > rows:
                batch["ids"] = shown.ids[1 : 1 + rows]
            case "other":
                batch["ids"] = shown.twice[:rows]
            case _ if self.last is not None and len(self.last["twice"]) >= rows:
                batch["ids"] = self.last["twice"][:rows]
        if isinstance(batch["ids"], torch.Tensor):
            means["ids"] = batch["ids"].cpu().clone()
        return batch, means


def by_form(runner: Any, backend: Backend, seed: int, inputs: type[Quick] = Slots) -> set[str]:
    """Slots that were wrong in steps whose sources took any form."""
    found, brings = set[str](), Bringing(runner, backend, seed)
    for number in range(60):
        rows = brings.draw.choice((1, 2, 4, 4, 4, 6, BEYOND))
        batch, means = brings(drawn(rows, number % 20, absent=brings.draw.random() < 0.2, inputs=inputs))
        outputs = runner(batch) if number % 3 else runner.replay(runner.fill(batch))
        found |= {*wrong(taken(outputs), means)}
        brings.last = outputs
    return found


@each_lowering
def test_values_alone_count(backend: Backend, lowering: str) -> None:
    """Dtypes, strides, offsets, modes, host data, addresses that come again, sources in slots: all give the same."""
    for seed, inputs in enumerate(EITHER):
        assert by_form(runner_of(backend, lowering, inputs), backend, seed, inputs) == set()


@each_lowering
def test_a_batch_that_comes_again(backend: Backend, lowering: str) -> None:
    """It is filled anew, whatever was written into live rows since."""
    values = drawn(3, 0, inputs=Quick)
    runner, batch = runner_of(backend, lowering, Quick), on(backend, values)
    for _ in range(2):
        runner.fill(batch).ids[:3].fill_(77)
        assert [*wrong(runner(batch), values)] == []
        runner.fill(batch).ids[:3].fill_(77)
        assert [*wrong(runner.replay(runner.fill(batch)), values)] == []
