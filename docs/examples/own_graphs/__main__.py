"""Entry point of `python docs/examples/own_graphs`."""

import sys

from engine.program import main

if __name__ == "__main__":
    sys.exit(main())
