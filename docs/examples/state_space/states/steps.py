"""The steps that the runners run: one prompt eagerly, and one token of each request, captured once for each bucket."""

from typing import Any

import attrs
import torch
from transformers import DynamicCache, PreTrainedModel

from states.cache import StepCache
from states.inputs import DecodeInputs, PromptInputs
from states.pools import Pools


@attrs.frozen(eq=False)
class Steps:
    """A model over its pools."""

    model: PreTrainedModel
    pools: Pools

    @classmethod
    @torch.no_grad()
    def over(cls, model: PreTrainedModel, rows: int, context: int) -> "Steps":
        """Steps over empty pools: what a layer remembers, and in which shape, is seen after a prompt of one token."""
        sample = DynamicCache(config=model.config)
        _call(model, torch.zeros(1, 1, dtype=torch.int64, device=model.device), past_key_values=sample)
        return cls(model, Pools.like(sample, rows, context))

    def prefill(self, view: PromptInputs) -> torch.Tensor:
        """Logits for the first token after a prompt, [1, vocabulary]; its states then lie in its row.

        Alone, and with transformers' own cache: a recurrent state cannot be masked as attention can, so prompts of
        different lengths are no batch without kernels for it.
        """
        cache = DynamicCache(config=self.model.config)
        logits = _call(self.model, view.input_ids[None], past_key_values=cache)
        self.pools.store(view.req_pool_indices, cache)
        return logits

    def decode(self, view: DecodeInputs) -> torch.Tensor:
        """Logits for the token after each request's newest, [requests, vocabulary]."""
        cache = StepCache(self.pools, view.req_pool_indices, view.positions)
        places = torch.arange(self.pools.context, device=view.positions.device)
        seen = (places < view.seq_lens[:, None])[:, None, None, :]
        logits = _call(
            self.model,
            view.input_ids[:, None],
            position_ids=view.positions[:, None],
            attention_mask={"full_attention": seen, "linear_attention": None},  # made already: the model makes none
            past_key_values=cache,
        )
        cache.put_back()
        return view.next_token_logits.copy_(logits)


def _call(model: Any, input_ids: torch.Tensor, **settings: Any) -> torch.Tensor:
    """Logits of each text's last token, [texts, vocabulary]."""
    logits: torch.Tensor = model(input_ids, use_cache=True, logits_to_keep=1, **settings).logits
    return logits[:, -1]
