"""A recipe on meshes: GPT-Neo from a config, a vocabulary that does not divide, saved in the middle (T104, T107)."""

import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from distaff.cli import main
from recipe_cases import as_if_killed, logged, one_line, sentences

VOCAB = 61
SHAPE = f"vocab_size={VOCAB},hidden_size=32,num_layers=2,num_heads=4,max_position_embeddings=32,window_size=4,embed_dropout=0.1,"
SHAPE += "resid_dropout=0.1,attention_dropout=0.1,attention_types=[[[global,local],1]]"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "train.txt").write_text("\n".join(sentences(60, 0)) + "\n")
    (folder / "validation.txt").write_text("\n".join(sentences(9, 1)) + "\n")
    flags = ("--train_file", str(folder / "train.txt"), "--vocab_size", str(VOCAB), "--algorithm", "unigram")
    assert main(["tokenizer", "train", *flags, "--output_dir", str(folder / "tokenizer")]) == 0
    return folder


def train(corpus, output, mesh, *flags, rows):
    """Eight steps of four rows; `rows` are those of a device."""
    return main(
        [
            *("train", "clm", "--output_dir", str(output), "--model_type", "gpt_neo", "--config_overrides", SHAPE),
            *("--tokenizer_name", str(corpus / "tokenizer"), "--train_file", str(corpus / "train.txt")),
            *("--validation_file", str(corpus / "validation.txt"), "--per_device_eval_batch_size", "2"),
            *("--block_size", "16", "--per_device_train_batch_size", str(rows), "--max_steps", "8"),
            *("--logging_steps", "1", "--learning_rate", "1e-3", "--report_to", "none", "--mesh", mesh, *flags),
            # Gradients that are zero but for rounding must not move anything.
            *("--adam_epsilon", "1e-5"),
        ]
    )


def assert_same_run(ours, theirs):
    """Losses and parameters to 1e-5, and a vocabulary of its own size in what is saved."""
    for here, there in zip(logged(ours), logged(theirs), strict=True):
        assert here == pytest.approx(there, rel=1e-5, abs=1e-5)
    one, two = load_file(ours / "model.safetensors"), load_file(theirs / "model.safetensors")
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        np.testing.assert_allclose(two[name], tensor, atol=1e-5, err_msg=name)
    assert one["transformer.wte.weight"].shape == (VOCAB, 32)
    assert json.loads((theirs / "config.json").read_text())["vocab_size"] == VOCAB


def test_a_run_on_a_mesh_is_that_of_one_device_and_goes_on_on_another(corpus, tmp_path, monkeypatch):
    every = jax.devices()

    def have(count):
        monkeypatch.setattr(jax, "devices", lambda *names: every[:count])

    have(4)
    assert train(corpus, tmp_path / "many", "fsdp=2,tensor=2", "--save_steps", "4", rows=2) == 0
    for mesh, devices, rows in (("data=2,tensor=4", 8, 2), ("tensor=2", 2, 4)):
        have(devices)
        as_if_killed(tmp_path / "many", tmp_path / mesh, step=4)
        assert train(corpus, tmp_path / mesh, mesh, "--resume_from_checkpoint", rows=rows) == 0
        assert_same_run(tmp_path / "many", tmp_path / mesh)
    # Saving neither moves parameters nor changes a result: the other run saves at its end alone.
    have(1)
    assert train(corpus, tmp_path / "one", "data=1", rows=4) == 0
    assert_same_run(tmp_path / "many", tmp_path / "one")


def test_a_mesh_larger_than_the_devices_is_refused(corpus, tmp_path, capsys):
    assert train(corpus, tmp_path / "out", "tensor=16", rows=4) == 2
    assert "tensor=16" in one_line(capsys)
    assert not [*(tmp_path / "out").iterdir()]
