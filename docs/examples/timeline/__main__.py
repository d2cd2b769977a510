"""Entry point of `python docs/examples/timeline`."""

import sys

from spans.program import main

if __name__ == "__main__":
    sys.exit(main())
