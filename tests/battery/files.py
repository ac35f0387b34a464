"""Checks of files: what is written is what PyTorch and old Flax wrote, and comes back bit for bit."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from battery.family import Common, assert_parity, assert_trees_equal, loss_and_gradients, model_class
from distaff.hub import open_checkpoint
from golden import cases as golden

FORMATS = {
    "safetensors": {},
    "safetensors-sharded": {"max_shard_size": "8KB"},
    "msgpack": {"save_format": "msgpack"},
    "msgpack-sharded": {"save_format": "msgpack", "max_shard_size": "8KB"},
}


class FileChecks(Common):
    def test_values_equal_pytorch(self, case, store):
        assert_parity(case, store.model(case))

    def test_gradients_equal_pytorch(self, graded_case, store, tmp_path):
        case, run = graded_case, graded_case.runs["gradient"]
        model = store.model(case)
        loss, gradients = loss_and_gradients(model, run, **self.training_options(case))
        assert abs(float(loss) - case.loss) < 1e-4
        # Saved as if they were parameters, they come back under PyTorch's names and in its layout.
        model.save_pretrained(tmp_path, params=gradients)
        found = open_checkpoint(tmp_path)
        assert set(case.gradients) <= set(found)
        for name, expected in case.gradients.items():
            norm, projection = golden.summary(name, found[name])
            scale = max(1.0, expected[0])
            assert abs(norm - expected[0]) < 1e-4 * scale, name
            assert abs(projection - expected[1]) < 1e-4 * scale, name

    def test_written_keys_and_values_are_those_of_pytorch(self, case, store, keep):
        folder = keep / case.id / "safetensors"
        store.model(case).save_pretrained(folder)
        written = open_checkpoint(folder)
        assert {name: tuple(written[name].shape) for name in written} == case.keys
        for name in set(case.keys) - set(case.dead):
            np.testing.assert_array_equal(written[name], golden.tensor(name, case.keys[name]), err_msg=name)
        config = json.loads((folder / "config.json").read_text())
        assert config["architectures"] == [case.class_name]
        # What loads a head that is not tied may say so.
        untied = case.dead or case.name.endswith("tie_broken")
        free = {"transformers_version", *(["tie_word_embeddings"] if untied else [])}
        assert {**case.config, **dict.fromkeys(free)} == {**config, **dict.fromkeys(free)}

    @pytest.mark.parametrize("file_format", FORMATS)
    @pytest.mark.parametrize("name", ["base", "lm", "headed"])
    def test_round_trip_is_exact(self, name, file_format, store, keep):
        case = self.cases[getattr(self, name)]
        model, folder = store.model(case), keep / case.id / file_format
        model.save_pretrained(folder, **FORMATS[file_format])
        weights = {path.name for path in folder.iterdir()} - {"config.json", "README.md", "generation_config.json"}
        assert len(weights) > 2 if "sharded" in file_format else len(weights) == 1, weights
        again = model_class(case).from_pretrained(folder)
        assert_trees_equal(again.params, self.kept_by(model.params, file_format.partition("-")[0]))
        assert not again.loading_report.new
        assert not again.loading_report.unused

    def test_bfloat16_is_written_and_recorded(self, store, keep):
        case = self.cases[self.lm]
        model = store.model(case, param_dtype=jnp.bfloat16)
        assert {leaf.dtype for leaf in jax.tree.leaves(model.params)} == {jnp.dtype(jnp.bfloat16)}
        for options in ({}, {"save_format": "msgpack"}):
            folder = keep / f"{case.id}-in-bfloat16" / (options.get("save_format") or "safetensors")
            model.save_pretrained(folder, **options)
            assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
            again = model_class(case).from_pretrained(folder, param_dtype=jnp.bfloat16)
            assert_trees_equal(again.params, model.params)
            # Asked for in float32, the values are those of the bfloat16 file.
            wide = model_class(case).from_pretrained(folder, param_dtype=jnp.float32)
            assert_trees_equal(wide.params, jax.tree.map(lambda leaf: leaf.astype(jnp.float32), model.params))

    def test_given_params_are_saved(self, store, tmp_path):
        case = self.cases[self.lm]
        model = store.model(case)
        model.save_pretrained(tmp_path, params=jax.tree.map(lambda leaf: leaf * 2, model.params))
        written = open_checkpoint(tmp_path)
        name = next(iter(case.keys))
        np.testing.assert_array_equal(written[name], 2 * golden.tensor(name, case.keys[name]))

    def test_msgpack_of_old_flax(self, old_folder, tmp_path):
        """A real file of the old classes loads, answers as PyTorch, and is written again name for name."""
        narrow = old_folder.name.endswith("-bfloat16")
        case = self.cases[old_folder.name.removeprefix(f"{self.family}-").removesuffix("-bfloat16")]
        model = model_class(case).from_pretrained(old_folder, param_dtype=jnp.bfloat16 if narrow else jnp.float32)
        assert not model.loading_report.new
        assert not model.loading_report.unused
        if not narrow:
            assert_parity(case, model)
        model.save_pretrained(tmp_path, save_format="msgpack")
        theirs, ours = open_checkpoint(old_folder), open_checkpoint(tmp_path)
        assert set(ours) == set(theirs)
        for path in theirs:
            assert ours[path].dtype == theirs[path].dtype
            np.testing.assert_array_equal(ours[path], theirs[path], err_msg=path)
