"""Frames between workers: doors that workers open over their pools, and readers that copy from them."""
