"""Attention by blocks equals attention that writes all scores out, forwards and backwards."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from distaff.core.mesh import make_mesh
from distaff.nn.attend import attend, attend_by_library
from distaff.nn.blocks import _Plan, attend_in_blocks
from distaff.nn.mask import Sight

BATCH, HEADS, WIDTH = 2, 3, 8


def case(queries, keys, *, pairwise=False, ends=None, **fields):
    """A sight and which queries see something; `ends` are (left, right) padding of the second row."""
    padding = None
    if ends is not None:
        padding = np.ones((BATCH, 1, 1, keys), bool)
        padding[1, ..., : ends[0]] = False
        padding[1, ..., keys - ends[1] :] = False
    if pairwise:
        segments = np.sort(np.random.default_rng(1).integers(0, 3, (BATCH, keys)), axis=1)
        padding = (segments[:, :, None] == segments[:, None])[:, None]
    return queries, keys, Sight(padding if padding is None else jnp.asarray(padding), **fields)


RELATIVE = {"relative": jnp.asarray(np.random.default_rng(2).normal(size=(HEADS, 74)), jnp.float32), "origin": 36}
CASES = {
    "all": case(37, 37),
    "padded": case(37, 37, ends=(0, 9)),
    "other lengths": case(19, 50, ends=(5, 20)),
    "causal, left padding": case(37, 37, ends=(20, 0), causal=True),
    "packed": case(37, 37, pairwise=True, causal=True),
    "cache": case(5, 41, ends=(3, 0), causal=True, start=jnp.asarray(17)),
    "window": case(37, 37, ends=(6, 0), causal=True, window=jnp.asarray(5)),
    "wide window": case(37, 37, causal=True, window=jnp.asarray(20)),
    "window and cache": case(6, 41, causal=True, start=jnp.asarray(17), window=jnp.asarray(9)),
    "relative": case(37, 37, ends=(0, 4), **RELATIVE),
    "causal, relative": case(37, 37, causal=True, **RELATIVE),
}


def arrays(queries, keys, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    shapes = [(BATCH, HEADS, length, WIDTH) for length in (queries, keys, keys, queries)]
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def sees(queries, keys, sight):
    """Queries `[batch or 1, 1, queries, 1]` that see a key; what others get, nobody reads."""
    bias = sight.replace(relative=None).bias(queries, keys)
    return 1.0 if bias is None else (bias == 0).any(axis=-1, keepdims=True).astype(jnp.float32)


def run(attend, queries, keys, sight, dtype=jnp.float32):
    """Outputs where something is seen, and gradients of their sum weighed at random."""
    query, key, value, weights = arrays(queries, keys, dtype)
    weights = weights * sees(queries, keys, sight)

    def total(query, key, value, relative):
        out = attend(query, key, value, sight.replace(relative=relative)) * weights
        return out.astype(jnp.float32).sum(), out

    argnums = (0, 1, 2) if sight.relative is None else (0, 1, 2, 3)
    (_, out), gradients = jax.value_and_grad(total, argnums, has_aux=True)(query, key, value, sight.relative)
    return [out, *gradients]


def eager(query, key, value, sight):
    bias = sight.bias(query.shape[2], key.shape[2])
    return attend(query, key, value, bias=bias, scale=1.0, dropout=lambda weights: weights)[0]


def blocks(query, key, value, sight):
    return attend_in_blocks(query, key, value, sight, block=8)


def assert_alike(name, attend, reference, dtype=jnp.float32, tolerance=1e-5):
    both = jax.jit(lambda: [run(each, *CASES[name], dtype) for each in (attend, reference)])()
    for found, expected in zip(*both, strict=True):
        assert found.dtype == expected.dtype
        scale = max(1.0, float(jnp.abs(expected).max()))
        np.testing.assert_allclose(
            *(np.asarray(each, np.float32) for each in (found, expected)), atol=tolerance * scale
        )


@pytest.mark.parametrize("name", CASES)
def test_blocks_change_nothing(name):
    assert_alike(name, blocks, eager)


def test_rows_and_heads_may_lie_on_several_devices():
    """Each device computes its own, without a word to the others."""
    mesh = make_mesh(data=2, tensor=4)
    sharding = NamedSharding(mesh, PartitionSpec("data", "tensor"))
    made = [jnp.concatenate([each, each[:, :1]], axis=1) for each in arrays(37, 37)[:3]]
    alone = [jnp.asarray(each) for each in made]
    padding = jax.device_put(CASES["causal, left padding"][2].padding, NamedSharding(mesh, PartitionSpec("data")))
    rng = jax.random.key(0)

    def total(query, key, value, padding):
        out = attend_in_blocks(query, key, value, Sight(padding, causal=True), rng=rng, dropout_rate=0.1, block=8)
        return (out**2).sum()

    compiled = jax.jit(jax.grad(total, (0, 1, 2))).lower(*jax.device_put(made, sharding), padding).compile()
    text = compiled.as_text()
    assert not [name for name in ("all-gather", "all-reduce", "all-to-all", "collective-permute") if name in text]
    expected = jax.jit(jax.grad(total, (0, 1, 2)))(*alone, CASES["causal, left padding"][2].padding)
    for one, other in zip(compiled(*jax.device_put(made, sharding), padding), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 * float(jnp.abs(other).max()))


def test_bfloat16_is_close():
    assert_alike("causal, relative", blocks, eager, jnp.bfloat16, 3e-2)


def test_statistics_are_float32():
    """A sum of 2000 equal weights, which bfloat16 could not count."""
    query, key, value = jnp.zeros((1, 1, 1, 2)), jnp.zeros((1, 1, 2000, 2)), jnp.ones((1, 1, 2000, 2))
    found = attend_in_blocks(*(each.astype(jnp.bfloat16) for each in (query, key, value)), Sight(), block=64)
    np.testing.assert_array_equal(found.astype(jnp.float32), np.ones((1, 1, 1, 2)))


@pytest.mark.parametrize("name", ["causal, left padding", "relative", "all"])
def test_the_library_changes_nothing(name):
    def library(*arrays):
        return attend_by_library(*arrays, implementation="xla", dropout_rate=0.0)

    assert_alike(name, library, eager)


def test_dropout_is_that_of_the_drawn_factors():
    """The same in the backward pass, another in each block, and of the rate that is asked for."""
    rng, rate = jax.random.key(3), 0.25
    plan = _Plan.of(37, 37, 8, rate)
    shape = (BATCH, HEADS, plan.height, plan.width)
    factors = [[plan.kept(rng, shape, row, column) for column in range(plan.columns)] for row in range(plan.rows)]
    whole = jnp.concatenate([jnp.concatenate(row, axis=3) for row in factors], axis=2)[:, :, :37, :37]
    assert not np.array_equal(factors[0][0], factors[0][1])
    assert not np.array_equal(factors[0][1], factors[1][0])
    assert abs(float((whole == 0).mean()) - rate) < 0.03
    assert set(np.unique(whole)) == {0.0, np.float32(1 / 0.75)}

    def dropped(query, key, value, sight):
        return attend_in_blocks(query, key, value, sight, rng=rng, dropout_rate=rate, block=8)

    def reference(query, key, value, sight):
        bias = sight.bias(37, 37)
        return attend(query, key, value, bias=bias, scale=1.0, dropout=lambda weights: weights * whole)[0]

    assert_alike("causal, relative", dropped, reference)
