"""Proofs: replays of a runner that show a wrong input for what it is, and name the slot that it came through."""
