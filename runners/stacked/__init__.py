"""Steps of which a part, the stack, is captured by tokens: breaks, the watch over them, calls, and runs."""
