"""A worker's part in hand-overs (docs/handover.md), as state machines: leases where it prefills, reservations where it decodes."""
