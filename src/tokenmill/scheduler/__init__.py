"""Which sequence does what in the next step: sequences, their queues, and the pure plan. Token ids and counts only."""
