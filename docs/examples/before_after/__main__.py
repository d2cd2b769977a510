"""Entry point of `python docs/examples/before_after`."""

import sys

from twins.program import main

if __name__ == "__main__":
    sys.exit(main())
