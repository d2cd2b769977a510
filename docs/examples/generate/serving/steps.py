"""The steps that the runners run: what is captured once for each bucket, and what runs eagerly."""

from typing import Any

import attrs
import torch
from transformers import PreTrainedModel

from serving.attention import DecodeAttention, PrefillAttention, StepAttention
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

    def prefill(self, view: PrefillInputs) -> torch.Tensor:
        """Logits for the first token after each prompt, [requests, vocabulary] float32."""
        return self._logits(self._hidden(view, PrefillAttention(self.cache, view))[view.last_rows])

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
        output = self.model.base_model(
            input_ids=view.input_ids[None], position_ids=view.positions[None], use_cache=False, step_attention=attention
        )
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden
