"""KV cache as a service: blocks of computed KV in a Valkey server or a folder, under the hashes of the tokens that they are of.

It deals in bytes and keys: what a payload means, and where it goes, is known to who fetches and keeps it. `service.py` is what a worker
uses, `embedded.py` a server that comes along.
"""
