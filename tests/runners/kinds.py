"""Each runner over its standard declaration, with batches for it."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, Final

import attrs
import torch
from torch import nn

from slotgraph import BATCH, TOKENS, BreakableRunner, DecodeRunner, EagerRunner, Inputs, standard
from slotgraph.backends import Backend
from slotgraph.dataflow.axes import WIDTH, Axis, Sizes, extent
from slotgraph.dataflow.capabilities import HOST, resolve_dtype
from slotgraph.dataflow.declaration import Declaration
from slotgraph.runners.draft import DraftExtendRunner, DraftRunner, MultiLayerDraftExtendRunner

TOPK: Final = 4
STEPS: Final = 3
FRONT: Final = 2
DRAFTS: Final = 8
SETTINGS: Final = standard.Sharding()


@attrs.frozen(kw_only=True)
class Scale:
    """How large steps are: live and padded requests of a decode, live and padded tokens of a prefill, of `prompts`.

    most_prompts: requests that a prefill has room for. hidden: elements of one token's hidden state.
    """

    requests: tuple[int, int]
    tokens: tuple[int, int]
    prompts: int
    most_prompts: int
    hidden: int


class DecodeCounted(standard.DecodeInputs, standard.ExpertParallel):
    """A decode step with the count that its experts need."""


class VerifyCounted(standard.TargetVerifyInputs, standard.ExpertParallel):
    """A verification with the count that its experts need."""


class PrefillCounted(standard.BreakableInputs, standard.ExpertParallel):
    """A prefill with the count that its experts need."""


@attrs.frozen(kw_only=True, eq=False)
class Kind:
    """One kind of step: its declaration, and the runner that engines would run it with.

    runner: the class's name. make: a captured runner. leading: the axis that `live` and `padded` count, and `width`
    the tokens of a request where that is BATCH. requests: live ones of a prefill, and how many it has room for.
    """

    phase: str
    runner: str
    inputs: type[Inputs]
    make: Callable[["Kind", Backend], Any]
    live: int
    padded: int
    hidden: int
    width: int = 1
    leading: Axis = BATCH
    requests: tuple[int, int] = (0, 0)

    @property
    def declaration(self) -> Declaration:
        """Its slots."""
        return self.inputs.slotgraph.under(SETTINGS)

    @property
    def fixed(self) -> dict[Axis, int]:
        """Sizes of all fixed axes; VOCAB is one of outputs, which no fill writes, and so as small as a draft bears."""
        own = {standard.HIDDEN: self.hidden, standard.VOCAB: TOPK, standard.FILL: 1, WIDTH: self.width}
        return {**own, standard.TOPK: TOPK, standard.STEPS: STEPS, standard.FRONT: FRONT}

    def sizes(self, live: int) -> Sizes:
        """All sizes of a batch."""
        if self.leading == TOKENS:
            return {BATCH: min(self.requests[0], live), TOKENS: live, **self.fixed}
        return {BATCH: live, TOKENS: live * self.width, **self.fixed}

    def options(self, backend: Backend) -> dict[str, Any]:
        """What each runner is given."""
        axes = self.inputs.slotgraph.axes
        sizes = {axis: size for axis, size in self.fixed.items() if axis in axes and axis != WIDTH}
        shown = {} if self.runner == "EagerRunner" else {"progress": False}
        return {"sizes": sizes, "settings": SETTINGS, "backend": backend, **shown}

    def batch(self, backend: Backend, live: int, number: int = 0) -> Any:
        """A batch with seeded values, all of them others than under another number."""
        seeded, sizes, made = torch.Generator().manual_seed(live + number), self.sizes(live), SimpleNamespace()
        for name, slot in self.declaration.slots.items():
            if slot.reads(name) is not None:
                shape, dtype = extent(slot.shape, sizes), resolve_dtype(slot.dtype, backend.capabilities)
                values = torch.randint(100 * number + 2, 100 * number + 102, shape, device="cpu", generator=seeded)
                if name == "extend_seq_lens":
                    values = _lengths(sizes[BATCH], sizes[TOKENS], seeded)
                setattr(made, name, values.to(dtype).to("cpu" if slot.placement == HOST else backend.device))
        return made


def _lengths(requests: int, tokens: int, seeded: torch.Generator) -> torch.Tensor:
    """How the tokens of a prefill belong to its requests: at least one each."""
    cuts = 1 + torch.randperm(tokens - 1, device="cpu", generator=seeded)[: requests - 1].sort().values
    return torch.diff(torch.tensor([0, *cuts.tolist(), tokens], device="cpu"))


def kinds(scale: Scale) -> Iterator[Kind]:
    """One for each."""
    sized: dict[str, Any] = {"live": scale.requests[0], "padded": scale.requests[1], "hidden": scale.hidden}
    for phase, runner, inputs, make, width in (
        ("decode", "DecodeRunner", DecodeCounted, _decode, 1),
        ("verify", "DecodeRunner", VerifyCounted, _decode, DRAFTS),
        ("eager", "EagerRunner", standard.EagerInputs, _eager, 1),
        ("prefill", "BreakableRunner", PrefillCounted, _prefill, 1),
        ("draft", "DraftRunner", standard.DraftInputs, _draft, TOPK),
        ("extend", "DraftExtendRunner", standard.DraftExtendInputs, _extend, DRAFTS),
        ("multi-layer", "MultiLayerDraftExtendRunner", standard.MultiLayerDraftExtendInputs, _layers, FRONT + DRAFTS),
    ):
        told = {**sized, "phase": phase, "runner": runner, "inputs": inputs, "make": make, "width": width}
        if phase == "prefill":
            told |= {"leading": TOKENS, "requests": (scale.prompts, scale.most_prompts)}
            told |= {"live": scale.tokens[0], "padded": scale.tokens[1]}
        yield Kind(**told)


def _captured(runner: Any) -> Any:
    runner.capture()
    return runner


def _decode(kind: Kind, backend: Backend) -> Any:
    options = {**kind.options(backend), "width": kind.width, "output_rows": BATCH}
    return _captured(DecodeRunner(kind.inputs, _next, buckets=[kind.padded], **options))


def _eager(kind: Kind, backend: Backend) -> Any:
    return EagerRunner(kind.inputs, _next, no_copy=False, **kind.options(backend))


def _prefill(kind: Kind, backend: Backend) -> Any:
    stack, options = _Stack(), {**kind.options(backend), "max_batch": kind.requests[1], "output_rows": TOKENS}
    step: Callable[[Any], Any] = lambda view: stack(view.positions)  # noqa: E731 - as small as one can be
    return _captured(BreakableRunner(kind.inputs, step, stack=stack, buckets=[kind.padded], **options))


def _draft(kind: Kind, backend: Backend) -> Any:
    options = {"topk": TOPK, "steps": STEPS, "buckets": [kind.padded], **kind.options(backend)}
    return _captured(DraftRunner(kind.inputs, _forward, **options))


def _extend(kind: Kind, backend: Backend) -> Any:
    options = {"width": kind.width, "buckets": [kind.padded], **kind.options(backend)}
    return _captured(DraftExtendRunner(kind.inputs, _next, **options))


def _layers(kind: Kind, backend: Backend) -> Any:
    steps, options = [_layer] * STEPS, {"width": kind.width, "buckets": [kind.padded], **kind.options(backend)}
    return _captured(MultiLayerDraftExtendRunner(kind.inputs, steps, **options))


def _next(view: Any) -> Any:
    """The step: as small as one can be."""
    return view.seq_lens + 1


def _layer(view: Any, after: Any) -> Any:
    del after
    return _next(view)


def _forward(view: Any, step: object) -> tuple[torch.Tensor, None]:
    del step
    return view.positions[:, None].expand(-1, TOPK).float(), None


class _Stack(nn.Module):
    """What is captured of a prefill."""

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        """As small as one can be."""
        return positions + 1
