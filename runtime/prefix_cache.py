"""Computed blocks kept for later sequences that start with the same tokens.

The cached blocks form a tree: a block's parent holds the tokens just before it. A block is found by a key,
the hash of its parent's key and its tokens, but a hit also compares the parent itself, the tokens and the
namespace. So by induction from the first block a hit proves the whole prefix, whatever the hash function
does.

Three rules keep the tree sound:

1. Only computed, full blocks enter it (`publish` is called when a step is committed). They are never written
   again.
2. Who owns a block owns its parent. A sequence that computed a block that is already cached swaps its own for
   the cached one, which also saves the memory.
3. Blocks are released last one first. With rule 2 a child thus becomes unowned no later than its parent, so
   evicting in the order of release (least recently used first) never takes a parent before its child, and
   every unowned block can be evicted.
"""

from __future__ import annotations

import os
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from .blocks import BlockPool

HashFunction = Callable[[bytes], bytes]


def keyed_hash() -> HashFunction:
    """BLAKE2b of 16 bytes with a random key, so that nobody outside can craft keys that collide."""
    secret = os.urandom(32)
    return lambda data: blake2b(data, digest_size=16, key=secret).digest()


@dataclass(eq=False, slots=True)
class CachedBlock:
    """A node of the tree: block `block_id` holds the K/V of `content` after everything up to `parent`."""

    key: bytes
    namespace: tuple[str, str]
    parent: CachedBlock | None
    content: bytes
    block_id: int

    def is_for(self, namespace: tuple[str, str], parent: CachedBlock | None, content: bytes) -> bool:
        return self.parent is parent and self.content == content and self.namespace == namespace


@dataclass(eq=False, slots=True)
class TokenChain:
    """One sequence seen as full blocks of tokens; keys are hashed once, when a block is first asked for.

    `nodes` are the cached blocks that the sequence owns: its first `len(nodes)` blocks. `namespace` is
    (salt, tag): sequences share blocks only when both are equal (the tag is for what else changes K/V, such
    as an adapter). A chain with `is_reading` False publishes what nobody has published, but neither finds nor
    swaps in a block that another sequence computed.
    """

    namespace: tuple[str, str]
    is_reading: bool = True
    is_publishing: bool = True
    keys: list[bytes] = field(default_factory=list)
    contents: list[bytes] = field(default_factory=list)
    nodes: list[CachedBlock] = field(default_factory=list)

    def fork(self) -> TokenChain:
        """An equal chain. Its sequence must own the blocks of `nodes` too."""
        return TokenChain(
            self.namespace,
            self.is_reading,
            self.is_publishing,
            list(self.keys),
            list(self.contents),
            list(self.nodes),
        )


class PrefixCache:
    """The cached blocks of `pool`; also the pool's front for allocating and releasing, since it evicts."""

    def __init__(self, pool: BlockPool, *, hash_function: HashFunction | None = None) -> None:
        self._pool = pool
        self._hash = hash_function or keyed_hash()
        self._by_key: dict[bytes, CachedBlock] = {}
        self._by_block: dict[int, CachedBlock] = {}
        self._unowned: OrderedDict[int, CachedBlock] = OrderedDict()  # by block, least recently used first
        self.num_evictions = 0
        self.num_collisions = 0

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can give: free ones and cached ones that nobody owns."""
        return self._pool.num_free + len(self._unowned)

    def allocate(self) -> int:
        """A block to write, with one owner; evicts the least recently used cached block if none is free."""
        if not self._pool.num_free and self._unowned:
            self._evict()
        return self._pool.allocate()

    def release(self, block_ids: Sequence[int], chain: TokenChain | None = None) -> None:
        """Take one owner from each of a sequence's blocks; published ones stay cached."""
        for block in reversed(block_ids):
            node = self._by_block.get(block)
            if self._pool.release(block, keep=node is not None) and node is not None:
                self._unowned[block] = node
        if chain is not None:
            chain.nodes = []

    def match(self, chain: TokenChain, token_ids: Sequence[int], max_blocks: int) -> list[CachedBlock]:
        """The longest cached prefix of `token_ids`, at most `max_blocks` full blocks. Takes nothing."""
        found: list[CachedBlock] = []
        if not chain.is_reading:
            return found
        parent: CachedBlock | None = None
        for index in range(max_blocks):
            key, content = self._block_at(chain, token_ids, index)
            node = self._by_key.get(key)
            if node is None or not node.is_for(chain.namespace, parent, content):
                break
            found.append(node)
            parent = node
        return found

    def num_unowned(self, nodes: Sequence[CachedBlock]) -> int:
        """How many of `nodes` count as available until they are acquired."""
        unowned = self._unowned
        return sum(node.block_id in unowned for node in nodes)

    def acquire(self, chain: TokenChain, nodes: list[CachedBlock]) -> list[int]:
        """Make the chain's sequence an owner of matched `nodes`, its first blocks. Returns their ids."""
        for node in nodes:
            self._unowned.pop(node.block_id, None)
            self._pool.share(node.block_id)
        chain.nodes = nodes
        chain.is_publishing = True
        return [node.block_id for node in nodes]

    def publish(
        self, chain: TokenChain, token_ids: Sequence[int], num_computed_tokens: int, block_ids: list[int]
    ) -> None:
        """Cache the sequence's full blocks that are computed; swaps duplicates in `block_ids` in place.

        A block whose key is taken by other content is not cached, nor is anything after it.
        """
        nodes = chain.nodes
        while chain.is_publishing and len(nodes) < num_computed_tokens // self._pool.block_size:
            index = len(nodes)
            parent = nodes[-1] if nodes else None
            key, content = self._block_at(chain, token_ids, index)
            node = self._by_key.get(key)
            if node is None:
                node = CachedBlock(key, chain.namespace, parent, content, block_ids[index])
                self._by_key[key] = node
                self._by_block[node.block_id] = node
            elif not node.is_for(chain.namespace, parent, content):
                self.num_collisions += 1
                chain.is_publishing = False
                break
            elif not chain.is_reading:
                chain.is_publishing = False
                break
            else:
                self._unowned.pop(node.block_id, None)
                self._pool.share(node.block_id)
                self._pool.release(block_ids[index])
                block_ids[index] = node.block_id
            nodes.append(node)

    def _block_at(self, chain: TokenChain, token_ids: Sequence[int], index: int) -> tuple[bytes, bytes]:
        """Key and content of a full block; the blocks before it have been asked for earlier."""
        keys, contents = chain.keys, chain.contents
        if index == len(keys):
            size = self._pool.block_size
            content = array("q", token_ids[index * size : (index + 1) * size]).tobytes()
            parent_key = keys[-1] if keys else self._root_key(chain.namespace)
            keys.append(self._hash(parent_key + content))
            contents.append(content)
        return keys[index], contents[index]

    def _root_key(self, namespace: tuple[str, str]) -> bytes:
        salt, tag = (part.encode("utf-8", "surrogatepass") for part in namespace)
        return self._hash(len(salt).to_bytes(8, "little") + salt + tag)

    def _evict(self) -> None:
        block, node = self._unowned.popitem(last=False)
        del self._by_key[node.key]
        del self._by_block[block]
        self._pool.reclaim(block)
        self.num_evictions += 1

    def is_cached(self, block: int) -> bool:
        """Whether `block` is published, owned or not: it must never be written."""
        return block in self._by_block

    def check_invariants(self) -> None:
        """Raise `AssertionError` unless the tree is whole and agrees with the pool."""
        assert len(self._by_key) == len(self._by_block), "keys and blocks disagree"
        assert len(self._unowned) == self._pool.num_cached, "unowned cached blocks and the pool disagree"
        for block, node in self._by_block.items():
            assert node.block_id == block, f"block {block} has the node of block {node.block_id}"
            assert self._by_key.get(node.key) is node, f"block {block} cannot be found by its key"
            is_owned = self._pool.num_owners(block) > 0
            assert is_owned != (block in self._unowned), f"block {block} is owned and evictable, or neither"
            if node.parent is not None:
                above = node.parent.block_id
                assert self._by_block.get(above) is node.parent, f"block {block} outlived its parent"
                assert not is_owned or self._pool.num_owners(above), f"the parent of block {block} is unowned"
        rank = {block: i for i, block in enumerate(self._unowned)}
        for block, node in self._unowned.items():
            if node.parent is not None and node.parent.block_id in rank:
                assert rank[block] < rank[node.parent.block_id], f"block {block} would outlive its parent"
