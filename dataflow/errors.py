"""Everything that slotgraph raises, in one place."""

from collections.abc import Sequence


class SlotGraphError(Exception):
    """Base of every error of this library, so that one except clause can hold them all."""


class DeclarationError(SlotGraphError, TypeError):
    """A declaration breaks a rule: the message names the slot, what was expected and the way out."""


class DeclarationErrors(ExceptionGroup[DeclarationError], SlotGraphError):  # noqa: N818 - the plural says it
    """All faults of one declaration together."""

    def derive(self, excs: Sequence[DeclarationError]) -> "DeclarationErrors":  # type: ignore[override]
        """A part of the group, as `except*` asks for it."""
        return DeclarationErrors(self.message, excs)


class CycleError(DeclarationError):
    """Slots need each other in a circle: the message shows the path."""


class BatchError(SlotGraphError, ValueError):
    """A batch does not fit its declaration; nothing was written."""


class MissingSourceError(BatchError, LookupError):
    """A required source is not in the batch."""


class BindError(SlotGraphError, ValueError):
    """A tensor cannot be adopted as a slot's buffer."""


class ComputeError(SlotGraphError, RuntimeError):
    """A slot's function raised, or returned what its slot cannot hold."""


class BackendUnavailableError(SlotGraphError, RuntimeError):
    """A backend cannot run here: the message says why and what to install."""


class CaptureError(SlotGraphError, RuntimeError):
    """A graph could not be captured."""


class ReplayError(SlotGraphError, RuntimeError):
    """A graph cannot be replayed now: not captured yet, forked, or its addresses moved."""


class StaleOutputError(SlotGraphError, RuntimeError):
    """An output was used after the replay that overwrote it."""


class CheckError(SlotGraphError, RuntimeError):
    """A check found a wrong step: the message names the slot, or what else the step depends on."""


class FailedCheckError(CheckError, AssertionError):
    """A check found a wrong step, where a test asserted that there is none."""


class WrongBytesError(SlotGraphError, AssertionError):
    """A fill left other bytes than the oracle, or a step returned others: the message names the slot and the row."""


class RegressionError(SlotGraphError, AssertionError):
    """A fill or a step takes longer than was allowed, held against the one by hand of the same run."""


class ConfigError(SlotGraphError, ValueError):
    """A configuration has an unknown key or a value of the wrong kind."""


class RecordingError(SlotGraphError, ValueError):
    """A recorded file cannot be read or written, or is of another runner."""


class LayoutError(SlotGraphError, RuntimeError):
    """A layout of shared memory breaks a promise: the message names the slots that would meet."""


class RankError(SlotGraphError, RuntimeError):
    """Ranks that run their steps together do not: one refused its batch, is elsewhere, or did not come; it is named."""
