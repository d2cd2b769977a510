"""The field's declarations, ready to subclass. `slotgraph.standard` exports them."""
