"""The program: compare the drop-in with SGLang's own registry on random batches, then time both."""

import argparse
import pathlib
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import torch

from registry import batches, timing
from registry import cuda_graph_buffer_registry as drop_in
from registry.original import VARIABLE, NoWheelError, Original, find_wheel, loaded
from slotgraph.backends import choose
from slotgraph.errors import BackendUnavailableError


def main(argv: Sequence[str] | None = None) -> int:
    """Run on a command line: 0 if all bytes are equal, 1 if some differ, 2 if it cannot be run here."""
    options = _parser().parse_args(argv)
    try:
        device = choose(options.backend).device
    except BackendUnavailableError as error:
        return _cannot(error)
    with tempfile.TemporaryDirectory() as folder:
        try:
            wheel = find_wheel(options.wheel, pathlib.Path(folder))
        except NoWheelError as error:
            return _cannot(error)
        with loaded(wheel) as original:
            return run(original, drop_in, device, options.batches, options.rounds)


def run(original: Original, ours: Any, device: torch.device, count: int, rounds: int) -> int:
    """Compare, then time. ours: The module of the drop-in."""
    each = -(-count // len(batches.CASES))
    for name in batches.CASES:
        faults = batches.compare(name, original, ours, device, each)
        if faults:
            print(f"DIFFERENT, {name}: {faults[0]}")
            return 1
        print(f"equal, {name}: every byte after each of {each} batches")
    if rounds:
        where = torch.cuda.get_device_name(device) if device.type == "cuda" else "one thread of the CPU"
        print(f"\nMicroseconds of a step on the host, {where}, torch {torch.__version__}\n")
        print(f"{'':62} {'SGLang':>8} {'drop-in':>8} {'times less':>10}")
        for one in timing.measure(original, ours, device, rounds):
            print(f"{one.row.name:62} {one.original:8.1f} {one.ours:8.1f} {one.ratio:10.1f}", flush=True)
    return 0


def _cannot(why: object) -> int:
    print(f"sglang_registry: {why}", file=sys.stderr)
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="sglang_registry", description=__doc__)
    parser.add_argument("--backend", default="cpu", help="cpu or cuda (default: cpu)")
    wheel = f"SGLang's wheel (default: that of {VARIABLE}, or pip downloads it)"
    parser.add_argument("--wheel", type=pathlib.Path, help=wheel)
    parser.add_argument("--batches", type=int, default=1800, help="random batches to compare (default: 1800)")
    parser.add_argument("--rounds", type=int, default=timing.ROUNDS, help="rounds of timing; 0 for none")
    return parser
