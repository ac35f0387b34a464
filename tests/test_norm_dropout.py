"""Norms against Flax's, and what dropout does to values and keeps for the backward pass."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from distaff.nn.dropout import Dropout
from distaff.nn.norm import LayerNorm, RMSNorm

VALUES = jax.random.normal(jax.random.key(0), (3, 5, 16)) * 3.0 + 7.0


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (LayerNorm(1e-3), nn.LayerNorm(epsilon=1e-3, use_fast_variance=False)),
        (RMSNorm(1e-3), nn.RMSNorm(epsilon=1e-3)),
    ],
)
def test_norms_and_their_gradients_are_those_of_flax(ours, theirs):
    params = theirs.init(jax.random.key(1), VALUES)
    assert jax.tree.map(jnp.shape, ours.init(jax.random.key(1), VALUES)) == jax.tree.map(jnp.shape, params)
    params = jax.tree.map(lambda leaf: leaf + jax.random.normal(jax.random.key(2), leaf.shape), params)

    def score(module):
        return lambda params, values: jnp.sum(jnp.sin(module.apply(params, values)))

    for mine, other in zip(
        jax.tree.leaves(jax.value_and_grad(score(ours), argnums=(0, 1))(params, VALUES)),
        jax.tree.leaves(jax.value_and_grad(score(theirs), argnums=(0, 1))(params, VALUES)),
        strict=True,
    ):
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("norm", [LayerNorm, RMSNorm])
def test_norms_of_bfloat16_keep_float32_statistics(norm):
    values = VALUES.astype(jnp.bfloat16)
    params = norm(1e-6).init(jax.random.key(0), values)
    narrow = norm(1e-6, dtype=jnp.bfloat16).apply(params, values)
    assert narrow.dtype == jnp.bfloat16
    wide = norm(1e-6).apply(params, values.astype(jnp.float32))
    np.testing.assert_array_equal(narrow, wide.astype(jnp.bfloat16))


def drop(rate, values, seed=0, **options):
    return Dropout(rate).apply({}, values, **options, rngs={"dropout": jax.random.key(seed)})


def test_dropout_leaves_out_its_rate_and_scales_the_rest():
    ones = jnp.ones((200, 500))
    dropped = drop(0.3, ones, deterministic=False)
    np.testing.assert_allclose(dropped[dropped != 0], 1 / 0.7, rtol=1e-6)
    assert float((dropped == 0).mean()) == pytest.approx(0.3, abs=5 * (0.3 * 0.7 / ones.size) ** 0.5)
    assert (drop(0.3, ones, seed=1, deterministic=False) != dropped).any()
    np.testing.assert_array_equal(drop(0.3, ones, deterministic=True), ones)
    np.testing.assert_array_equal(drop(0.0, ones, deterministic=False), ones)
    np.testing.assert_array_equal(drop(1.0, ones, deterministic=False), 0 * ones)
    assert drop(0.3, ones.astype(jnp.bfloat16), deterministic=False).dtype == jnp.bfloat16


def test_gradient_passes_where_the_value_passed():
    values = jnp.full((64, 64), 2.0)
    grads = jax.grad(lambda values: drop(0.5, values, deterministic=False).sum())(values)
    np.testing.assert_array_equal(grads, drop(0.5, values, deterministic=False) / 2.0)


def test_dropout_keeps_less_for_the_backward_pass_than_flax():
    shape = (64, 128, 128)

    def temporary(module) -> int:
        def loss(values, weights):
            hidden = module.apply({}, values @ weights, deterministic=False, rngs={"dropout": jax.random.key(0)})
            return jnp.sum((jax.nn.relu(hidden) @ weights) ** 2)

        args = jnp.ones(shape), jnp.ones(shape[-2:])
        return jax.jit(jax.grad(loss, argnums=1)).lower(*args).compile().memory_analysis().temp_size_in_bytes

    assert temporary(Dropout(0.1)) < 0.9 * temporary(nn.Dropout(0.1))
