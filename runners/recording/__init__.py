"""Recordings: the last steps of a runner in one file, and their replay on another machine or at another time."""
