"""The cross-entropy that is computed in chunks, against the plain one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from distaff.nn.vocabulary import Projection, cross_entropy_sum, score_sums

BATCH, COUNT, EMBED, VOCAB = 3, 7, 8, 31


@pytest.fixture
def arrays():
    keys = jax.random.split(jax.random.key(0), 5)
    return (
        jax.random.normal(keys[0], (BATCH, COUNT, EMBED)),
        jax.random.normal(keys[1], (VOCAB, EMBED)),
        jax.random.normal(keys[2], (VOCAB,)),
        jax.random.randint(keys[3], (BATCH, COUNT), 0, VOCAB),
        jax.random.uniform(keys[4], (BATCH, COUNT)),
    )


def plainly(hidden, table, bias, labels, weights, smoothing=0.0):
    """The definition: all logits, the target as a distribution."""
    scores = jax.nn.log_softmax(hidden @ table.T + bias[None, None])
    target = (1 - smoothing) * jax.nn.one_hot(labels, VOCAB) + smoothing / VOCAB
    return (-(target * scores).sum(-1) * weights).sum()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("chunk", [1, 2 * BATCH * VOCAB, 1 << 20])  # one position, two (which pads), all at once
def test_loss_and_gradients_are_those_of_the_whole(arrays, chunk, smoothing):
    hidden, table, bias, labels, weights = arrays

    def chunked(hidden, table, bias, weights):
        projection = Projection(hidden, table, bias)
        return cross_entropy_sum(projection, labels, weights, label_smoothing=smoothing, chunk=chunk)

    def whole(hidden, table, bias, weights):
        return plainly(hidden, table, bias, labels, weights, smoothing)

    inputs = (hidden, table, bias, weights)
    loss, gradients = jax.value_and_grad(chunked, argnums=(0, 1, 2, 3))(*inputs)
    np.testing.assert_allclose(loss, whole(*inputs), rtol=1e-6)
    np.testing.assert_allclose(chunked(*inputs), loss, rtol=1e-6)
    for found, expected in zip(gradients, jax.grad(whole, argnums=(0, 1, 2, 3))(*inputs), strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("smoothing", "chunk"), [(0.0, 1 << 20), (0.1, 2 * BATCH * VOCAB)])
def test_padding_changes_nothing_and_gets_no_gradient(arrays, smoothing, chunk):
    hidden, table, bias, labels, weights = arrays
    more = jnp.pad(table, ((0, 9), (0, 0)), constant_values=2.0), jnp.pad(bias, (0, 9), constant_values=50.0)

    def loss(hidden, table, bias):
        projection = Projection(hidden, table, bias, VOCAB)
        return cross_entropy_sum(projection, labels, weights, label_smoothing=smoothing, chunk=chunk)

    found, (by_hidden, *others) = jax.value_and_grad(loss, argnums=(0, 1, 2))(hidden, *more)
    wanted, (same, *without) = jax.value_and_grad(loss, argnums=(0, 1, 2))(hidden, table, bias)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    np.testing.assert_allclose(by_hidden, same, atol=1e-5)
    for ours, theirs in zip(others, without, strict=True):
        np.testing.assert_allclose(ours[:VOCAB], theirs, atol=1e-5)
        assert not ours[VOCAB:].any()
    padded, plain = Projection(hidden, *more, VOCAB), Projection(hidden, table, bias)
    np.testing.assert_allclose(padded.logits(), plain.logits(), rtol=1e-6)
    np.testing.assert_allclose(score_sums(padded, labels, weights), score_sums(plain, labels, weights), rtol=1e-6)


def test_scores_count_hits(arrays):
    hidden, table, bias, labels, weights = arrays
    projection = Projection(hidden, table, bias)
    likeliest = jnp.argmax(projection.logits(), axis=-1)
    labels = labels.at[:, ::2].set(likeliest[:, ::2])
    loss, hits = score_sums(projection, labels, weights, chunk=2 * BATCH * VOCAB)
    np.testing.assert_allclose(loss, plainly(hidden, table, bias, labels, weights), rtol=1e-6)
    np.testing.assert_allclose(hits, weights[likeliest == labels].sum(), rtol=1e-6)


def test_whole_logits_are_never_held(arrays):
    """No array of the compiled gradient has as many numbers as all logits."""
    batch, count, vocab = 4, 64, 512

    def loss(hidden, table, labels):
        return cross_entropy_sum(Projection(hidden, table), labels, jnp.ones(labels.shape), chunk=batch * 8 * vocab)

    shapes = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (((batch, count, 16), "f4"), ((vocab, 16), "f4"), ((batch, count), "i4"))
    ]
    memory = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(*shapes).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 4 * batch * count * vocab


def test_bfloat16_sums_in_float32(arrays):
    hidden, table, bias, labels, weights = arrays
    narrow = Projection(hidden.astype(jnp.bfloat16), table, bias)
    loss = cross_entropy_sum(narrow, labels, weights)
    assert loss.dtype == jnp.float32
    np.testing.assert_allclose(loss, plainly(hidden, table, bias, labels, weights), rtol=2e-2)
