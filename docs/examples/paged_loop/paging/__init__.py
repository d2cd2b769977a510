"""A paged engine in the manner of nano-vllm, whose decode steps are launched ahead of the host."""
