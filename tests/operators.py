"""What runs of torch within a block."""

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Operators(TorchDispatchMode):
    """Lists the operators that run, by name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: D105
        del types
        self.names.append(func.overloadpacket._qualified_op_name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))
