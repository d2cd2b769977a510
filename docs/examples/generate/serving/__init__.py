"""A small continuous-batching engine over transformers' Llama whose steps' inputs are declared with slotgraph."""
