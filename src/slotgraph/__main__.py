"""The command line, as `python -m slotgraph`."""

from slotgraph_cli import main

if __name__ == "__main__":
    main()
