"""The steps that the runners run: of one all is captured, of the other the model's layers."""

from collections.abc import Callable
from typing import Any, TypeAlias

import attrs
import torch
from transformers import PreTrainedModel

from serving.attention import Attend, DecodeAttention, PrefillAttention, StepAttention
from serving.cache import PagedCache
from serving.compiled import compiled_for_each_size
from serving.inputs import DecodeInputs, PrefillInputs, TokenInputs, all_counts, proxies
from serving.ranks import ALONE, World

Made: TypeAlias = "torch.Tensor | dict[str, torch.Tensor]"
"""Logits, float32; or hidden states, [tokens, elements], where the model goes on in another process."""
Decode: TypeAlias = Callable[[DecodeInputs], Made]


@attrs.frozen(eq=False)
class Steps:
    """A model over a paged cache, or its layers of one rank of a pipeline.

    counted: live tokens decoded so far, [1] int32, counted on the device. counted_all: those of all ranks, where steps
    know of one another's.
    """

    model: PreTrainedModel
    cache: PagedCache
    world: World
    counted: torch.Tensor
    counted_all: torch.Tensor

    @classmethod
    def over(cls, model: PreTrainedModel, cache: PagedCache, world: World = ALONE) -> "Steps":
        """Steps whose counts stand at zero."""
        own, everyones = torch.zeros(2, 1, dtype=torch.int32, device=model.device)
        return cls(model, cache, world, own, everyones)

    @property
    def layers(self) -> torch.nn.Module:
        """All of the model but its head: what prefill graphs hold."""
        layers: torch.nn.Module = self.model.base_model
        return layers

    def prefill(self, attend: Attend) -> Callable[[PrefillInputs], Made]:
        """The prefill step: logits for the first token after each prompt, [requests, vocabulary]; or hidden states."""
        attention = PrefillAttention(self.cache, attend)

        def step(view: PrefillInputs) -> Made:
            hidden = self._hidden(view, attention)
            return self._logits(hidden[view.last_rows]) if self.world.ends else {"hidden_states": hidden}

        return step

    def decode(self, view: DecodeInputs) -> Made:
        """Logits for the token after each request's newest, [tokens, vocabulary]; or hidden states."""
        self.counted.add_(view.num_token_non_padded)
        if self.world.data_parallel:
            self.counted_all.add_(all_counts(view).sum())
        hidden = self._hidden(view, DecodeAttention(self.cache, view))
        return self._logits(hidden) if self.world.ends else {"hidden_states": hidden}

    def decoding(self, *, compiled: bool) -> Decode:
        """The decode step as a runner gets it; compiled: by torch.compile, anew for each bucket."""
        return compiled_for_each_size(self.decode) if compiled else self.decode

    def start(self) -> None:
        """Forget what was counted: warm-ups were, too."""
        self.counted.zero_()
        self.counted_all.zero_()

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        head: Any = self.model.get_output_embeddings()
        logits: torch.Tensor = head(hidden)
        return logits.float()

    def _hidden(self, view: TokenInputs, attention: StepAttention) -> torch.Tensor:
        """Without transformers' own cache and masks: positions are given, and attention knows what it may see."""
        begin = {"input_ids": view.input_ids[None]} if self.world.begins else {"inputs_embeds": proxies(view)[None]}
        output = self.layers(
            **begin,
            position_ids=view.positions[None],
            use_cache=False,
            step_attention=attention,
            step_view=view,
        )
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden
