"""The figures of `slotgraph bench` as a drawing; needs matplotlib, which the extra `plot` brings."""

import importlib.util
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import attrs

from .figures import FILL, OURS, STEP, Figure, Key, Results, RunnerFigure, What
from .lowerings import PER_SLOT
from .timing import Spread

_COLOURS: Final = {
    "per_slot": "#b7b7b7",
    "regrouped": "#7f8c9b",
    "in_graph": "#0b3c6f",
    "fused": "#2f6fb5",
    "foreach": "#6fa8dc",
    "fill_alone": "#b8d4f0",
    "bare": "#e0a458",
}
"""Also the order of bars. What has no colour is not drawn: the oracle would dwarf all else."""
_OURS: Final = "#2a9d8f"
"""Of a runner, whatever its lowering."""
INSTALL: Final = "pip install 'slotgraph[plot]'"
ENDINGS: Final = (".pdf", ".png", ".svg")

Cases = Mapping[Key, Mapping[str, Figure]]


def can_plot() -> bool:
    """Whether matplotlib is here."""
    return importlib.util.find_spec("matplotlib") is not None


@attrs.frozen
class _Strip:
    """A row of panels: one time of one way to run, over all cases."""

    label: str
    what: What
    time: Callable[[Figure], Spread | None]


_STRIPS: Final = (
    _Strip("host us, fill and view", FILL, lambda figure: figure.host),
    _Strip("host us, whole step", STEP, lambda figure: figure.host),
    _Strip("device us, whole step", STEP, lambda figure: figure.gpu),
)


def draw(results: Results, path: pathlib.Path) -> None:
    """Draw times over cases: a column of panels for each number of slots, the device's below where it was measured.

    The last row of panels is one for all runners.
    """
    from matplotlib.figure import Figure as Sheet  # noqa: PLC0415 - optional, and slow to import

    counts = sorted({figure.slots for figure in results.figures})
    strips = [one for one in _STRIPS if any(one.what == f.what and one.time(f) for f in results.figures)]
    widths = [sum(key.slots == count for key in results.grouped(STEP)) for count in counts]
    below = int(bool(results.runners))
    sheet = Sheet(figsize=(1.5 + 0.85 * sum(widths), 1 + 3.2 * (len(strips) + below)), layout="constrained")
    rows = sheet.add_gridspec(1 + below, 1, height_ratios=[len(strips), 1][: 1 + below])
    panels = rows[0].subgridspec(len(strips), len(counts), width_ratios=widths).subplots(squeeze=False)
    for strip, row in zip(strips, panels, strict=True):
        cases = results.grouped(strip.what)
        for count, panel in zip(counts, row, strict=True):
            _panel(panel, strip, {key: case for key, case in cases.items() if key.slots == count})
        row[0].set_ylabel(strip.label)
    for count, panel in zip(counts, panels[0], strict=True):
        panel.set_title(f"{count} slots", fontsize="medium")
    if below:
        _runner_panel(sheet.add_subplot(rows[1]), results.runners)
    handles = {
        label: bar for panel in sheet.axes for bar, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    sheet.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=len(handles), frameon=False)
    sheet.savefig(path)


def _panel(panel: Any, strip: _Strip, cases: Cases) -> None:
    """Bars of every contestant beside one another, case by case."""
    times = {
        name: [_time(strip, case.get(name)) for case in cases.values()]
        for name in _COLOURS
        if any(name in case for case in cases.values())
    }
    _bars(panel, times)
    _label(panel, [key.rows if key.sources == "device" else f"{key.rows}\n{key.sources}" for key in cases])


def _runner_panel(panel: Any, runners: Sequence[RunnerFigure]) -> None:
    """The same for runners."""
    times: dict[str, Sequence[Spread | None]] = {
        PER_SLOT: [one.per_slot for one in runners],
        OURS: [one.ours for one in runners],
    }
    _bars(panel, times)
    _label(panel, [f"{one.phase}\n{one.rows}" for one in runners])
    panel.set_ylabel("host us, fill and view")
    panel.set_title("each runner", fontsize="medium")


def _bars(panel: Any, times: Mapping[str, Sequence[Spread | None]]) -> None:
    """Bars by name, one a place, from the tenth to the ninetieth percentile; a gap where there is none."""
    width = 0.85 / max(len(times), 1)
    for offset, (name, row) in enumerate(times.items()):
        timed = [(place, time) for place, time in enumerate(row) if time is not None]
        panel.bar(
            [place + width * (offset - (len(times) - 1) / 2) for place, _ in timed],
            [time.median for _, time in timed],
            width,
            yerr=[[time.median - time.p10 for _, time in timed], [time.p90 - time.median for _, time in timed]],
            label=name,
            color=_COLOURS.get(name, _OURS),
            error_kw={"lw": 0.6},
        )
    medians = [time.median for row in times.values() for time in row if time is not None]
    panel.set_ylim(0, 1.15 * max(medians, default=1.0))  # a machine's noise may reach far beyond: it is cut off


def _label(panel: Any, labels: Sequence[str]) -> None:
    panel.set_xticks(range(len(labels)), labels, fontsize="x-small", rotation=45)
    panel.spines[["top", "right"]].set_visible(False)


def _time(strip: _Strip, figure: Figure | None) -> Spread | None:
    return None if figure is None else strip.time(figure)
