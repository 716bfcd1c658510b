from __future__ import annotations

import random
from hashlib import blake2b

import pytest

from pelton.runtime.blocks import BlockPool
from pelton.runtime.prefix_cache import HashFunction, PrefixCache, TokenChain
from support.scheduling import StepDriver, generate, make_config, make_sequence


def four_bit_hash(data: bytes) -> bytes:
    return bytes([blake2b(data).digest()[0] & 15])


def make_cache(num_blocks: int = 8, hash_function: HashFunction | None = None) -> PrefixCache:
    return PrefixCache(BlockPool(num_blocks, 4), hash_function=hash_function)


def compute(cache: PrefixCache, chain: TokenChain, tokens: list[int]) -> list[int]:
    """Find, allocate and publish the full blocks of `tokens` as a sequence would; returns its blocks."""
    hits = cache.match(chain, tokens, len(tokens) // 4)
    blocks = cache.acquire(chain, hits)
    blocks += [cache.allocate() for _ in range(len(tokens) // 4 - len(hits))]
    cache.publish(chain, tokens, len(tokens), blocks)
    cache.check_invariants()
    return blocks


def count_hits(cache: PrefixCache, tokens: list[int], namespace: tuple[str, str] = ("", "")) -> int:
    return len(cache.match(TokenChain(namespace), tokens, len(tokens) // 4))


def shared_prefix_prompts(count: int, rng: random.Random) -> list[list[int]]:
    """Different prompts of 5 to 40 tokens, most of which start like others at block or odd places."""
    stems = [[rng.randrange(900) for _ in range(24)] for _ in range(6)]
    prompts: list[list[int]] = []
    while len(prompts) < count:
        tail = [rng.randrange(900) for _ in range(rng.randint(5, 16))]
        prompt = rng.choice(stems)[: rng.randrange(25)] + tail
        if prompt not in prompts:
            prompts.append(prompt)
    return prompts


def test_pc_01_four_bit_hash_equals_the_run_without_a_cache() -> None:
    prompts = shared_prefix_prompts(500, random.Random(1))
    config = {"num_blocks": 64, "max_batch_size": 8, "max_step_tokens": 64}
    cold = StepDriver(make_config(enable_prefix_caching=False, **config))
    weak = StepDriver(make_config(**config), hash_function=four_bit_hash)
    expected = cold.run(*(make_sequence(p, 4) for p in prompts))
    assert expected == [generate(p, 4) for p in prompts]
    assert weak.run(*(make_sequence(p, 4) for p in prompts)) == expected
    assert weak.scheduler.num_prefix_hit_tokens > 0, "without hits the test proves nothing"
    assert weak.scheduler._cache.num_collisions > 100, "without collisions the test proves nothing"
    assert cold.scheduler.num_prefix_hit_tokens == 0
    assert cold.scheduler.num_cached_blocks == 0


def test_pc_01_a_hit_compares_tokens_parent_and_namespace() -> None:
    cache = make_cache(hash_function=lambda data: b"same")
    compute(cache, TokenChain(("salt", "tag")), [1, 2, 3, 4])
    assert count_hits(cache, [1, 2, 3, 4], ("salt", "tag")) == 1
    assert count_hits(cache, [1, 2, 3, 5], ("salt", "tag")) == 0
    assert count_hits(cache, [1, 2, 3, 4], ("other", "tag")) == 0
    assert count_hits(cache, [1, 2, 3, 4], ("salt", "other")) == 0
    # The second block has the key and the tokens of the first, but another parent.
    assert count_hits(cache, [1, 2, 3, 4, 1, 2, 3, 4], ("salt", "tag")) == 1


def test_pc_01_equal_blocks_after_different_parents_stay_apart() -> None:
    cache = make_cache()
    compute(cache, TokenChain(("", "")), [1, 1, 1, 1, 9, 9, 9, 9])
    compute(cache, TokenChain(("", "")), [2, 2, 2, 2])
    assert count_hits(cache, [2, 2, 2, 2, 9, 9, 9, 9]) == 1
    assert count_hits(cache, [9, 9, 9, 9]) == 0


def test_a_salt_cannot_be_shifted_into_the_tag() -> None:
    cache = make_cache()
    chains = [TokenChain(namespace) for namespace in (("ab", "c"), ("a", "bc"))]
    for chain in chains:
        compute(cache, chain, [1, 2, 3, 4])
    assert chains[0].keys != chains[1].keys
    assert count_hits(cache, [1, 2, 3, 4], ("abc", "")) == 0


def test_a_collision_ends_publishing_until_the_sequence_starts_again() -> None:
    cache = make_cache(3, hash_function=lambda data: b"same")
    first, second = TokenChain(("", "")), TokenChain(("", ""))
    first_blocks = compute(cache, first, [1, 2, 3, 4])
    second_blocks = compute(cache, second, [5, 6, 7, 8])
    assert (cache.num_collisions, second.nodes, second.is_publishing) == (1, [], False)
    cache.release(first_blocks, first)
    cache.release(second_blocks, second)
    others = [cache.allocate() for _ in range(3)]  # evicts what was in the way
    cache.release(others)
    compute(cache, second, [5, 6, 7, 8])
    assert count_hits(cache, [5, 6, 7, 8]) == 1


@pytest.mark.parametrize("salts", [("a", "b"), ("", "a"), ("\ud800", "\ud801")])
def test_salts_separate_requests(salts: tuple[str, str]) -> None:
    driver = StepDriver(make_config())
    prompt = list(range(12))
    for salt in salts:
        other = make_sequence(prompt, 2, salt=salt)
        driver.run(other)
        assert other.num_cached_tokens == 0
    again = make_sequence(prompt, 2, salt=salts[0])
    driver.run(again)
    assert again.num_cached_tokens == 8


@pytest.mark.parametrize("hash_function", [None, four_bit_hash])
@pytest.mark.parametrize("length", [15, 16, 17, 32, 33, 48])
def test_pc_04_a_fully_cached_prompt_leaves_a_token(length: int, hash_function: HashFunction | None) -> None:
    driver = StepDriver(make_config(block_size=16, max_step_tokens=64), hash_function=hash_function)
    prompt = [(7 * i) % 900 for i in range(length)]
    cold, *repeats = [make_sequence(prompt, 20) for _ in range(3)]
    expected = generate(prompt, 20)
    assert driver.run(cold) == [expected]
    assert cold.num_cached_tokens == 0
    for repeat in repeats:
        num_before = driver.executor.num_computed_tokens
        assert driver.run(repeat) == [expected]
        assert repeat.num_cached_tokens <= length - 1
        if hash_function is None:
            assert repeat.num_cached_tokens == (length - 1) // 16 * 16
        # The last sampled token is never computed.
        assert driver.executor.num_computed_tokens - num_before == length + 19 - repeat.num_cached_tokens


@pytest.mark.parametrize("length", [15, 16, 17, 32])
def test_pc_04_entry_of_a_longer_prompt(length: int) -> None:
    driver = StepDriver(make_config(block_size=16, max_step_tokens=64))
    longer = [(5 * i) % 900 for i in range(length + 40)]
    driver.run(make_sequence(longer, 2))
    shorter = make_sequence(longer[:length], 6)
    assert driver.run(shorter) == [generate(longer[:length], 6)]
    assert shorter.num_cached_tokens == (length - 1) // 16 * 16


@pytest.mark.parametrize("num_output", [15, 16, 17, 32, 33])
def test_pc_04_entry_of_generated_tokens(num_output: int) -> None:
    driver = StepDriver(make_config(block_size=16, max_step_tokens=64))
    first = make_sequence(range(16), num_output)
    driver.run(first)
    follow_up = make_sequence(first.token_ids, 4)
    assert driver.run(follow_up) == [generate(first.token_ids, 4)]
    # The K/V of the last sampled token was never computed.
    assert follow_up.num_cached_tokens == (first.num_tokens - 1) // 16 * 16


def test_pc_05_a_prefix_shared_within_one_tick() -> None:
    settings = {"max_model_len": 512, "max_batch_size": 64, "num_blocks": 2048, "block_size": 16}
    prompts = [[*range(256), 300 + i] for i in range(64)]
    driver = StepDriver(make_config(max_step_tokens=64 * 257, **settings))
    sequences = [make_sequence(p, 4) for p in prompts]
    for sequence in sequences:
        driver.add(sequence)
    plan = driver.step()
    assert [item.num_tokens for item in plan.items] == [257] * 64, "a block was a hit before it was computed"
    # They computed the prefix side by side; from the commit on they share one copy of it.
    assert driver.scheduler.num_used_blocks == 16 + 64
    while driver.live:
        driver.step()
    driver.check_idle()
    assert [s.output_token_ids for s in sequences] == [generate(p, 4) for p in prompts]


def test_pc_05_nothing_is_published_before_commit() -> None:
    driver = StepDriver(make_config())
    driver.add(make_sequence(range(12), 4))
    driver.plan()
    assert driver.scheduler._cache._by_block == {}
    driver.step()
    assert len(driver.scheduler._cache._by_block) == 3


def test_pc_07_a_sequence_that_ends_before_its_commit_publishes_nothing() -> None:
    driver = StepDriver(make_config())
    doomed = driver.add(make_sequence(range(12), 4))
    driver.step(on_commit=lambda: driver.abort(doomed))
    assert driver.scheduler._cache._by_block == {}
    driver.check_idle()
    follower = make_sequence(range(12), 4)
    assert driver.run(follower) == [generate(range(12), 4)]
    assert follower.num_cached_tokens == 0


@pytest.mark.parametrize("order", ["pppcpp", "cpcp", "ppcc"])
@pytest.mark.parametrize("length", [15, 16, 17, 33, 512])
def test_pc_03_prompt_logprobs_compute_every_position(length: int, order: str) -> None:
    """p asks for prompt log-probabilities, c does not; the driver checks the logits of every row."""
    driver = StepDriver(make_config(block_size=16, max_model_len=600, num_blocks=64, max_step_tokens=128))
    prompt = [(11 * i) % 900 for i in range(length)]
    for place, kind in enumerate(order):
        sequence = make_sequence(prompt, 3, prompt_logprobs=1 if kind == "p" else None)
        num_before = driver.executor.num_computed_tokens
        assert driver.run(sequence) == [generate(prompt, 3)]
        num_computed = driver.executor.num_computed_tokens - num_before
        if kind == "p":
            assert (sequence.num_cached_tokens, num_computed) == (0, length + 2)
        else:
            num_hits = (length - 1) // 16 * 16 if place else 0
            assert sequence.num_cached_tokens == num_hits, "what p computed is of use to c"


def test_pc_03_prompt_logprobs_keep_their_own_blocks() -> None:
    driver = StepDriver(make_config())
    plain = driver.add(make_sequence(range(12), 8))
    scoring = driver.add(make_sequence(range(12), 8, prompt_logprobs=1))
    driver.step()
    driver.step()
    assert scoring.num_computed_tokens >= 12
    assert not set(plain.block_ids) & set(scoring.block_ids)


def test_a_duplicate_block_is_swapped_for_the_cached_one() -> None:
    cache = make_cache(4)
    first, second = TokenChain(("", "")), TokenChain(("", ""))
    tokens = [1, 2, 3, 4, 5, 6, 7, 8]
    mine, theirs = [cache.allocate(), cache.allocate()], [cache.allocate(), cache.allocate()]
    cache.publish(first, tokens, 8, mine)
    kept = list(mine)
    cache.publish(second, tokens, 8, theirs)
    assert theirs == mine == kept
    assert cache.num_available == 2
    cache.release(mine, first)
    assert cache.num_available == 2
    cache.release(theirs, second)
    assert cache.num_available == 4
    cache.check_invariants()


def test_only_full_blocks_are_published() -> None:
    cache = make_cache()
    chain = TokenChain(("", ""))
    blocks = [cache.allocate(), cache.allocate()]
    cache.publish(chain, [1, 2, 3, 4, 5, 6, 7], 7, blocks)
    assert len(chain.nodes) == 1
    assert cache.is_cached(blocks[0])
    assert not cache.is_cached(blocks[1])


def test_evicts_least_recently_used_and_children_before_parents() -> None:
    cache = make_cache(6)
    stem = [0, 0, 0, 0]
    chains = {tail: TokenChain(("", "")) for tail in (1, 2)}
    blocks = {tail: compute(cache, chain, [*stem, *[tail] * 4]) for tail, chain in chains.items()}
    for tail in (1, 2):
        cache.release(blocks[tail], chains[tail])
    assert (cache.num_available, cache.num_evictions) == (6, 0)
    assert count_hits(cache, [*stem, 1, 1, 1, 1]) == 2
    again = TokenChain(("", ""))
    cache.release(cache.acquire(again, cache.match(again, [*stem, 1, 1, 1, 1], 2)), again)  # used last
    lost = []
    for _ in range(3):
        cache.allocate()
    for _ in range(3):
        cache.allocate()
        cache.check_invariants()
        lost.append((count_hits(cache, [*stem, 1, 1, 1, 1]), count_hits(cache, [*stem, 2, 2, 2, 2])))
    assert lost == [(2, 1), (1, 1), (0, 0)]
    assert cache.num_evictions == 3


def test_a_block_in_use_is_never_evicted() -> None:
    cache = make_cache(3)
    compute(cache, TokenChain(("", "")), [1] * 8)
    cache.allocate()
    assert cache.num_available == 0
    with pytest.raises(RuntimeError, match="no free block"):
        cache.allocate()
    assert count_hits(cache, [1] * 8) == 2


def test_every_block_is_hashed_once() -> None:
    """Waiting at the head, preemption, a second match and publishing all reuse a sequence's keys."""
    hashed: list[bytes] = []

    def counting_hash(data: bytes) -> bytes:
        hashed.append(data)
        return blake2b(data).digest()

    driver = StepDriver(make_config(num_blocks=8, max_step_tokens=8), hash_function=counting_hash)
    sequences = [make_sequence(range(start, start + 9), 16) for start in (0, 100, 200)]
    driver.run(*sequences)
    assert driver.scheduler.num_preemptions > 0
    num_full_blocks = sum((s.num_tokens - 1) // 4 for s in sequences)
    assert len(hashed) <= num_full_blocks + len(sequences), "a root key each, and one key a block"


def test_the_default_hash_is_keyed() -> None:
    keys = set()
    for _ in range(2):
        cache, chain = make_cache(), TokenChain(("", ""))
        compute(cache, chain, [1, 2, 3, 4])
        keys.add(chain.keys[0])
    assert len(keys) == 2, "keys that can be computed outside let a client craft collisions"


def test_invariants_see_a_parent_that_went_first() -> None:
    cache = make_cache()
    chain = TokenChain(("", ""))
    blocks = compute(cache, chain, [1] * 8)
    cache.release(blocks, chain)
    cache._unowned.move_to_end(blocks[0], last=False)
    with pytest.raises(AssertionError, match="outlive"):
        cache.check_invariants()
