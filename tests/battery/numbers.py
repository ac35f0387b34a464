"""Checks of numbers: masks, dtypes, and the routes that must give the same as the plain one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from battery.family import (
    CLOSE,
    Common,
    assert_trees_equal,
    flat_outputs,
    layers_of,
    loss_and_gradients,
    model_class,
    tensor_inputs,
)
from distaff.core.mesh import make_mesh
from distaff.core.tree import flatten
from distaff.hub import open_checkpoint
from golden import cases as golden

DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16]


def row_of(inputs: dict[str, np.ndarray], row: int) -> dict[str, np.ndarray]:
    """Return one row of a batch, without its padding and its mask."""
    real = inputs["attention_mask"][row].astype(bool)
    return {name: value[row : row + 1, real] for name, value in inputs.items() if name != "attention_mask"}


class NumberChecks(Common):
    def test_padding_changes_nothing(self, store):
        """Real tokens of a padded row get what they get alone."""
        case = self.cases[self.base]
        model, inputs = store.model(case), tensor_inputs(case.runs["mixed"])
        padded = model(**inputs).last_hidden_state
        for row in (0, 1, 2) if self.left_padding_is_free else (0, 1):
            alone = model(**row_of(inputs, row)).last_hidden_state[0]
            real = inputs["attention_mask"][row].astype(bool)
            np.testing.assert_allclose(padded[row][real], alone, rtol=0, atol=CLOSE, err_msg=f"row {row}")

    def test_left_padding_with_positions_changes_nothing(self, store):
        case = self.cases[self.base]
        model, inputs = store.model(case), tensor_inputs(case.runs["mixed"])
        real = inputs["attention_mask"][2].astype(bool)
        positions = np.maximum(np.cumsum(inputs["attention_mask"], axis=1) - 1, 0) + self.first_position(case)
        padded = model(**inputs, position_ids=positions).last_hidden_state[2][real]
        alone = model(**row_of(inputs, 2)).last_hidden_state[0]
        np.testing.assert_allclose(padded, alone, rtol=0, atol=CLOSE)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_empty_row_is_finite_and_harmless(self, dtype, store):
        case = self.cases[self.lm]
        model, run = store.model(case, dtype=dtype), self.cases[self.base].runs["empty_row"]
        inputs = tensor_inputs(run)
        assert not inputs["attention_mask"][1].any()
        logits = np.asarray(model(**inputs).logits, np.float32)
        assert np.isfinite(logits).all()
        if dtype == jnp.float16:  # the one with the smallest range
            labels = np.where(inputs["attention_mask"] == 1, inputs["input_ids"], -100)
            _, gradients = loss_and_gradients(model, golden.Run({**inputs, "labels": labels}, {}))
            assert all(np.isfinite(np.asarray(leaf, np.float32)).all() for leaf in jax.tree.leaves(gradients))
        if dtype == jnp.float32:
            without = model(**{name: value[[0, 2]] for name, value in inputs.items()}).logits
            np.testing.assert_allclose(logits[[0, 2]], without, rtol=0, atol=CLOSE)

    def test_bfloat16_compute_is_close(self, store):
        case = self.cases[self.lm]
        model = store.model(case, dtype=jnp.bfloat16)
        assert {leaf.dtype for leaf in jax.tree.leaves(model.params)} == {jnp.dtype(jnp.float32)}
        run = case.runs["mixed"]
        found = np.asarray(model(**tensor_inputs(run)).logits, np.float32)
        # bfloat16 keeps 8 bits: relative to the size of the logits, which is that of golden weights, not of trained ones.
        error = np.abs(found - run.outputs["logits"]).max() / np.abs(run.outputs["logits"]).max()
        assert 1e-5 < error < 5e-2

    def test_casting(self, store):
        case = self.cases[self.lm]
        model = store.model(case)
        mask = jax.tree_util.tree_map_with_path(lambda path, _: "kernel" in str(path[-1]), model.params)
        for cast, dtype in ((model.to_bf16, jnp.bfloat16), (model.to_fp16, jnp.float16)):
            assert {leaf.dtype for leaf in jax.tree.leaves(cast(model.params))} == {jnp.dtype(dtype)}
            for path, leaf in flatten(cast(model.params, mask)).items():
                assert leaf.dtype == (dtype if path.endswith("kernel") else jnp.float32), path
        assert_trees_equal(model.to_fp32(model.params), model.params)

    def test_remat_changes_nothing(self):
        """With dropout: what is computed again in the backward pass draws the same masks again."""
        case, run = self.gradient_case()
        plain, remat = self.one_layer(case), self.one_layer(case, gradient_checkpointing=True)
        self.assert_same_gradients(plain, remat, run, train=True, dropout_rng=jax.random.key(0))

        def program(model):
            def loss(params):
                return model(**tensor_inputs(run), params=params).logits.sum()

            return str(jax.make_jaxpr(jax.grad(loss))(model.params))

        assert "remat" in program(remat)
        assert "remat" not in program(plain)

    @pytest.mark.parametrize("remat", [False, "dots"])
    def test_scan_changes_nothing(self, remat, store, tmp_path):
        case, run = self.gradient_case()
        plain, scan = store.model(case), store.model(case, scan_layers=True, gradient_checkpointing=remat)
        layers = layers_of(case)
        assert len(flatten(scan.params)) < len(flatten(plain.params))
        assert any(leaf.shape[0] == layers for leaf in jax.tree.leaves(scan.params))
        options = {"output_hidden_states": True, "output_attentions": True}
        one, other = (flat_outputs(model(**tensor_inputs(run), **options)) for model in (plain, scan))
        assert one.keys() == other.keys()
        for name in one:
            np.testing.assert_allclose(one[name], other[name], rtol=0, atol=CLOSE, err_msg=name)
        loss, gradients = loss_and_gradients(plain, run)
        scan_loss, scan_gradients = loss_and_gradients(scan, run)
        np.testing.assert_allclose(loss, scan_loss, rtol=0, atol=CLOSE)
        for file_format in ("safetensors", "msgpack"):
            files = []
            for model, values in ((plain, None), (scan, None), (plain, gradients), (scan, scan_gradients)):
                folder = tmp_path / f"{file_format}-{len(files)}"
                model.save_pretrained(folder, params=values, save_format=file_format)
                files.append(open_checkpoint(folder))
            assert [set(file) for file in files] == [set(files[0])] * 4
            for name in files[0]:
                np.testing.assert_array_equal(files[0][name], files[1][name], err_msg=name)
                np.testing.assert_allclose(files[2][name], files[3][name], rtol=0, atol=CLOSE, err_msg=name)

    def test_eight_devices_change_nothing(self, store):
        case, run = self.gradient_case()
        mesh = make_mesh(data=2, fsdp=2, tensor=2)
        plain, sharded = store.model(case), model_class(case).from_pretrained(store.folder(case), mesh=mesh)
        leaves = flatten(sharded.params)
        assert all(len(leaf.sharding.device_set) == 8 for leaf in leaves.values())
        split = {path for path, leaf in leaves.items() if leaf.addressable_shards[0].data.shape != leaf.shape}
        big = {path for path, leaf in leaves.items() if path.endswith("kernel")}
        assert big <= split, big - split
        self.assert_same_gradients(plain, sharded, run)

    def assert_same_gradients(self, one, other, run, **options):
        loss, gradients = loss_and_gradients(one, run, **options)
        other_loss, other_gradients = loss_and_gradients(other, run, **options)
        np.testing.assert_allclose(loss, other_loss, rtol=0, atol=CLOSE)
        assert_trees_equal(gradients, other_gradients, atol=CLOSE)
