"""ResNet, its head for images, and the statistics of its BatchNorms."""

import json
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distaff
from battery import VisionBattery
from battery.family import CLOSE, TOLERANCE, assert_trees_equal, config_of, model_class, tensor_inputs
from distaff.core.errors import DistaffError
from distaff.core.mesh import batch_sharding, make_mesh, place
from distaff.core.tree import flatten, unflatten
from distaff.hub import open_checkpoint
from golden import cases as golden


class TestResNet(VisionBattery):
    family = "resnet"
    layer_bias = "encoder.stages.{}.layers.0.layer.0.normalization.bias"
    layer_weight = "encoder.stages.{}.layers.0.layer.1.convolution.weight"
    shallow: ClassVar = {"depths": [1], "hidden_sizes": [16], "out_features": ["stage1"], "out_indices": [1]}
    refused = (
        {"hidden_act": "no_such_activation"},
        {"depths": [1, 0]},
        {"depths": [2, 2, 2]},
        {"hidden_sizes": [3, 16]},
        {"embedding_size": -1},
    )

    def training_options(self, case):
        return {"train": True} if case.name.endswith("training") else {}

    def kept_by(self, params, file_format):
        """Old Flax counted no batches."""
        if file_format == "safetensors":
            return params
        flat = flatten(params)
        return unflatten({path: leaf * 0 if path.endswith("/count") else leaf for path, leaf in flat.items()})

    @pytest.mark.parametrize("name", ["model", "model_odd", "model_basic", "classification"])
    def test_training_equals_pytorch(self, name, store, tmp_path):
        """Answers of two batches in training mode, and running statistics after each."""
        case = self.cases[name]
        model, run = store.model(case), case.runs["train"]
        before = jax.tree.map(np.asarray, model.params)
        params, compared = model.params, 0
        for step, pixels in enumerate(run.inputs["pixel_values"]):
            outputs, updates = model(pixels, params=params, train=True)
            params = {**params, **updates}
            for key, value in outputs.items():
                expected = run.outputs[f"{step}/{key}"]
                np.testing.assert_allclose(value, expected, rtol=0, atol=TOLERANCE, err_msg=f"{step}/{key}")
            model.save_pretrained(tmp_path, params=params)
            written = open_checkpoint(tmp_path)
            for key in (key for key in run.outputs if key.startswith(f"{step}/buffers/")):
                found = written[key.removeprefix(f"{step}/buffers/")]
                np.testing.assert_allclose(found, run.outputs[key], rtol=0, atol=TOLERANCE, err_msg=key)
                compared += 1
        assert compared == 2 * 3 * sum(key.endswith("running_mean") for key in case.keys)
        assert written[next(key for key in written if key.endswith("num_batches_tracked"))] == 5
        # The model that was called keeps its own.
        assert_trees_equal(model.params, before)

    def test_new_statistics_are_used_saved_and_restored(self, store, keep):
        case = self.cases["classification"]
        model = model_class(case).from_pretrained(store.folder(case))
        pixels = case.runs["mixed"].inputs["pixel_values"]
        evaluated = model(pixels).logits
        for batch in case.runs["train"].inputs["pixel_values"]:
            _, updates = model(batch, train=True)
            model.params = {**model.params, **updates}
        assert np.abs(np.asarray(model(pixels).logits - evaluated)).max() > 1e-3
        for file_format in ("safetensors", "msgpack"):
            folder = keep / "resnet-after-training" / file_format
            model.save_pretrained(folder, save_format=file_format)
            again = model_class(case).from_pretrained(folder)
            assert_trees_equal(again.params, self.kept_by(model.params, file_format))

    def test_rows_that_fill_a_batch_do_not_count(self, store):
        """They change neither the answers nor the statistics, whatever is in them; a batch of them alone does nothing."""
        case = self.cases["classification"]
        model, pixels = store.model(case), case.runs["train"].inputs["pixel_values"][0]
        outputs, updates = model(pixels, train=True)
        filled = np.concatenate([pixels, np.full_like(pixels[:2], 7.0)])
        mask = np.array([1, 1, 1, 1, 0, 0], np.float32)
        found, new = model(filled, mask, train=True)
        np.testing.assert_allclose(found.logits[:4], outputs.logits, rtol=0, atol=CLOSE)
        assert_trees_equal(new, updates, atol=CLOSE)
        unmasked, _ = model(filled, train=True)
        assert np.abs(np.asarray(unmasked.logits[:4] - outputs.logits)).max() > 1e-3
        _, none = model(filled, mask * 0, train=True)
        np.testing.assert_array_equal(none["batch_stats"]["resnet"]["stem"]["norm"]["mean"], self.mean_of(model))
        assert_trees_equal(none, {"batch_stats": model.params["batch_stats"]})

    def mean_of(self, model):
        return model.params["batch_stats"]["resnet"]["stem"]["norm"]["mean"]

    @pytest.mark.parametrize("devices", [1, 2, 4])
    def test_statistics_are_of_the_global_batch(self, devices, store):
        case = self.cases["classification"]
        model, pixels = store.model(case), case.runs["train"].inputs["pixel_values"][0]
        outputs, updates = model(pixels, train=True)
        mesh = make_mesh(devices=jax.devices()[:devices])
        placed = place({"pixels": pixels}, batch_sharding(mesh))["pixels"]
        params = jax.device_put(model.params, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
        found, new = jax.jit(lambda params, pixels: model(pixels, params=params, train=True))(params, placed)
        np.testing.assert_allclose(found.logits, outputs.logits, rtol=0, atol=CLOSE)
        assert_trees_equal(new, updates, atol=CLOSE)

    def test_one_value_a_channel_is_refused(self, store):
        model = store.model(self.cases["model"])
        with pytest.raises(DistaffError, match="more images"):
            model(np.zeros((1, 3, 8, 8), np.float32), train=True)
        assert np.isfinite(np.asarray(model(np.zeros((1, 3, 8, 8), np.float32)).pooler_output)).all()

    def test_bfloat16_is_written_and_recorded(self, keep):
        """Statistics stay float32: bfloat16 would lose most of what a batch adds to them."""
        case = self.cases["classification"]
        model = model_class(case)(config_of(case), param_dtype=jnp.bfloat16, dtype=jnp.bfloat16)
        dtypes = {part: {leaf.dtype.name for leaf in jax.tree.leaves(model.params[part])} for part in model.params}
        assert dtypes == {"params": {"bfloat16"}, "batch_stats": {"float32"}}
        _, updates = model(case.runs["train"].inputs["pixel_values"][0], train=True)
        assert {leaf.dtype.name for leaf in jax.tree.leaves(updates)} == {"float32"}
        # After a function of jax the statistics stand first.
        model.params = jax.tree.map(jnp.asarray, {**updates, "params": model.params["params"]})
        folder = keep / "resnet-classification-in-bfloat16"
        model.save_pretrained(folder)
        assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
        assert_trees_equal(model_class(case).from_pretrained(folder, param_dtype=jnp.bfloat16).params, model.params)

    def test_random_weights(self):
        """Of He et al. 2015, counted from what goes out; nothing seen yet; neither norms nor statistics decay."""
        case = self.cases["classification"]
        model = model_class(case)(config_of(case, embedding_size=64, hidden_sizes=[256, 128]), seed=3)
        flat = flatten(model.params)
        kernels = {path: np.asarray(leaf) for path, leaf in flat.items() if path.endswith("conv/kernel")}
        for path, kernel in kernels.items():
            wanted = (2 / (kernel.shape[-1] * kernel.shape[0] * kernel.shape[1])) ** 0.5
            assert abs(kernel.std() / wanted - 1) < 4 / np.sqrt(2 * kernel.size), path
        for end, value in (("mean", 0), ("var", 1), ("count", 0), ("scale", 1), ("bias", 0)):
            assert all((np.asarray(leaf) == value).all() for path, leaf in flat.items() if path.endswith(f"/{end}")), (
                end
            )
        decaying = {path for path, decays in flatten(model.decay_mask()).items() if decays}
        assert decaying == {*kernels, "params/classifier/kernel"}

    def test_published_sizes(self):
        """ResNet-50 of microsoft/resnet-50 has 25,557,032 parameters, ResNet-18 11,689,512; statistics beside them."""
        config = type(config_of(self.cases["classification"]))
        build = distaff.FlaxResNetForImageClassification
        large = build(config(num_labels=1000), _do_init=False)
        assert large.num_params(large.params_shape_tree["params"]) == 25_557_032
        sizes = {"hidden_sizes": [64, 128, 256, 512], "depths": [2, 2, 2, 2], "layer_type": "basic"}
        small = build(config(num_labels=1000, **sizes), _do_init=False)
        assert small.num_params(small.params_shape_tree["params"]) == 11_689_512

    def test_files_without_counts(self, tmp_path):
        """PyTorch before 0.4.1 kept none."""
        case = self.cases["classification"]
        folder = golden.write(
            case, tmp_path, change=lambda state: {name: state[name] for name in state if "num_batches" not in name}
        )
        model = model_class(case).from_pretrained(folder)
        assert not model.loading_report.new
        counts = [leaf for path, leaf in flatten(model.params).items() if path.endswith("count")]
        assert counts
        assert not any(counts)

    def test_a_whole_model_is_differentiable(self, store):
        """Statistics are numbers like others to jax; in training they have no part in the loss."""
        case = self.cases["classification"]
        model, inputs = store.model(case), tensor_inputs(case.runs["mixed"])
        grads = jax.grad(lambda params: model(**inputs, params=params, train=True)[0].logits.sum())(model.params)
        assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(grads["batch_stats"]))
        assert any(np.asarray(leaf).any() for leaf in jax.tree.leaves(grads["params"]))
