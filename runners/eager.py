"""The eager runner: the same declaration, never padded, with buffers that grow on demand."""

from typing import Final, Unpack, final

from ..dataflow import environment
from ..dataflow.axes import BATCH, TOKENS
from ..dataflow.inputs import V
from ..dataflow.sizing import Sizer
from .decode import StageArguments
from .engine.config import config_of
from .engine.graphs import ReadBatch
from .engine.outputs import Out
from .engine.routes import EagerRoutes, Route
from .engine.runner import Runner
from .engine.stage import Stage, StepFunction
from .engine.statistics import Decision
from .ranks.agreement import coordinator_of

_ALWAYS: Final = Decision("eager", None, "always_eager", "an eager runner captures nothing")


class EagerArguments(StageArguments, total=False):
    """The arguments of an eager runner besides its declaration and its step."""

    no_copy: bool | None


@final
class EagerRunner(Runner[V, Out]):
    """Runs a step on unpadded views of a declaration.

    Buffers grow to the next power of two on each axis when a batch needs more. With `no_copy` nothing is copied: the
    step sees the batch's own tensors, which are checked as usual. Nothing is allocated before the first batch.

    Args:
        inputs: The declaration class.
        step: Called with its view, or with the slots and fields that its parameters name.
        sizes: Sizes of the fixed axes.
        settings: What `when=` of slots refers to.
        ranks: The processes that run each step together, and exchange their sizes.
        config: Its options; keywords beside it win. Options that this runner does not use are ignored.
        backend: A backend or its name.
        options: `no_copy`, as `RunnerConfig` describes it.

    Raises:
        ConfigError: An argument does not fit.
    """

    def __init__(self, inputs: type[V], step: StepFunction[V, Out], **options: Unpack[EagerArguments]) -> None:
        config = config_of(type(self), options)
        stage = Stage.of(inputs, step, **options)
        declaration = stage.declaration
        name = type(self).__name__
        varying = stage.declaration.varying
        no_copy = bool(environment.switch_of(environment.NO_COPY)) if config.no_copy is None else config.no_copy
        # count rows of requests if there are any, else of tokens, else of the first varying axis
        lead = next((axis for axis in (BATCH, TOKENS, *varying) if axis in varying), None)
        size = Sizer(declaration, stage.relations, stage.sizes, lead)
        coordinator = coordinator_of(declaration, name, config, {}, (), *([] if lead is None else [lead]))
        super().__init__(config, stage, size, coordinator, capacity=stage.sizes)
        self.eager = EagerRoutes(stage, name, self._table, no_copy=no_copy)

    @property
    def nbytes(self) -> int:
        """The bytes of the buffers at their present capacity."""
        return self.stats()["memory"]["inputs"]

    def _route(self, call: ReadBatch) -> Route[V]:
        decision = _ALWAYS
        if not self.coordinator.alone:

            def admit() -> None:
                self.eager.route(call, _ALWAYS, self.tally).filling.bucket.admit(call.sources, call.live)

            decision = self.coordinator.agree(_ALWAYS, call.live, admit)
        return self.eager.route(call, decision, self.tally)

    def _decide(self, call: ReadBatch) -> Decision:
        del call
        return _ALWAYS
