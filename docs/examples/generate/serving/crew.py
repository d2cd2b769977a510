"""Crews: how the steps of one process go with those of others."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist

from serving.inputs import DecodeInputs, PrefillInputs, TokenInputs, after_others, with_all_counts
from serving.model import Language
from serving.ranks import ALONE, World
from serving.request import Request
from serving.sampling import Sampler
from slotgraph import Axis, standard
from slotgraph.ranks import PipelineStage, Ranks
from slotgraph.runners.runner import Runner
from slotgraph.runners.statistics import Decision

Outputs: TypeAlias = "torch.Tensor | None"
"""Logits, or None where the rank has none of them."""
D = TypeVar("D", bound=DecodeInputs)
P = TypeVar("P", bound=PrefillInputs)
T = TypeVar("T", bound=TokenInputs)


class Crew:
    """One process by itself, or one of several that run the same batches, as those of tensor parallelism do.

    world: its place among all. ranks: what runners are told of the others, None where there are none, or none matter.
    """

    def __init__(self, world: World = ALONE, ranks: Ranks | None = None) -> None:
        self.world = world
        self.ranks = ranks

    def decode_inputs(self, declaration: type[D]) -> type[D]:
        """What decode steps read here."""
        return declaration

    def prefill_inputs(self, declaration: type[P]) -> type[P]:
        """What prefill steps read here."""
        return declaration

    @property
    def among(self) -> Mapping[str, Any]:
        """What runners are told of other ranks, by keyword."""
        return {} if self.ranks is None else {"ranks": self.ranks}

    @property
    def sizes(self) -> Mapping[Axis, int]:
        """Sizes of axes that declarations may have here beside their own."""
        return {}

    def sizes_of(self, declaration: type[DecodeInputs] | type[PrefillInputs]) -> Mapping[Axis, int]:
        """Those that one has."""
        return {axis: size for axis, size in self.sizes.items() if axis in declaration.slotgraph.axes}

    def stage(self, runner: Runner[Any]) -> Runner[Any] | PipelineStage:
        """What runs a batch through what this process has of the model."""
        return runner

    def tokens(self, logits: Outputs, requests: Sequence[Request], sampler: Sampler) -> list[int]:
        """The next token of each request."""
        if logits is None:
            raise RuntimeError(f"there are no logits for {len(requests)} requests")
        return sampler.choose(logits, requests)

    def decision(self, runner: Runner[Any], batch: PrefillInputs) -> Decision:
        """The path that a batch has just taken, and why."""
        return runner.decide(batch)

    def idle(self, runner: Runner[Any], batch: object = None) -> bool:
        """Take part in what others run of a runner without a request here; whether they ran anything.

        batch: one without rows, where the declaration does not tell how that looks.
        """
        del runner, batch
        return False

    def goes_on(self, *, ran: bool, steps: int) -> bool:
        """Whether others may still need this process. ran: whether any ran something in the step before."""
        del ran, steps
        return False


class Peers(Crew):
    """Ranks with requests of their own that run each step together, in one bucket, as data parallelism does.

    last_arrival: the engine step at which the last request of all arrives.
    """

    def __init__(self, world: World, last_arrival: int) -> None:
        super().__init__(world, Ranks())
        self._last_arrival = last_arrival

    def decode_inputs(self, declaration: type[D]) -> type[D]:
        """The same, and how many tokens each rank has."""
        return with_all_counts(declaration)

    @property
    def sizes(self) -> Mapping[Axis, int]:
        """A count for each rank."""
        return {standard.DP: self.world.size}

    def decision(self, runner: Runner[Any], batch: PrefillInputs) -> Decision:
        """What all ranks have agreed on."""
        return runner.agreed or runner.decide(batch)

    def idle(self, runner: Runner[Any], batch: object = None) -> bool:
        """A step without rows, unless no rank has any."""
        return runner.idle(batch) is not None

    def goes_on(self, *, ran: bool, steps: int) -> bool:
        """A request that somebody has still to run has not arrived, or was there in the step before."""
        return ran or steps <= self._last_arrival


class Pipeline(Crew):
    """Ranks that run one part of the model's layers each, one after another."""

    def __init__(self, world: World, language: Language) -> None:
        super().__init__(world)
        self._model = language.model

    def decode_inputs(self, declaration: type[D]) -> type[D]:
        """The same, and hidden states but on the first rank."""
        return self._after_others(declaration)

    def prefill_inputs(self, declaration: type[P]) -> type[P]:
        """The same, and hidden states but on the first rank."""
        return self._after_others(declaration)

    def _after_others(self, declaration: type[T]) -> type[T]:
        return declaration if self.world.begins else after_others(declaration, self._model.dtype)

    @property
    def sizes(self) -> Mapping[Axis, int]:
        """Elements of a hidden state."""
        return {standard.HIDDEN: self._model.config.hidden_size}

    def stage(self, runner: Runner[Any]) -> PipelineStage:
        """Hidden states come from the rank before, and go to the one after."""
        return PipelineStage(runner)

    def tokens(self, logits: Outputs, requests: Sequence[Request], sampler: Sampler) -> list[int]:
        """The last rank chooses, and tells the others."""
        chosen = [0] * len(requests) if logits is None else sampler.choose(logits, requests)
        tokens = torch.tensor(chosen)
        dist.broadcast(tokens, self.world.size - 1)
        return tokens.tolist()

    def decision(self, runner: Runner[Any], batch: PrefillInputs) -> Decision:
        """Asked for with hidden states of the batch's size, of which there is nothing any more but that."""
        if self.world.begins:
            return runner.decide(batch)
        shape = len(batch.input_ids), self._model.config.hidden_size
        came = torch.empty(shape, dtype=self._model.dtype, device="meta")
        return runner.decide(batch, pp_proxy_tensors={"hidden_states": came})


def crew_of(world: World, language: Language, requests: Sequence[Request]) -> Crew:
    """The crew of a process in its world. requests: of all ranks."""
    if world.data_parallel:
        return Peers(world, max(request.arrival for request in requests))
    if world.pipeline_parallel:
        return Pipeline(world, language)
    return Crew(world, Ranks(equal=True) if world.tensor_parallel else None)
