"""What every model can do: a user's own subclass, parameters, casting, gradients of pure functions, memory."""

import copy
import json
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from transformers import BertConfig, GPT2Config, PretrainedConfig, T5Config

import distaff
from distaff import FlaxAutoModel, FlaxAutoModelForMaskedLM, FlaxBertForMaskedLM, FlaxBertModel, FlaxPreTrainedModel
from distaff.core.errors import CheckpointError, ConfigError, DataError, UsageError
from distaff.core.mesh import make_mesh, place, replicated
from distaff.core.tree import flatten

TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}


def tiny_bert(**changes):
    return BertConfig(**{**TINY, **changes})


# A user's own model.


class MlpConfig(PretrainedConfig):
    model_type = "mlp"

    def __init__(self, features=8, width=16, classes=3, **kwargs):
        super().__init__(**kwargs)
        self.features, self.width, self.classes = features, width, classes


class MlpModule(nn.Module):
    config: MlpConfig
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, inputs):
        hidden = nn.relu(nn.Dense(self.config.width, dtype=self.dtype, name="inner")(inputs))
        return nn.Dense(self.config.classes, dtype=self.dtype, name="outer")(nn.LayerNorm(name="norm")(hidden))


class FlaxMlp(FlaxPreTrainedModel):
    config_class = MlpConfig
    base_model_prefix = "mlp"
    main_input_name = "input_values"
    module_class = MlpModule

    def init_weights(self, rng, input_shape, params=None):
        random = self.module.init({"params": rng}, jnp.zeros(input_shape))["params"]
        return random if params is None else {**random, **params}

    def dummy_inputs(self, input_shape):
        return {"inputs": jnp.zeros(input_shape)}

    def __call__(self, inputs, params=None, train=False, dropout_rng=None):
        return self.module.apply({"params": self.params if params is None else params}, inputs)


class OldStyleMlp(FlaxMlp):
    """Hands its module to the base class, as subclasses of Transformers' `FlaxPreTrainedModel` did."""

    def __init__(self, config, input_shape=(1, 8), seed=0, dtype=jnp.float32, _do_init=True, **kwargs):
        module = self.module_class(config=config, dtype=dtype)
        super().__init__(config, module, input_shape=input_shape, seed=seed, dtype=dtype, _do_init=_do_init)


@pytest.mark.parametrize("save_format", ["safetensors", "msgpack"])
@pytest.mark.parametrize("model_class", [FlaxMlp, OldStyleMlp])
def test_own_subclass_inits_runs_saves_and_loads(tmp_path, model_class, save_format):
    model = model_class(MlpConfig(), input_shape=(1, 8), seed=3)
    inputs = np.random.default_rng(0).normal(size=(5, 8)).astype(np.float32)
    before = model(inputs)
    assert before.shape == (5, 3)
    model.save_pretrained(tmp_path, save_format=save_format)
    again = model_class.from_pretrained(tmp_path, **({} if model_class is OldStyleMlp else {"input_shape": (1, 8)}))
    np.testing.assert_array_equal(again(inputs), before)
    assert again.config.width == 16


def test_own_subclass_is_trained_by_a_plain_loop(tmp_path):
    model = FlaxMlp(MlpConfig(), input_shape=(1, 8))
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(64, 8)).astype(np.float32)
    labels = (inputs[:, 0] > 0).astype(np.int32)
    tx = optax.adam(1e-2)

    @jax.jit
    def step(params, opt_state):
        def loss_fn(params):
            return optax.softmax_cross_entropy_with_integer_labels(model(inputs, params=params), labels).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    params, opt_state = model.params, tx.init(model.params)
    losses = []
    for _ in range(60):
        params, opt_state, loss = step(params, opt_state)
        losses.append(float(loss))
    assert losses[-1] < 0.3 * losses[0]
    model.save_pretrained(tmp_path, params=params)
    again = FlaxMlp.from_pretrained(tmp_path, input_shape=(1, 8))
    np.testing.assert_array_equal(again(inputs), model(inputs, params=params))


# Parameters.


def test_params_can_be_assigned_and_misfits_are_listed():
    model = FlaxBertModel(tiny_bert())
    other = FlaxBertModel(tiny_bert(), seed=1)
    model.params = other.params
    np.testing.assert_array_equal(
        flatten(model.params)["pooler/dense/kernel"], flatten(other.params)["pooler/dense/kernel"]
    )
    broken = {**other.params, "stranger": jnp.zeros(3)}
    del broken["pooler"]
    broken["embeddings"] = {**broken["embeddings"], "norm": {"scale": jnp.ones(31), "bias": jnp.ones(32)}}
    with pytest.raises(UsageError, match="2 missing: pooler/dense/bias, pooler/dense/kernel") as refusal:
        model.params = broken
    assert "1 unknown: stranger" in str(refusal.value)
    assert "embeddings/norm/scale (31,) instead of (32,)" in str(refusal.value)


@pytest.mark.parametrize("params", [None, [1], 3])
def test_params_that_are_no_tree_are_refused(params):
    model = FlaxBertModel(tiny_bert())
    with pytest.raises(UsageError, match="nested dicts of arrays"):
        model.params = params


def test_params_must_be_floating():
    model = FlaxBertModel(tiny_bert())
    with pytest.raises(UsageError, match="39 without floating numbers: embeddings/word_embeddings/embedding int32"):
        model.params = jax.tree.map(lambda leaf: leaf.astype(jnp.int32), model.params)
    model.params = model.to_bf16(model.params)


def test_a_model_can_be_pickled_and_copied():
    model = FlaxBertModel(tiny_bert())
    ids = np.ones((1, 3), np.int32)
    wanted = model(ids).last_hidden_state
    for again in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        np.testing.assert_array_equal(again(ids).last_hidden_state, wanted)


def test_inputs_that_cannot_be_are_one_sentence():
    model = FlaxBertForMaskedLM(tiny_bert())
    with pytest.raises(DataError, match="rows without a token"):
        model(np.ones((2, 0), np.int32))
    with pytest.raises(DataError, match=r"masked_positions is \[2\] and must be \[batch, count\]"):
        model(np.ones((1, 3), np.int32), masked_positions=np.array([0, 1]))
    with pytest.raises(UsageError, match=r"pass jax\.random\.key\(0\)"):
        model.init_weights(0, (1, 1))
    with pytest.raises(UsageError, match=r"params=variables\['params'\]"):
        model(np.ones((1, 3), np.int32), params={"params": model.params})


def test_a_config_may_be_a_folder(tmp_path):
    FlaxBertModel(tiny_bert()).save_pretrained(tmp_path / "model")
    tiny_bert(hidden_act="relu").save_pretrained(tmp_path / "config")
    for model_class in (FlaxBertModel, FlaxAutoModel):
        for config in (str(tmp_path / "config"), tmp_path / "config"):
            model = model_class.from_pretrained(tmp_path / "model", config=config)
            assert model.config.hidden_act == "relu"


def test_casts_leave_masked_leaves_and_integers_alone():
    model = FlaxBertModel(tiny_bert())
    mask = jax.tree.map(lambda leaf: leaf.ndim == 2, model.params)
    cast = flatten(model.to_bf16(model.params, mask))
    assert cast["pooler/dense/kernel"].dtype == jnp.bfloat16
    assert cast["pooler/dense/bias"].dtype == jnp.float32
    assert {leaf.dtype for leaf in flatten(model.to_fp16(model.params)).values()} == {jnp.dtype(jnp.float16)}
    assert {leaf.dtype for leaf in flatten(model.to_fp32(model.to_bf16(model.params))).values()} == {
        jnp.dtype("float32")
    }
    assert model.to_bf16({"step": jnp.zeros((), jnp.int32)})["step"].dtype == jnp.int32


def test_init_weights_keeps_given_leaves():
    model = FlaxBertModel(tiny_bert())
    kept = {"pooler": {"dense": {"kernel": jnp.full((32, 32), 7.0)}}}
    flat = flatten(model.init_weights(jax.random.key(5), (1, 1), params=kept))
    assert float(flat["pooler/dense/kernel"].min()) == 7.0
    assert not np.array_equal(
        flat["embeddings/word_embeddings/embedding"], flatten(model.params)["embeddings/word_embeddings/embedding"]
    )


def test_unknown_settings_and_types_name_the_remedy(tmp_path):
    with pytest.raises(UsageError, match="did you mean 'gradient_checkpointing'"):
        FlaxBertModel(tiny_bert(), gradient_checkpoint=True)
    FlaxBertModel(tiny_bert()).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="no class for model type 'gpt2'"):
        FlaxAutoModelForMaskedLM.from_config(GPT2Config())
    with pytest.raises(CheckpointError, match="holds a 'bert' model"):
        distaff.FlaxRobertaModel.from_pretrained(tmp_path)
    with pytest.raises(UsageError, match="from_pt is not needed"):
        FlaxBertModel.from_pretrained(tmp_path, from_pt=True)
    with pytest.raises(UsageError, match="dtype is that of the computation"):
        FlaxBertModel.from_pretrained(tmp_path, torch_dtype="bfloat16")
    with pytest.raises(UsageError, match="name of the model is empty"):
        FlaxBertModel.from_pretrained("")
    with pytest.raises(UsageError, match="save_format is"):
        FlaxBertModel(tiny_bert()).save_pretrained(tmp_path, save_format="bin")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("position_embedding_type", "relative_key"),
        ("add_cross_attention", True),
        ("hidden_act", "softshrink2"),
        ("num_attention_heads", 0),
        ("vocab_size", -5),
        ("hidden_dropout_prob", 1.5),
    ],
)
def test_config_fields_are_refused_by_name(field, value):
    with pytest.raises(ConfigError, match=field):
        FlaxBertModel(tiny_bert(**{field: value}))


def test_rows_longer_than_the_positions_are_refused():
    model = FlaxBertModel(tiny_bert())
    with pytest.raises(DataError, match="65 tokens are longer than the 64 positions"):
        model(np.ones((1, 65), np.int32))


def test_auto_model_loads_the_class_of_the_config(tmp_path):
    FlaxBertForMaskedLM(tiny_bert()).save_pretrained(tmp_path)
    assert type(FlaxAutoModel.from_pretrained(tmp_path)) is FlaxBertModel
    assert type(FlaxAutoModelForMaskedLM.from_pretrained(tmp_path)) is FlaxBertForMaskedLM
    (tmp_path / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        FlaxAutoModel.from_pretrained(tmp_path)


# Pure functions of the parameters.


@pytest.mark.parametrize("scan", [False, True], ids=["loop", "scan"])
def test_matrices_are_the_kernels_of_layers(scan):
    """No embedding, position, distance, pooler, projection to words or head, bias or norm."""
    gpt2 = GPT2Config(vocab_size=40, n_positions=8, n_embd=8, n_layer=2, n_head=2, tie_word_embeddings=False)
    t5 = T5Config(vocab_size=40, d_model=8, d_kv=4, d_ff=16, num_layers=2, num_heads=2, tie_word_embeddings=False)
    one = ("attention/query", "attention/key", "attention/value", "attention/out", "mlp/up", "mlp/down")
    other = tuple(f"cross_{name}" for name in one[:4])
    for model_class, config, names, count in (
        (distaff.FlaxGPT2LMHeadModel, gpt2, ("attention/qkv", "attention/out", "mlp/up", "mlp/down"), 4),
        (distaff.FlaxBertForSequenceClassification, tiny_bert(), one, 6),
        (distaff.FlaxT5ForConditionalGeneration, t5, one + other, 6 + 10),
    ):
        model = model_class(config, scan_layers=scan, _do_init=False)
        found = [path for path, matrix in flatten(model.matrices()).items() if matrix]
        assert len(found) == count * (1 if scan else 2)
        assert all(path.removesuffix("/kernel").endswith(names) for path in found)
        shapes = flatten(model.params_shape_tree)
        axes = flatten(model.matrices())
        for path in found:
            # GPT-2's kernel of three has an axis for them between what goes in and what comes out.
            assert axes[path] == (-3 if path.endswith("qkv/kernel") else -2)
            assert len(shapes[path].shape) == scan - axes[path]
    own = FlaxMlp(MlpConfig(), input_shape=(1, 8)).matrices()
    assert {path for path, matrix in flatten(own).items() if matrix} == {"inner/kernel", "outer/kernel"}


def mlm_losses(model, params, ids, rng=None):
    """The cross-entropy of each row."""
    logits = model(ids, params=params, dropout_rng=rng, train=rng is not None).logits
    return optax.softmax_cross_entropy_with_integer_labels(logits, ids).mean(-1)


def test_per_example_gradients_remat_sharding_and_jit_agree():
    config = tiny_bert(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    model = FlaxBertForMaskedLM(config)
    remat = FlaxBertForMaskedLM(config, gradient_checkpointing=True)
    ids = np.random.default_rng(0).integers(1, 64, (8, 8)).astype(np.int32)

    def row_loss(params, row):
        return mlm_losses(model, params, row[None])[0]

    per_example = jax.vmap(jax.grad(row_loss), in_axes=(None, 0))(model.params, ids)
    mean = jax.tree.map(lambda leaf: leaf.mean(0), per_example)
    mesh = make_mesh(data=8)
    rows = place({"ids": ids}, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data")))["ids"]
    params = jax.device_put(model.params, replicated(mesh))
    whole = jax.grad(lambda params, ids: mlm_losses(model, params, ids).mean())
    for grads in (
        whole(model.params, ids),
        jax.jit(whole)(params, rows),
        jax.grad(lambda params: mlm_losses(remat, params, ids).mean())(model.params),
    ):
        for path, grad in flatten(grads).items():
            np.testing.assert_allclose(grad, flatten(mean)[path], atol=2e-6, err_msg=path)
    assert float(jnp.abs(flatten(mean)["bert/embeddings/word_embeddings/embedding"]).max()) > 1e-3


def test_nnx_users_can_wrap_the_module():
    from flax import nnx

    model = FlaxBertModel(tiny_bert())
    ids = np.arange(1, 9, dtype=np.int32)[None]
    wrapped = nnx.bridge.ToNNX(model.module, rngs=nnx.Rngs(0))
    nnx.bridge.lazy_init(wrapped, ids)
    state = nnx.state(wrapped, nnx.Param)
    nnx.update(
        wrapped,
        nnx.State(
            nnx.traversals.unflatten_mapping(
                {path: nnx.Param(value) for path, value in nnx.traversals.flatten_mapping(model.params).items()}
            )
        ),
    )
    assert len(jax.tree.leaves(state)) == len(jax.tree.leaves(model.params))
    np.testing.assert_allclose(wrapped(ids).last_hidden_state, model(ids).last_hidden_state, atol=1e-6)


# Memory, time and imports, each in a process of its own.


def run_python(code: str) -> dict:
    """Run `code` in a new process and return the JSON of its last line."""
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_import_loads_no_framework():
    found = run_python(
        """
        import json, sys
        import distaff
        names = ("jax", "transformers", "torch", "tensorflow", "flax", "numpy", "datasets")
        print(json.dumps([name for name in names if name in sys.modules]))
        """
    )
    assert found == []


def test_all_public_names_exist():
    for name in distaff.__all__:
        # GPT-2 kept the name of its first release beside the regular one.
        assert getattr(distaff, name).__name__ == name.replace("FlaxGPT2ForCausalLM", "FlaxGPT2LMHeadModel")
    with pytest.raises(AttributeError, match="FlaxNothing"):
        _ = distaff.FlaxNothing
    assert "FlaxBertModel" in dir(distaff)


def test_shapes_of_six_billion_parameters_take_no_memory():
    found = run_python(
        """
        import json, resource
        import jax
        from transformers import BertConfig
        from distaff import FlaxBertForMaskedLM
        jax.devices()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        config = BertConfig(hidden_size=4096, num_hidden_layers=30, num_attention_heads=32, intermediate_size=16384)
        model = FlaxBertForMaskedLM(config, _do_init=False)
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print(json.dumps({"params": model.num_params(), "mb": (after - before) / 1024}))
        """
    )
    assert found["params"] > 6e9
    assert found["mb"] < 300


def test_loading_takes_the_memory_of_the_weights(tmp_path):
    """Case T14, with the bound of 1.3 x: 84 million parameters in a process of their own."""
    run_python(
        f"""
        from transformers import BertConfig
        from distaff import FlaxBertModel
        config = BertConfig(hidden_size=1024, num_hidden_layers=6, num_attention_heads=16, intermediate_size=4096,
                            vocab_size=8000)
        FlaxBertModel(config).save_pretrained({str(tmp_path)!r})
        print("{{}}")
        """
    )
    size = (tmp_path / "model.safetensors").stat().st_size
    assert size > 330e6
    found = run_python(
        f"""
        import json, resource
        import jax
        from distaff import FlaxBertModel
        import distaff.loading
        jax.devices()
        def refuse(*arguments, **keywords):
            raise AssertionError("random initialisation of what is loaded")
        distaff.loading.random_tensor = refuse
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        model = FlaxBertModel.from_pretrained({str(tmp_path)!r})
        jax.block_until_ready(model.params)
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print(json.dumps((after - before) * 1024))
        """
    )
    assert found < 1.3 * size


# Cases of loading that are not a family's.


def test_folders_without_weights_are_refused(tmp_path):
    """Case T13."""
    only_config = tmp_path / "only config"
    tiny_bert().save_pretrained(only_config)
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*pytorch_model\.bin.*flax_model\.msgpack"):
        FlaxBertModel.from_pretrained(only_config)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(CheckpointError, match=r"no config\.json \(it holds nothing\)"):
        FlaxBertModel.from_pretrained(empty)
    with pytest.raises(CheckpointError, match="does not exist"):
        FlaxBertModel.from_pretrained(tmp_path / "mispelt")
    strange = tmp_path / "Zürich isch schön"
    FlaxBertModel(tiny_bert()).save_pretrained(strange)
    assert FlaxBertModel.from_pretrained(strange).loading_report.new == ()


def test_storage_and_computation_dtypes(tmp_path):
    """Cases T08 and T10."""
    model = FlaxBertForMaskedLM(tiny_bert())
    ids = np.arange(1, 13, dtype=np.int32)[None]
    model.save_pretrained(tmp_path / "fp32")
    half = FlaxBertForMaskedLM.from_pretrained(tmp_path / "fp32", dtype=jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(half.params)} == {jnp.dtype("float32")}
    assert half(ids).logits.dtype == jnp.bfloat16
    np.testing.assert_allclose(half(ids).logits.astype(jnp.float32), model(ids).logits, atol=5e-2)
    stored = FlaxBertForMaskedLM.from_pretrained(tmp_path / "fp32", param_dtype=jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(stored.params)} == {jnp.dtype(jnp.bfloat16)}
    stored.save_pretrained(tmp_path / "bf16")
    assert json.loads((tmp_path / "bf16" / "config.json").read_text())["dtype"] == "bfloat16"
    again = FlaxBertForMaskedLM.from_pretrained(tmp_path / "bf16")
    for path, leaf in flatten(again.params).items():
        np.testing.assert_array_equal(leaf, flatten(stored.params)[path].astype(jnp.float32), err_msg=path)


@pytest.mark.parametrize("folder", sorted((Path(__file__).parent / "golden" / "releases").glob("*/*")), ids=str)
def test_checkpoints_of_every_release_load(folder):
    """Case T12."""
    model = FlaxAutoModelForMaskedLM.from_pretrained(folder)
    wanted = json.loads((folder / "expected.json").read_text())
    logits = model(np.asarray(wanted["input_ids"], np.int32)).logits
    np.testing.assert_allclose(logits[0, 0, : len(wanted["logits"])], wanted["logits"], atol=1e-5)
