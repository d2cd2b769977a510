"""One small engine with two model runners: written by hand in `before.py`, with slotgraph in `after.py`."""
