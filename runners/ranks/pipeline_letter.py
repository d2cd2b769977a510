"""Letters: what stages of a pipeline tell each other beside tensors, so that none waits for what nobody sends."""

import json
from collections.abc import Mapping
from typing import Final

import attrs
import torch

from ...dataflow.capabilities import dtype_from_text, dtype_text
from ...dataflow.errors import ConfigError, RankError

NBYTES: Final = 2048
"""Bytes of every letter: its reader must know how many."""
TEXT: Final = 1000
"""Characters of an error that are told, at most."""


@attrs.frozen
class Spec:
    """What a tensor is, beside its values: its dtype, the type of its device, its shape."""

    dtype: torch.dtype
    place: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Spec":
        """That of a tensor."""
        return cls(tensor.dtype, tensor.device.type, tuple(tensor.shape))

    def empty(self, device: torch.device) -> torch.Tensor:
        """Memory for such a tensor on the host, or on a device."""
        with torch.inference_mode(mode=False):
            return torch.empty(self.shape, dtype=self.dtype, device="cpu" if self.place == "cpu" else device)

    def stand_in(self) -> torch.Tensor:
        """Such a tensor, without any memory, for whoever asks for shapes alone."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")

    def __str__(self) -> str:
        """In words."""
        return f"{dtype_text(self.dtype)} {list(self.shape)} on {self.place}"


@attrs.frozen
class Letter:
    """What one stage tells another of a step.

    step: its number, from 1. specs: the tensors that follow, by key, in their order. error: why there are none; to the
    stage before, why it was wrong to send them. Empty where all is well.
    """

    step: int
    specs: Mapping[str, Spec] = attrs.field(factory=dict)
    error: str = ""

    def tensor(self) -> torch.Tensor:
        """NBYTES bytes. ConfigError where there is too much to tell."""
        specs = [[key, dtype_text(one.dtype), one.place, one.shape] for key, one in self.specs.items()]
        raw = json.dumps([self.step, specs, self.error[:TEXT]], ensure_ascii=False).encode(errors="replace")
        if len(raw) > NBYTES and self.error:
            return attrs.evolve(self, error=self.error[: TEXT // 8]).tensor()
        if len(raw) > NBYTES:
            message = f"{len(self.specs)} proxies have too many or too long keys: they are told in {NBYTES} bytes"
            raise ConfigError(message)
        with torch.inference_mode(mode=False):
            return torch.frombuffer(bytearray(raw.ljust(NBYTES)), dtype=torch.uint8)

    @classmethod
    def blank(cls) -> torch.Tensor:
        """Memory that a letter is received into."""
        with torch.inference_mode(mode=False):
            return torch.empty(NBYTES, dtype=torch.uint8, device="cpu")

    @classmethod
    def read(cls, tensor: torch.Tensor) -> "Letter":
        """What `tensor` wrote."""
        step, specs, error = json.loads(tensor.numpy().tobytes())
        found = {key: Spec(dtype_from_text(dtype), place, tuple(shape)) for key, dtype, place, shape in specs}
        return cls(step, found, error)


def told(error: BaseException) -> str:
    """An error in words, for another rank: with its kind, unless it is of ranks anyway."""
    return str(error) if isinstance(error, RankError) else f"{type(error).__name__}: {error}"
