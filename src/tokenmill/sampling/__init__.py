"""Logits to tokens: what a sequence asks of its sampler, and the native sampler."""
