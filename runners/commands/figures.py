"""What `slotgraph bench` found: rows of figures, as JSON and as tables with ratios."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import attrs
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from .timing import Spread

Figures = Mapping[tuple[Any, ...], Mapping[str, "Figure"]]
OURS: Final = "foreach"


@attrs.frozen
class Figure:
    """One measurement: `live` of `padded` rows; `lowest` is below `live` where the live size changed in each step."""

    slots: int
    lowest: int
    live: int
    padded: int
    lowering: str
    host: Spread
    gpu_us: float | None

    @property
    def changes(self) -> bool:
        """Whether the live size changed in each step."""
        return self.lowest != self.live

    def as_row(self) -> dict[str, Any]:
        """The row that goes into JSON."""
        live = {"lowest": self.lowest, "highest": self.live} if self.changes else {"live": self.live}
        host = {"host_us": self.host.median, "p10_us": self.host.p10, "p90_us": self.host.p90}
        figures = {name: round(value, 3) for name, value in host.items()}
        return {
            "slots": self.slots,
            **live,
            "padded": self.padded,
            "lowering": self.lowering,
            **figures,
            "gpu_us": self.gpu_us,
        }


def as_data(figures: Sequence[Figure], conditions: Mapping[str, Any]) -> dict[str, Any]:
    """Everything as plain data: `rows` of steady live sizes, `changing` ones, and the conditions of the run."""
    rows = [figure.as_row() for figure in figures if not figure.changes]
    changing = [figure.as_row() for figure in figures if figure.changes]
    return {"rows": rows, "changing": changing, "conditions": dict(conditions)}


def as_tables(figures: Sequence[Figure], *, spread: bool) -> RenderableType:
    """The tables: the same live size in each step, then one that changes; the device's time where it was measured.

    spread: whether percentiles stand beside medians, which takes some 130 columns.
    """
    return Group(*_parts(figures, spread=spread))


def _parts(figures: Sequence[Figure], *, spread: bool) -> Iterator[RenderableType]:
    steady = grouped([figure for figure in figures if not figure.changes])
    changing = grouped([figure for figure in figures if figure.changes])
    what = "median (p10 to p90)" if spread else "median"
    yield Text(f"host microseconds for fill and view: {what}", style="bold")
    yield _table(steady, spread=spread)
    if changing:
        yield Text("the same in the largest bucket, where the live size changes in each step", style="bold")
        yield _table(changing, spread=spread)
    if any(figure.gpu_us is not None for figure in figures):
        yield Text("device microseconds", style="bold")
        yield _device_table(steady)


def grouped(figures: Sequence[Figure]) -> Figures:
    """Figures of one case together: by slots, lowest and highest live rows, and padded rows; then by lowering."""
    found: dict[tuple[Any, ...], dict[str, Figure]] = {}
    for figure in figures:
        key = (figure.slots, figure.lowest, figure.live, figure.padded)
        found.setdefault(key, {})[figure.lowering] = figure
    return found


def _columns(figures: Figures) -> list[str]:
    return list(dict.fromkeys(name for case in figures.values() for name in case))


def _table(figures: Figures, *, spread: bool) -> Table:
    names = _columns(figures)
    rivals = [name for name in names if name.startswith(("per_", "regrouped"))]
    table = _empty([*names, *(f"{name}\n/ {OURS}" for name in rivals)])
    for key, case in figures.items():
        cells = [_cell(case[name].host, spread=spread) for name in names]
        ratios = [f"{case[name].host.median / case[OURS].host.median:.1f} x" for name in rivals]
        table.add_row(*_case(key), *cells, *ratios)
    return table


def _device_table(figures: Figures) -> Table:
    names = _columns(figures)
    table = _empty(names)
    for key, case in figures.items():
        times = [case[name].gpu_us for name in names]
        table.add_row(*_case(key), *("-" if time is None else f"{time:.1f}" for time in times))
    return table


def _empty(titles: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for title in ("slots", "rows", *titles):
        table.add_column(title, justify="right", no_wrap=True)
    return table


def _case(key: tuple[Any, ...]) -> tuple[str, str]:
    slots, lowest, live, padded = key
    return str(slots), f"{live}/{padded}" if lowest == live else f"{lowest}-{live}"


def _cell(host: Spread, *, spread: bool) -> str:
    return f"{host.median:.1f} ({host.p10:.1f} to {host.p90:.1f})" if spread else f"{host.median:.1f}"
