"""Transitions: what slots hold in the next step if no batch comes, and the operators that write it.

A rule `slot + number` or `other slot`, whose result no other rule reads, runs together with all others of its kind: in
the fill kernel of a graph, else in foreach operators. All other rules run before that as torch operators, each after
the rules whose new value it reads. They write to separate memory, from which slots are then written. Only live rows
advance.
"""

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

import attrs
import torch

from .axes import BATCH, TOKENS, Sizes
from .buffers import Buffer, Buffers
from .computation import Computation, places, words
from .declaration import Declaration
from .guard import outside_inference
from .slots import Slot
from .sources import SETTINGS
from .tails import Number
from .views import Views

_FOREACH_COPY: Final = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage] - no public name
_FOREACH_ADD: Final = torch._foreach_add_  # pyright: ignore[reportPrivateImportUsage] - likewise


@attrs.frozen
class Advance:
    """How one slot advances: as the sum of a slot and a number, in one call for all such slots, or by operators.

    Attributes:
        slot: The slot.
        function: The name of its rule.
        needs: What the rule reads.
        source: The slot in the sum, or "" if the rule runs as operators.
        add: The number in the sum.
    """

    slot: str
    function: str
    needs: tuple[str, ...]
    source: str = ""
    add: int = 0

    @property
    def value(self) -> str:
        """The new value as a formula."""
        number = f" {'-' if self.add < 0 else '+'} {abs(self.add)}" if self.add else ""
        return f"{self.source}{number}" if self.source else f"{self.function}({', '.join(self.needs)})"

    def __str__(self) -> str:
        """Return one line of the plan."""
        return f"advance {self.slot} = {self.value}{'' if self.source else ', operators'}"


def rows_of_requests(slot: Slot, sizes: Sizes) -> tuple[int, int] | None:
    """Return the dim of a slot whose rows belong to requests and the rows of each request, or None."""
    requests = sizes.get(BATCH, 0)
    for dim in slot.varying if requests else ():
        one = {**sizes, BATCH: 1, TOKENS: sizes.get(TOKENS, 0) // requests}
        size = slot.shape[dim]
        if all(axis.fixed or axis in {BATCH, TOKENS} for axis in size.axes):
            each = size.at(one)
            return (dim, each) if each * requests == size.at(sizes) else None
    return None


def _wrapped(add: int, dtype: torch.dtype) -> int:
    """Convert a number that is added to the signed number of the same bits."""
    least = torch.iinfo(dtype).min
    return (add - least) % (-2 * least) + least


Mask = Sequence[tuple[torch.Tensor, int]]
"""For each varying dim, the positions along it and the index of its live count."""


def _below(mask: Mask, counts: Sequence[Any], *others: torch.Tensor) -> torch.Tensor:
    """Return a mask of the elements whose rows are live along each dim, and for which all others are true."""
    found: torch.Tensor = functools.reduce(torch.logical_and, [*others, *(place < counts[at] for place, at in mask)])
    return found


class Transition:
    """The rules of one bucket: runs those that are functions, and writes slots from the results.

    A rule that is a function sees the live rows and the declared tail of the step. Tails that others may have written
    are therefore reset before it runs. In a new value that another rule reads, the padded rows are those of the slot.

    Attributes:
        sources: By slot, the slot or operator result that it is written from, and the number that is added.
    """

    def __init__(
        self,
        rules: Sequence[Advance],
        written: Mapping[str, Number],
        lanes: Collection[str] | None,
        declaration: Declaration,
        buffers: Buffers,
        views: Views,
        sizes: Sizes,
    ) -> None:
        """Bind the rules.

        Args:
            rules: How slots advance, in order.
            written: Tails that something other than a fill may write, and what they must hold.
            lanes: Slots that the fill kernel writes, or None if there is no kernel.
            declaration: The slots.
            buffers: The memory of the slots.
            views: The slots at their padded sizes.
            sizes: The padded sizes.
        """
        known = {SETTINGS: declaration.settings, **views}
        made = dict[str, torch.Tensor]()
        self.sources: dict[str, tuple[Buffer, int]] = {}
        self._declaration = declaration
        self._buffers = buffers
        self._sizes = sizes
        self._computations: list[Computation] = []
        for rule in rules:
            if rule.source:
                source = buffers.following(rule.source) if rule.source in made else buffers[rule.source]
            else:
                source = buffers.following(rule.slot)
                given = declaration.rules[rule.slot]
                view = source.view(sizes)
                self._computations.append(Computation.bind(rule.slot, declaration, {**known, **made}, view, given))
                made[rule.slot] = view
            self.sources[rule.slot] = source, rule.add
        read = {(need, one.slot) for one in self._computations for need in one.compute.needs}
        names = {need for need, _ in read}
        others = {need for need, slot in read if need != slot}
        self._apart = [] if lanes is None else [name for name in self.sources if name not in lanes]
        self._written: dict[str, torch.Tensor] = {}
        with outside_inference():
            for name, value in written.items():
                if name in names or not (lanes is None or name in lanes):
                    like = buffers[name].tensor
                    self._written[name] = torch.full((), value, dtype=like.dtype, device=like.device)
        self._made = {name: view for name, view in made.items() if name in others and declaration.slots[name].varying}
        self.compile(lambda group: [functools.partial(one.run, None) for one in group])
        self._masks = {name: self._mask(name) for name in (*self._apart, *self._written, *self._made)}
        device = next((buffers[name].tensor.device for name in self.sources), torch.device("cpu"))
        with outside_inference():
            self._taken = torch.zeros((), dtype=torch.int64, device=device)  # the number of the last packet

    def compile(self, compiler: Callable[[Sequence[Computation]], Sequence[Callable[[], None]]]) -> None:
        """Let calls that a compiler makes of neighbouring functions run the rules.

        A function whose new value others read ends its group, because the padded rows of that value are written next.
        """
        self._calls = list[tuple[Sequence[Callable[[], None]], str]]()
        group = list[Computation]()
        for computation in self._computations:
            group.append(computation)
            if computation.slot in self._made or computation is self._computations[-1]:
                self._calls.append((compiler(group), computation.slot))
                group = []

    def _mask(self, name: str) -> Mask:
        """Make the mask that selects the live rows of a slot."""
        slot = self._declaration.slots[name]
        view = self._buffers[name].view(self._sizes)
        mask = list[tuple[torch.Tensor, int]]()
        with outside_inference():
            for dim in slot.varying:
                mask.append((places(view, dim), self._declaration.counted.index(slot.shape[dim])))
        return mask

    def _words_of(self, buffer: Buffer) -> torch.Tensor:
        """Return the padded rows of a slot as integers."""
        return words(buffer.view(self._sizes))

    @property
    def has_functions(self) -> bool:
        """Whether some rules are functions."""
        return bool(self._computations)

    def leaves(self, lanes: Collection[str]) -> bool:
        """Return whether work is left once a kernel has advanced some lanes: function rules, or other slots."""
        return bool(self._computations) or not {*self.sources, *self._written} <= {*lanes}

    def _compute(self, counts: Sequence[Any], *moves: torch.Tensor) -> None:
        """Run the rules that are functions. This writes no live row of a slot.

        Args:
            counts: Live counts of the sizes in `Declaration.counted`: numbers, or tensors that a graph reads.
            moves: A tensor that says whether slots advance, if only the graph knows that.
        """
        live = {name: _below(self._masks[name], counts) for name in (*self._written, *self._made)}
        for name, number in self._written.items():
            is_tail = functools.reduce(torch.logical_and, moves, live[name].logical_not())
            slot = self._words_of(self._buffers[name])
            torch.where(is_tail, words(number), slot, out=slot)
        for calls, last in self._calls:
            for call in calls:
                call()
            view = self._made.get(last)
            if view is not None:
                slot = self._words_of(self._buffers[last])
                torch.where(live[last], words(view), slot, out=words(view))

    def advance_in_graph(self, head: Sequence[torch.Tensor]) -> None:
        """Do what the graph's kernel does not: run functions, and write slots without lanes unless a new packet came.

        `head` has the packet's first words; see `.packet`.
        """
        armed, number, _, _, *counts = head
        moves = [(armed != 0) & (number == self._taken)] if self._apart or self._written else []
        self.advance(counts, *moves)
        if moves:
            self._taken.copy_(number)

    def advance(self, counts: Sequence[torch.Tensor], *moves: torch.Tensor) -> None:
        """Run functions, and write slots without lanes, in a graph. The arguments are those of `_compute`."""
        self._compute(counts, *moves)
        for slot in self._apart:
            buffer, add = self.sources[slot]
            target = self._words_of(self._buffers[slot])
            source = self._words_of(buffer)
            is_live = _below(self._masks[slot], counts, *moves)
            value = source + _wrapped(add, source.dtype) if add else source
            torch.where(is_live, value, target, out=target)

    def of(self, live: Sizes, lanes: Collection[str] = ()) -> Callable[[], None]:
        """Return a call that advances the live rows of slots with rules, except lanes, which the kernel advances."""
        counts = self._declaration.counts(live)
        adds = dict[int, list[torch.Tensor]]()
        targets = list[torch.Tensor]()
        sources = list[torch.Tensor]()
        for slot in self.sources.keys() - {*lanes}:
            buffer, add = self.sources[slot]
            target = words(self._buffers[slot].view(live))
            source = words(buffer.view(live))
            if source.data_ptr() != target.data_ptr():
                targets.append(target)
                sources.append(source)
            if add:
                adds.setdefault(_wrapped(add, target.dtype), []).append(target)

        def advance() -> None:
            if self._computations:
                self._compute(counts)
            if targets:
                _FOREACH_COPY(targets, sources)
            for add, grown in adds.items():
                _FOREACH_ADD(grown, add)

        return advance
