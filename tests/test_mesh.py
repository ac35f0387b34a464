"""One path from one device to many: the same losses, gradients and parameters on every mesh."""

from functools import partial

import jax
import numpy as np
import optax
import pytest
from transformers import (
    BartConfig,
    BertConfig,
    GPT2Config,
    GPTNeoConfig,
    ResNetConfig,
    T5Config,
    ViTConfig,
)

import distaff
from distaff.core.errors import UsageError
from distaff.core.mesh import make_mesh, on, parse_mesh
from distaff.core.tree import flatten, unflatten
from distaff.models._seq2seq import shift_tokens_right
from distaff.tasks._seq2seq import seq2seq_loss
from distaff.tasks.clm import clm_loss
from distaff.tasks.image_classification import Classifier
from distaff.tasks.mlm import mlm_loss
from distaff.train.measure import Compilations
from distaff.train.state import create_state, opt_state_shardings
from distaff.train.step import make_train_step, place_rows

# The vocabulary and the length divide by none of the meshes.
ROWS, LENGTH, VOCAB, MASKED = 16, 13, 61, 3
MESHES = ((8, 1, 1), (1, 8, 1), (2, 2, 2), (1, 2, 4))

BERT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
BERT |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
IDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
GPT2 |= dict.fromkeys(("embd_pdrop", "resid_pdrop", "attn_pdrop"), 0.0)
NEO = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 32, "window_size": 4}
NEO |= dict.fromkeys(("embed_dropout", "resid_dropout", "attention_dropout"), 0.0)
NEO |= {"attention_types": [[["global", "local"], 1]]}
T5 = {"d_model": 32, "d_kv": 8, "num_heads": 4, "d_ff": 64, "num_layers": 1, "dropout_rate": 0.0}
BART = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
BART |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_position_embeddings": 32, "dropout": 0.0}
RESNET = {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1], "layer_type": "basic", "num_labels": 5}

KINDS = {
    "bert": (distaff.FlaxAutoModelForMaskedLM, BertConfig(vocab_size=VOCAB, **BERT)),
    "gpt2": (distaff.FlaxAutoModelForCausalLM, GPT2Config(vocab_size=VOCAB, **GPT2, **IDS)),
    "gpt_neo": (distaff.FlaxAutoModelForCausalLM, GPTNeoConfig(vocab_size=VOCAB, **NEO, **IDS)),
    "t5": (distaff.FlaxAutoModelForSeq2SeqLM, T5Config(vocab_size=VOCAB, **T5)),
    "bart": (distaff.FlaxAutoModelForSeq2SeqLM, BartConfig(vocab_size=VOCAB, **BART, **IDS)),
    "vit": (
        distaff.FlaxAutoModelForImageClassification,
        ViTConfig(**BERT, image_size=16, patch_size=4, num_labels=5),
    ),
    "resnet": (distaff.FlaxAutoModelForImageClassification, ResNetConfig(**RESNET)),
}


def model_of(kind, mesh=None):
    auto_class, config = KINDS[kind]
    return auto_class.from_config(config, seed=3, mesh=mesh)


def batch_of(kind):
    """Sixteen rows, of which some have few labels and the last has none at all."""
    rng = np.random.default_rng(5)
    ids = rng.integers(3, VOCAB, (ROWS, LENGTH)).astype(np.int32)
    weights = np.ones(ROWS, np.float32)
    weights[-1] = 0
    if kind in ("vit", "resnet"):
        pixels = rng.normal(size=(ROWS, 3, 16, 16)).astype(np.float32)
        return {"pixel_values": pixels, "labels": rng.integers(0, 5, ROWS).astype(np.int32), "weights": weights}
    if kind in ("gpt2", "gpt_neo"):
        return {"input_ids": ids, "weights": weights}
    mask = (np.arange(LENGTH)[None] < rng.integers(4, LENGTH + 1, (ROWS, 1))).astype(np.int32)
    rows = {"input_ids": ids, "attention_mask": mask}
    if kind == "bert":
        places = rng.integers(0, LENGTH, (ROWS, MASKED)).astype(np.int32)
        counted = (rng.random((ROWS, MASKED)) < 0.5) * weights[:, None]
        labels = rng.integers(3, VOCAB, (ROWS, MASKED)).astype(np.int32)
        return {**rows, "masked_positions": places, "masked_labels": labels, "masked_weights": np.float32(counted)}
    labels = rng.integers(3, VOCAB, (ROWS, 7)).astype(np.int32)
    counted = (np.arange(7)[None] < rng.integers(1, 8, (ROWS, 1))) * weights[:, None]
    return {**rows, "labels": labels, "label_weights": np.float32(counted)}


def loss_of(kind, module):
    if kind in ("vit", "resnet"):
        return Classifier(module).loss
    if kind == "bert":
        return partial(mlm_loss, module)
    if kind in ("gpt2", "gpt_neo"):
        return partial(clm_loss, module)
    return partial(seq2seq_loss, module, partial(shift_tokens_right, pad_token_id=2, decoder_start_token_id=1))


def trained(kind, mesh):
    """Losses, first moments (sums of gradients) and parameters of five steps, without the padding of a vocabulary."""
    model = model_of(kind, mesh)
    params, carried = model.params, None
    if "batch_stats" in params:
        carried, params = {"batch_stats": params["batch_stats"]}, params["params"]
    # A larger epsilon: gradients that are zero but for rounding must not move anything.
    tx = optax.adamw(1e-3, eps=1e-5)
    state = create_state(params, tx, mesh=mesh, carried=carried)
    step = make_train_step(loss_of(kind, model.module), tx, state=state)
    rows, losses = place_rows(batch_of(kind), mesh), []
    with on(mesh), Compilations("train_step") as compilations:
        for _ in range(5):
            state, metrics = step(state, rows)
            losses.append(float(metrics.sums["loss"][0] / metrics.sums["loss"][1]))
    assert compilations.counts == {"train_step": 1}
    moments = next(part.mu for part in jax.tree.leaves(state.opt_state, is_leaf=_is_adam) if _is_adam(part))
    return losses, flatten(jax.device_get(moments)), flatten(jax.device_get(state.params))


def _is_adam(part):
    return isinstance(part, optax.ScaleByAdamState)


@pytest.mark.parametrize("kind", KINDS)
def test_every_mesh_trains_alike(kind, capfd):
    losses, moments, params = trained(kind, make_mesh(devices=jax.devices()[:1]))
    assert losses[-1] < losses[0]
    # GPT-2 differs from GPT-Neo by its fused projection alone.
    for sizes in MESHES[2:3] if kind == "gpt2" else MESHES:
        mesh = make_mesh(**dict(zip(("data", "fsdp", "tensor"), sizes)))
        their_losses, their_moments, their_params = trained(kind, mesh)
        np.testing.assert_allclose(their_losses, losses, atol=1e-5, err_msg=str(sizes))
        for ours, theirs in ((moments, their_moments), (params, their_params)):
            for path, array in ours.items():
                # What an array has more than the one of a single device is padding, which stays zero.
                padding = [(0, more - size) for size, more in zip(array.shape, theirs[path].shape)]
                wanted = np.pad(array, padding)
                np.testing.assert_allclose(theirs[path], wanted, atol=1e-5, err_msg=f"{sizes} {path}")
    # The compiler says so where it has to bring a whole array to every device to lay it out anew. It says it
    # when it compiles: programs that come from the cache say nothing.
    assert "Involuntary full rematerialization" not in capfd.readouterr().err


def test_a_mesh_without_our_axes_is_refused():
    auto_class, config = KINDS["gpt2"]
    for mesh, said in ((jax.make_mesh((8,), ("x",)), r"is x \(Explicit\)"), (8, "is a int")):
        with pytest.raises(UsageError, match=f"The mesh {said}: it needs the axes data, fsdp, tensor of the type Auto"):
            auto_class.from_config(config, mesh=mesh)
    padded, plain = (auto_class.from_config(config, mesh=mesh) for mesh in ("tensor=2,data=4", None))
    assert padded.mesh == make_mesh(tensor=2)
    for call in (plain, plain.generate):
        with pytest.raises(UsageError, match=r"transformer/wte/embedding \(62, 32\) instead of \(61, 32\)"):
            call(np.ones((1, 3), np.int32), params=padded.params)
    four = auto_class.from_config(config, mesh=make_mesh(devices=jax.devices()[4:], tensor=2))
    for call in (padded, padded.generate):
        with pytest.raises(UsageError, match="lie on different devices, and this FlaxGPT2LMHeadModel on 8 devices"):
            call(np.ones((1, 3), np.int32), params=four.params)


@pytest.mark.parametrize("kind", ["bert", "gpt_neo", "t5", "bart", "vit", "resnet"])
def test_every_device_holds_an_eighth(kind):
    auto_class, config = KINDS[kind]
    config = type(config)()  # of the usual size: shapes alone are made
    model = auto_class.from_config(config, _do_init=False)
    mesh = make_mesh(data=1, fsdp=8)
    shapes, shardings = model.params_shape_tree, unflatten(model.param_shardings(mesh))
    moments = jax.eval_shape(optax.adamw(1e-3).init, shapes)
    placed = opt_state_shardings(moments, shapes, shardings, mesh)
    pairs = [*zip(*map(jax.tree.leaves, (shapes, shardings))), *zip(*map(jax.tree.leaves, (moments, placed)))]
    whole = sum(leaf.size * leaf.dtype.itemsize for leaf, _ in pairs)
    here = sum(np.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf, sharding in pairs)
    assert here <= whole / 8 * 1.05


def test_sizes_that_jax_does_not_lay_out_by_itself_are_laid_out(monkeypatch):
    def refuses(*words, **options):
        raise NotImplementedError("Failed to find assignment")  # of a v6e's grid of 4 by 4 to 8 by 2

    monkeypatch.setattr(jax, "make_mesh", refuses)
    mesh = make_mesh(data=1, fsdp=4, tensor=2)
    assert dict(mesh.shape) == {"data": 1, "fsdp": 4, "tensor": 2}
    assert set(mesh.axis_types) == {jax.sharding.AxisType.Auto}


def test_a_mesh_is_read_from_text():
    assert dict(parse_mesh(None).shape) == {"data": 8, "fsdp": 1, "tensor": 1}
    assert dict(parse_mesh("fsdp=2, tensor=2").shape) == {"data": 2, "fsdp": 2, "tensor": 2}
    assert dict(parse_mesh("data=2,tensor=-1").shape) == {"data": 2, "fsdp": 1, "tensor": 4}
    assert dict(parse_mesh("fsdp=-1").shape) == {"data": 1, "fsdp": 8, "tensor": 1}


@pytest.mark.parametrize(
    "text", ["model=2", "data=2,data=4", "fsdp", "tensor=two", "tensor=16", "fsdp=3", "data=0", "fsdp=--2"]
)
def test_a_mesh_that_cannot_be_is_refused(text):
    with pytest.raises(UsageError, match=r"[.]$"):
        parse_mesh(text)
