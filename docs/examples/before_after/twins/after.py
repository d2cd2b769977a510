"""After: the same runner with slotgraph; what a step reads is declared once, and two runners do the rest."""

from collections.abc import Sequence as Several

import torch

from slotgraph import BATCH, CACHE_LOC, SEQ_LEN_FILL, TOKENS, Axis, DecodeRunner, EagerRunner, Inputs, copied
from twins.attention import DecodeAttention, PrefillAttention
from twins.engine import Runner, Setting
from twins.sequences import Sequence, decode_numbers, prefill_numbers

PAGES = Axis("PAGES")


class TokenInputs(Inputs):
    """What every step reads of each token."""

    input_ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    positions: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    slot_mapping: torch.Tensor = copied(TOKENS, dtype=CACHE_LOC, pad=0)  # page 0 is nobody's


class PrefillInputs(TokenInputs):
    """What a prefill step reads: the prompts of several sequences behind one another."""

    sequence_rows: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=-1)
    last_rows: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)


class DecodeInputs(TokenInputs):
    """What a decode step reads: a token a sequence, and where that sequence's keys and values are."""

    context_lens: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=SEQ_LEN_FILL)
    block_tables: torch.Tensor = copied(BATCH, PAGES, dtype=torch.int32, pad=0)


class Slotgraph(Runner):
    """Two declarations, two steps. declaration: what a decode step reads; a subclass may override its slots."""

    def __init__(self, setting: Setting, declaration: type[DecodeInputs] = DecodeInputs) -> None:
        super().__init__(setting)
        self.eager = EagerRunner(PrefillInputs, self.prefill_step, backend=setting.backend)
        self.graphs = DecodeRunner(
            declaration,
            self.decode_step,
            buckets=setting.buckets,
            backend=setting.backend,
            sizes={PAGES: setting.max_pages},
        )

    def capture(self) -> None:
        """The largest bucket first."""
        self.graphs.capture()

    def prefill(self, sequences: Several[Sequence]) -> torch.Tensor:
        """Eagerly, without padding."""
        logits: torch.Tensor = self.eager(prefill_numbers(sequences, self.setting.cache.page_size))
        return logits

    def decode(self, sequences: Several[Sequence]) -> torch.Tensor:
        """From the smallest graph that holds the batch; eagerly where none does."""
        logits: torch.Tensor = self.graphs(decode_numbers(sequences, self.setting.cache.page_size))
        return logits

    def prefill_step(self, view: PrefillInputs) -> torch.Tensor:
        """The prefill step."""
        attention = PrefillAttention(self.setting.cache, view.slot_mapping, view.positions, view.sequence_rows)
        hidden = self.setting.model(view.input_ids, view.positions, attention)
        return self.setting.model.logits(hidden[view.last_rows])

    def decode_step(self, view: DecodeInputs) -> torch.Tensor:
        """The decode step."""
        attention = DecodeAttention(self.setting.cache, view.slot_mapping, view.context_lens, view.block_tables)
        return self.setting.model.logits(self.setting.model(view.input_ids, view.positions, attention))
