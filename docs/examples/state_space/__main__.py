"""Entry point of `python docs/examples/state_space`."""

import sys

from states.program import main

if __name__ == "__main__":
    sys.exit(main())
