"""The drawing: a host row and a device row for each way, all on one axis of time; needs matplotlib."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from spans.record import Bar, Kind, Recording

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK: Final = "#7a7a7a"
"""Lines and letters: as far from a white page as from a dark one. The page shows through."""
COLOURS: Final[Mapping[Kind, str]] = {"call": "#3f86c8", "inputs": "#dd7a2f", "step": "#2f9e83"}
MEANINGS: Final[Mapping[Kind, str]] = {
    "call": "host: one call a step",
    "inputs": "device: inputs",
    "step": "device: the captured step",
}
ROWS: Final[Mapping[Kind, int]] = {"call": 1, "inputs": 0, "step": 0}
_HIGH: Final = 0.7
_STYLE: Final[dict[Any, Any]] = {
    "svg.fonttype": "none",  # letters stay letters: smaller, and they can be searched and read aloud
    "svg.hashsalt": "slotgraph",
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "axes.titlecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}


def draw(recordings: Sequence[Recording], path: pathlib.Path, title: str, note: str) -> None:
    """Write the drawing as SVG."""
    import matplotlib as mpl  # noqa: PLC0415 - optional, and slow to import
    from matplotlib.figure import Figure  # noqa: PLC0415 - likewise
    from matplotlib.patches import Patch  # noqa: PLC0415 - likewise

    with mpl.rc_context(_STYLE):
        sheet = Figure(figsize=(9, 1.3 + 1.2 * len(recordings)), layout="constrained")
        panels = sheet.subplots(len(recordings), 1, sharex=True, squeeze=False)[:, 0]
        for panel, recording in zip(panels, recordings, strict=True):
            _panel(panel, recording)
        last = max(bar.stop for recording in recordings for bar in recording.bars)
        panels[0].set_xlim(-0.01 * last, 1.01 * last)
        panels[-1].set_xlabel(f"microseconds since the first call  ({note})")
        sheet.suptitle(title, fontsize="large")
        handles = [Patch(color=COLOURS[kind], label=meaning) for kind, meaning in MEANINGS.items()]
        sheet.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
        about: dict[str, Any] = {"Title": title, "Date": None, "Creator": None}
        sheet.savefig(path, format="svg", transparent=True, metadata=about)


def _panel(panel: "Axes", recording: Recording) -> None:
    """One way: its host row above its device row."""
    panel.set_title(recording.name, loc="left", fontsize="medium")
    for kind, row in ROWS.items():
        bars = [bar for bar in recording.bars if bar.kind == kind]
        spans = [(bar.start, bar.stop - bar.start) for bar in bars]
        if spans:
            panel.broken_barh(spans, (row - _HIGH / 2, _HIGH), facecolors=COLOURS[kind], linewidth=0)
        if kind == "call":
            _number(panel, bars)
    if all(bar.kind == "call" for bar in recording.bars):
        panel.text(0, 0, "the host is the device", va="center", style="italic")
    panel.set_ylim(-0.5, 1.5)
    panel.set_yticks([1, 0], ["host", "device"])
    panel.tick_params(axis="y", length=0)
    panel.spines[["top", "right", "left"]].set_visible(False)


def _number(panel: "Axes", calls: Sequence[Bar]) -> None:
    """Count the steps within their calls."""
    for number, call in enumerate(calls, start=1):
        panel.text((call.start + call.stop) / 2, 1, str(number), ha="center", va="center", color="white")
