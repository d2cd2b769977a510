"""An engine that captures its own graphs."""
