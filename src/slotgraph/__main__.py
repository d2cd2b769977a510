"""The command line, as `python -m slotgraph`; the program `slotgraph` starts without torch."""

from slotgraph_cli import main

__all__ = ["main"]

if __name__ == "__main__":
    main()
