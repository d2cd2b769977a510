"""The program: cycles laid out at one scale, and what each takes, as a table or as JSON."""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence

import attrs
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cycles.members import Cycle, Scale, cycles
from slotgraph.dataflow.capabilities import Capabilities

MB = 1e6


@attrs.frozen(kw_only=True)
class Figures:
    """What the inputs of one cycle take, in bytes.

    apart: each slot with memory of its own. blindly: one memory for all slots of one name, as engines do, whether they
    are in use at once or not. shared: the layout. peak: what must hold at once.
    """

    cycle: str
    runners: int
    slots: int
    apart: int
    blindly: int
    shared: int
    peak: int

    @classmethod
    def of(cls, cycle: Cycle) -> "Figures":
        """Lay a cycle out."""
        layout, largest = cycle.layout, dict[tuple[str, str], int]()
        for place in layout.places:
            key = place.placement, place.slot
            largest[key] = max(largest.get(key, 0), place.nbytes)
        return cls(
            cycle=cycle.name,
            runners=len(cycle.schedule.phases),
            slots=len(layout.places),
            apart=layout.apart,
            blindly=sum(largest.values()),
            shared=layout.nbytes,
            peak=layout.peak,
        )


def figures(scale: Scale, capabilities: Capabilities | None = None) -> Iterator[Figures]:
    """Those of every cycle."""
    return map(Figures.of, cycles(scale, capabilities))


def table(found: Sequence[Figures]) -> Table:
    """Megabytes of each, and what sharing saves."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    made.add_column("cycle")
    for name in ("slots", "own memory", "by name, blindly", "shared", "needed", "saved"):
        made.add_column(name, justify="right")
    for one in found:
        nbytes_of_all = one.apart, one.blindly, one.shared, one.peak, one.apart - one.shared
        sizes = [f"{nbytes / MB:,.1f}" for nbytes in nbytes_of_all]
        made.add_row(*map(Text, (one.cycle, str(one.slots), *sizes)))
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Print the figures of all cycles, or the layout of one."""
    options = _parser().parse_args(argv)
    asked = {field.name: getattr(options, field.name) for field in attrs.fields(Scale)}
    scale, console = Scale(**asked), Console()
    capabilities = Capabilities(arenas=not options.no_arenas)
    if options.layout is not None:
        chosen = [cycle for cycle in cycles(scale, capabilities) if cycle.name == options.layout]
        if not chosen:
            names = "; ".join(cycle.name for cycle in cycles(scale, capabilities))
            sys.stderr.write(f"no cycle {options.layout!r}: there are {names}\n")
            return 2
        sys.stdout.write(f"{chosen[0].layout}\n")
        return 0
    found = [*figures(scale, capabilities)]
    if options.json:
        sys.stdout.write(json.dumps([attrs.asdict(one) for one in found], indent=1) + "\n")
    else:
        console.print(f"MB of inputs, {scale.batch} requests, {scale.vocabulary:,} tokens known, {scale.hidden} wide:")
        console.print(table(found))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python docs/examples/shared_memory",
        description="What the inputs of whole cycles of runners take, with memory of their own and shared. Lays out "
        "memory on paper: nothing is allocated.",
    )
    for field in attrs.fields(Scale):
        parser.add_argument(f"--{field.name}", type=int, default=field.default, metavar="N", help="%(default)s")
    parser.add_argument("--layout", metavar="CYCLE", help="print where each slot of one cycle lies, and why")
    parser.add_argument("--no-arenas", action="store_true", help="an allocation for each block, as on NPUs")
    parser.add_argument("--json", action="store_true", help="print bytes as JSON")
    return parser
