"""Guessing how sequences go on, so that a step gives several tokens (docs/speculation.md)."""
