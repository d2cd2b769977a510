"""The command line, as `python -m slotgraph`."""

from slotgraph_cli import main

__all__ = ["main"]

if __name__ == "__main__":
    main()
