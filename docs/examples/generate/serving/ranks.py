"""The processes of a run over several ranks: who they are, and how the steps of one go with those of others."""

import contextlib
import gc
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias, TypeVar

import attrs
import torch
import torch.distributed as dist

from serving.inputs import DecodeInputs, PrefillInputs, TokenInputs, after_others, with_all_counts
from serving.model import Language
from serving.options import Options, OptionsError
from serving.request import Request
from serving.sampling import Chosen
from slotgraph import Axis, backends, standard
from slotgraph.ranks import PipelineStage, Ranks
from slotgraph.runners.engine.runner import Runner
from slotgraph.runners.engine.statistics import Decision

Outputs: TypeAlias = "Chosen | None"
"""Tokens, or None where another rank chooses them."""
D = TypeVar("D", bound=TokenInputs)
T = TypeVar("T")
WAYS = {"tp": "tensor parallel", "dp": "data parallel", "pp": "pipeline parallel"}
"""What can be shared out among ranks, by the option that asks for it."""


@attrs.frozen
class World:
    """This process among those of its run. way: the option that shares work out, empty where there is one process."""

    way: str = ""
    rank: int = 0
    size: int = 1

    @property
    def begins(self) -> bool:
        """Whether its part of the model begins with tokens."""
        return self.rank == 0 or self.way != "pp"

    @property
    def ends(self) -> bool:
        """Whether its part of the model ends with logits."""
        return self.rank == self.size - 1 or self.way != "pp"

    def share(self, items: Sequence[T]) -> list[T]:
        """What this rank serves: every so many-th with data parallelism, else all. OptionsError where that is none."""
        if self.way != "dp":
            return list(items)
        if len(items) < self.size:
            raise OptionsError(
                f"--dp {self.size}: {len(items)} prompts leave ranks without work: give at least {self.size}"
            )
        return list(items[self.rank :: self.size])

    def gathered(self, mine: T) -> list[T]:
        """What each rank brings, by rank, in every rank; it travels over the host."""
        if self.size == 1:
            return [mine]
        parts: list[T] = [mine] * self.size
        dist.all_gather_object(parts, mine)
        return parts


ALONE: Final = World()  # a run of one process


@contextlib.contextmanager
def joined(options: Options) -> Iterator[World]:
    """The processes that the options ask for, in one group; OptionsError where there are others, or too few devices."""
    world = world_of(options)
    if world.size == 1:
        yield world
        return
    local = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
    there = torch.accelerator.device_count()
    if local < there:
        torch.accelerator.set_device_index(local)
    device = backends.choose(options.backend).device
    if device.type != "cpu" and local >= there:
        raise OptionsError(f"local rank {local} has no device: this machine has {there}; run fewer processes on it")
    own = "" if device.type == "cpu" else f"{device.type}:{dist.get_default_backend_for_device(device)}"
    dist.init_process_group(f"cpu:gloo,{own}" if own else "gloo")
    yield world
    # After an error graphs may live on in its traceback, and NCCL waits for the last graph that knows its communicator.
    gc.collect()
    dist.destroy_process_group()


def world_of(options: Options) -> World:
    """This process's place, as torchrun told it; OptionsError where that is not what the options ask for."""
    sizes = {way: size for way in WAYS if (size := getattr(options, way)) > 1}
    present = int(os.environ.get("WORLD_SIZE", "1"))
    asked = " ".join(f"--{way} {size}" for way, size in sizes.items())
    if len(sizes) > 1:
        raise OptionsError(f"{asked}: one at a time")
    if not sizes and present > 1:
        ways = " or ".join(f"--{way} {present}" for way in WAYS)
        raise OptionsError(f"{present} processes would all do the same: say {ways}")
    if not sizes:
        return ALONE
    [(way, size)] = sizes.items()
    if present != size or "RANK" not in os.environ:
        run = f"torchrun --nproc-per-node {size} docs/examples/generate {asked}"
        are = "is 1" if present == 1 else f"are {present}"
        raise OptionsError(f"{asked} is for {size} processes, and here {are}: {run}")
    if options.prompts == "-":
        raise OptionsError(f"{asked}: {size} processes cannot share standard input: give a file, --prompts FILE")
    return World(way, int(os.environ["RANK"]), size)


class Crew:
    """One process by itself, or one of several that run the same batches, as those of tensor parallelism do.

    world: its place among all. ranks: what runners are told of the others, None where there are none, or none matter.
    sizes: of axes that declarations may have here beside their own.
    """

    def __init__(
        self, world: World = ALONE, ranks: Ranks | None = None, sizes: Mapping[Axis, int] | None = None
    ) -> None:
        self.world = world
        self._ranks = ranks
        self._sizes = sizes or {}

    def inputs(self, declaration: type[D]) -> type[D]:
        """What steps of a declaration read here."""
        return declaration

    def given(self, declaration: type[TokenInputs], sizes: Mapping[Axis, int] | None = None) -> dict[str, Any]:
        """What a declaration's runner is told by keyword: of other ranks, and the sizes of its axes."""
        here = {axis: size for axis, size in self._sizes.items() if axis in declaration.slotgraph.axes}
        ranks = {} if self._ranks is None else {"ranks": self._ranks}
        return {"sizes": {**(sizes or {}), **here}, **ranks}

    def stage(self, runner: Runner[Any]) -> Runner[Any] | PipelineStage:
        """What runs a batch through what this process has of the model."""
        return runner

    def tokens(self, chosen: Outputs, count: int) -> list[int]:
        """The next token of each of so many requests."""
        if chosen is None:
            raise RuntimeError(f"no rank has chosen the tokens of {count} requests")
        return chosen.next_ids.tolist()

    def decision(self, runner: Runner[Any], batch: PrefillInputs) -> Decision:
        """The path that a batch has just taken, and why: with data parallelism what all ranks have agreed on."""
        return runner.agreed or runner.decide(batch)

    def idle(self, runner: Runner[Any], batch: object = None) -> bool:
        """Take part, with a batch without rows, in what others run of a runner; whether they ran anything."""
        del runner, batch
        return False

    def goes_on(self, *, ran: bool, steps: int) -> bool:
        """Whether others may still need this process. ran: whether any ran something in the step before."""
        del ran, steps
        return False


class Peers(Crew):
    """Ranks with requests of their own that run each step together, in one bucket, as data parallelism does."""

    def __init__(self, world: World, last_arrival: int) -> None:
        super().__init__(world, Ranks(), {standard.DP: world.size})
        self._last_arrival = last_arrival

    def inputs(self, declaration: type[D]) -> type[D]:
        """Decode steps also read how many tokens each rank has."""
        return with_all_counts(declaration) if issubclass(declaration, DecodeInputs) else declaration

    def idle(self, runner: Runner[Any], batch: object = None) -> bool:
        """A step without rows, unless no rank has any."""
        return runner.idle(batch) is not None

    def goes_on(self, *, ran: bool, steps: int) -> bool:
        """A request that somebody has still to run has not arrived, or was there in the step before."""
        return ran or steps <= self._last_arrival


class Pipeline(Crew):
    """Ranks that run one part of the model's layers each, one after another."""

    def __init__(self, world: World, language: Language) -> None:
        self._dtype, self._hidden = language.model.dtype, language.model.config.hidden_size
        super().__init__(world, sizes={standard.HIDDEN: self._hidden})

    def inputs(self, declaration: type[D]) -> type[D]:
        """The same, and hidden states but on the first rank."""
        return declaration if self.world.begins else after_others(declaration, self._dtype)

    def stage(self, runner: Runner[Any]) -> PipelineStage:
        """Hidden states come from the rank before, and go to the one after."""
        return PipelineStage(runner)

    def tokens(self, chosen: Outputs, count: int) -> list[int]:
        """The last rank chooses, and tells the others."""
        tokens = torch.zeros(count, dtype=torch.int64) if chosen is None else chosen.next_ids.cpu()
        dist.broadcast(tokens, self.world.size - 1)
        return tokens.tolist()

    def decision(self, runner: Runner[Any], batch: PrefillInputs) -> Decision:
        """Asked for with hidden states of the batch's size, of which there is nothing any more but that."""
        if self.world.begins:
            return runner.decide(batch)
        came = torch.empty(len(batch.input_ids), self._hidden, dtype=self._dtype, device="meta")
        return runner.decide(batch, pp_proxy_tensors={"hidden_states": came})


def crew_of(world: World, language: Language, requests: Sequence[Request]) -> Crew:
    """The crew of a process in its world. requests: of all ranks."""
    if world.way == "dp":
        return Peers(world, max(request.arrival for request in requests))
    if world.way == "pp":
        return Pipeline(world, language)
    return Crew(world, Ranks(equal=True) if world.way == "tp" else None)
