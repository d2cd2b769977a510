"""The command line: `slotgraph`, or `python -m slotgraph`."""

from slotgraph.runners.commands.app import main

__all__ = ["main"]

if __name__ == "__main__":
    main()
