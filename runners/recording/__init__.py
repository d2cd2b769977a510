"""Recordings: the last steps of a runner in one file, and their replay where there is time to look."""
