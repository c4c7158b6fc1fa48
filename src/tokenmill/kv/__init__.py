"""Which frames hold whose keys and values: pages, page tables, the prefix tree. Counts and ids only, never bytes."""
