"""What drafts gain: the same answers with and without them, and what theory says of it (docs/benchmarking.md)."""
