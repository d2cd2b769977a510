"""The processes of a run over several ranks: who they are, what each does, and how they tell one another."""

import contextlib
import gc
import os
from collections.abc import Iterator, Sequence
from typing import Final, TypeVar

import attrs
import torch
import torch.distributed as dist

from serving.options import Options, OptionsError
from slotgraph import backends

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
    def first(self) -> bool:
        """Whether it is the one that prints."""
        return self.rank == 0

    @property
    def tensor_parallel(self) -> bool:
        """Whether all ranks run each request together, a share of the model each."""
        return self.way == "tp"

    @property
    def data_parallel(self) -> bool:
        """Whether each rank has requests of its own, and the whole model."""
        return self.way == "dp"

    @property
    def pipeline_parallel(self) -> bool:
        """Whether all ranks run each request one after another, a part of the model's layers each."""
        return self.way == "pp"

    @property
    def begins(self) -> bool:
        """Whether its part of the model begins with tokens."""
        return self.rank == 0 or not self.pipeline_parallel

    @property
    def ends(self) -> bool:
        """Whether its part of the model ends with logits."""
        return self.rank == self.size - 1 or not self.pipeline_parallel

    @property
    def timed(self) -> bool:
        """Whether steps can be timed by themselves: each rank runs all that a step is, on the same batch."""
        return self.way in {"", "tp"}

    def share(self, items: Sequence[T]) -> list[T]:
        """What this rank serves: every so many-th with data parallelism, else all. OptionsError where that is none."""
        if not self.data_parallel:
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


ALONE: Final = World()
"""A run of one process."""


def as_first_says(number: int) -> int:
    """Rank 0's number, in every rank, where a clock decides how often ranks meet; one process's is its own."""
    if not dist.is_initialized():
        return number
    said = [number]
    dist.broadcast_object_list(said)
    return said[0]


@contextlib.contextmanager
def joined(options: Options) -> Iterator[World]:
    """The processes that the options ask for, in one group as long as the block runs.

    Raises OptionsError where the environment has other processes than that, or too few devices for them.
    """
    world = world_of(options)
    if world.size == 1:
        yield world
        return
    device = _device(options)
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
        return World()
    [(way, size)] = sizes.items()
    if present != size or "RANK" not in os.environ:
        run = f"torchrun --nproc-per-node {size} docs/examples/generate {asked}"
        raise OptionsError(f"{asked} is for {size} processes, and here {_are(present)}: {run}")
    if options.prompts == "-":
        raise OptionsError(f"{asked}: {size} processes cannot share standard input: give a file, --prompts FILE")
    return World(way, int(os.environ["RANK"]), size)


def _device(options: Options) -> torch.device:
    """Of several devices on a machine the one of this rank's number there; else the host."""
    local = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
    there = torch.accelerator.device_count()
    if local < there:
        torch.accelerator.set_device_index(local)
    device = backends.choose(options.backend).device
    if device.type != "cpu" and local >= there:
        raise OptionsError(f"local rank {local} has no device: this machine has {there}; run fewer processes on it")
    return device


def _are(present: int) -> str:
    return "is 1" if present == 1 else f"are {present}"
