from __future__ import annotations

import random

import pytest

from pelton.runtime.blocks import BlockPool


def test_allocates_every_block_once() -> None:
    pool = BlockPool(5, 4)
    blocks = [pool.allocate() for _ in range(5)]
    assert sorted(blocks) == list(range(5))
    assert (pool.num_free, pool.num_owned, pool.num_cached) == (0, 5, 0)
    with pytest.raises(RuntimeError, match="no free block"):
        pool.allocate()


def test_a_shared_block_is_free_only_after_its_last_owner() -> None:
    pool = BlockPool(1, 4)
    block = pool.allocate()
    pool.share(block)
    assert pool.num_owners(block) == 2
    assert not pool.release(block)
    assert pool.num_free == 0
    assert pool.release(block)
    assert (pool.num_free, pool.num_owners(block)) == (1, 0)


def test_a_kept_block_is_cached_until_shared_or_reclaimed() -> None:
    pool = BlockPool(2, 4)
    block = pool.allocate()
    pool.release(block, keep=True)
    assert (pool.num_free, pool.num_cached, pool.num_owned) == (1, 1, 0)
    pool.share(block)
    assert (pool.num_free, pool.num_cached, pool.num_owned) == (1, 0, 1)
    pool.release(block, keep=True)
    pool.reclaim(block)
    assert (pool.num_free, pool.num_cached, pool.num_owned) == (2, 0, 0)
    pool.check_invariants()


def test_pc_07_a_wrong_release_or_share_is_refused() -> None:
    pool = BlockPool(2, 4)
    block = pool.allocate()
    with pytest.raises(RuntimeError, match="not cached"):
        pool.reclaim(block)
    pool.release(block)
    with pytest.raises(RuntimeError, match="no owner"):
        pool.release(block)
    with pytest.raises(RuntimeError, match="is free"):
        pool.share(block)
    with pytest.raises(RuntimeError, match="not cached"):
        pool.reclaim(block)
    pool.share(kept := pool.allocate())
    pool.release(kept)
    pool.release(kept, keep=True)
    with pytest.raises(RuntimeError, match="no owner"):
        pool.release(kept)
    pool.check_invariants()


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (32, 2)])
def test_blocks_for_tokens(num_tokens: int, num_blocks: int) -> None:
    assert BlockPool(1, 16).num_blocks_for(num_tokens) == num_blocks


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 4), (4, 0), (-1, 4)])
def test_refuses_an_empty_pool(num_blocks: int, block_size: int) -> None:
    with pytest.raises(ValueError, match="pool"):
        BlockPool(num_blocks, block_size)


@pytest.mark.parametrize("seed", range(4))
def test_pc_07_random_operations_agree_with_a_model(seed: int) -> None:
    rng = random.Random(seed)
    pool = BlockPool(7, 4)
    owners: dict[int, int] = {}  # of blocks that are owned or cached
    for _ in range(3000):
        owned = [block for block, count in owners.items() if count]
        cached = [block for block, count in owners.items() if not count]
        action = rng.choice(("allocate", "share", "release", "keep", "reclaim"))
        if action == "allocate" and len(owners) < 7:
            block = pool.allocate()
            assert block not in owners
            owners[block] = 1
        elif action == "share" and owners:
            block = rng.choice(list(owners))
            pool.share(block)
            owners[block] += 1
        elif action in ("release", "keep") and owned:
            block = rng.choice(owned)
            owners[block] -= 1
            assert pool.release(block, keep=action == "keep") == (owners[block] == 0)
            if not owners[block] and action == "release":
                del owners[block]
        elif action == "reclaim" and cached:
            block = rng.choice(cached)
            pool.reclaim(block)
            del owners[block]
        pool.check_invariants()
        assert [pool.num_owners(block) for block in range(7)] == [owners.get(block, 0) for block in range(7)]
        assert pool.num_free == 7 - len(owners)
        assert pool.num_cached == sum(count == 0 for count in owners.values())


def test_invariants_name_a_block_that_is_free_twice() -> None:
    pool = BlockPool(3, 4)
    block = pool.allocate()
    pool.release(block)
    pool._free.append(block)
    with pytest.raises(AssertionError, match="twice"):
        pool.check_invariants()


def test_invariants_name_a_block_that_is_free_and_owned() -> None:
    pool = BlockPool(3, 4)
    block = pool.allocate()
    pool._free.append(block)
    with pytest.raises(AssertionError, match=f"block {block}"):
        pool.check_invariants()
