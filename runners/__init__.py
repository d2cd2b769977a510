"""Runners: what captures and replays graphs, with its buckets, outputs, decisions and tools."""
