"""Serve images through captured steps, compare each answer with the model's own, and time both."""

import argparse
import contextlib
import functools
import itertools
import math
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch

from images.inputs import CLASSES, EDGE, ROOM, ImageInputs
from images.model import CROP, Classifier, Labels
from images.service import Batch, Image, Service, batch_of
from slotgraph import DecodeRunner
from slotgraph.backends import choose
from slotgraph.errors import BackendUnavailableError, CaptureError

SIZES = {EDGE: 96, ROOM: 96 - CROP, CLASSES: 10}
BURSTS = (1, 3, 8, 5, 2, 7, 6, 4)
TOLERANCE = 1e-4
Run = Callable[[Batch], Labels]


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read a command line, that of the process if none is given. Exit with status 2 where one is wrong."""
    exits = "exit status: 0 all is equal, 1 an answer differs, 2 it cannot be run"
    parser = argparse.ArgumentParser(prog="vision", description=__doc__, epilog=exits)
    parser.add_argument("--backend", default="cpu-capture", help="cuda, cpu, or cpu-capture: a graph's rules on a CPU")
    for name, default, text in (
        ("images", 160, "how many are served"),
        ("most", 8, "images of the largest batch"),
        ("wait", 4, "milliseconds that a batch waits for more images"),
        ("rounds", 5, "rounds of timing"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"{text} (default: {default})")
    parser.add_argument("--compile", action="store_true", help="time torch.compile, too: that takes up to a minute")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run on a command line; the exit status is 0 if all is equal, 1 if not, 2 if it cannot run."""
    options = parse(argv)
    torch.set_num_threads(1)  # the small model's operators are too short to share: threads would wait for each other
    try:
        return serve(options)
    except (BackendUnavailableError, CaptureError) as error:
        print(f"vision: {error}", file=sys.stderr)
        return 2


def serve(options: argparse.Namespace, declaration: type[ImageInputs] = ImageInputs) -> int:
    """Serve the images and print the report; 0 if all is equal to the model's own answers, else 1."""
    backend, images = choose(options.backend), make_images(options.images)
    model = Classifier(SIZES[CLASSES], rows=1 + len(images)).to(backend.device).eval()
    runner = DecodeRunner(declaration, model, max_batch=options.most, sizes=SIZES, backend=backend)
    runner.capture()

    def as_written(batch: Batch, step: Callable[[ImageInputs], Labels] = model) -> Labels:
        """The batch as tensors of its own size, through the model."""
        tensors = {name: torch.as_tensor(value).to(backend.device) for name, value in batch.items()}
        return step(ImageInputs(**tensors))

    with Service(runner, options.most, options.wait / 1e3) as service:
        answer_in_bursts(service, images)
        wrong, right = (service.submit(image) for image in (images[0].again(corner=[0, 99]), images[0].again()))
    shape = f"{SIZES[EDGE]}x{SIZES[EDGE]} pixels cropped to {CROP}x{CROP}"
    print(f"model     vision transformer, {shape}, on {backend.name}")
    print(f"images    {len(images)}, {len({image.future.result()[0] for image in images})} different labels")
    print(textwrap.fill(f"refused   1 of 2 more: {wrong.exception()}", 80, subsequent_indent=" " * 10))
    for bucket, use in sorted(runner.stats()["buckets"].items()):
        print(f"bucket {bucket:<2} {use['steps']} steps, {use['live']} live of {use['padded']} rows")
    difference = largest_difference(images, model, as_written)
    if right.exception() is not None or not difference <= TOLERANCE:
        print(f"DIFFERENT from the model on each image alone: by {difference:.2g}, {TOLERANCE:.0g} is allowed")
        return 1
    print(f"equal to the model on each image alone: labels, scores and embeddings, within {difference:.1g}\n")
    ways: dict[str, Run] = {"the model as written": as_written, "DecodeRunner": runner}
    if options.compile:
        ways["torch.compile(model)"] = functools.partial(as_written, step=torch.compile(model, dynamic=True))
    for line in timed(ways, images, options):
        print(line)
    return 0


def make_images(count: int) -> list[Image]:
    """Images of 16 coloured squares, each with a corner and classes of its own."""
    draw, square = np.random.default_rng(0), SIZES[EDGE] // 4
    return [
        Image(
            pixels=draw.integers(0, 256, (4, 4, 3), np.uint8).repeat(square, 0).repeat(square, 1),
            corner=draw.integers(0, SIZES[ROOM], 2, endpoint=True).tolist(),
            allowed=draw.permutation(SIZES[CLASSES]) > 0,
            index_row=1 + number,
        )
        for number in range(count)
    ]


def answer_in_bursts(service: Service, images: Sequence[Image]) -> None:
    """Submit a few images at once, wait for their answers, and so on: batches of all sizes."""
    rest = iter(images)
    for size in itertools.cycle(BURSTS):
        futures = [service.submit(image) for image in itertools.islice(rest, size)]
        for future in futures:
            future.result()
        if not futures:
            return


@torch.inference_mode()
def largest_difference(images: Sequence[Image], model: Classifier, run: Run) -> float:
    """Of a score or an embedding, from what the model makes of the image alone; infinite where the label differs."""
    index, found = model.index.clone(), list[float]()
    for image in images:
        expected, [score] = (column.tolist() for column in run(batch_of([image])))
        label, got = image.future.result()
        apart = (index - model.index)[image.index_row].abs().max()
        found += [float(apart), abs(got - score) if [label] == expected else math.inf]
    return float(np.max(found))  # nan where any is


def timed(ways: Mapping[str, Run], images: Sequence[Image], options: argparse.Namespace) -> Iterator[str]:
    """Lines of a table: all images at once, then one after another, at half the rate that the first way can take."""
    rates, waits = ({name: list[float]() for name in ways} for _ in range(2))
    gap = 0.0
    with contextlib.ExitStack() as stack:
        services = {
            name: stack.enter_context(Service(run, options.most, options.wait / 1e3)) for name, run in ways.items()
        }
        for number in range(1 + options.rounds):
            for name, service in services.items():
                seconds = max(latencies(service, images, 0.0))
                gap = gap or 2 * seconds / len(images)
                spread = latencies(service, images, gap)
                if number:  # the first round warms up
                    rates[name].append(len(images) / seconds)
                    waits[name] += spread
    yield f"{'':48}ms at {1 / gap:.0f} images/s"
    yield "way                    images/s  of the first's     median  99 of 100"
    for name, rate in rates.items():
        ratios = np.divide(rate, next(iter(rates.values())))
        median, most = 1e3 * np.percentile(waits[name], (50, 99))
        times = f"{np.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
        yield f"{name:22} {np.median(rate):8.0f}  {times:18} {median:6.1f}  {most:9.1f}"


def latencies(service: Service, images: Sequence[Image], gap: float) -> list[float]:
    """Submit an image every `gap` seconds; from when it was due to its answer, in seconds."""
    begin = time.monotonic()
    sent = [(begin + number * gap, image.again()) for number, image in enumerate(images)]
    for due, image in sent:
        time.sleep(max(0.0, due - time.monotonic()))
        service.submit(image)
    return [image.future.result() and image.answered - due for due, image in sent]
