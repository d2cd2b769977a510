"""transformers' continuous batching with the inputs and graphs of slotgraph."""
