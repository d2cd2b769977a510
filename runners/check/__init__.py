"""Checks of a runner: replays that expose a wrong input, and name the slot that it came through."""
