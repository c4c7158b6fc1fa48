"""Model architectures: one file each turns a configuration into a `Program`; `loader.py` brings file, program and kernels together."""
