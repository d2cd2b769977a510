"""A cache for one decode step: what transformers' models ask of theirs, answered from the pools."""

from typing import Any

import torch

from states.pools import Pools


class StepCache:
    """Hands each layer the states of this step's rows, and takes them back when the step is over.

    A mixer advances the convolution's and the recurrent state in place, by formulas that stay transformers' own. So it
    gets copies of the rows, gathered from the pool, and `put_back` scatters them. Nothing is read by the host, and all
    shapes follow from the bucket.

    rows: which row of the pools each request has, [requests] int64. positions: of the newest tokens, [requests] int64.
    """

    def __init__(self, pools: Pools, rows: torch.Tensor, positions: torch.Tensor) -> None:
        self._pools = pools
        self._rows = rows
        self._positions = positions
        self._taken: list[tuple[torch.Tensor, torch.Tensor]] = []

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor:
        """The convolution's newest inputs, [requests, channels, kernel]."""
        del state_idx
        return self._take(self._pools.layers[layer_idx].conv)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor:
        """The recurrent states, [requests, ...]."""
        del state_idx
        return self._take(self._pools.layers[layer_idx].state)

    def is_recording_past(self, layer_idx: int) -> bool:
        """Never: no token is taken back."""
        del layer_idx
        return False

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the newest token's keys and values, [requests, KV heads, 1, head size]; all so far come back."""
        layer: Any = self._pools.layers[layer_idx]
        layer.keys[self._rows, :, self._positions] = keys[:, :, 0]
        layer.values[self._rows, :, self._positions] = values[:, :, 0]
        return layer.keys[self._rows], layer.values[self._rows]

    def put_back(self) -> None:
        """Store the states as the step left them. Padded rows all write to the dummy row: whichever is last may win."""
        for pool, states in self._taken:
            pool[self._rows] = states

    def _take(self, pool: Any) -> torch.Tensor:
        states: torch.Tensor = pool[self._rows]
        self._taken.append((pool, states))
        return states
