"""Collectives of torch.distributed in a recorded step: what they write, and how they are done again."""

from collections.abc import Callable, Mapping
from typing import Any, Final

from .refusals import refuse

_NAMESPACE: Final = "c10d"
_FUNCTIONAL: Final = "_c10d_functional"


def is_collective(operator: Any) -> bool:
    """Whether an operator is one, whose schema does not say that it writes the tensors it is given.

    CaptureError for a functional one, whose results are memory that torch.distributed hands out anew each time.
    """
    namespace = operator.namespace
    if namespace == _FUNCTIONAL:
        refuse(
            f"{operator.name()}, a functional collective",
            "its result has no fixed address: use the one of torch.distributed that writes into a tensor of yours",
        )
    return bool(namespace == _NAMESPACE)


def again(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callable[[], None]:
    """The call that does a collective again, and waits for it as the step's own `wait` did."""
    from torch.distributed.distributed_c10d import Work  # noqa: PLC0415 - some builds of torch have none of it

    unbox: Any = Work.unbox

    def call() -> None:
        result = operator(*args, **kwargs)
        unbox(result[-1] if isinstance(result, tuple | list) else result).wait()

    return call
