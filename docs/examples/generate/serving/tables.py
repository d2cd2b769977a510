"""The report on a terminal: texts, a table of figures, and the verdict."""

from collections.abc import Iterable

import rich.box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from serving.comparison import Comparison
from serving.ranks import WAYS
from serving.report import PrefillUse, Report
from serving.times import prefill_sentence, show_times
from slotgraph.runners.statistics import human_bytes

MOST_TEXTS = 16
"""Texts that are printed."""


def show(report: Report, console: Console) -> None:
    """Print the texts, what the run took, and the verdict. Nothing is wider than 80 columns."""
    for text in report.texts[:MOST_TEXTS]:
        console.print(Text(_line(text.prompt), style="bold"), no_wrap=True, overflow="ellipsis")
        console.print(Padding(Text(_line(text.text, keep="\n").strip()), (0, 0, 1, 2)))
    if report.requests > MOST_TEXTS:
        console.print(f"... and {report.requests - MOST_TEXTS} more texts")
    console.print(_figures(report))
    if report.prefill_times is not None:
        console.print(prefill_sentence(report.prefill_times), highlight=False)
    if report.measured is not None:
        show_times(report.measured, console)
    console.print(_verdict(report), soft_wrap=True)


def _figures(report: Report) -> Table:
    table = Table(
        box=rich.box.SIMPLE_HEAD, show_header=False, title=f"{report.model}, {report.dtype}, {report.backend}"
    )
    table.add_column("what", no_wrap=True)
    table.add_column("figure")
    for name, figure in (*_speeds(report), *_work(report), *_costs(report)):
        table.add_row(name, figure)
    return table


def _speeds(report: Report) -> Iterable[tuple[str, str]]:
    batched = report.batched
    yield "tokens/s, this program", f"{report.tokens_per_second:.1f}"
    yield "tokens/s, generate() one at a time", f"{report.reference_tokens_per_second:.1f}"
    speed = batched.tokens_per_second
    yield (
        "tokens/s, transformers' continuous batching",
        f"not measured: {batched.note}" if speed is None else f"{speed:.1f}",
    )


def _work(report: Report) -> Iterable[tuple[str, str]]:
    if report.ranks is not None:
        forced = (f"rank {rank}: {count}" for rank, count in report.ranks.forced.items())
        yield "ranks", f"{report.ranks.size}, {WAYS[report.ranks.way]}"
        yield "steps by the rank that forced their bucket", ", ".join(forced) or "-"
    yield "requests, tokens generated", f"{report.requests}, {report.tokens}"
    eagerly = f", {report.eager_steps} of them eagerly" if report.eager_steps else ""
    yield "decode steps", f"{report.decode_steps}{eagerly}"
    yield "decode steps by bucket", ", ".join(f"{use.bucket}: {use.steps}" for use in report.buckets)
    yield "prefill steps", _by_path(report.prefill)
    yield "time in prefill steps, of all steps", f"{report.prefill.share:.1%}"


def _costs(report: Report) -> Iterable[tuple[str, str]]:
    memory, prefill = report.memory, report.prefill
    yield "padding in decode steps, of all rows", f"{report.padding_waste:.1%}"
    if prefill.buckets:
        yield "padding in prefill steps, of all tokens", f"{prefill.padding_waste:.1%}"
    if report.fill.fills:
        yield "host time of a fill, median", f"{report.fill.median_us:.0f} us"
    yield "capture, decode", f"{len(report.buckets)} graphs used, {report.capture_seconds:.2f} s"
    if prefill.buckets:
        yield "capture, prefill", f"{prefill.capture_seconds:.2f} s"
        yield "memory of prefill's inputs and graphs", human_bytes(prefill.memory)
    yield "memory of decode's inputs", human_bytes(memory.inputs)
    yield "memory of its graphs and outputs", human_bytes(memory.graphs + memory.outputs)
    yield "memory of the paged KV cache", human_bytes(memory.kv_cache)


def _by_path(prefill: PrefillUse) -> str:
    why = "".join(f", {word}" for word in prefill.reasons) if prefill.asked != "eager" else ""
    return ", ".join(f"{steps} {path}{why if path == 'eager' else ''}" for path, steps in prefill.paths.items())


def _verdict(report: Report) -> Text:
    """One line or two, green or red: the comparison, and over ranks with tensor parallelism that with one process."""
    ranks = report.ranks
    if ranks is not None and ranks.differing:
        others = ", ".join(map(str, ranks.differing))
        return Text(f"DIFFERENT texts in rank {others} and rank 0, of the same requests", style="bold red")
    if report.comparison.difference is None and report.miscounted is not None:
        counts = f"{report.decoded} rows were decoded, the graphs counted {report.miscounted}"
        return Text(f"WRONG COUNT of live rows: {counts}", style="bold red")
    if ranks is None or ranks.alone is None:
        return _compared(report.comparison, report.requests)
    eager = Text("beside the same ranks, eagerly: ").append_text(_compared(report.comparison, report.requests))
    alone = Text("beside one process: ").append_text(_compared(ranks.alone, report.requests))
    return Text("\n").join([eager, alone])


def _compared(comparison: Comparison, requests: int) -> Text:
    if comparison.difference is not None:
        apart = f"differences in {comparison.apart} of {requests} requests; {_logits(comparison)}"
        return Text(f"DIFFERENT from generate(): {comparison.difference}\n{apart}", style="bold red")
    return Text(f"{_equal(comparison, requests)}; {_logits(comparison)}", style="green")


def _equal(comparison: Comparison, requests: int) -> str:
    if not comparison.bounds.tie:
        return f"equal to generate(): all {comparison.tokens} tokens of {requests} requests"
    same = f"{comparison.tokens - comparison.ties} of {comparison.tokens} tokens of {requests} requests outright"
    room = f"it prefers another token by {comparison.gap:.2g} at most, {comparison.bounds.tie:.2g} is allowed"
    count = "1 near-tie" if comparison.ties == 1 else f"{comparison.ties} near-ties"
    ties = f"{count} ({room})" if comparison.ties else "no near-tie"
    return f"equal to what the model makes of the same texts: {same}, {ties}"


def _logits(comparison: Comparison) -> str:
    bounds = comparison.bounds
    found = f"largest difference of a logit {comparison.largest:.2g}, tolerance {bounds.logits:.2g}"
    if bounds.noise is None:
        return found
    context = (
        f"{bounds.noise:.2g} between the model and itself in other batches; logits spread by {comparison.spread:.2g}"
    )
    return f"{found} ({context})"


def _line(text: str, keep: str = "") -> str:
    """The text with a dot for what cannot be printed."""
    return "".join(sign if sign.isprintable() or sign in keep else "·" for sign in text)
