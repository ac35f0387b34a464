"""What a layer computes again in the backward pass changes memory and time, and no number."""

import jax
import numpy as np
import pytest
from transformers import BertConfig

from distaff import FlaxBertForMaskedLM
from distaff.cli import COMMANDS, parse
from distaff.core.errors import UsageError
from distaff.core.tree import flatten
from distaff.nn.stack import remat_policy
from distaff.tasks._flags import checkpointing
from distaff.tasks.mlm import MlmFlags

FIELDS = {"vocab_size": 32, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 64}
# A loop compiles each of its layers, a scan one.
CONFIGS = {
    scan: BertConfig(**FIELDS, num_hidden_layers=layers, max_position_embeddings=16)
    for scan, layers in ((False, 1), (True, 8))
}
IDS = np.random.default_rng(0).integers(1, 32, (2, 8)).astype(np.int32)


def program(scan, remat):
    """The gradient of a loss with dropout, as a function of parameters."""
    module = FlaxBertForMaskedLM(CONFIGS[scan], scan_layers=scan, gradient_checkpointing=remat, _do_init=False).module

    def loss(params):
        logits = module.apply({"params": params}, IDS, deterministic=False, rngs={"dropout": jax.random.key(1)}).logits
        return (logits**2).mean()

    return jax.value_and_grad(loss)


@pytest.mark.parametrize("scan", [False, True], ids=["looped", "scanned"])
def test_none_dots_and_full_are_the_same(scan):
    params = FlaxBertForMaskedLM(CONFIGS[scan], scan_layers=scan).params
    plain, products, memory = None, {}, {}
    for remat in ("none", "dots", "full"):
        gradient = program(scan, remat)
        products[remat] = str(jax.make_jaxpr(gradient)(params)).count("dot_general")
        compiled = jax.jit(gradient).lower(params).compile()
        memory[remat] = compiled.memory_analysis().temp_size_in_bytes
        loss, gradients = compiled(params)
        found = {"loss": loss, **flatten(gradients)}
        plain = plain or found
        for path, leaf in found.items():
            np.testing.assert_allclose(leaf, plain[path], rtol=0, atol=1e-6, err_msg=path)
    # With dots those of queries with keys and of weights with values alone are computed again.
    assert products["none"] < products["dots"] < products["full"]
    if scan:  # in a loop, XLA for CPU finds what is computed twice, and keeps it after all
        assert memory["full"] < memory["dots"] < memory["none"]


@pytest.mark.parametrize(
    ("words", "said"), [("", "none"), (" ", "full"), (" True", "full"), (" false", "none"), (" dots", "dots")]
)
def test_the_flag_takes_names_and_what_it_took_before(words, said):
    """Alone, and as the booleans of the `recipe.yaml` of an earlier run."""
    name = ("train", "mlm")
    given = f"--gradient_checkpointing{words}".split() if words else []
    assert checkpointing(parse(name, COMMANDS[name], MlmFlags, given)[0]) == said


def test_booleans_mean_full_and_none():
    assert [remat_policy(remat) for remat in (True, False)] == ["full", "none"]
    with pytest.raises(UsageError, match="gradient_checkpointing is 'some': choose one of none, dots, full"):
        FlaxBertForMaskedLM(CONFIGS[False], gradient_checkpointing="some")
