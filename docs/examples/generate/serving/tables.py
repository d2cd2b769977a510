"""The report as tables on a terminal."""

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from serving.comparison import Comparison
from serving.ranks import WAYS
from serving.report import BucketUse, PrefillUse, Report
from serving.times import prefill_sentence, show_times
from slotgraph.runners.statistics import human_bytes

SAMPLES = 6
COLUMNS = {"request": 7, "steps": 7, "prompt": 20, "text": 33}


def show(report: Report, console: Console) -> None:
    """Print what the run did, bucket by bucket, a sample of the texts, and the verdict."""
    console.print(_run(report))
    if report.prefill.buckets:
        console.print(_buckets("prefill steps by bucket", "tokens", report.prefill.buckets))
    console.print(_buckets("decode steps by bucket", "rows", report.buckets))
    console.print(_texts(report))
    if report.prefill_times is not None:
        console.print(prefill_sentence(report.prefill_times), highlight=False)
    if report.measured is not None:
        show_times(report.measured, console)
    console.print(_verdict(report), soft_wrap=True)


def _run(report: Report) -> Table:
    table = Table(title=f"{report.model}, {report.parameters:,} parameters, {report.dtype}")
    table.add_column("what")
    table.add_column("value", justify="right")
    for name, value in (*_work(report), *_costs(report)):
        table.add_row(name, value)
    return table


def _work(report: Report) -> Iterable[tuple[str, str]]:
    steps = report.prefill.steps, report.decode_steps, report.eager_steps
    yield "backend", report.backend
    if report.ranks is not None:
        yield "ranks", f"{report.ranks.size}, {WAYS[report.ranks.way]}"
        if report.ranks.forced:
            forced = (f"rank {rank}: {count}" for rank, count in report.ranks.forced.items())
            yield "steps by the rank that forced their bucket", ", ".join(forced)
    yield "requests", f"{report.requests}"
    yield "steps: prefill / decode / decode, eagerly", _slashed(*steps)
    yield "prefill steps by path", _by_path(report.prefill)
    yield "prompt tokens / requests in one prefill, at most", _slashed(report.prefill.tokens, report.prefill.most)
    yield "tokens generated", f"{report.tokens}"
    yield "decoded rows: host's count / graphs' count", _slashed(report.decoded, report.counted)
    yield "tokens per second", f"{report.tokens_per_second:.0f}"
    yield "the same, generate() one at a time", f"{report.reference_tokens_per_second:.0f}"


def _costs(report: Report) -> Iterable[tuple[str, str]]:
    memory, prefill = report.memory, report.prefill
    yield "padding waste: prefill / decode", f"{prefill.padding_waste:.1%} / {report.padding_waste:.1%}"
    yield "time in prefill steps, of all steps", f"{prefill.share:.1%}"
    if report.fill.fills:
        yield "host time per fill, median / p99", f"{report.fill.median_us:.1f} / {report.fill.p99_us:.1f} us"
    yield "capture: prefill / decode", f"{prefill.capture_seconds:.2f} / {report.capture_seconds:.2f} s"
    yield "memory: inputs", human_bytes(memory.inputs)
    yield "memory: graphs / outputs", _slashed(human_bytes(memory.graphs), human_bytes(memory.outputs))
    yield "memory: of prefill, all of it", human_bytes(prefill.memory)
    yield "memory: paged KV cache", human_bytes(memory.kv_cache)


def _by_path(prefill: PrefillUse) -> str:
    why = "".join(f", {word}" for word in prefill.reasons) if prefill.asked != "eager" else ""
    return _slashed(*(f"{path} {steps}{why if path == 'eager' else ''}" for path, steps in prefill.paths.items()))


def _buckets(title: str, rows: str, uses: Sequence[BucketUse]) -> Table:
    table = Table(title=title)
    for name in ("bucket", "steps", f"live {rows}", f"padded {rows}", "waste"):
        table.add_column(name, justify="right")
    for use in uses:
        table.add_row(f"{use.bucket}", f"{use.steps}", f"{use.live}", f"{use.padded}", f"{use.waste:.1%}")
    return table


def _texts(report: Report) -> Table:
    table = Table(title=f"{min(SAMPLES, report.requests)} of {report.requests} texts")
    for name, width in COLUMNS.items():
        table.add_column(name, width=width)
    for text in report.texts[:: max(1, report.requests // SAMPLES)][:SAMPLES]:
        table.add_row(f"{text.request}", f"{text.arrived}-{text.ended}", _line(text.prompt), _line(text.text))
    return table


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


def _line(text: str) -> Text:
    """Printable characters only; the column cuts them to its width."""
    return Text("".join(sign if sign.isprintable() else "·" for sign in text), overflow="ellipsis", no_wrap=True)


def _slashed(*values: object) -> str:
    return " / ".join(map(str, values))
