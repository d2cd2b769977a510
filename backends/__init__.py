"""Device adapters: one file a device over one abstract base, loaded by name on first use."""
