"""The mode runner: runners of one declaration over one set of buffers, of which each batch takes one."""

from collections.abc import Callable, Mapping
from typing import Any, Final, Generic, final

import attrs

from ..dataflow.axes import Axis
from ..dataflow.buffers import NOT_BOUND, Bound
from ..dataflow.errors import BatchError, CaptureError, ConfigError, place_of
from ..dataflow.inputs import V
from ..dataflow.sources import Side
from .decode import CapturingRunner
from .engine.config import checked, checked_keys, refuse
from .engine.current import StepLock, Unique, opaque
from .engine.outputs import Out
from .engine.stage import Stage
from .engine.statistics import CaptureReport, Decision, Statistics

When = Callable[[Any], bool]
ANY_BATCH: Final[Mapping[str, When]] = {}


@final
@opaque
class ModeRunner(Unique, Generic[V, Out]):
    """Runs each batch by the first mode that has a graph for it. All modes have one set of buffers.

    A batch goes through the modes in order. A mode takes it if its `when` is true, or has none, and one of its graphs
    holds the batch. If none does, the batch runs eagerly by the last mode whose `when` is true. Usually the first mode
    captures whole steps, for uniform decode, and the last captures pieces, for everything else.

    Args:
        modes: Runners that capture graphs, by name, which captured nothing yet. They have one declaration, with the
            same settings, and one device. With ranks, all of them get the same batches.
        when: By mode, a function of the batch that says whether the batch may have it.
        bind: Tensors to adopt as buffers, by slot: see `DecodeRunner`.
        keep_bound: Keep the contents of adopted tensors, in place of each slot's initial value.

    Attributes:
        modes: The runners, which now use the common buffers. Each may be used by itself, too:
            `runner.modes["decode"].steps(batch)`.

    Raises:
        ConfigError: An argument does not fit.
        BindError: A tensor cannot be adopted.
    """

    def __init__(
        self,
        modes: Mapping[str, CapturingRunner[V, Out]],
        when: Mapping[str, When] = ANY_BATCH,
        *,
        bind: Mapping[str, Bound] = NOT_BOUND,
        keep_bound: bool = False,
    ) -> None:
        expected = "a mapping of names to runners, such as {'decode': DecodeRunner(...)}"
        self.modes: dict[str, CapturingRunner[V, Out]] = checked_keys("modes", expected, modes, str)
        self._when: dict[str, When] = checked_keys("when", "a mapping of modes to functions of the batch", when, str)
        for name, function in self._when.items():
            if name not in self.modes:
                raise ConfigError(f"when names {name!r}, which is none of the modes: {', '.join(self.modes)}")
            if not callable(function):
                refuse(f"when of mode {name!r}", "a function of the batch", function)
        first = next(iter(self.modes.values()), None)
        if first is None:
            raise ConfigError("modes= is empty: give at least one runner")
        capacity = dict[Axis, int]()
        step_lock = StepLock(type(self).__name__)
        for mode, runner in self.modes.items():
            checked(f"mode {mode!r}", "a runner that captures graphs", runner, CapturingRunner)
            own, other = [_kind(one.stage) for one in (runner, first)]
            reasons = {
                "its declaration, settings, sizes of fixed axes or device are not the first mode's": own != other,
                "it shares memory in a pool: leave out phase=": runner.phase is not None,
                "its ranks have batches of their own, which may have other modes": not runner.coordinator.quiet,
                "it is captured already: capture the modes together": runner.report is not None,
                "another mode has the same runner: make one for each": [*self.modes.values()].count(runner) > 1,
                "it has tensors of yours: give bind= to ModeRunner": any(one.adopted for one in runner.graphs.buffers),
            }
            for reason in (reason for reason, holds in reasons.items() if holds):
                raise ConfigError(f"mode {mode!r}: {reason}")
            for sizes in runner.sizes.values():
                capacity |= {axis: max(size, capacity.get(axis, 0)) for axis, size in sizes.items()}
            runner.step_lock = step_lock  # one step at a time, since all modes use the same memory
        buffers = first.stage.allocate(capacity, bind, keep_bound=keep_bound)
        for runner in self.modes.values():
            runner.use(buffers)
        self._filled = first

    def __repr__(self) -> str:
        """Return one line."""
        return f"<ModeRunner of {self.modes}>"

    def decide(self, batch: Any, **side: Any) -> Decision:
        """Return the path that a batch would take, its mode, its bucket, and why. Nothing is run.

        Raises:
            BatchError: No source has a size, or sources differ in it, or the batch has no mode.
            ReplayError: Nothing is captured yet.
        """
        mode, reasons = self._choose(batch, side)
        return attrs.evolve(self.modes[mode].decide(batch, **side), mode=mode, reason="; ".join(reasons))

    def _choose(self, batch: Any, side: Side) -> tuple[str, list[str]]:
        """Return the mode of a batch, and why it has this one and none before it."""
        chosen = ""
        reasons = list[str]()
        for mode, runner in self.modes.items():
            if not self._may_take(mode, batch):
                reasons.append(f"{mode}: its when= is not true")
                continue
            chosen = mode
            decision, _ = runner.decide_alone(batch, side)
            reasons.append(f"{mode}: {decision.reason}")
            if decision.bucket is not None:
                break
        if not chosen:
            raise BatchError("this batch has no mode: the last mode, which runs batches eagerly, needs no when=")
        return chosen, reasons

    def _may_take(self, mode: str, batch: Any) -> bool:
        """Return whether a mode's `when` is true, or it has none. Raise BatchError for what the function raises."""
        try:
            return mode not in self._when or bool(self._when[mode](batch))
        except Exception as error:
            raise BatchError(
                f"mode {mode!r}: its when= raised {type(error).__name__}{place_of(error)}: {error}"
            ) from error

    def __call__(self, batch: Any, **side: Any) -> Out:
        """Run one step by the batch's mode, and return its outputs as that mode's runner does.

        Raises:
            BatchError: The batch does not fit its declaration, or has no mode. Nothing was written.
            ReplayError: Nothing is captured yet, or a mode is in the middle of a step.
        """
        mode, _ = self._choose(batch, side)
        return self.modes[mode](batch, **side)

    def fill(self, batch: Any, **side: Any) -> V:
        """Fill the inputs from a batch and return the view that its mode's step sees, valid until the next fill.

        Raises:
            BatchError: The batch does not fit its declaration, or has no mode. Nothing was written.
            ReplayError: Nothing is captured yet, or a mode is in the middle of a step.
        """
        mode, _ = self._choose(batch, side)
        view = self.modes[mode].fill(batch, **side)
        self._filled = self.modes[mode]
        return view

    def replay(self, view: V) -> Out:
        """Run the step on the view that was filled last, and return its outputs for the live rows.

        Raises:
            ReplayError: It is not that view, or a mode is in the middle of a step.
        """
        return self._filled.replay(view)

    def capture(self) -> Mapping[str, CaptureReport | None]:
        """Capture each mode, and return the reports by mode.

        Raises:
            CaptureError: Buckets of a mode failed, or it is captured already. The other modes are captured.
        """
        failed: CaptureError | None = None
        for runner in self.modes.values():
            try:
                runner.capture()
            except CaptureError as error:
                failed = failed or error
        if failed is not None:
            raise failed
        return self.report

    @property
    def report(self) -> Mapping[str, CaptureReport | None]:
        """The buckets, times and memory of the captures by mode, or None before them."""
        return {name: runner.report for name, runner in self.modes.items()}

    def stats(self) -> dict[str, Statistics]:
        """Return the statistics by mode. The bytes of the inputs count in the first mode only, so that all add up."""
        found = {mode: runner.stats() for mode, runner in self.modes.items()}
        _, *others = found.values()
        for one in others:
            one["memory"]["total"] -= one["memory"]["inputs"]
            one["memory"]["inputs"] = 0
        return found


def _kind(stage: Stage[Any]) -> tuple[object, ...]:
    """Return what the stages of all modes have in common."""
    fixed = {axis: size for axis, size in stage.sizes.items() if axis.fixed}
    return stage.declaration.slots, fixed, stage.backend.device
