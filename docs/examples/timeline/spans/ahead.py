"""Two loops of decode steps, `steps(ahead=0)` and `steps(ahead=1)`: the timelines of host and device, from a profile.

`python -m spans.ahead measure FILE` measures on a CUDA device and writes the intervals to a file of JSON, and
`python -m spans.ahead draw FILE` prints their picture, both in the folder above.
"""

import argparse
import functools
import html
import itertools
import json
import pathlib
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import attrs
import torch

from slotgraph import BATCH, TOKENS, DecodeRunner, Inputs, copied, output
from slotgraph.backends import Backend, choose
from slotgraph.dataflow.errors import BackendUnavailableError
from spans.record import FILL, ON_DEVICE, quiet, trace

ROWS, BUCKET, WORDS, WIDE, PAGES = 60, 64, 160 * 1024, 8192, 64
WORK: Final = 300
"""Microseconds that the host works in each step."""
HOST: Final = ("launch", "read", "work")
"""What the host does in turn."""
FIRST, COUNT, SHOWN, BEFORE = 50, 50, 4000, 70
"""The first step that counts, how many do, and the microseconds drawn from its start on, and before it."""
JOINED: Final = 5
"""Pieces of device work of one step that are so many microseconds apart are drawn as one."""
_STYLE: Final = """<style>text{font:13px system-ui,sans-serif;fill:#24292f;text-anchor:middle}
.small,text.idle{font-size:11px;fill:#57606a}.lane{font-weight:600;fill:#57606a}.lane,.left{text-anchor:start}
.page{fill:#fff}rect.launch{fill:#3b78b5}rect.work{fill:#eef4fb;stroke:#3b78b5}rect.read{fill:none;stroke:#8b949e}
rect.step{fill:#e4f3dc;stroke:#5a9a3a}rect.idle{fill:none;stroke:#b0563c;stroke-dasharray:4 3}text.idle{fill:#b0563c}
path{stroke:#57606a;fill:none}.head{fill:#57606a;stroke:none}
@media(prefers-color-scheme:dark){text{fill:#e6edf3}.small,.lane{fill:#9da7b3}.page{fill:#131416}
rect.launch{fill:#5b9bd5}rect.work{fill:#16304a;stroke:#5b9bd5}rect.step{fill:#1d3a17;stroke:#6fbf4b}
rect.idle{stroke:#d98b70}text.idle{fill:#d98b70}path{stroke:#9da7b3}.head{fill:#9da7b3}}</style>
<defs><marker id="a" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">
<path class="head" d="M0 0L8 4L0 8z"/></marker></defs>"""


class Decode(Inputs):
    """Twelve slots."""

    input_ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0, then=lambda next_ids: next_ids)
    positions: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0, then=lambda positions: positions + 1)
    seq_lens: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=1, then=lambda seq_lens: seq_lens + 1)
    pages: torch.Tensor = copied(BATCH, PAGES, dtype=torch.int32, pad=0)
    req_pool_indices: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
    lora_ids: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=0)
    mamba_indices: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=0)
    is_greedy: torch.Tensor = copied(BATCH, dtype=torch.bool, pad=False)
    temperatures: torch.Tensor = copied(BATCH, dtype=torch.float32, pad=1)
    top_ps: torch.Tensor = copied(BATCH, dtype=torch.float32, pad=1)
    top_ks: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=1)
    next_ids: torch.Tensor = output(BATCH, dtype=torch.int64)


class Span(NamedTuple):
    """What the host does, or "step" for what the device does: for which step, and when in microseconds."""

    what: str
    number: int
    start: float
    stop: float


@attrs.frozen
class Loop:
    """One loop.

    Attributes:
        ahead: Steps launched ahead.
        took: Microseconds a step, under the profiler.
        alone: The same without the profiler.
        idle: Share of the time in which the device runs no kernel and copies nothing.
        within: The part of `idle` that is between two kernels of one step.
        spans: Those that are drawn; 0 is where the device begins the first step that counts.
    """

    ahead: int
    took: float
    alone: float
    idle: float
    within: float
    spans: Sequence[Span]

    def __str__(self) -> str:
        """What a picture says of it."""
        return f"ahead={self.ahead}: {self.took:,.0f} us a step; the device idles {100 * self.idle:.1f} % of the time"


def make_runner(backend: Backend, words: int = WORDS, wide: int = WIDE) -> DecodeRunner[Decode]:
    """A step of few and long kernels, as a profiler adds to each: it looks ids up, and chooses the likeliest words."""
    dtype = torch.float32 if backend.device.type == "cpu" else torch.bfloat16
    table, head = (torch.randn(words, wide, dtype=dtype, device=backend.device) for _ in range(2))

    def step(view: Decode) -> torch.Tensor:
        return torch.argmax(torch.nn.functional.linear(table[view.input_ids], head), 1, out=view.next_ids)

    runner = DecodeRunner(Decode, step, buckets=[BUCKET], output_rows=BATCH, backend=backend, progress=False)
    runner.capture()
    return runner


def drive(runner: DecodeRunner[Decode], ahead: int, count: int = FIRST + COUNT + 10) -> float:
    """Run steps in which the host reads the tokens, and then works; returns microseconds a step."""
    batch: dict[str, Any] = dict.fromkeys(Decode.slotgraph.sources, [1] * ROWS)
    batch |= {"input_ids": [*range(ROWS)], "pages": [[1] * PAGES] * ROWS, "is_greedy": [True] * ROWS}
    loop, times = runner.steps(batch, ahead=ahead), list[int]()
    for number in range(count):
        with torch.profiler.record_function(f"launch {number + ahead}"):
            step = next(loop)
        with torch.profiler.record_function(f"read {number}"):
            step.tokens()
        times.append(time.perf_counter_ns())
        with torch.profiler.record_function(f"work {number}"):
            while time.perf_counter_ns() - times[-1] < WORK * 1000:
                pass
    runner.stage.backend.synchronize()
    half = count // 2
    return (times[-1] - times[half]) / (count - 1 - half) / 1000


def spans_of(events: Iterable[Mapping[str, Any]]) -> list[Span]:
    """What the profiler noted of `drive`. The device runs step after step, each from the kernel that fills slots."""
    known = sorted((event for event in events if "cat" in event and "dur" in event), key=lambda event: event["ts"])
    names = [(event, event["name"].split(" ")) for event in known if event["cat"] == "user_annotation"]
    spans, number = [_span(event, name[0], int(name[1])) for event, name in names if name[0] in HOST], -1
    for event in known:
        if event["cat"] in ON_DEVICE:
            number += FILL in event["name"]
            spans.append(_span(event, "step", max(number, 0)))  # an upload comes before the first
    return spans


def loop_of(spans: Iterable[Span], ahead: int, alone: float) -> Loop:
    """Figures of the steps that count, and what is drawn of them. alone: microseconds a step without the profiler."""
    spans = [*spans]
    pieces = _joined(spans, 0)
    last = next(index for index, span in enumerate(pieces) if span.number == FIRST + COUNT)
    counted = [span for span in pieces[: last + 1] if span.number >= FIRST]
    zero, took = counted[0].start, counted[-1].start - counted[0].start
    gaps = [(max(0, two.start - one.stop), one.number == two.number) for one, two in itertools.pairwise(counted)]
    shown = [
        Span(what, number, round(start - zero, 1), round(stop - zero, 1))
        for what, number, start, stop in (*(span for span in spans if span.what != "step"), *_joined(spans, JOINED))
        if stop > zero - BEFORE and start < zero + SHOWN
    ]
    idle, within = sum(gap for gap, _ in gaps), sum(gap for gap, inside in gaps if inside)
    return Loop(ahead, round(took / COUNT, 1), round(alone, 1), round(idle / took, 4), round(within / took, 4), shown)


def _joined(spans: Iterable[Span], near: float) -> list[Span]:
    """The device's, those of one step that are so near in one piece."""
    pieces = list[Span]()
    for span in sorted((span for span in spans if span.what == "step"), key=lambda span: span.start):
        if pieces and pieces[-1].number == span.number and span.start - pieces[-1].stop <= near:
            pieces[-1] = pieces[-1]._replace(stop=max(pieces[-1].stop, span.stop))
        else:
            pieces.append(span)
    return pieces


def measure(backend: Backend) -> str:
    """Both loops as JSON, a span a line."""
    loops = list[dict[str, Any]]()
    with quiet():
        runner = make_runner(backend)
        for ahead in (0, 1):
            drive(runner, ahead)  # warm
            alone = drive(runner, ahead)
            loop = loop_of(spans_of(trace(functools.partial(drive, runner, ahead))), ahead, alone)
            print(f"{loop}, {100 * loop.within:.1f} % within steps; without the profiler a step takes {alone:,.0f} us")
            loops.append(attrs.asdict(loop, recurse=False))
    machine = torch.cuda.get_device_name(backend.device)
    made = json.dumps({"machine": machine, "torch": torch.__version__, "loops": loops})
    return made.replace(' ["', '\n["').replace(' {"', '\n{"') + "\n"


def picture(measured: str) -> str:
    """An SVG of what was measured, light or dark as the page is."""
    about = json.loads(measured)
    loops = [Loop(**{**one, "spans": [Span(*span) for span in one["spans"]]}) for one in about["loops"]]
    where = f"{about['machine']}, torch {about['torch']}; the profiler lengthens launches"
    size = f'viewBox="0 0 840 354" role="img" aria-label="{"; ".join(map(str, loops))}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{_STYLE}',
        '<rect class="page" width="840" height="354"/>',
        *itertools.chain.from_iterable(_drawn(loop, 152 * row) for row, loop in enumerate(loops)),
        f'<path d="M{_x(-BEFORE)} 300H{_x(SHOWN)}"/>',
        *(f'<path d="M{_x(at)} 300v5"/>{_text("small", _x(at), 318, f"{at:,}")}' for at in range(0, SHOWN, 500)),
        _text("small left", 10, 318, "us"),
        '<rect class="launch" x="82" y="332" width="8" height="12"/>',
        _text("small left", 96, 342, f"launch of a step; measured on {where}"),
    ]
    return "\n".join([*lines, "</svg>\n"])


def _drawn(loop: Loop, top: int) -> Iterator[str]:
    """Its two rows: boxes, arrows from launches to steps, and where the device idles."""
    host, device = top + 34, top + 104
    yield _text("lane", 10, top + 22, str(loop))
    yield _text("left", 10, host + 21, "host") + _text("left", 10, device + 21, "device")
    pieces = [span for span in loop.spans if span.what == "step"]
    between = itertools.pairwise([Span("", 0, -BEFORE, -BEFORE), *pieces, Span("", 0, SHOWN, SHOWN)])
    idle = [Span("idle", 0, one.stop, two.start) for one, two in between]
    for what, number, start, stop in (*idle, *loop.spans):
        left, right, row = _x(start), _x(stop), host if what in HOST else device
        label = {"launch": "", "work": "work", "idle": "idle"}.get(what, f"{what} {number}")
        if what != "idle" or right - left > len(label):  # narrower ones are hard to see
            yield f'<rect class="{what}" x="{left}" y="{row}" width="{right - left:.1f}" height="32" rx="2"/>'
        if right - left > 7 * len(label) > 0:
            yield _text(what, round((left + right) / 2, 1), row + 21, label)
    starts = {span.number: _x(span.start) for span in reversed(pieces)}
    for what, number, start, _ in loop.spans:
        if what == "launch" and start > -BEFORE and number in starts:
            path = f"M{_x(start)} {host + 32}V{host + 46}H{starts[number]}V{device - 1}"
            yield f'<path d="{path}" marker-end="url(#a)"/>'


def _text(kind: str, x: float, y: int, words: str) -> str:
    return f'<text class="{kind}" x="{x}" y="{y}">{html.escape(words)}</text>'


def _x(time: float) -> float:
    """Where a time is, or the edge beyond which it is."""
    return round(82 + 750 * (min(max(time, -BEFORE), SHOWN) + BEFORE) / (SHOWN + BEFORE), 1)


def _span(event: Mapping[str, Any], what: str, number: int) -> Span:
    return Span(what, number, event["ts"], event["ts"] + event["dur"])


def main(argv: Sequence[str] | None = None) -> int:
    """Run on a command line; the exit status is 0, or 2 if it cannot be run here."""
    parser = argparse.ArgumentParser(prog="spans.ahead", description=__doc__)
    parser.add_argument("do", choices=["measure", "draw"])
    parser.add_argument("file", type=pathlib.Path, help="the file of JSON")
    options = parser.parse_args(argv)
    if options.do == "draw":
        print(picture(options.file.read_text(encoding="utf-8")), end="")
        return 0
    try:
        backend = choose("cuda")
    except BackendUnavailableError as error:
        print(f"spans.ahead: {error}", file=sys.stderr)
        return 2
    options.file.write_text(measure(backend), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
