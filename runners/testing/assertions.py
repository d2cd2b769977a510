"""What a test asserts of a captured runner: that padding changes nothing, and that graphs do what the step does."""

from collections.abc import Collection, Iterable
from typing import Any

import torch

from ...dataflow.errors import FailedCheckError
from ...dataflow.sampling import NO_VALUES, Values
from ..check.batches import Batches
from ..check.checks import check
from ..check.report import CheckReport
from ..runner import Runner


def assert_padding_independent(
    runner: Runner[Any],
    batches: Batches | None = None,
    *,
    values: Values = NO_VALUES,
    state: Iterable[torch.Tensor] | None = None,
    rounds: int = 1,
    seed: int = 0,
) -> CheckReport:
    """Replay with poison in every tail: live outputs must be the same, bit for bit, whatever padded rows hold.

    batches: what to check with, or a function of rows and a generator; drawn where nothing is said, by `values`. state:
    tensors that the step changes beside its slots; found where nothing is said. Returns the report.
    Raises FailedCheckError, an AssertionError, which names the slot through which a difference came.
    """
    return _assert(runner, {"poison"}, batches, values, state, rounds, seed)


def assert_parity(
    runner: Runner[Any],
    batches: Batches | None = None,
    *,
    values: Values = NO_VALUES,
    state: Iterable[torch.Tensor] | None = None,
    rounds: int = 1,
    seed: int = 0,
) -> CheckReport:
    """Run batches through the graphs, and by the step as it is written: all buckets, and all captured patterns.

    Arguments as for `assert_padding_independent`. Raises FailedCheckError, an AssertionError, with slot or row.
    """
    return _assert(runner, {"parity"}, batches, values, state, rounds, seed)


def _assert(
    runner: Runner[Any],
    only: Collection[str],
    batches: Batches | None,
    values: Values,
    state: Iterable[torch.Tensor] | None,
    rounds: int,
    seed: int,
) -> CheckReport:
    report = check(runner, batches, state=state, only=only, rounds=rounds, seed=seed, values=values, progress=False)
    if not report.ok:
        raise FailedCheckError(str(report))
    return report
