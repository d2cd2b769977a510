"""Entry point of `python docs/examples/shared_memory`."""

import sys

from cycles.program import main

if __name__ == "__main__":
    sys.exit(main())
