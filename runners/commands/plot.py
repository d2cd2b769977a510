"""The figures of `slotgraph bench` as a drawing; needs matplotlib, which the extra `plot` brings."""

import importlib.util
import pathlib
from collections.abc import Sequence
from typing import Any, Final

from .figures import Figure, grouped

_COLOURS: Final = {"per_slot": "#b7b7b7", "regrouped": "#7f8c9b", "foreach": "#2f6fb5", "fill_alone": "#8fbbe8"}
INSTALL: Final = "pip install 'slotgraph[plot]'"
ENDINGS: Final = (".pdf", ".png", ".svg")


def can_plot() -> bool:
    """Whether matplotlib is here."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(figures: Sequence[Figure], path: pathlib.Path) -> None:
    """Draw host time over live rows, one panel for each number of slots, and one where live sizes change."""
    from matplotlib.figure import Figure as Sheet  # noqa: PLC0415 - optional, and slow to import

    panels = _panels(figures)
    sheet = Sheet(figsize=(3.6 * len(panels), 4.2), layout="constrained")
    axes = sheet.subplots(1, len(panels), squeeze=False)[0]
    for axis, (title, rows) in zip(axes, panels, strict=True):
        _panel(axis, title, rows)
    axes[0].set_ylabel("host microseconds, fill and view")
    sheet.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=4, frameon=False)
    sheet.savefig(path)


def _panels(figures: Sequence[Figure]) -> list[tuple[str, list[Figure]]]:
    counts = sorted({figure.slots for figure in figures})
    steady = [(f"{n} slots", [f for f in figures if f.slots == n and not f.changes]) for n in counts]
    return [*steady, ("live size changes each step", [f for f in figures if f.changes])]


def _panel(axis: Any, title: str, figures: Sequence[Figure]) -> None:
    cases = grouped(figures)
    names = list(dict.fromkeys(figure.lowering for figure in figures))
    width = 0.8 / max(len(names), 1)
    for offset, name in enumerate(names):
        places = [i + width * (offset - (len(names) - 1) / 2) for i in range(len(cases))]
        host = [case[name].host for case in cases.values()]
        spread = [[h.median - h.p10 for h in host], [h.p90 - h.median for h in host]]
        axis.bar(
            places,
            [h.median for h in host],
            width,
            yerr=spread,
            label=name,
            color=_COLOURS.get(name),
            error_kw={"lw": 0.8},
        )
    labels = [f"{live}/{padded}" if low == live else f"{slots} slots" for slots, low, live, padded in cases]
    axis.set_xticks(range(len(cases)), labels)
    axis.set_title(title, fontsize="medium")
    axis.spines[["top", "right"]].set_visible(False)
