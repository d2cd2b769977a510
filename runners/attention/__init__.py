"""What attention kernels read besides lengths and pages, ready to subclass. `slotgraph.attention` exports it."""
