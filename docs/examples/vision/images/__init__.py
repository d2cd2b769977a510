"""An image classifier behind a batch queue: no tokens, no decoding."""
