"""SGLang's buffer registry over slotgraph's fills, and the same beside the original."""
