"""The stack: the part of a model that is captured, the rest of which runs eagerly around it."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Final

import attrs
from torch import nn

from ...dataflow.errors import ConfigError

OFFER: Final = "layer_stack"


@attrs.frozen(eq=False)
class Stack:
    """A module inside a step, and how it was named."""

    module: nn.Module
    name: str

    @contextlib.contextmanager
    def answered(self, answer: Callable[..., Any]) -> Iterator[None]:
        """While a step runs: what its call of the module gets to do instead."""
        before = self.module.__dict__.get("forward")
        self.module.__dict__["forward"] = answer
        try:
            yield
        finally:
            if before is None:
                del self.module.__dict__["forward"]
            else:
                self.module.__dict__["forward"] = before


def find_stack(step: Callable[..., Any], stack: nn.Module | str | None) -> Stack | None:
    """The module that was given, the one at a dotted path under the step, or the one that the step offers; else None.

    Raises ConfigError where a path leads nowhere or to no module; it says how far it leads and what is there.
    """
    if isinstance(stack, nn.Module):
        return Stack(stack, type(stack).__name__)
    if isinstance(stack, str):
        return Stack(_followed(step, stack), stack)
    if stack is not None:
        message = f"stack is a module, or a dotted path to one under the step, not {type(stack).__name__}"
        raise ConfigError(message)
    offer = getattr(step, OFFER, None)
    if offer is None:
        return None
    offered = offer()
    if not isinstance(offered, nn.Module):
        message = f"{type(step).__name__}.{OFFER}() returned {type(offered).__name__}, no module"
        raise ConfigError(message)
    return Stack(offered, f"{type(step).__name__}.{OFFER}()")


def required_stack(step: Callable[..., Any], stack: nn.Module | str | None) -> Stack:
    """The same where there must be one. ConfigError, with all that was looked for."""
    found = find_stack(step, stack)
    if found is None:
        kind = getattr(step, "__qualname__", type(step).__name__)
        message = (
            f"there is no stack to capture: stack= is not given, neither a module nor a dotted path to one, and {kind} "
            f"offers no method {OFFER}(); name the model's inner layers, as in stack='model' or stack=model.layers"
        )
        raise ConfigError(message)
    return found


def _followed(step: Callable[..., Any], path: str) -> nn.Module:
    holder: Any = step
    walked: list[str] = []
    for part in path.split("."):
        inner = getattr(holder, part, None)
        if inner is None:
            where = ".".join(walked) or getattr(step, "__qualname__", type(step).__name__)
            message = f"stack={path!r} leads nowhere: {where} has no {part!r}; modules there: {_modules_of(holder)}"
            raise ConfigError(message)
        holder = inner
        walked.append(part)
    if not isinstance(holder, nn.Module):
        message = f"stack={path!r} leads to {type(holder).__name__}, which is no module"
        raise ConfigError(message)
    return holder


def _modules_of(holder: Any) -> str:
    named = dict(holder.named_children()) if isinstance(holder, nn.Module) else {}
    own = {name: value for name, value in getattr(holder, "__dict__", {}).items() if isinstance(value, nn.Module)}
    return ", ".join(map(repr, {**named, **own})) or "none"
