"""The program: record three steps each way, say what they took, and draw them."""

import argparse
import importlib.util
import pathlib
import sys
from collections.abc import Sequence
from typing import Final

import torch

from slotgraph.backends import Backend, choose
from slotgraph.dataflow.errors import BackendUnavailableError
from spans.draw import draw
from spans.record import Recording, record
from spans.ways import BUCKET, LIVE, SLOTS, drawn, make_ways

ON_A_DEVICE: Final = 2048
ON_A_CPU: Final = 64
"""Columns of the small model's layers."""
NEEDS: Final = "a drawing needs matplotlib: pip install 'slotgraph[plot]'"


def main(argv: Sequence[str] | None = None) -> int:
    """Run on a command line; the exit status is 0, or 2 if it cannot be run here."""
    options = _parser().parse_args(argv)
    if importlib.util.find_spec("matplotlib") is None:
        return _cannot(NEEDS)
    try:
        backend = choose(options.backend)
    except BackendUnavailableError as error:
        return _cannot(error)
    on_cpu = backend.device.type == "cpu"
    if on_cpu:
        torch.set_num_threads(1)  # the small model's operators are too short to share
    recordings = _recorded(backend, options.hidden or (ON_A_CPU if on_cpu else ON_A_DEVICE), options.layers)
    for recording in recordings:
        print(_said(recording))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    title = f"{len(LIVE)} decode steps of {SLOTS} slots, {min(LIVE)} to {max(LIVE)} of {BUCKET} rows live"
    draw(recordings, options.out, title, _where(backend))
    print(f"drawn: {options.out}")
    return 0


def _cannot(why: object) -> int:
    print(f"timeline: {why}", file=sys.stderr)
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="timeline", description=__doc__)
    parser.add_argument("--backend", default="auto", help="a backend's name (default: the best that is here)")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("timeline.svg"), help="the SVG file to write")
    parser.add_argument("--layers", type=int, default=8, help="layers of the small model (default: 8)")
    columns = f"columns of a layer (default: {ON_A_DEVICE}, or {ON_A_CPU} on a CPU)"
    parser.add_argument("--hidden", type=int, help=columns)
    return parser


def _recorded(backend: Backend, hidden: int, layers: int) -> list[Recording]:
    inputs, ways = make_ways(backend, hidden, layers)
    batches = [drawn(inputs, backend, rows) for rows in LIVE]
    return [record(way, batches, backend) for way in ways]


def _said(recording: Recording) -> str:
    """One line: microseconds a step, on the host and on the device."""
    host, inputs, step = (recording.took(kind) / len(LIVE) for kind in ("call", "inputs", "step"))
    device = f", device {inputs:.1f} for inputs and {step:.1f} for the step" if inputs or step else ""
    return f"{recording.name}: a step took host {host:.1f} us{device}"


def _where(backend: Backend) -> str:
    """What it was recorded on."""
    on_cuda = backend.device.type == "cuda"
    device = torch.cuda.get_device_name(backend.device) if on_cuda else f"backend {backend.name}"
    return f"{device}, torch {torch.__version__}"
