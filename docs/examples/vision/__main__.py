"""Entry point of `python docs/examples/vision`."""

import sys

from images.program import main

if __name__ == "__main__":
    sys.exit(main())
