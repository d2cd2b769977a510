"""Runs of the demo one after the other in the same group of processes; test_generate_ranks.py has torchrun start it.

Its argument: a JSON list of cases, each the demo's arguments and the name of a bug to plant, or an empty one.
"""

import contextlib
import json
import sys
from typing import Any

import attrs
import pytest
import torch
import torch.distributed as dist

from serving import program, sharded
from serving.engine import unchanged
from serving.options import parse
from serving.ranks import world_of


def shifted(batch: Any) -> Any:
    """Every decode position is one too far."""
    return attrs.evolve(batch, positions=batch.positions + 1)


def forgotten(share: torch.Tensor) -> None:
    """Shares are not added up."""
    del share


def run(patch: pytest.MonkeyPatch, argv: list[str], plant: str) -> None:
    """One case; its report goes to the file that its arguments name."""
    patch.setattr(program, "joined", lambda options: contextlib.nullcontext(world_of(options)))  # one group for all
    if plant == "forgotten":
        patch.setattr(sharded, "add_up", forgotten)
    program.generate(parse(argv), prepare=shifted if plant == "shifted" else unchanged)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with contextlib.redirect_stdout(sys.stderr):
        for case in json.loads(sys.argv[1]):
            with pytest.MonkeyPatch.context() as patched:
                run(patched, *case)
    dist.destroy_process_group()
