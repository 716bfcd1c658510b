"""Blocks of the paged KV cache: who owns each one and which are free. Counts only, never tensors."""

from __future__ import annotations

_FREE = -1


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens, numbered from 0, each in one of three states:

        free     on the free list, its content means nothing
        cached   nobody owns it, its content is kept for the prefix cache
        owned    by one or more sequences; more than one means shared, and a shared block is never written

    Every operation is O(1). A wrong one (a second release, sharing a free block) raises `RuntimeError`: it
    is a bug that would hand one block to two writers.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool needs blocks and tokens in them, got {num_blocks} x {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._owners = [_FREE] * num_blocks  # _FREE, 0: cached, n: owned by n sequences
        self._free = list(range(num_blocks - 1, -1, -1))
        self._num_cached = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return self._num_cached

    @property
    def num_owned(self) -> int:
        return self.num_blocks - len(self._free) - self._num_cached

    def num_owners(self, block: int) -> int:
        """How many sequences own `block`: 0 if it is free or cached."""
        return max(self._owners[block], 0)

    def num_blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def allocate(self) -> int:
        """Take a free block; it has one owner."""
        if not self._free:
            raise RuntimeError("no free block: the caller must check num_free")
        block = self._free.pop()
        self._owners[block] = 1
        return block

    def share(self, block: int) -> None:
        """Add an owner to an owned or cached block."""
        owners = self._owners[block]
        if owners == _FREE:
            raise RuntimeError(f"block {block} is free, it cannot be shared")
        if owners == 0:
            self._num_cached -= 1
        self._owners[block] = owners + 1

    def release(self, block: int, *, keep: bool = False) -> bool:
        """Take one owner away. Without owners the block becomes cached if `keep`, else free.

        Returns whether that was the last owner.
        """
        owners = self._owners[block]
        if owners < 1:
            raise RuntimeError(f"block {block} is released but has no owner")
        if owners > 1:
            self._owners[block] = owners - 1
            return False
        if keep:
            self._owners[block] = 0
            self._num_cached += 1
        else:
            self._owners[block] = _FREE
            self._free.append(block)
        return True

    def reclaim(self, block: int) -> None:
        """Make a cached block free: its content is given up."""
        if self._owners[block] != 0:
            raise RuntimeError(f"block {block} is not cached, it cannot be reclaimed")
        self._num_cached -= 1
        self._owners[block] = _FREE
        self._free.append(block)

    def check_invariants(self) -> None:
        """Raise `AssertionError` unless each block is in exactly one state."""
        free = set(self._free)
        assert len(free) == len(self._free), "a block is on the free list twice"
        for block, owners in enumerate(self._owners):
            assert (owners == _FREE) == (block in free), f"block {block}: free list and owner count disagree"
            assert owners >= _FREE, f"block {block} has {owners} owners"
        assert self._owners.count(0) == self._num_cached, "the count of cached blocks is wrong"
