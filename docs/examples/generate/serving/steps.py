"""The steps that the runners run: of one all is captured, of the other the model's layers."""

from collections.abc import Callable
from typing import Any

import attrs
import torch
from transformers import PreTrainedModel

from serving.attention import Attend, DecodeAttention, PrefillAttention, StepAttention
from serving.cache import PagedCache
from serving.inputs import DecodeInputs, PrefillInputs, TokenInputs


@attrs.frozen(eq=False)
class Steps:
    """A model over a paged cache. counted: live tokens decoded so far, [1] int32, counted on the device."""

    model: PreTrainedModel
    cache: PagedCache
    counted: torch.Tensor

    @classmethod
    def over(cls, model: PreTrainedModel, cache: PagedCache) -> "Steps":
        """Steps whose count stands at zero."""
        return cls(model, cache, torch.zeros(1, dtype=torch.int32, device=model.device))

    @property
    def layers(self) -> torch.nn.Module:
        """All of the model but its head: what prefill graphs hold."""
        layers: torch.nn.Module = self.model.base_model
        return layers

    def prefill(self, attend: Attend) -> Callable[[PrefillInputs], torch.Tensor]:
        """The prefill step: logits for the first token after each prompt, [requests, vocabulary] float32."""
        attention = PrefillAttention(self.cache, attend)

        def step(view: PrefillInputs) -> torch.Tensor:
            return self._logits(self._hidden(view, attention)[view.last_rows])

        return step

    def decode(self, view: DecodeInputs) -> torch.Tensor:
        """Logits for the token after each request's newest, [tokens, vocabulary] float32."""
        self.counted.add_(view.num_token_non_padded)
        return self._logits(self._hidden(view, DecodeAttention(self.cache, view)))

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        head: Any = self.model.get_output_embeddings()
        logits: torch.Tensor = head(hidden)
        return logits.float()

    def _hidden(self, view: TokenInputs, attention: StepAttention) -> torch.Tensor:
        """Without transformers' own cache and masks: positions are given, and attention knows what it may see."""
        output = self.layers(
            input_ids=view.input_ids[None],
            position_ids=view.positions[None],
            use_cache=False,
            step_attention=attention,
            step_view=view,
        )
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden
