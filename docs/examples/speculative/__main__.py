"""Entry point of `python docs/examples/speculative`."""

import sys

from speculating.program import main

if __name__ == "__main__":
    sys.exit(main())
