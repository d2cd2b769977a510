"""The steps that runners run: all of a decode step is captured, and the model's layers of a prefill step."""

from collections.abc import Callable
from typing import Any, TypeAlias

import attrs
import torch
from transformers import PreTrainedModel

from serving.attention import ATTEND, DECODE, Attend, PagedCache, PrefillAttention, StepAttention, best_attention
from serving.inputs import DecodeInputs, PrefillInputs, TokenInputs
from serving.options import Options, OptionsError
from serving.ranks import ALONE, Crew, World
from serving.sampling import GREEDY, Chosen, Sampler
from slotgraph import BATCH, TOKENS, BreakableRunner, EagerRunner, PrefillRunner

Made: TypeAlias = "Chosen | dict[str, torch.Tensor]"
"""Tokens; or hidden states, [tokens, elements], where the model goes on in another process."""
Decode: TypeAlias = Callable[[DecodeInputs], Made]
Prefill: TypeAlias = "EagerRunner[PrefillInputs] | BreakableRunner[PrefillInputs] | PrefillRunner[PrefillInputs]"


@attrs.frozen(eq=False)
class Steps:
    """A model over a paged cache, or its layers of one rank of a pipeline.

    sampler: chooses tokens, within the step. logits: whether steps hand out their logits, too.
    attention: of decode steps, by its name in `DECODE`.
    counts: live tokens decoded so far, [2, 1] int32 on the device: here, and by all ranks where they know of others.
    """

    model: PreTrainedModel
    cache: PagedCache
    world: World = ALONE
    sampler: Sampler = GREEDY
    logits: bool = True
    attention: str = attrs.field(
        default=attrs.Factory(lambda self: best_attention("auto", self.model.device), takes_self=True)
    )
    counts: torch.Tensor = attrs.field(init=False)

    @counts.default
    def _zeros(self) -> torch.Tensor:
        return torch.zeros(2, 1, dtype=torch.int32, device=self.model.device)

    @property
    def layers(self) -> torch.nn.Module:
        """All of the model but its head: what prefill graphs hold."""
        layers: torch.nn.Module = self.model.base_model
        return layers

    def decode(self, view: DecodeInputs) -> Made:
        """The token after each request's newest, or hidden states."""
        self.counts[0].add_(view.num_token_non_padded)
        if self.world.way == "dp":
            everyones: Any = view
            self.counts[1].add_(everyones.global_num_tokens.sum())
        hidden = self._hidden(view, DECODE[self.attention](self.cache, view))
        if not self.world.ends:
            return {"hidden_states": hidden}
        return self._choose(hidden, view.numbers, view.positions)

    def prefill(self, attend: Attend) -> Callable[[PrefillInputs], Made]:
        """The prefill step: the first token after each prompt, or hidden states."""
        attention = PrefillAttention(self.cache, attend)

        def step(view: PrefillInputs) -> Made:
            hidden = self._hidden(view, attention)
            if not self.world.ends:
                return {"hidden_states": hidden}
            return self._choose(hidden[view.last_rows], view.numbers, view.positions[view.last_rows])

        return step

    def decoding(self, *, compiled: bool) -> Decode:
        """The decode step as a runner gets it; compiled: by torch.compile, which a runner's warm-ups call.

        torch compiles for the largest bucket, then once for all others, and once more for a single row. It compiles no
        write to one of several inputs of one storage, as slots are: what was chosen is written after it.
        """
        decode = torch.compile(self.decode, fullgraph=True) if compiled else self.decode

        def step(view: DecodeInputs) -> Made:
            made = decode(view)
            if isinstance(made, Chosen):
                view.next_ids.copy_(made.next_ids)
            return made

        return step

    def _choose(self, hidden: torch.Tensor, numbers: torch.Tensor, positions: torch.Tensor) -> Chosen:
        """The token after the one of each row, which has a request's number and a position."""
        head: Any = self.model.get_output_embeddings()
        logits: torch.Tensor = head(hidden).float()
        return Chosen(self.sampler.choose(logits, numbers, positions + 1), logits if self.logits else None)

    def _hidden(self, view: TokenInputs, attention: StepAttention) -> torch.Tensor:
        """Without transformers' own cache and masks: positions are given, and attention knows what it may see."""
        of: Any = view
        if not len(view.positions):  # of an idle rank that runs eagerly; transformers cannot reshape these
            return torch.empty(0, self.model.config.hidden_size, dtype=self.model.dtype, device=self.model.device)
        begin = {"input_ids": of.input_ids} if self.world.begins else {"inputs_embeds": of.pp_hidden_states}
        output = self.layers(
            **{name: tensor[None] for name, tensor in begin.items()},
            position_ids=view.positions[None],
            use_cache=False,
            step_attention=attention,
            step_view=view,
        )
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden


def prefill_runner(declaration: type[PrefillInputs], steps: Steps, options: Options, crew: Crew) -> Prefill:
    """A runner of prompts by the path that the options name. Its graphs are for so many tokens of any requests."""
    attend, given = ATTEND[options.prefill], {"backend": options.backend, **crew.given(declaration)}
    step = steps.prefill(attend)
    if options.prefill == "eager":
        return EagerRunner(declaration, step, **given)
    rows = BATCH if steps.world.ends else TOKENS
    given |= {"max_tokens": options.max_prefill_tokens, "max_batch": options.max_batch, "output_rows": rows}
    if options.prefill == "breakable":
        return BreakableRunner(declaration, step, stack=steps.layers, **given)
    return PrefillRunner(declaration, step, stack=steps.layers, splits=[attend], **given)


def check_compiles(backend: str) -> None:
    """Raises OptionsError for a backend whose graphs cannot hold compiled kernels."""
    if backend == "cpu-capture":
        raise OptionsError(
            "cpu-capture records torch operators and cannot record compiled kernels: compile with --backend cpu or cuda"
        )
