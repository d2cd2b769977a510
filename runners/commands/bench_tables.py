"""The tables of `slotgraph bench`: fills, whole steps, the device's time, runners, memory; as wide as it can be."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, Literal

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from .figures import FILL, OURS, STEP, Figure, HabitFigure, Key, Memory, Results, RunnerFigure, What, rivals
from .lowerings import BARE, FILL_ALONE, IN_GRAPH, ORACLE, PER_SLOT, REGROUPED
from .timing import Spread

_TITLES: Final[Mapping[What, str]] = {FILL: "fill and view", STEP: "whole step (fill, view and replay)"}
_BROKEN: Final = {
    PER_SLOT: "per\nslot",
    REGROUPED: "re-\ngrouped",
    IN_GRAPH: "in\ngraph",
    FILL_ALONE: "fill\nalone",
    ORACLE: "slot by\nslot",
}
"""Titles over two lines, for narrow terminals."""
_LEGEND: Final = (
    "device: tensors there, four sets take turns; same: one set; new: addresses not seen lately; numpy: arrays; "
    "lists: three lists, else arrays. Rows a-b: the live size changes in each step"
)
_RUNNERS: Final = (
    "Each runner over its standard declaration, against the same fill by hand. Rows are requests, of prefill tokens; "
    "PrefillRunner fills as BreakableRunner does. KiB: what one step copies; where there is much, both wait for memory"
)
_ANY: Final = 1000
"""Columns enough for any table."""

Cases = Mapping[Key, Mapping[str, Figure]]
Width = Literal["wide", "narrow"]


def show(results: Results, console: Console) -> None:
    """Print all tables."""
    for what, title in _TITLES.items():
        made = _host_table(results.grouped(what), results.ours)
        _print(console, f"host microseconds, {title}", "median (p10-p90)", made)
    for what, title in _TITLES.items():
        timed = {key: case for key, case in results.grouped(what).items() if any(one.gpu for one in case.values())}
        if timed:
            made = _device_table(timed, results.ours)
            _print(console, f"device microseconds, {title}", "median ± half of p10-p90", made)
    for line in (f"ours: {results.ours}, which this backend prefers", _LEGEND, *_list_costs(results)):
        console.print(Text(line))
    if results.runners:
        _print(console, "microseconds of each runner, fill and view", "median (p10-p90)", _runners(results.runners))
        console.print(Text(_RUNNERS))
    if results.habits:
        show_habits(results.habits, console)
    if results.memory:
        _print(console, "bytes of a runner", "", _memory_table(results.memory))


def show_habits(found: Sequence[HabitFigure], console: Console) -> None:
    """Print what a whole step takes under each habit, beside its base, by each lowering."""
    lowerings = list(dict.fromkeys(one.lowering for one in found))
    by_habit: dict[str, dict[str, HabitFigure]] = {}
    for one in found:
        by_habit.setdefault(one.habit, {})[one.lowering] = one
    on_device = any(one.gpu for one in found)

    def table(width: Width) -> Table:
        """A row a habit; the device's time where it was measured."""
        each = ["", "/ base", *(["device", "/ base"] * on_device)]
        made = _plain(
            width, ["habit", *(_broken(f"{name} {title}".strip(), width) for name in lowerings for title in each)]
        )
        for habit, figures in by_habit.items():
            cells = [cell for name in lowerings for cell in _habit_cells(figures[name], width, on_device=on_device)]
            made.add_row(habit, *cells)
        return made

    _print(console, "microseconds of a whole step under each habit, and ratio to the base", "median (p10-p90)", table)
    detours = [f"{one.habit} by {one.lowering}: {one.detours}" for one in found if one.detours]
    console.print(Text(f"steps filled by another lowering than the runner's: {', '.join(detours) or 'none'}"))


def _habit_cells(one: HabitFigure, width: Width, *, on_device: bool) -> Iterator[str]:
    yield from (_spread(one.host, width), f"{one.ratio:.2f}")
    if on_device:
        yield from (_spread(one.gpu, width), "-" if one.gpu_ratio is None else f"{one.gpu_ratio:.2f}")


def _print(console: Console, title: str, spread: str, table: Callable[[Width], Table]) -> None:
    """The wide table, whose cells are told by `spread`, where there is room for it; else the narrow one."""
    wide = table("wide")
    is_wide = Measurement.get(console, console.options.update(width=_ANY), wide).maximum <= console.width
    console.print(Text(f"\n{title}" + (f": {spread}" if is_wide and spread else ""), style="bold"))
    console.print(wide if is_wide else table("narrow"))


def _host_table(cases: Cases, ours: str) -> Callable[[Width], Table]:
    every = _contestants(cases)

    def table(width: Width) -> Table:
        """Medians alone, and neither the oracle nor the second ratio, where it is narrow."""
        is_wide = width == "wide"
        names = every if is_wide else [name for name in every if name != ORACLE]
        compared = rivals(names) if is_wide else rivals(names)[:1]
        made = _empty(width, [*names, *(f"{name} / ours" for name in compared)])
        for key, case in cases.items():
            ratios = [_ratio(case.get(name), case.get(ours)) for name in compared]
            made.add_row(*_case(key), *(_host(case.get(name), width) for name in names), *ratios)
        return made

    return table


def _device_table(cases: Cases, ours: str) -> Callable[[Width], Table]:
    """Each contestant's time, and what it takes beyond a bare replay; of ours alone where it is narrow."""
    every = _contestants(cases)
    has_bare = BARE in every

    def table(width: Width) -> Table:
        is_wide = width == "wide"
        names = every if is_wide else [name for name in every if name != ORACLE]
        over = [name for name in every if has_bare and name != BARE and (is_wide or name == ours)]
        made = _empty(width, [*names, *(f"{name} - bare" for name in over)])
        for key, case in cases.items():
            beyond = [_beyond(case.get(name), case.get(BARE)) for name in over]
            made.add_row(*_case(key), *(_device(case.get(name), width) for name in names), *beyond)
        return made

    return table


def _memory_table(memory: Sequence[Memory]) -> Callable[[Width], Table]:
    def table(width: Width) -> Table:
        made = _plain(width, ["slots", "rows", "lowering", "declared", "inputs", "table", "packet", "ring (host)"])
        for one in memory:
            numbers = (one.declared, one.inputs, one.table, one.packet, one.ring)
            made.add_row(str(one.slots), str(one.capacity), one.lowering, *(f"{number:,}" for number in numbers))
        return made

    return table


def _runners(found: Sequence[RunnerFigure]) -> Callable[[Width], Table]:
    """A row a runner; the device's time where it was measured."""
    on_device = any(one.ours_gpu for one in found)

    def table(width: Width) -> Table:
        """Classes' names only where it is wide."""
        is_wide = width == "wide"
        times = [PER_SLOT, OURS, f"{PER_SLOT} / {OURS}", *([f"{PER_SLOT} device", f"{OURS} device"] * on_device)]
        titles = ["step", *(["runner", "declaration"] * is_wide), "rows", "slots", "KiB"]
        made = _plain(width, [*titles, *(_broken(title, width) for title in times)])
        for one in found:
            named = [one.phase, *([one.runner, one.declaration] * is_wide)]
            sized = [one.rows, str(one.slots), f"{one.nbytes / 1024:,.0f}"]
            host = [_spread(one.per_slot, width), _spread(one.ours, width), f"{one.ratio:.1f} x"]
            gpu = [_spread(spread, width) for spread in (one.per_slot_gpu, one.ours_gpu) if on_device]
            made.add_row(*named, *sized, *host, *gpu)
        return made

    return table


def _list_costs(results: Results) -> Iterator[str]:
    """What a list's numbers cost beside an array's, by the preferred lowering."""
    for one in results.integers():
        if one.lowering == results.ours:
            yield (
                f"{one.slots} slots, {one.live} rows: {one.integers} integers in lists take {one.ns_each:.0f} ns each "
                f"more than in arrays ({one.lowering})"
            )


def _contestants(cases: Cases) -> list[str]:
    """All names, a bare replay last."""
    names = list(dict.fromkeys(name for case in cases.values() for name in case))
    return sorted(names, key=lambda name: name == BARE)


def _empty(width: Width, titles: Sequence[str]) -> Table:
    return _plain(width, ["slots", "rows", "sources", *(_broken(title, width) for title in titles)])


def _broken(title: str, width: Width) -> str:
    """A title over several lines: all but a name, and where it is narrow the name too."""
    name, space, rest = title.partition(" ")
    return (_BROKEN.get(name, name) if width == "narrow" else name) + space.replace(" ", "\n") + rest


def _plain(width: Width, titles: Sequence[str]) -> Table:
    padding = (0, 1) if width == "wide" else (0, 0)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, padding=padding)
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    return table


def _case(key: Key) -> tuple[str, str, str]:
    return str(key.slots), key.rows, key.sources


def _host(figure: Figure | None, width: Width) -> str:
    return _spread(None if figure is None else figure.host, width)


def _spread(time: Spread | None, width: Width) -> str:
    if time is None:
        return "-"
    return f"{_short(time.median)} ({_short(time.p10)}-{_short(time.p90)})" if width == "wide" else _short(time.median)


def _device(figure: Figure | None, width: Width) -> str:
    if figure is None or figure.gpu is None:
        return "-"
    gpu = figure.gpu
    return f"{_short(gpu.median)} ±{(gpu.p90 - gpu.p10) / 2:.1f}" if width == "wide" else _short(gpu.median)


def _beyond(figure: Figure | None, bare: Figure | None) -> str:
    if figure is None or bare is None or figure.gpu is None or bare.gpu is None:
        return "-"
    return f"{figure.gpu.median - bare.gpu.median:+.1f}"


def _ratio(one: Figure | None, ours: Figure | None) -> str:
    return "-" if one is None or ours is None else f"{one.host.median / ours.host.median:.1f} x"


def _short(microseconds: float) -> str:
    """Four digits are enough."""
    return f"{microseconds:.1f}" if microseconds < 999.95 else f"{microseconds:.0f}"  # noqa: PLR2004 - as said above
