"""What `slotgraph bench` has a row for: each runner over its standard declaration, at the sizes of a server."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Protocol

import attrs
import torch
from torch import nn

from ...backends.base import Backend
from ...dataflow.axes import BATCH, TOKENS, WIDTH, Axis, Sizes, extent
from ...dataflow.capabilities import HOST
from ...dataflow.declaration import Declaration
from ...dataflow.inputs import Inputs
from ...dataflow.roles import resolve_dtype
from .. import standard
from ..breakable import BreakableRunner
from ..decode import DecodeRunner
from ..draft import DraftRunner, DraftStep
from ..draft_extend import DraftExtendRunner
from ..eager import EagerRunner
from ..multi_layer import MultiLayerDraftExtendRunner
from .workload import SETS, Batch

TOPK: Final = 4
STEPS: Final = 3
FRONT: Final = 2
DRAFTS: Final = 8
SETTINGS: Final = standard.Sharding()
EXTEND: Final = "extend_seq_lens"


@attrs.frozen(kw_only=True)
class Scale:
    """How large steps are: live and padded requests of a decode, live and padded tokens of a prefill, of `prompts`.

    most_prompts: requests that a prefill has room for. hidden: elements of one token's hidden state.
    """

    requests: tuple[int, int] = (200, 256)
    tokens: tuple[int, int] = (1800, 2048)
    prompts: int = 8
    most_prompts: int = 32
    hidden: int = 1024


SERVING: Final = Scale()


class DecodeCounted(standard.DecodeInputs, standard.ExpertParallel):
    """A decode step with the count that its experts need."""


class VerifyCounted(standard.TargetVerifyInputs, standard.ExpertParallel):
    """A verification with the count that its experts need."""


class PrefillCounted(standard.BreakableInputs, standard.ExpertParallel):
    """A prefill with the count that its experts need."""


class Runner(Protocol):
    """What a row is about."""

    def fill(self, batch: Any) -> Any:
        """Fill the inputs from a batch and return the view."""


@attrs.frozen(kw_only=True, eq=False)
class Kind:
    """One kind of step: its declaration, and the runner that engines would run it with.

    runner: the class's name. make: a captured runner. leading: the axis that `live` and `padded` count, and `width`
    the tokens of a request where that is BATCH. unpadded: axes of which a view has the live rows alone. computes:
    whether a fill computes what needs slots on the device, too; elsewhere a graph does. requests: live ones of a
    prefill, and how many it has room for.
    """

    phase: str
    runner: str
    inputs: type[Inputs]
    make: Callable[["Kind", Backend], Runner]
    live: int
    padded: int
    hidden: int
    width: int = 1
    leading: Axis = BATCH
    unpadded: frozenset[Axis] = frozenset()
    computes: bool = False
    requests: tuple[int, int] = (0, 0)

    @property
    def declaration(self) -> Declaration:
        """Its slots."""
        return self.inputs.slotgraph.under(SETTINGS)

    @property
    def declared(self) -> str:
        """The standard classes that the declaration is made of."""
        own = self.inputs.__module__ == __name__
        return ", ".join(base.__name__ for base in (self.inputs.__bases__ if own else (self.inputs,)))

    @property
    def shown(self) -> int:
        """Rows that a view has along the leading axis."""
        return self.live if self.leading in self.unpadded else self.padded

    @property
    def fixed(self) -> dict[Axis, int]:
        """Sizes of all fixed axes; VOCAB is one of outputs, which no fill writes, and so as small as a draft bears."""
        own = {standard.HIDDEN: self.hidden, standard.VOCAB: TOPK, standard.FILL: 1, WIDTH: self.width}
        return {**own, standard.TOPK: TOPK, standard.STEPS: STEPS, standard.FRONT: FRONT}

    @property
    def capacity(self) -> Sizes:
        """The sizes that buffers have."""
        padded = self.sizes(self.padded)
        return {**padded, BATCH: self.requests[1]} if self.leading == TOKENS else padded

    def sizes(self, live: int) -> Sizes:
        """All sizes of a batch."""
        if self.leading == TOKENS:
            return {BATCH: min(self.requests[0], live), TOKENS: live, **self.fixed}
        return {BATCH: live, TOKENS: live * self.width, **self.fixed}

    def options(self, backend: Backend) -> dict[str, Any]:
        """What each runner is given."""
        axes = self.inputs.slotgraph.axes
        sizes = {axis: size for axis, size in self.fixed.items() if axis in axes and axis != WIDTH}
        shown = {} if self.runner == EagerRunner.__name__ else {"progress": False}
        return {"sizes": sizes, "settings": SETTINGS, "backend": backend, **shown}

    def sets(self, backend: Backend) -> list[Batch]:
        """Batches that take turns, each with addresses and values of its own."""
        return [self.batch(backend, self.live, number) for number in range(SETS)]

    def batch(self, backend: Backend, live: int, number: int = 0) -> Batch:
        """A batch with seeded values, all of them others than under another number."""
        seeded, sizes = torch.Generator().manual_seed(live + number), self.sizes(live)
        requests, tokens = sizes[BATCH], sizes[TOKENS]
        padded = live if self.leading in self.unpadded else self.padded
        made = Batch(rows=live, padded=padded, lives=(requests, tokens))
        for name, slot in self.declaration.slots.items():
            if slot.reads(name) is not None:
                shape, dtype = extent(slot.shape, sizes), resolve_dtype(slot.dtype, backend.capabilities)
                values = torch.randint(100 * number + 2, 100 * number + 102, shape, device="cpu", generator=seeded)
                if name == EXTEND:
                    values = _lengths(requests, tokens, seeded)
                setattr(made, name, values.to(dtype).to("cpu" if slot.placement == HOST else backend.device))
        return made


def _lengths(requests: int, tokens: int, seeded: torch.Generator) -> torch.Tensor:
    """How the tokens of a prefill belong to its requests: at least one each."""
    cuts = 1 + torch.randperm(tokens - 1, device="cpu", generator=seeded)[: requests - 1].sort().values
    return torch.diff(torch.tensor([0, *cuts.tolist(), tokens], device="cpu"))


def kinds(scale: Scale = SERVING) -> Iterator[Kind]:
    """One for each row."""
    requests, tokens, hidden = scale.requests, scale.tokens, scale.hidden
    sized: Mapping[str, Any] = {"live": requests[0], "padded": requests[1], "hidden": hidden}
    extended: Mapping[str, Any] = {**sized, "width": DRAFTS}
    yield Kind(phase="decode", runner="DecodeRunner", inputs=DecodeCounted, make=_decode, **sized)
    yield Kind(phase="verify", runner="DecodeRunner", inputs=VerifyCounted, make=_decode, **extended)
    yield Kind(
        phase="eager",
        runner="EagerRunner",
        inputs=standard.EagerInputs,
        make=_eager,
        unpadded=frozenset({BATCH, TOKENS}),
        computes=True,
        **sized,
    )
    yield Kind(
        phase="prefill",
        runner="BreakableRunner",
        inputs=PrefillCounted,
        make=_prefill,
        live=tokens[0],
        padded=tokens[1],
        hidden=hidden,
        leading=TOKENS,
        unpadded=frozenset({BATCH}),
        computes=True,
        requests=(scale.prompts, scale.most_prompts),
    )
    yield Kind(
        phase="draft", runner="DraftRunner", inputs=standard.DraftInputs, make=_draft, **{**sized, "width": TOPK}
    )
    yield Kind(phase="extend", runner="DraftExtendRunner", inputs=standard.DraftExtendInputs, make=_extend, **extended)
    yield Kind(
        phase="multi-layer",
        runner="MultiLayerDraftExtendRunner",
        inputs=standard.MultiLayerDraftExtendInputs,
        make=_multi_layer,
        **{**sized, "width": FRONT + DRAFTS},
    )


def _decode(kind: Kind, backend: Backend) -> Runner:
    options = {**kind.options(backend), "width": kind.width, "output_rows": BATCH}
    runner = DecodeRunner(kind.inputs, _next, buckets=[kind.padded], **options)
    runner.capture()
    return runner


def _eager(kind: Kind, backend: Backend) -> Runner:
    return EagerRunner(kind.inputs, _next, no_copy=False, **kind.options(backend))


def _prefill(kind: Kind, backend: Backend) -> Runner:
    stack, options = _Stack(), {**kind.options(backend), "max_batch": kind.requests[1], "output_rows": TOKENS}

    def step(view: Any) -> Any:
        return stack(view.positions)

    runner = BreakableRunner(kind.inputs, step, stack=stack, buckets=[kind.padded], **options)
    runner.capture()
    return runner


def _draft(kind: Kind, backend: Backend) -> Runner:
    runner = DraftRunner(kind.inputs, _forward, topk=TOPK, steps=STEPS, buckets=[kind.padded], **kind.options(backend))
    runner.capture()
    return runner


def _extend(kind: Kind, backend: Backend) -> Runner:
    runner = DraftExtendRunner(kind.inputs, _next, width=kind.width, buckets=[kind.padded], **kind.options(backend))
    runner.capture()
    return runner


def _multi_layer(kind: Kind, backend: Backend) -> Runner:
    steps, options = [_layer] * STEPS, kind.options(backend)
    runner = MultiLayerDraftExtendRunner(kind.inputs, steps, width=kind.width, buckets=[kind.padded], **options)
    runner.capture()
    return runner


def _next(view: Any) -> Any:
    """The step: as small as one can be. It is captured, and never timed."""
    return view.seq_lens + 1


def _layer(view: Any, after: Any) -> Any:
    del after
    return _next(view)


def _forward(view: Any, step: DraftStep) -> tuple[torch.Tensor, None]:
    del step
    return view.positions[:, None].expand(-1, TOPK).float(), None


class _Stack(nn.Module):
    """What is captured of a prefill."""

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        """As small as one can be."""
        return positions + 1
