"""Cycles of runners at serving sizes, and what their inputs take where memory is shared and where it is not."""
