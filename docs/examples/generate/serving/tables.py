"""The report on a terminal: texts, a table of figures, what was measured, and the verdict."""

import textwrap
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from serving.attention import SDPA, TRITON
from serving.comparison import Comparison
from serving.measuring import ALONE, MASKED, MODE, WAYS, Times
from serving.model import Language
from serving.options import Options
from serving.ranks import WAYS as RANK_WAYS
from serving.report import Report, miscounted
from slotgraph.runners.engine.statistics import human_bytes
from slotgraph.runners.testing.timing import Spread

MOST_TEXTS = 16  # that are printed
WIDTH, BEFORE = 80, 30  # columns of a line; signs of a text before what differs
WAITS = {False: "one behind another", True: "the host waits for each"}
ATTENTIONS = {TRITON: "a Triton kernel over the pages", SDPA: "sdpa over a copy of all pages"}
NO_DEVICE = "A CPU has no graphs to launch, and no figure here says what a device gains."


def show_start(language: Language, prompts: int, options: Options, console: Console) -> None:
    """Print what this run does, before it takes its time."""
    *some, most = map(str, options.ladder)
    rows = f"{', '.join(some)} or {most}" if some else most
    console.print(
        f"{prompts} prompts share decode steps of {language.name}: graphs for {rows} rows, whose inputs stay where "
        "they are. Rows without a request run, too.\n",
        highlight=False,
        markup=False,
    )


def show_reasons(report: Report, console: Console) -> None:
    """Print why inputs are better declared than filled by hand, as far as this run shows it."""
    forgotten, fills = report["forgotten"], report["fills"]
    sentences = []
    if forgotten is not None and forgotten.prompt is not None:
        console.print("By hand, two forgotten resets of such rows are no error, but another text:", highlight=False)
        pairs = enumerate(zip(forgotten.text, forgotten.instead, strict=False))
        same = next((place for place, (one, other) in pairs if one != other), 0)
        for name, text in (("reset", forgotten.text), ("not reset", forgotten.instead)):
            line = Text(f"  {name:9}  {_part(text, same)}")
            console.print(line, no_wrap=True, overflow="ellipsis", highlight=False)
        sentences.append("slotgraph takes no input without a rule for its padding.")
    if fills is not None:
        sentences.append(f"{'It' if sentences else 'slotgraph'} {_filled(fills)}")
    if sentences:
        console.print(" ".join(sentences) + "\n", highlight=False)


def _part(text: str, place: int) -> str:
    """The text from a few words before a place on, in one line."""
    begin = text.rfind(" ", 0, max(0, place - BEFORE)) + 1 if place > BEFORE else 0
    return ("... " if begin else "") + _line(text[begin:].replace("\n", " "))


def _filled(fills: Times) -> str:
    """Say how long a fill of one step's inputs takes, by the runner and by hand."""
    one, when = fills["at_once"], "back to back"
    if one is None:
        one, when = fills["after_a_step"], "after a step of the model"
    ratio = f"{one['ratio'].median:.2f} times as long (mostly {one['ratio'].p10:.2f} to {one['ratio'].p90:.2f})"
    took = f"{one['runner'].median:.1f} us of the host, {when}"
    return f"fills the inputs of {fills['live']} requests in {took}; by hand that takes {ratio}."


def show(report: Report, console: Console) -> None:
    """Print the texts, what the run took, and the verdict. Nothing is wider than 80 columns."""
    for text in report["texts"][:MOST_TEXTS]:
        console.print(Text(_line(text["prompt"]), style="bold"), no_wrap=True, overflow="ellipsis")
        for line in _line(text["text"], keep="\n").strip().split("\n"):
            print(textwrap.fill(line, WIDTH, initial_indent="  ", subsequent_indent="  "), file=console.file)
        print(file=console.file)
    if report["requests"] > MOST_TEXTS:
        console.print(f"... and {report['requests'] - MOST_TEXTS} more texts")
    table = Table(
        box=None,
        show_header=False,
        title=f"{report['dtype']}, {report['backend']}",
        title_justify="left",
        padding=(0, 2, 0, 0),
    )
    table.add_column("what", no_wrap=True)
    table.add_column("figure")
    for name, figure in _figures(report):
        table.add_row(name, figure)
    console.print(table)
    if report["prefill_times"] is not None:
        console.print(_prefill_sentence(report["prefill_times"]), highlight=False)
    if report["measured"] is not None:
        _show_times(report["measured"], report["fills"], console)
    console.print()
    console.print(_speed(report), highlight=False)
    console.print(_verdict(report))


def _speed(report: Report) -> str:
    """Tokens a second of each run of this program and of transformers."""
    alone, pairs = report["reference_tokens_per_second"], report["pairs"]
    ours, theirs = zip(*pairs, strict=True) if pairs else ((report["tokens_per_second"],), ())
    lines = {
        "this program": _each(ours),
        "transformers' continuous batching": _each(theirs) or f"not measured: {report['batched']['note']}",
        "generate(), one prompt at a time": "not asked, by --no-verify" if alone is None else f"{alone:.1f}",
    }
    text = "\n".join(f"tokens a second, {name:34} {figure}" for name, figure in lines.items())
    ratios = [f"{one / other:.2f}" for one, other in pairs if other]
    if report["turns"]:
        text += "\nRuns that took turns:"
    for way, speeds in report["turns"].items():
        text += f"\ntokens a second, {way:34} {_each(speeds)}"
    if len(ratios) > 1:
        text += f"\nIn pairs of runs this program makes {' and '.join(ratios)} times as many as transformers' batching."
    return text


def _each(speeds: Sequence[float | None]) -> str:
    return " and ".join("-" if speed is None else f"{speed:.1f}" for speed in speeds)


def _figures(report: Report) -> Iterator[tuple[str, str]]:
    prefill, memory, ranks = (report[name] for name in ("prefill", "memory", "ranks"))
    if ranks is not None:
        forced = (f"rank {rank}: {count}" for rank, count in ranks["forced"].items())
        yield "ranks", f"{ranks['size']}, {RANK_WAYS[ranks['way']]}"
        yield "steps by the rank that forced their bucket", ", ".join(forced) or "-"
    yield "requests, tokens generated", f"{report['requests']}, {report['tokens']}"
    yield "attention of decode steps", ATTENTIONS[report["attention"]]
    eagerly = f", {report['eager_steps']} of them eagerly" if report["eager_steps"] else ""
    yield "decode steps", f"{report['decode_steps']}{eagerly}"
    if report["ahead"]:
        yield "decode steps by how they were launched", ", ".join(f"{n} {how}" for how, n in report["ahead"].items())
    yield "decode steps by bucket", ", ".join(f"{use['bucket']}: {use['steps']}" for use in report["buckets"])
    why = "".join(f", {word}" for word in prefill["reasons"]) if prefill["asked"] != "eager" else ""
    paths = (f"{steps} {path}{why if path == 'eager' else ''}" for path, steps in prefill["paths"].items())
    if prefill["asked"] != "eager":
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
        return Text(f"{equal}\n{logits}", style="green")
    same = f"{comparison.tokens - comparison.ties} of {comparison.tokens} tokens of {requests} requests outright"
    room = f"it prefers another token by {comparison.gap:.2g} at most, {bounds.tie:.2g} is allowed"
    count = "1 near-tie" if comparison.ties == 1 else f"{comparison.ties} near-ties"
    ties = f"{count} ({room})" if comparison.ties else "no near-tie"
    return Text(f"equal to what the model makes of the same texts: {same}, {ties}\n{logits}", style="green")


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


def _show_times(measured: Times, fills: Times | None, console: Console) -> None:
    """A table for each way of waiting, one of the ways to run a whole step, and what the largest batch tells."""
    for each, waits in WAITS.items():
        times = [one for one in measured["times"] if one["each"] is each]
        if times:
            table = Table(title=f"decode steps, {waits}: us, median of {measured['rounds']} rounds")
            for name in ("live rows", "graph alone", "whole step", "inputs", "no graph"):
                table.add_column(name, justify="right")
            for one in times:
                replay, whole, eager = (_microseconds(one[name]) for name in ("replay", "whole", "eager"))
                share = f"{one['share'].median:.2%} ±{50 * (one['share'].p90 - one['share'].p10):.1f}"
                table.add_row(f"{one['live']} of {one['bucket']}", replay, whole, share, eager)
            console.print(table)
    if compared := [one for one in measured["times"] if one["ways"]]:
        table = Table(title=f"whole decode steps of {compared[0]['live']} requests: us")
        table.add_column("way")
        for one in compared:
            table.add_column(WAITS[one["each"]], justify="right")
        for name in WAYS:
            ways = [one["ways"].get(name) for one in compared]
            if not any(ways):
                continue
            table.add_row(name, *("-" if way is None else _microseconds(way) for way in ways))
        console.print(table)
    row, *waiting = (one for one in measured["times"] if one["bucket"] == measured["times"][-1]["bucket"])
    by_sdpa = f"With sdpa the step takes {_as_long(row['ways'][MASKED], row)}. " if MASKED in row["ways"] else ""
    others = f"{by_sdpa}Without a graph the step takes {_as_long(row['eager'], row)}"
    if ALONE in row["ways"]:
        others += f', transformers\' own under torch.compile(mode="{MODE}") {_as_long(row["ways"][ALONE], row)}'
    note = f"{measured['note']}." if measured["note"] else ""
    parts = [_share(row, waiting, fills), f"{others}.", note, "" if measured["device"] else NO_DEVICE]
    console.print(Text(" ".join(filter(None, parts))), highlight=False)


def _share(row: Times, waiting: Sequence[Times], fills: Times | None) -> str:
    share = row["share"]
    if fills is not None and not fills["on_a_device"]:
        took = f"{fills['after_a_step']['runner'].median:.0f} us, {share.median:.2%}"
        return (
            f"On this CPU, whose caches the model empties, to fill the inputs takes {took} of a decode step of "
            f"{row['live']} requests; by hand it takes {fills['after_a_step']['by_hand'].median:.0f} us."
        )
    if share.p10 <= 0:
        return f"The inputs take less than {max(share.p90, 0.001):.1%} of a decode step of {row['live']} requests."
    text = f"The inputs (sizes, route, fill, padding, view) take {share.median:.1%} of a decode step"
    alone = "".join(f", {one['share'].median:.1%} where the host waits for each" for one in waiting)
    return f"{text} of {row['live']} requests{alone}: the whole step, runner(batch), less its graph alone."


def _as_long(way: Spread, row: Times) -> str:
    return f"{way.median / row['whole'].median:.2f} times as long"


def _microseconds(spread: Spread) -> str:
    """The median, and half of what lies between the tenth and the ninetieth percentile."""
    digits = 0 if spread.median >= 1000 else 1  # noqa: PLR2004 - four digits are enough
    return f"{spread.median:.{digits}f} ±{(spread.p90 - spread.p10) / 2:.{digits}f}"
