"""Explanations and recordings outside of the command line: as plain data, as pages, and replayed."""

from slotgraph import _publish
from slotgraph.dataflow.shown import html
from slotgraph.runners.explained.declared import explain_declaration
from slotgraph.runners.explained.explanation import RunnerExplanation
from slotgraph.runners.recording.records import RecordedFile
from slotgraph.runners.recording.replaying import RecordedRanks, replay_file
from slotgraph.runners.serial import from_data, to_data

# fmt: off
__all__ = [
    "RecordedFile", "RecordedRanks", "RunnerExplanation", "explain_declaration", "from_data", "html", "replay_file",
    "to_data",
]
# fmt: on

_publish(__name__)
