"""Names for prefixes that hold between processes and hosts: chained hashes over blocks of token ids.

The name of a block is a digest of its tokens and of the name of the block before it, so that it names all tokens up to its end. The
first block continues a root made of fingerprint, salt and block length: the same tokens under another model, KV format or tenant have
other names.

Who is given a frame by its name gets the keys and values of somebody's prompt. A second prompt of the same name would therefore show one
tenant's text to another, so the digest is a cryptographic one, BLAKE2b with 128 bits: finding a prompt for a given name takes about
2**128 attempts. A fast hash such as XXH3 promises nothing against someone who looks for such prompts, and would save no more than half of
the microsecond that a block takes.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b

from tokenmill.core.types import FRAME

BLOCK = 64
"""Tokens in a block."""

HASH_BYTES = 16


class BlockHasher:
    """The hashes of a text that grows: fed with tokens, in any pieces, it gives the hash of each block that they complete.

    salt: the tenant's `cache_salt`. block: tokens in a block, whole frames. Token ids have 31 bits.
    """

    def __init__(self, salt: str, fingerprint: str, block: int = BLOCK) -> None:
        assert block > 0, f"blocks of {block} tokens"
        assert block % FRAME == 0, f"blocks of {block} tokens are no whole frames of {FRAME}"
        self.hashes: list[bytes] = []
        """Of all blocks so far."""
        self._block = block
        self._before = _root(salt, fingerprint, block)
        self._tail: list[int] = []  # tokens of the block that is not complete

    def feed(self, tokens: Sequence[int]) -> list[bytes]:
        """The hashes of the blocks that become complete."""
        self._tail.extend(tokens)
        whole = len(self._tail) - len(self._tail) % self._block
        if not whole:
            return []
        data = struct.pack(f"<{whole}i", *self._tail[:whole])
        del self._tail[:whole]
        found = []
        step = 4 * self._block
        for start in range(0, len(data), step):
            self._before = blake2b(self._before + data[start : start + step], digest_size=HASH_BYTES, person=b"tokenmill block").digest()
            found.append(self._before)
        self.hashes += found
        return found


def block_hashes(tokens: Sequence[int], salt: str, fingerprint: str, block: int = BLOCK) -> list[bytes]:
    """One hash of 16 bytes for each whole block of `tokens`; the tokens after the last whole block have none."""
    return BlockHasher(salt, fingerprint, block).feed(tokens)


def _root(salt: str, fingerprint: str, block: int) -> bytes:
    digest = blake2b(struct.pack("<I", block), digest_size=HASH_BYTES, person=b"tokenmill root")
    for text in (fingerprint, salt):  # each with its length, so that none of one can pass for the start of the other
        encoded = text.encode("utf-8", "surrogatepass")
        digest.update(struct.pack("<Q", len(encoded)) + encoded)
    return digest.digest()
