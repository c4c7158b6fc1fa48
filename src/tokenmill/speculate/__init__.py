"""Proposers: tokens that a sequence may be about to put out, for the model to check many at once."""
