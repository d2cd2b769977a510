"""The faults, grouped by the promise that each breaks: the docstring of each says what it does and what a user sees.

docs/decisions/tests-and-tools.md has the table of all promises.
"""

import contextlib
import itertools
import struct
import types
from typing import Any, Final

import attrs
import torch

from slotgraph.backends import cpu_capture, ring
from slotgraph.dataflow import admission, buffers, capabilities, computation, guard, hostdata, sources, views
from slotgraph.dataflow.declaration import Declaration
from slotgraph.dataflow.fill import bucket, kinds, packing, reach, tails, ways, writers
from slotgraph.dataflow.packet import Feed
from slotgraph.dataflow.slots import Copied
from slotgraph.dataflow.tails import Pad
from slotgraph.dataflow.transition import Transition
from slotgraph.runners import decode, tree
from slotgraph.runners.engine import chunks, current, graphs, outputs, routes, selection, sharing
from slotgraph.runners.engine.capture import FORKS
from slotgraph.runners.engine.runner import Runner
from slotgraph.runners.engine.stage import Stage
from slotgraph.runners.engine.state import State
from slotgraph.runners.engine.traffic import HostReads
from slotgraph.runners.ranks import agreement, shared
from slotgraph.runners.stacked import recipe, stack
from slotgraph.runners.steps import chain, host_work, loop, ragged_rows
from tests.faults.planting import FAULTS, fault

__all__ = ["FAULTS"]

TAILS: Final = "Behind its live rows a slot holds the value of its tail, whatever sizes came before."
OTHERS: Final = "A tail is reset that somebody else may have written: a producer, an owner, a neighbour, a broken fill."
SOURCES: Final = "A slot gets the values of its source, wherever that lies and however it is laid out."
KINDS: Final = "What was learned of one batch is used only for batches like it; sizes are those of the batch."
REFUSALS: Final = "A batch that does not fit is refused in each step, the first and all later ones."
NOTHING: Final = "A refused batch leaves buffers, views and graphs as they were."
NUMBERS: Final = "Host data arrives as the numbers that it is, or is refused."
READ: Final = "What a caller brings or declares is read, and never changed."
VIEWS: Final = "A view shows what was filled, to steps, micro-batches and whoever copies it."
COMPUTED: Final = "A computed slot holds what its function returns for the slots of this step, or the step is refused."
ROLES: Final = "Where a backend wants another dtype or tail, slots have it."
PACKETS: Final = "What is uploaded are this step's bytes, each slot's at its own place."
LAST: Final = "Only the view that was filled last is replayed, and only while nobody else has filled its memory."
LOCK: Final = "One step runs at a time: another thread is refused."
BOOKS: Final = "Watchers are told of each step, and statistics count it."
ROUTES: Final = "A batch is replayed by the smallest graph that it fits, or runs eagerly, and `decide` says why."
FORK: Final = "A forked process replays no graph of its parent."
OUTPUTS: Final = "Outputs have one row for each live row, of this step, and are the caller's as the option says."
STALE: Final = "In debug mode an output that was overwritten is not read without an error."
CAPTURES: Final = "A capture leaves slots, state and random numbers as they were."
RECORDED: Final = "A replay does what the step does, in the memory in which it was captured, or raises."
RESTORED: Final = "A restored slot is after the step as it was before, and what the step returns of it is the step's."
POOLS: Final = "Runners share only memory that nobody needs any more."
DRAFTS: Final = "A draft proposes the tokens that plain steps of the model would, on the same paths."
STACKS: Final = "A stack of graphs and breaks computes what its code would, from this step's arguments."
RANKS: Final = "All ranks run one step in one bucket that holds every batch, or all of them are told why not."
SHARED: Final = "Ranks of one host read what the others have sent for this exchange, whole."
FLIGHT: Final = "No memory is written, freed or read while the device has yet to use it."
STREAMS: Final = "A step waits for the last one that used its memory, on whatever stream that ran."
ROWS: Final = "Between steps, requests leave, join and change, and each keeps its own rows."
RULES: Final = "A slot with a rule advances as the rule says, its live rows alone."
AHEAD: Final = "A loop of steps hands out each request's outputs, takes what fits, and foretells what will be."


@fault(TAILS, tails.CleanTails, "begin", "invariants/test_tails.py::test_tails_hold_their_values")
def tails_are_never_reset(old: Any, *given: Any) -> None:
    """Take every tail for clean: padded rows hold what a longer batch left there."""
    old(*given)


@fault(TAILS, reach, "boxes", "dataflow/test_lowerings.py::test_tails_along_two_dims_keep_no_stale_corner")
def one_dim_of_two_is_reset(old: Any, *given: Any) -> Any:
    """Reset the tail along one dim alone: of a slot with two varying dims, a part of the padding keeps old values."""
    return itertools.islice(old(*given), 1)


@fault(TAILS, writers.HostTails, "reset", "invariants/test_tails.py::test_lowerings_leave_the_same_bytes")
def tails_begin_a_row_late(old: Any, self: Any, live: Any, dirty: Any) -> None:
    """Reset a tail from its second row on: the first padded row keeps what a longer batch left there."""
    old(self, tuple(rows + 1 for rows in live), dirty)


@fault(OTHERS, tails.CleanTails, "begin", "runners/engine/test_pool.py::test_producers_of_another_are_known")
def producers_are_trusted(old: Any, self: Any, *given: Any) -> Any:
    """Believe tails though producers have the slots: padded rows that one writes reach the next step."""
    self.handed_out = False
    return old(self, *given)


@fault(OTHERS, tails.CleanTails, "begin", "invariants/test_tails.py::test_tails_after_exact_fills")
def broken_fills_are_believed(old: Any, self: Any, by: Any, live: Any, padded: Any) -> Any:
    """Keep what is known when a fill begins: after one that broke off, its rows stay in the next one's tail."""
    before = self._filled_by
    dirty = old(self, by, live, padded)
    self._filled_by = before
    return dirty


@fault(OTHERS, tails.CleanTails, "begin", "runners/engine/test_pool.py::test_shared_memory_changes_no_output[cpu]")
def neighbours_are_trusted(old: Any, self: Any, by: Any, *given: Any) -> Any:
    """Take any fill for one's own: rows of another runner of the pool stay in the tail."""
    self._filled_by = self._filled_by and by
    return old(self, by, *given)


@fault(
    OTHERS,
    buffers.Buffers,
    "foreign",
    "invariants/test_tails.py::test_tails_hold_their_values",
)
def owners_are_trusted(old: Any, *given: Any) -> frozenset[str]:
    """Take adopted memory for one's own: rows that its owner writes between steps stay in the tail."""
    del old, given
    return frozenset()


@fault(SOURCES, buffers.Buffers, "reaches", "runners/test_lowerings.py::test_any_sequence_gives_what_the_oracle_gives")
def sources_in_slots_are_read_late(old: Any, *given: Any) -> bool:
    """Find no source that lies in slots: it is read after other slots were written over it."""
    del old, given
    return False


@fault(SOURCES, ways, "row_stride", "runners/test_lowerings.py::test_rows_that_lie_apart_are_read_as_they_lie")
def rows_apart_are_read_as_one_piece(old: Any, *given: Any) -> int:
    """Take rows that lie apart for one piece: a step sees what lies between them."""
    del old, given
    return 0


@fault(SOURCES, hostdata, "laid_out", "dataflow/test_ragged.py::test_rows_are_laid_out_as_by_hand")
def the_rest_of_a_ragged_row_is_zero(old: Any, slot: Any, *given: Any) -> Any:
    """Lay out ragged rows with zeros behind them: a page table names page 0, which belongs to somebody."""
    return old(attrs.evolve(slot, pad=Pad(0)), *given)


@fault(SOURCES, Copied, "reads", "dataflow/test_groups.py::test_a_step_reads_each_slot_by_its_name")
def a_group_has_one_source(old: Any, self: Any, name: str) -> Any:
    """Read the value of a group's first name for each of them: all cache groups have the same pages."""
    group, dot, _ = name.partition(".")
    return old(self, f"{group}.full" if dot else name)


@fault(KINDS, kinds.SourceKinds, "read", "runners/engine/test_outputs.py::test_rows_of_outputs_follow_their_axis")
def sizes_are_those_of_the_batch_before(old: Any, self: Any, given: Any) -> Any:
    """Keep the sizes of the first batch: a later one of other sizes has its rows cut, or rows that it has not."""
    _, live, _ = self._last
    return live or old(self, given)


@fault(KINDS, guard, "own_guard", "invariants/test_sources.py::test_values_alone_count")
def a_guard_takes_anything(old: Any, *given: Any) -> Any:
    """Ask nothing of tensors but their shape: bytes of another dtype or layout are misread."""
    del old, given
    return lambda *_: True


@fault(REFUSALS, admission, "_faults", "runners/test_batches.py::test_a_source_that_does_not_fit_is_refused[cpu-dtype]")
def any_tensor_is_taken(old: Any, *given: Any) -> Any:
    """Find no fault with a tensor: floats are truncated into an index slot without a word."""
    del old, given
    return iter(())


@fault(REFUSALS, kinds.SourceKinds, "_agree", "runners/test_batches.py::test_the_slot_that_differs_is_blamed")
def sizes_are_not_compared(old: Any, *given: Any) -> bool:
    """Ask one source for the rows of all: others with more or fewer rows are read beyond their end."""
    del old, given
    return True


@fault(
    REFUSALS,
    Runner,
    "check_limits",
    "runners/test_batches.py::test_numbers_in_a_list_are_taken_or_refused_by_their_slot",
)
def limits_are_not_checked(old: Any, *given: Any) -> None:
    """Look at no limit: a length beyond it reaches the kernel."""
    del old, given


@fault(NOTHING, bucket.Bucket, "admit", "invariants/test_broken_off.py::test_refusals_leave_nothing")
def a_refused_batch_leaves_a_row(old: Any, self: Any, *given: Any) -> Any:
    """Write before the whole batch was looked at: the next step sees a row of a batch that was refused."""
    next(iter(self.buffers)).tensor.fill_(1)
    return old(self, *given)


@fault(NOTHING, Runner, "_fill", "invariants/test_broken_off.py::test_refusals_leave_nothing")
def a_refused_batch_ends_the_view(old: Any, self: Any, *given: Any, **named: Any) -> Any:
    """Forget the view at any error: after a refused batch, the view that was filled last cannot be replayed."""
    try:
        return old(self, *given, **named)
    except BaseException:
        self._filled = None
        raise


@fault(NUMBERS, hostdata, "_format", "dataflow/test_host_data.py::test_each_odd_number_is_what_torch_makes_of_it")
def floats_overflow(old: Any, rows: int, dtype: Any) -> Any:
    """Pack floats as C does: 1e300 in a list for a float32 slot becomes infinity."""
    old(rows, dtype)
    return struct.Struct(f"{rows}{hostdata.LETTERS[dtype]}")


@fault(READ, bucket, "hand_over", "runners/test_restored.py::test_no_copy_spares_the_batch")
def a_step_writes_the_batch(old: Any, where: Any, batch: Any, live: Any, *side: Any) -> Any:
    """Hand over what a step writes without a copy: with no_copy it advances the caller's own tensors."""
    return {**old(where, batch, live, *side), **where.tensors(batch, live, *side)}


@fault(
    READ,
    computation.Computation,
    "_refuse_writes",
    "runners/test_restored.py::test_a_function_that_changes_what_it_reads_is_refused",
)
def functions_change_what_they_read(old: Any, self: Any, now: Any) -> None:
    """Let functions write the slots that they are given: the step sees what they made of them."""
    del old
    self.versions[:] = now


@fault(VIEWS, bucket.Bucket, "at", "runners/test_views.py::test_an_eager_step_sees_the_live_rows_alone")
def exact_views_are_padded(old: Any, self: Any, live: Any) -> Any:
    """Show all rows of a bucket: an eager step sees rows that the batch has not."""
    del live
    return old(self, self.padded)


@fault(VIEWS, views.Aliases, "__call__", "runners/test_restored.py::test_changed_views_and_outputs_harm_no_later_step")
def changed_views_are_handed_out_again(old: Any, self: Any) -> Any:
    """Hand out the same tensors for ever: a view that somebody has reshaped in place comes to the next step so."""
    return self._made or old(self)


@fault(COMPUTED, Declaration, "_ordered", "dataflow/test_slots.py::test_computed_slots_follow_what_they_need")
def computed_slots_go_by_name(old: Any, *given: Any, **named: Any) -> Any:
    """Compute slots in the order of their names: one that reads another sees the last step's value."""
    return dict(sorted(old(*given, **named).items()))


@fault(COMPUTED, computation, "write", "dataflow/test_slots.py::test_a_result_that_does_not_fit_is_refused")
def results_are_cast(old: Any, target: Any, value: Any, what: str) -> None:
    """Copy whatever a function returns: floats are truncated, and one row fills all of them, without a word."""
    del old, what
    target.copy_(torch.as_tensor(value))


@fault(COMPUTED, sources, "changed", "runners/test_again.py", "life/test_functions.py")
def plans_are_of_another_batch(old: Any, **values: Any) -> bytes:
    """Compare no contents of what `again=` names: a function that would run keeps the value of another batch."""
    del old, values
    return b"nothing"


@fault(
    COMPUTED,
    computation,
    "part_of",
    "runners/test_filled_together.py::test_one_call_fills_several_slots[True-in_graph]",
)
def calls_for_several_are_remembered(old: Any, parts: Any, compute: Any, slot: str, *leads: bool, **given: Any) -> Any:
    """Call a function that fills several slots once for ever: all steps have the results of the first."""
    if slot not in parts:
        parts[slot] = old(parts, compute, slot, *leads, **given)
    return parts[slot]


@fault(
    COMPUTED,
    computation.ResultTail,
    "write",
    "runners/test_filled_together.py::test_one_call_fills_several_slots[True-in_graph]",
)
def results_keep_their_tails(old: Any, *given: Any) -> None:
    """Write no tail behind what a function gives: padded rows hold what it makes of padding."""
    del old, given


@fault(ROLES, capabilities.Role, "on", "dataflow/test_slots.py::test_the_backend_decides_dtypes_and_pads_of_roles")
def dtypes_are_the_same_everywhere(old: Any, self: Any, record: Any) -> Any:
    """Pass over what the backend says of dtypes: cache locations are int64 on an NPU, whose kernel wants int32."""
    del old, record
    return self.default


@fault(PACKETS, packing.Packing, "_pack_words", "invariants/test_tails.py::test_lowerings_leave_the_same_bytes")
def a_packet_counts_a_row_less(old: Any, self: Any, addresses: Any, sizes: Any) -> Any:
    """Pack a count that is one too low: the kernel takes the last live row for the tail."""
    live, nbytes = sizes
    return old(self, addresses, (tuple(max(0, rows - 1) for rows in live), nbytes))


@fault(PACKETS, Feed, "send", "invariants/test_sources.py::test_values_alone_count")
def packets_are_known_by_their_length(old: Any, self: Any, data: bytes, kept: object) -> None:
    """Send no packet that is as long as the last: the next step computes on the numbers before."""
    if len(data) != len(self._data):
        old(self, data, kept)


@fault(PACKETS, Feed, "was_disarmed", "invariants/test_sources.py::test_a_batch_that_comes_again")
def a_packet_is_taken_for_armed(old: Any, self: Any) -> None:
    """Forget that a replay used the packet up: a step of the same batch replays what lay in the slots."""
    del old, self


@fault(LAST, Runner, "_replay_view", "invariants/test_memory.py::test_stale_views_are_refused")
def any_view_is_replayed(old: Any, self: Any, view: Any) -> Any:
    """Take any view for the last one: what a later fill has overwritten is replayed, with the later batch's rows."""
    if self._filled is not None:
        self._filled.view = view
    return old(self, view)


@fault(LAST, Runner, "_fill", "invariants/test_broken_off.py::test_broken_fills_are_not_believed")
def a_broken_fill_keeps_the_view(old: Any, self: Any, *given: Any, **named: Any) -> Any:
    """Keep the view when a fill breaks off: half of one batch and half of another are replayed by it."""
    before = self._filled
    try:
        return old(self, *given, **named)
    except BaseException:
        self._filled = before
        raise


@fault(LAST, buffers.BufferUse, "others", "invariants/test_memory.py::test_neighbours_take_turns")
def fills_of_neighbours_are_not_counted(old: Any, self: Any) -> int:
    """Count no fill of the pool's others: a view is replayed after one has filled the memory of both."""
    del old, self
    return 0


@fault(LAST, buffers.BufferUse, "others", "runners/test_modes.py::test_a_view_is_refused_after_a_fill_of_another_mode")
def fills_of_other_modes_are_not_counted(old: Any, self: Any) -> int:
    """Count the fills of a pool's others alone: a mode's view is replayed on what another mode has filled."""
    return int(old(self) - self.fills)


class _Open:
    """A lock that lets everybody in."""

    def locked(self) -> bool:
        return False

    def __enter__(self) -> None:
        """Let one in."""

    def __exit__(self, *error: object) -> None:
        """Let one out."""


@fault(LOCK, current.StepLock, "__init__", "life/test_threads.py::test_another_thread_is_refused")
def everybody_is_let_in(old: Any, self: Any, runner: str) -> None:
    """Lock nobody out: two threads fill the same slots at once, and one gets the other's rows."""
    old(self, runner)
    self.lock = _Open()


@fault(BOOKS, routes.GraphRoute, "run", "runners/engine/test_statistics.py::test_every_step_is_counted")
def replays_are_not_counted(old: Any, self: Any, view: Any, live: Any) -> Any:
    """Count no replay: statistics lack steps."""
    made = old(self, view, live)
    self.counts.steps -= 1
    return made


@fault(
    ROUTES,
    selection.BucketSelector,
    "select",
    "runners/test_decision.py::test_each_way_has_its_path_bucket_and_reason",
)
def exact_buckets_are_missed(old: Any, self: Any, live: Any) -> Any:
    """Look for one row more: a batch of exactly a bucket's size goes to the next, and of the largest runs eagerly."""
    return old(self, tuple(rows + 1 for rows in live))


@fault(ROUTES, decode, "_differing", "runners/test_views.py::test_a_default_at_capture_is_what_the_graph_holds")
def fields_make_no_difference(old: Any, *given: Any) -> str:
    """Compare no field: a batch whose field differs from the captured value is replayed with that."""
    del old, given
    return ""


@fault(
    ROUTES,
    selection.Variant,
    "select",
    "regressions/test_reports.py::test_transformers_45323_a_max_seqlen_frozen_in_a_graph",
)
def any_graph_froze_enough(old: Any, self: Any, value: Any) -> Any:
    """Take the graph of the smallest number for every number: its step reads no further than that."""
    del old, value
    return self.values[0]


@fault(ROUTES, decode.CapturingRunner, "_graph_route", "invariants/test_tails.py::test_absent_slots_are_none")
def absence_makes_no_difference(old: Any, self: Any, rows: Any, absent: Any, *more: Any) -> Any:
    """Take the graph of all slots for any batch: one without an optional slot is refused."""
    del absent
    return old(self, rows, frozenset(), *more)


@fault(FORK, graphs.GraphSet, "replay", "invariants/test_memory.py::test_forked_children_are_refused")
def forks_are_not_noticed(old: Any, self: Any, captured: Any) -> None:
    """Notice no fork: a child replays graphs of its parent, whose device it has not."""
    self._forks = FORKS.count
    old(self, captured)


@fault(
    OUTPUTS,
    routes.GraphRoute,
    "__init__",
    "runners/engine/test_outputs.py::test_each_tensor_has_its_live_rows",
)
def outputs_are_not_cut(old: Any, self: Any, *given: Any) -> None:
    """Cut no outputs: a caller gets padded rows."""
    old(self, *given)
    self._output_place = None


@fault(OUTPUTS, outputs, "own_copy", "runners/engine/test_kept_outputs.py::test_copies_are_the_callers_own")
def copies_are_views(old: Any, made: Any) -> Any:
    """Copy nothing: with outputs='copy' an output is overwritten by the next step."""
    del old
    return made


@fault(STALE, outputs.Stamped, "_check", "invariants/test_memory.py::test_stale_outputs_are_named")
def stale_outputs_are_read(old: Any, self: Any) -> None:
    """Look at no stamp: an output that a replay has overwritten is read without an error."""
    del old, self


@fault(CAPTURES, buffers, "at_rest", "runners/engine/test_capture.py::test_lazy_capture_keeps_what_a_producer_wrote")
def captures_run_on_live_rows(old: Any, *given: Any) -> Any:
    """Leave the slots as they are: warm-ups of a late capture run on the last step's inputs."""
    del old, given
    return contextlib.nullcontext()


@fault(CAPTURES, State, "kept", "invariants/test_memory.py::test_captures_change_nothing")
def warm_ups_change_state(old: Any, self: Any) -> Any:
    """Put no state back: warm-ups write caches and counters of the running engine."""
    del old, self
    return contextlib.nullcontext()


@fault(CAPTURES, State, "of", "runners/test_state.py::test_captures_and_checks_leave_tables_as_they_were")
def warm_ups_change_tables(old: Any, backend: Any, tensors: Any, _: Any = ()) -> Any:
    """Take no slot for state: warm-ups and checks leave in tables what they wrote on no request's behalf."""
    return old(backend, tensors)


@fault(RECORDED, cpu_capture, "_run_all", "backends/test_interrupt.py::test_graphs_and_calls_run_once_in_any_order")
def operators_run_twice(old: Any, calls: Any) -> None:
    """Run recorded operators twice: a counter that a step raises is raised twice in each replay."""
    old(calls)
    old(calls)


@fault(RECORDED, buffers.Buffers, "moved", "invariants/test_memory.py::test_moved_addresses_are_refused")
def moved_memory_is_not_seen(old: Any, self: Any) -> list[str]:
    """Find no memory that has moved: the owner of adopted memory resizes it, and graphs go on reading what it was."""
    del old, self
    return []


@fault(RESTORED, Stage, "run", "runners/test_restored.py::test_outputs_keep_what_the_step_made")
def outputs_in_restored_slots_are_not_copied(old: Any, self: Any, view: Any, step: Any = None) -> Any:
    """Copy no output that lies in a slot which is put back: the caller sees the slot as it was before the step."""
    made = list[Any]()
    old(self, view, lambda shown: made.append((step or self.step)(shown)))
    return made[-1]


@fault(POOLS, sharing, "lasting", "runners/engine/test_sharing.py::test_lifetimes_follow_from_what_slots_say")
def everything_is_shared(old: Any, *given: Any) -> None:
    """Share all slots: steps of one runner overwrite constants and host memory of another."""
    del old, given


@fault(
    DRAFTS,
    tree.Frontier,
    "grow",
    "runners/test_tree.py::test_a_tree_grows_as_plain_python_grows_it",
    "runners/test_draft.py",
)
def parents_are_one_level_off(old: Any, self: Any, *given: Any) -> Any:
    """Number nodes a level too low: drafted nodes name other parents, and the wrong path is verified."""
    made = old(self, *given)
    return attrs.evolve(made, nodes=made.nodes + self.tokens.shape[1])


@fault(
    STACKS, stack.StackCall, "settle", "runners/stacked/test_stack.py::test_an_argument_unlike_the_captures_is_refused"
)
def changed_values_are_ignored(old: Any, self: Any, *given: Any) -> None:
    """Compare no numbers with those of the capture: one that has changed since is ignored."""
    old(self, *given)
    self._values = []


@fault(STACKS, recipe, "live_viewer", "runners/stacked/test_stack.py::test_arguments_of_all_kinds_reach_the_stack")
def breaks_see_padded_requests(old: Any, stage: Any, where: Any, **info: Any) -> Any:
    """Show all requests of a bucket to what runs eagerly: breaks and the head run on padded ones."""
    del old
    return stage.viewer(where, **info)


@fault(RANKS, agreement, "agree", "ranks/test_agreement.py::test_the_largest_bucket_is_everyones[cpu]")
def each_rank_has_its_own_bucket(old: Any, own: Any, messages: Any, leading: int) -> Any:
    """Go on with this rank's own decision: collectives of the ranks are of different sizes."""
    del old, messages, leading
    return own


@fault(RANKS, agreement.Agreement, "_agreed", "ranks/test_counts.py::test_a_slot_has_the_counts_of_all_ranks")
def counts_of_ranks_are_old(old: Any, self: Any, *given: Any) -> Any:
    """Keep the last step's counts: token counts of all ranks are those of another batch."""
    before = self.ranks.live_sizes
    decision = old(self, *given)
    self.ranks.live_sizes = before or self.ranks.live_sizes
    return decision


@fault(RANKS, agreement.Agreement, "refuse", "ranks/test_failures.py::test_a_batch_refused_by_one_rank_is_run_by_none")
def refusals_are_not_told(old: Any, self: Any, error: Any) -> None:
    """Tell no other rank of a refused batch: they wait for this one until their time is over."""
    del old, self, error


@fault(SHARED, shared, "zlib", "ranks/test_shared.py::test_a_number_before_its_bytes_is_no_message")
def bytes_are_not_checked(old: Any) -> Any:
    """Trust a number before its bytes: a rank takes bytes that are not there yet."""
    del old
    return types.SimpleNamespace(crc32=lambda _: 0)


@fault(FLIGHT, ring.Ring, "_enter", "backends/test_ring.py::test_nothing_is_overwritten_in_flight")
def a_ring_waits_for_nothing(old: Any, self: Any, entered: int) -> None:
    """Enter a segment without a wait: a host that runs ahead overwrites an upload before the device has read it."""
    self._marks[entered] = None
    old(self, entered)


@fault(FLIGHT, HostReads, "wait", "invariants/test_order.py::test_host_memory_in_flight")
def host_memory_is_not_waited_for(old: Any, self: Any) -> None:
    """Wait for no read of host slots: a fill overwrites host memory that the device has yet to copy."""
    del old, self


@fault(STREAMS, graphs.Filler, "order", "invariants/test_order.py::test_a_step_waits_for_the_last_one")
def streams_are_not_ordered(old: Any, self: Any) -> None:
    """Have no stream wait for another: a step fills slots that the step before still reads."""
    del old, self


@fault(ROWS, chain, "rearrange", "life/test_ahead.py::test_steps_are_right_in_any_order_of_news")
def rows_do_not_move(old: Any, *given: Any) -> Any:
    """Move no row: after a request has left, one live row lies among the padded ones."""
    keys, _ = old(*given)
    return keys, ()


@fault(ROWS, host_work.HostWork, "of", "life/test_functions.py")
def rows_of_those_that_left_stay(old: Any, *given: Any) -> Any:
    """Reset no tail after an edit: rows of requests that left stay in the padded ones."""
    made = old(*given)
    made.tails = made.other_tails = []
    return made


@fault(RULES, Transition, "of", "life/test_functions.py")
def padded_rows_advance(old: Any, self: Any, live: Any, *lanes: Any) -> Any:
    """Advance all rows of a bucket: padded ones are no tail any more."""
    del live
    return old(self, self._sizes, *lanes)


@fault(
    RULES,
    Transition,
    "_compute",
    "life/test_functions.py",
)
def rules_see_what_a_step_left(old: Any, self: Any, *given: Any) -> None:
    """Reset no tail before a rule: one that sums a slot which the step writes counts its padded rows."""
    self._written = {}
    old(self, *given)


@fault(AHEAD, loop.StepLoop, "_forget_ended", "runners/steps/test_keys.py")
def last_tokens_are_lost(old: Any, self: Any) -> None:
    """Forget requests that have left: one that leaves with now=False loses its last token."""
    del old
    self._ended = []


@fault(
    AHEAD,
    ragged_rows.RaggedRows,
    "note",
    "runners/steps/test_ragged.py::test_what_is_appended_follows_what_was_said_before",
)
def edits_of_rows_are_not_noted(old: Any, self: Any, keys: Any, source: Any) -> None:
    """Note only rows of requests that join: what is appended after an edit follows the values before it."""
    if not self.rows.keys() & {*keys}:
        old(self, keys, source)


@fault(AHEAD, chain.Chain, "go_on", "runners/steps/test_loops.py::test_a_call_of_the_runner_ends_the_loop")
def a_loop_outlives_another_fill(old: Any, self: Any, *given: Any, **named: Any) -> Any:
    """Go on after a call of the runner: a loop hands out outputs of rows that are not its requests'."""
    self._fills = self._use.fills
    return old(self, *given, **named)


@fault(AHEAD, chunks, "_repeated", "runners/steps/test_chunks.py::test_outputs_of_a_chunk_are_kept_apart")
def steps_of_a_launch_share_outputs(old: Any, *given: Any) -> Any:
    """Keep no step's outputs apart: all steps of a launch hand out the last one's, where a slot has them."""
    return old(*given[:-1], ())


@fault(AHEAD, bucket, "resets", "runners/steps/test_chunks.py::test_whoever_is_done_is_handed_out_once")
def whoever_is_done_goes_on(old: Any, *given: Any) -> Any:
    """Reset no row of a request that is done: it writes to its pages until the host has read its end."""
    del old, given
    return ()
