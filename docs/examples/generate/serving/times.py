"""What was measured, as tables on a terminal, and one sentence that says what they come to."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from serving.compiled import MODE
from serving.measuring import ALONE, WAYS, Measured, StepTimes
from serving.prefill_times import PrefillTimes
from serving.timing import Spread

WAITS = {False: "one behind another", True: "the host waits for each"}
NO_DEVICE = "A CPU has no graphs to launch: the figures show that this can be measured, not what a device gains."


def show_times(measured: Measured, console: Console) -> None:
    """Print a table for each way of waiting, and what the largest batch tells."""
    for each in (False, True):
        times = [one for one in measured.times if one.each is each]
        if times:
            console.print(_table(times, measured.rounds))
    if compared := [one for one in measured.times if one.ways]:
        console.print(_compared(compared))
    console.print(_sentence(measured), highlight=False)


def prefill_sentence(times: PrefillTimes) -> Text:
    """What the prefill's path takes, and what the same step takes without graphs."""
    what = f"A prefill step of {times.requests} requests, {times.tokens} tokens"
    whole, eager = (f"{_microseconds(spread)} us" for spread in (times.whole, times.eager))
    ratio = f"{times.ratio.median:.2f} times as long"
    return Text(f"{what}, takes {whole} through {times.path} graphs (bucket {times.bucket}), {eager} without: {ratio}.")


def _table(times: Sequence[StepTimes], rounds: int) -> Table:
    table = Table(title=f"decode steps, {WAITS[times[0].each]}: us, median of {rounds} rounds")
    for name in ("live rows", "graph alone", "whole step", "inputs", "no graph"):
        table.add_column(name, justify="right")
    for one in times:
        replay, whole, eager = map(_microseconds, (one.replay, one.whole, one.eager))
        table.add_row(f"{one.live} of {one.bucket}", replay, whole, _percent(one.share), eager)
    return table


def _compared(times: Sequence[StepTimes]) -> Table:
    """The ways to run a whole step, a row each, and how the host waits, a column each."""
    table = Table(title=f"whole decode steps of {times[0].live} requests: us")
    table.add_column("way")
    for one in times:
        table.add_column(WAITS[one.each], justify="right")
    for name in WAYS:
        table.add_row(name, *(_microseconds(one.ways[name]) if name in one.ways else "-" for one in times))
    return table


def _sentence(measured: Measured) -> Text:
    row, *waiting = (one for one in measured.times if one.bucket == measured.times[-1].bucket)
    others = f"Without a graph the step takes {_as_long(row.eager, row)}"
    if ALONE in row.ways:
        others += f', transformers\' own under torch.compile(mode="{MODE}") {_as_long(row.ways[ALONE], row)}'
    note = f"{measured.note}." if measured.note else ""
    parts = [_share(row, *waiting), f"{others}.", note, "" if measured.device else NO_DEVICE]
    return Text(" ".join(filter(None, parts)))


def _share(row: StepTimes, *waiting: StepTimes) -> str:
    if row.share.p10 <= 0:
        return f"What the inputs take of a decode step of {row.live} requests is lost in the rounds' differences."
    share = f"The inputs (sizes, route, fill, padding, view) take {row.share.median:.1%} of a decode step"
    alone = "".join(f", {one.share.median:.1%} where the host waits for each" for one in waiting)
    return f"{share} of {row.live} requests{alone}: the whole step, runner(batch), less its graph alone."


def _as_long(way: Spread, row: StepTimes) -> str:
    return f"{way.median / row.whole.median:.2f} times as long"


def _microseconds(spread: Spread) -> str:
    """The median, and half of what lies between the tenth and the ninetieth percentile."""
    digits = 0 if spread.median >= 1000 else 1  # noqa: PLR2004 - four digits are enough
    return f"{spread.median:.{digits}f} ±{(spread.p90 - spread.p10) / 2:.{digits}f}"


def _percent(spread: Spread) -> str:
    return f"{spread.median:.1%} ±{50 * (spread.p90 - spread.p10):.1f}"
