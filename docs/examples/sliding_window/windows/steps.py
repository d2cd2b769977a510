"""The steps that the runners run: what is captured once for each bucket, and what runs eagerly."""

from typing import Any

import attrs
import torch
from transformers import PreTrainedModel

from windows.attention import DecodeAttention, PromptAttention, StepAttention
from windows.inputs import DecodeInputs, PromptInputs
from windows.pools import Pools


@attrs.frozen(eq=False)
class Steps:
    """A model over two pools. translates: whether layers look their places up in the window pool."""

    model: PreTrainedModel
    pools: Pools
    translates: bool

    def prefill(self, view: PromptInputs) -> torch.Tensor:
        """Logits for the first token after each prompt, [requests, vocabulary] float32."""
        attention = PromptAttention(self.pools, view, self._window)
        return self._logits(self._hidden(view, attention)[view.last_rows])

    def decode(self, view: DecodeInputs) -> torch.Tensor:
        """Logits for the token after each request's newest, in the slot that is made for them."""
        attention = DecodeAttention(self.pools, view, self._window)
        return view.next_token_logits.copy_(self._logits(self._hidden(view, attention)))

    @property
    def _window(self) -> int:
        window: int = self.model.config.sliding_window
        return window

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        head: Any = self.model.get_output_embeddings()
        logits: torch.Tensor = head(hidden)
        return logits.float()

    def _hidden(self, view: DecodeInputs | PromptInputs, attention: StepAttention) -> torch.Tensor:
        """Without transformers' own cache and masks: positions are given, and attention knows what it may see.

        The window pool has this step's places meanwhile, so that a graph writes there straight.
        """
        window = self.pools.window
        window.places = None if self.translates else view.out_cache_loc_swa
        try:
            output = self.model.base_model(
                input_ids=view.input_ids[None],
                position_ids=view.positions[None],
                attention_mask=dict.fromkeys(self.model.config.layer_types),
                use_cache=False,
                step_attention=attention,
            )
        finally:
            window.places = None
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden
