"""Packed values: what the host computes for slots on the device, as bytes that ride in the step's one upload."""

import ctypes
import struct
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch

from .computation import Computation
from .errors import blame
from .hostdata import letter_of
from .lanes import WORD, rounded


@attrs.frozen(eq=False)
class PackedValue:
    """A computation whose result becomes bytes: one number at once, anything else by way of a host tensor.

    nbytes: bytes in the upload, a multiple of its unit. pack: for one number of the slot's own kind. alone: whether its
    function is given neither fields of the batch nor slots.
    """

    computation: Computation
    scratch: torch.Tensor
    nbytes: int
    pack: Callable[[Any], bytes] | None
    alone: bool

    @classmethod
    def of(cls, computation: Computation, unit: int = WORD) -> "PackedValue":
        """The same computation with a host tensor as its target; unit: what its place's bytes are a multiple of."""
        target = computation.target
        nbytes = rounded(target.nbytes, unit)
        with torch.inference_mode(mode=False):
            room = torch.zeros(max(nbytes, unit), dtype=torch.uint8, device="cpu")
            scratch = room[: target.nbytes].view(target.dtype).view(target.shape)
        letter = letter_of(target.dtype) if target.numel() == 1 else None
        pack = struct.Struct(f"<{letter}{nbytes - target.nbytes}x").pack if letter is not None else None
        return cls(attrs.evolve(computation, target=scratch), scratch, nbytes, pack, computation.is_alone)

    @property
    def slot(self) -> str:
        """Which slot the value is for."""
        return self.computation.slot

    def on(self, known: Mapping[str, Any], fields: Mapping[str, Any]) -> "PackedValue":
        """The same function with other arguments."""
        computation = self.computation.on(known, fields)
        return attrs.evolve(self, computation=computation, alone=computation.is_alone)

    def tensor_of(self, batch: Any) -> torch.Tensor:
        """Call the function; its result on the host, until the next call. ComputeError as `bytes_of`."""
        with torch.no_grad():
            self.computation.run(batch)
        return self.scratch

    def bytes_of(self, batch: Any) -> bytes:
        """Call the function. ComputeError where it raises, or the slot cannot hold what it returns."""
        computation = self.computation
        if self.alone:
            try:
                value = computation.function()
            except Exception as error:  # noqa: BLE001 - a user's function may raise anything
                blame(self.slot, computation.compute.function, error)
        else:
            value = computation.value(batch)
        if self.pack is not None and type(value) is computation.number:
            try:
                return self.pack(value)
            except (struct.error, OverflowError):
                computation.store(value)  # which says what does not fit
        with torch.no_grad():
            computation.store(value)
        return ctypes.string_at(self.scratch.data_ptr(), self.nbytes)
