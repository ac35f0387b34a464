"""One argument says how every attention of a model is computed; what it computes stays the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from transformers import BartConfig, BertConfig, BigBirdConfig, GPT2Config, GPTNeoConfig, T5Config, ViTConfig

import distaff
from distaff.core.errors import UsageError
from distaff.nn import attend, blocks
from distaff.nn.mask import Sight

SMALL = {"vocab_size": 32, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2}
HALVES = {
    "vocab_size": 32, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "max_position_embeddings": 32,
}  # fmt: skip
NEO = {
    "vocab_size": 32, "hidden_size": 16, "num_heads": 2, "num_layers": 2, "window_size": 5,
    "max_position_embeddings": 4096, "attention_types": [[["global", "local"], 1]],
}  # fmt: skip
SCALED = {"n_positions": 4096, "scale_attn_by_inverse_layer_idx": True}
SCANNED = {"scan_layers": True, "gradient_checkpointing": "full"}
MODELS = {
    "gpt2": (distaff.FlaxGPT2Model, GPT2Config(**SMALL, **SCALED), {}),
    "gpt_neo": (distaff.FlaxGPTNeoModel, GPTNeoConfig(**NEO), SCANNED),
    "bert": (distaff.FlaxBertModel, BertConfig(**SMALL, intermediate_size=16), {}),
    "bart": (distaff.FlaxBartModel, BartConfig(**HALVES), {}),
    "t5": (
        distaff.FlaxT5Model,
        T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_decoder_layers=1, num_heads=2),
        {},
    ),
    "vit": (
        distaff.FlaxViTModel,
        ViTConfig(image_size=8, patch_size=2, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                  intermediate_size=16),
        {},
    ),
}  # fmt: skip


def inputs_of(name):
    rng = np.random.default_rng(0)
    if name == "vit":
        return {"pixel_values": rng.normal(size=(2, 3, 8, 8)).astype(np.float32)}
    ids, mask = rng.integers(3, 32, (2, 21)).astype(np.int32), np.ones((2, 21), np.int32)
    mask[1, :6] = 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    return {**inputs, "decoder_input_ids": ids[:, :13]} if name in ("bart", "t5") else inputs


def states_and_gradients(model, name, way):
    """Hidden states of real tokens, and the gradient of a sum of them."""
    inputs = inputs_of(name)
    real = 1.0
    if "attention_mask" in inputs and "decoder_input_ids" not in inputs:
        real = inputs["attention_mask"][..., None]
    module = model.module.clone(attn_implementation=way)

    def total(params):
        hidden = module.apply({"params": params}, **inputs).last_hidden_state * real
        return (hidden * jnp.sin(jnp.arange(hidden.size)).reshape(hidden.shape)).sum(), hidden

    (_, hidden), gradients = jax.jit(jax.value_and_grad(total, has_aux=True))(model.params)
    return [hidden, *jax.tree.leaves(gradients)]


@pytest.mark.parametrize("name", MODELS)
def test_the_ways_agree(name, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK", 8)
    model_class, config, options = MODELS[name]
    model = model_class(config, **options)
    eager, found = (states_and_gradients(model, name, way) for way in ("eager", "blocks"))
    for one, other in zip(eager, found, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 * max(1.0, np.abs(one).max()))


@pytest.mark.parametrize("name", ["gpt_neo", "t5"])
def test_memory_grows_with_the_length_alone(name):
    """Of a training step with dropout: the heads' scores alone would grow by the square."""
    model_class, config, _ = MODELS[name]
    model_class = distaff.FlaxT5EncoderModel if name == "t5" else model_class
    module = model_class(config, _do_init=False).module

    def temporary(length):
        ids = jax.ShapeDtypeStruct((1, length), jnp.int32)
        inputs = {"input_ids": ids, "attention_mask": ids}

        def loss(params, rng, inputs):
            outputs = module.apply({"params": params}, **inputs, deterministic=False, rngs={"dropout": rng})
            return outputs.last_hidden_state.sum()

        params = jax.eval_shape(module.init, jax.random.key(0), **inputs)["params"]
        compiled = jax.jit(jax.grad(loss)).lower(params, jax.random.key(0), inputs).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary(8192) < 2.2 * temporary(4096)


def heads(length, dtype=jnp.float32):
    return jax.ShapeDtypeStruct((1, 2, length, 8), dtype)


def test_auto_chooses_by_length_and_device(monkeypatch):
    def auto(length, dtype=jnp.float32, rate=0.0, **sight):
        sight = Sight(causal=True, **sight)
        return attend.chosen("auto", heads(length, dtype), heads(length, dtype), sight, dropout_rate=rate)

    assert [auto(length) for length in (8, 512, 513)] == ["eager", "eager", "blocks"]
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert auto(64, jnp.bfloat16) == "eager"  # the library, where JAX does not take it
    monkeypatch.setattr(attend, "_has_cudnn", lambda: True)
    assert auto(64, jnp.bfloat16) == "cudnn"
    assert auto(64) == auto(64, jnp.bfloat16, rate=0.1) == auto(64, jnp.bfloat16, window=5) == "eager"


def test_what_cannot_be_had_is_refused_in_a_sentence():
    model_class, config, _ = MODELS["gpt2"]
    with pytest.raises(UsageError, match="attn_implementation is 'sdpa': choose one of auto, eager"):
        model_class(config, attn_implementation="sdpa")
    with pytest.raises(UsageError, match="'cudnn', and the devices are of the kind 'cpu': take 'blocks'"):
        model_class(config, attn_implementation="cudnn")
    model = model_class(config, attn_implementation="xla")
    with pytest.raises(UsageError, match=r"drops no attention weights out, and the config says 0.1: set that to 0"):
        model(**inputs_of("gpt2"), train=True, dropout_rng=jax.random.key(0))
    with pytest.raises(UsageError, match="'xla', which has no float16 on CPU: take 'blocks', or bfloat16"):
        model_class(config, attn_implementation="xla", dtype="float16")
    sparse = BigBirdConfig(**SMALL, intermediate_size=16, block_size=4, num_random_blocks=1, max_position_embeddings=64)
    with pytest.raises(UsageError, match="'blocks', and the config's attention_type 'block_sparse'"):
        distaff.FlaxBigBirdModel(sparse, attn_implementation="blocks")(np.ones((1, 64), np.int32))


def test_weights_that_are_asked_for_are_there():
    model_class, config, _ = MODELS["gpt2"]
    model = model_class(config, attn_implementation="blocks")
    plain = model_class(config, attn_implementation="eager")
    inputs = {"input_ids": inputs_of("gpt2")["input_ids"], "output_attentions": True}
    for one, other in zip(model(**inputs).attentions, plain(**inputs).attentions, strict=True):
        np.testing.assert_array_equal(one, other)


def test_an_old_config_does_not_swallow_what_is_the_module_s(tmp_path):
    model_class, config, _ = MODELS["gpt2"]
    model_class(config).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(
        file.read_text().replace("{", '{"gradient_checkpointing": false, "attn_implementation": "eager",', 1)
    )
    model = model_class.from_pretrained(tmp_path, gradient_checkpointing=True, attn_implementation="blocks")
    assert (model.module.gradient_checkpointing, model.module.attn_implementation) == (True, "blocks")
