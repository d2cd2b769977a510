"""The report on a terminal: texts, a table of figures, what was measured, and the verdict."""

from collections.abc import Iterator, Sequence

import rich.box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from serving.comparison import Comparison
from serving.measuring import ALONE, MODE, WAYS, Times
from serving.ranks import WAYS as RANK_WAYS
from serving.report import Report, miscounted
from slotgraph.runners.engine.statistics import human_bytes
from slotgraph.runners.testing.timing import Spread

MOST_TEXTS = 16  # that are printed
WAITS = {False: "one behind another", True: "the host waits for each"}
NO_DEVICE = "A CPU has no graphs to launch: the figures show that this can be measured, not what a device gains."


def show(report: Report, console: Console) -> None:
    """Print the texts, what the run took, and the verdict. Nothing is wider than 80 columns."""
    for text in report["texts"][:MOST_TEXTS]:
        console.print(Text(_line(text["prompt"]), style="bold"), no_wrap=True, overflow="ellipsis")
        console.print(Padding(Text(_line(text["text"], keep="\n").strip()), (0, 0, 1, 2)))
    if report["requests"] > MOST_TEXTS:
        console.print(f"... and {report['requests'] - MOST_TEXTS} more texts")
    title = f"{report['model']}, {report['dtype']}, {report['backend']}"
    table = Table(box=rich.box.SIMPLE_HEAD, show_header=False, title=title)
    table.add_column("what", no_wrap=True)
    table.add_column("figure")
    for name, figure in _figures(report):
        table.add_row(name, figure)
    console.print(table)
    if report["prefill_times"] is not None:
        console.print(_prefill_sentence(report["prefill_times"]), highlight=False)
    if report["measured"] is not None:
        _show_times(report["measured"], console)
    console.print(_verdict(report), soft_wrap=True)


def _figures(report: Report) -> Iterator[tuple[str, str]]:
    speed, prefill, memory, ranks = (report[name] for name in ("batched", "prefill", "memory", "ranks"))
    batched = speed["tokens_per_second"]
    yield "tokens/s, this program", f"{report['tokens_per_second']:.1f}"
    alone = report["reference_tokens_per_second"]
    yield "tokens/s, generate() one at a time", "not asked, by --no-verify" if alone is None else f"{alone:.1f}"
    told = f"not measured: {speed['note']}" if batched is None else f"{batched:.1f}"
    yield "tokens/s, transformers' continuous batching", told
    if ranks is not None:
        forced = (f"rank {rank}: {count}" for rank, count in ranks["forced"].items())
        yield "ranks", f"{ranks['size']}, {RANK_WAYS[ranks['way']]}"
        yield "steps by the rank that forced their bucket", ", ".join(forced) or "-"
    yield "requests, tokens generated", f"{report['requests']}, {report['tokens']}"
    eagerly = f", {report['eager_steps']} of them eagerly" if report["eager_steps"] else ""
    yield "decode steps", f"{report['decode_steps']}{eagerly}"
    if report["ahead"]:
        yield "decode steps by how they were launched", ", ".join(f"{n} {how}" for how, n in report["ahead"].items())
    yield "decode steps by bucket", ", ".join(f"{use['bucket']}: {use['steps']}" for use in report["buckets"])
    why = "".join(f", {word}" for word in prefill["reasons"]) if prefill["asked"] != "eager" else ""
    paths = (f"{steps} {path}{why if path == 'eager' else ''}" for path, steps in prefill["paths"].items())
    yield "prefill steps", ", ".join(paths)
    yield "time in prefill steps, of all steps", f"{prefill['share']:.1%}"
    yield "padding in decode steps, of all rows", f"{report['padding_waste']:.1%}"
    if prefill["buckets"]:
        yield "padding in prefill steps, of all tokens", f"{prefill['padding_waste']:.1%}"
    if report["fill"]["fills"]:
        yield "host time of a fill, median", f"{report['fill']['median_us']:.0f} us"
    yield "capture, decode", f"{len(report['buckets'])} graphs used, {report['capture_seconds']:.2f} s"
    if prefill["buckets"]:
        yield "capture, prefill", f"{prefill['capture_seconds']:.2f} s"
        yield "memory of prefill's inputs and graphs", human_bytes(prefill["memory"])
    yield "memory of decode's inputs", human_bytes(memory["inputs"])
    yield "memory of its graphs and outputs", human_bytes(memory["graphs"] + memory["outputs"])
    yield "memory of the paged KV cache", human_bytes(memory["kv_cache"])


def _verdict(report: Report) -> Text:
    """One line or two, green or red: the comparison, and over ranks with tensor parallelism that with one process."""
    ranks, comparison, requests = report["ranks"], report["comparison"], report["requests"]
    if ranks is not None and ranks["differing"]:
        others = ", ".join(map(str, ranks["differing"]))
        return Text(f"DIFFERENT texts in rank {others} and rank 0, of the same requests", style="bold red")
    if (comparison is None or comparison.difference is None) and (wrong := miscounted(report)) is not None:
        counts = f"{report['decoded']} rows were decoded, the graphs counted {wrong}"
        return Text(f"WRONG COUNT of live rows: {counts}", style="bold red")
    if comparison is None:
        return Text("not compared with generate(), by --no-verify", style="yellow")
    if ranks is None or ranks["alone"] is None:
        return _compared(comparison, requests)
    eager = Text("beside the same ranks, eagerly: ").append_text(_compared(comparison, requests))
    alone = Text("beside one process: ").append_text(_compared(ranks["alone"], requests))
    return Text("\n").join([eager, alone])


def _compared(comparison: Comparison, requests: int) -> Text:
    bounds = comparison.bounds
    logits = f"largest difference of a logit {comparison.largest:.2g}, tolerance {bounds.logits:.2g}"
    if bounds.noise is not None:
        itself = f"{bounds.noise:.2g} between the model and itself in other batches"
        logits += f" ({itself}; logits spread by {comparison.spread:.2g})"
    if comparison.difference is not None:
        apart = f"differences in {comparison.apart} of {requests} requests; {logits}"
        return Text(f"DIFFERENT from generate(): {comparison.difference}\n{apart}", style="bold red")
    if not bounds.tie:
        equal = f"equal to generate(): all {comparison.tokens} tokens of {requests} requests"
        return Text(f"{equal}; {logits}", style="green")
    same = f"{comparison.tokens - comparison.ties} of {comparison.tokens} tokens of {requests} requests outright"
    room = f"it prefers another token by {comparison.gap:.2g} at most, {bounds.tie:.2g} is allowed"
    count = "1 near-tie" if comparison.ties == 1 else f"{comparison.ties} near-ties"
    ties = f"{count} ({room})" if comparison.ties else "no near-tie"
    return Text(f"equal to what the model makes of the same texts: {same}, {ties}; {logits}", style="green")


def _line(text: str, keep: str = "") -> str:
    """The text with a dot for what cannot be printed."""
    return "".join(sign if sign.isprintable() or sign in keep else "·" for sign in text)


def _prefill_sentence(times: Times) -> Text:
    """What the prefill's path takes, and what the same step takes without graphs."""
    what = f"A prefill step of {times['requests']} requests, {times['tokens']} tokens"
    whole, eager = (f"{_microseconds(times[name])} us" for name in ("whole", "eager"))
    ratio = f"{times['ratio'].median:.2f} times as long"
    return Text(
        f"{what}, takes {whole} through {times['path']} graphs (bucket {times['bucket']}), {eager} without: {ratio}."
    )


def _show_times(measured: Times, console: Console) -> None:
    """A table for each way of waiting, one of the ways to run a whole step, and what the largest batch tells."""
    for each, waits in WAITS.items():
        times = [one for one in measured["times"] if one["each"] is each]
        if times:
            table = Table(title=f"decode steps, {waits}: us, median of {measured['rounds']} rounds")
            for name in ("live rows", "graph alone", "whole step", "inputs", "no graph"):
                table.add_column(name, justify="right")
            for one in times:
                replay, whole, eager = (_microseconds(one[name]) for name in ("replay", "whole", "eager"))
                share = f"{one['share'].median:.1%} ±{50 * (one['share'].p90 - one['share'].p10):.1f}"
                table.add_row(f"{one['live']} of {one['bucket']}", replay, whole, share, eager)
            console.print(table)
    if compared := [one for one in measured["times"] if one["ways"]]:
        table = Table(title=f"whole decode steps of {compared[0]['live']} requests: us")
        table.add_column("way")
        for one in compared:
            table.add_column(WAITS[one["each"]], justify="right")
        for name in WAYS:
            ways = (one["ways"].get(name) for one in compared)
            table.add_row(name, *("-" if way is None else _microseconds(way) for way in ways))
        console.print(table)
    row, *waiting = (one for one in measured["times"] if one["bucket"] == measured["times"][-1]["bucket"])
    others = f"Without a graph the step takes {_as_long(row['eager'], row)}"
    if ALONE in row["ways"]:
        others += f', transformers\' own under torch.compile(mode="{MODE}") {_as_long(row["ways"][ALONE], row)}'
    note = f"{measured['note']}." if measured["note"] else ""
    parts = [_share(row, waiting), f"{others}.", note, "" if measured["device"] else NO_DEVICE]
    console.print(Text(" ".join(filter(None, parts))), highlight=False)


def _share(row: Times, waiting: Sequence[Times]) -> str:
    if row["share"].p10 <= 0:
        return f"What the inputs take of a decode step of {row['live']} requests is lost in the rounds' differences."
    share = f"The inputs (sizes, route, fill, padding, view) take {row['share'].median:.1%} of a decode step"
    alone = "".join(f", {one['share'].median:.1%} where the host waits for each" for one in waiting)
    return f"{share} of {row['live']} requests{alone}: the whole step, runner(batch), less its graph alone."


def _as_long(way: Spread, row: Times) -> str:
    return f"{way.median / row['whole'].median:.2f} times as long"


def _microseconds(spread: Spread) -> str:
    """The median, and half of what lies between the tenth and the ninetieth percentile."""
    digits = 0 if spread.median >= 1000 else 1  # noqa: PLR2004 - four digits are enough
    return f"{spread.median:.{digits}f} ±{(spread.p90 - spread.p10) / 2:.{digits}f}"
