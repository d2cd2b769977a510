"""Speculative decoding over transformers' Llama: trees of drafts, verified by the target, all steps captured."""
