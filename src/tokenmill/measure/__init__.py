"""What a machine can do, what this engine makes of it, and what a client of any server sees."""
