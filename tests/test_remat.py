"""What a layer computes again in the backward pass changes memory and time, and no number."""

import jax
import numpy as np
import pytest
from transformers import BertConfig

from distaff import FlaxBertForMaskedLM
from distaff.core.errors import UsageError
from distaff.core.tree import flatten
from distaff.nn.stack import remat_policy

CONFIG = BertConfig(
    vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
    max_position_embeddings=16,
)  # fmt: skip
IDS = np.random.default_rng(0).integers(1, 32, (2, 8)).astype(np.int32)


def program(scan, remat):
    """The gradient of a loss with dropout, as a function of parameters."""
    module = FlaxBertForMaskedLM(CONFIG, scan_layers=scan, gradient_checkpointing=remat, _do_init=False).module

    def loss(params):
        logits = module.apply({"params": params}, IDS, deterministic=False, rngs={"dropout": jax.random.key(1)}).logits
        return (logits**2).mean()

    return jax.value_and_grad(loss)


@pytest.mark.parametrize("scan", [False, True], ids=["looped", "scanned"])
def test_none_dots_and_full_are_the_same(scan):
    params = FlaxBertForMaskedLM(CONFIG, scan_layers=scan).params
    plain, products = None, {}
    for remat in ("none", "dots", "full"):
        gradient = program(scan, remat)
        products[remat] = str(jax.make_jaxpr(gradient)(params)).count("dot_general")
        loss, gradients = jax.jit(gradient)(params)
        found = {"loss": loss, **flatten(gradients)}
        plain = plain or found
        for path, leaf in found.items():
            np.testing.assert_allclose(leaf, plain[path], rtol=0, atol=1e-6, err_msg=path)
    # With dots those of queries with keys and of weights with values alone are computed again.
    assert products["none"] < products["dots"] < products["full"]


def test_booleans_mean_full_and_none():
    assert [remat_policy(remat) for remat in (True, False)] == ["full", "none"]
    with pytest.raises(UsageError, match="gradient_checkpointing is 'some': choose one of none, dots, full"):
        FlaxBertForMaskedLM(CONFIG, gradient_checkpointing="some")
