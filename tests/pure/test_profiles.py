"""Optimisation profiles cover every step that the limits allow, and no shape outside them."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from pelton.compile.bundle import Limits
from pelton.compile.profiles import Profile, ShapeRange, derive_profiles
from pelton.errors import BuildError
from pelton.runtime.trt_facts import EngineProfile


@dataclass(frozen=True)
class Pages:
    num_heads: int = 3
    head_dim: int = 64


def limits(**changes: int) -> Limits:
    sizes = {"max_model_len": 2048, "max_batch_size": 64, "max_step_tokens": 512, "block_size": 32}
    return Limits(**{**sizes, "kv_cache_bytes": 1 << 30, **changes})


def step_shapes(tokens: int, sequences: int, pages: int, rows: int) -> dict[str, tuple[int, ...]]:
    return {
        "input_ids": (1, tokens),
        "positions": (1, tokens),
        "block_table": (sequences, pages),
        "seq_lens": (sequences,),
        "query_start_loc": (sequences + 1,),
        "logits_rows": (rows,),
    }


def fault(profile: Profile, shapes: dict[str, tuple[int, ...]]) -> str | None:
    """What the executor says of `shapes`, which knows the profile from `engine.json`."""
    written = json.loads(json.dumps(profile.to_json()))
    return TypeAdapter(EngineProfile).validate_python(written).fault(shapes)


def fits(profile: Profile, shapes: dict[str, tuple[int, ...]]) -> bool:
    return fault(profile, shapes) is None


@given(
    batch=st.integers(1, 64),
    extra=st.integers(0, 1000),
    blocks=st.integers(1, 100),
    data=st.data(),
)
def test_every_step_within_the_limits_fits_a_profile(
    batch: int, extra: int, blocks: int, data: st.DataObject
) -> None:
    some = limits(max_batch_size=batch, max_step_tokens=batch + extra, max_model_len=32 * blocks)
    decode, mixed = derive_profiles(some, [Pages()], 100)
    sequences = data.draw(st.integers(1, batch))
    pages = data.draw(st.integers(1, blocks))
    tokens = data.draw(st.integers(sequences, batch + extra))
    rows = data.draw(st.integers(1, tokens))
    assert fits(mixed, step_shapes(tokens, sequences, pages, rows))
    assert fits(decode, step_shapes(sequences, sequences, pages, sequences))


@pytest.mark.parametrize(
    "shapes",
    [
        step_shapes(513, 64, 64, 64),
        step_shapes(512, 65, 64, 64),
        step_shapes(512, 64, 65, 64),
        step_shapes(0, 1, 1, 1),
    ],
)
def test_tr_02_a_step_past_the_limits_fits_none(shapes: dict[str, tuple[int, ...]]) -> None:
    assert not any(fits(profile, shapes) for profile in derive_profiles(limits(), [Pages()], 100))


def test_pages_of_every_layer_are_in_each_profile() -> None:
    geometry = [Pages(), Pages(num_heads=1, head_dim=128)]
    for profile in derive_profiles(limits(), geometry, 100):
        assert profile.shapes["k_caches_1"].opt == (100, 32, 1, 128)
        assert profile.shapes["v_caches_0"].opt == (100, 32, 3, 64)
        assert fits(profile, {"v_caches_0": (1, 32, 3, 64)})
        assert "v_caches_0: shape (100, 16, 3, 64)" in str(fault(profile, {"v_caches_0": (100, 16, 3, 64)}))


def test_more_pages_than_a_tensor_can_hold_are_refused() -> None:
    with pytest.raises(BuildError, match="kv_cache_bytes"):
        derive_profiles(limits(), [Pages()], 1 << 20)


def test_a_range_in_the_wrong_order_names_its_input() -> None:
    with pytest.raises(BuildError, match="seq_lens"):
        ShapeRange("seq_lens", (1,), (9,), (8,))
