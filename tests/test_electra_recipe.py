"""The ELECTRA recipe, from files to a folder, through the command line."""

import contextlib
import io
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pytest
from transformers import ElectraConfig

from distaff import FlaxElectraForMaskedLM, FlaxElectraForPreTraining, pipeline
from distaff.cli import main
from distaff.core.mesh import make_mesh
from distaff.core.tree import flatten
from distaff.data.masking import MlmMasking
from distaff.tasks.electra import (
    ElectraCollate,
    ElectraFlags,
    electra_loss,
    generator_config,
    join,
    replace_tokens,
    row_keys,
    without_embeddings,
)
from distaff.tasks.tokenizer import TokenizerFlags
from distaff.tasks.tokenizer import run as train_tokenizer
from distaff.train import OptimizerConfig, create_state, make_optimizer, make_train_step, place_rows

WORDS = "the cat sat on a mat while two dogs ran over green hills and saw red birds fly home at night".split()
SHAPE = (
    "embedding_size=8,hidden_size=16,num_hidden_layers=1,num_attention_heads=4,intermediate_size=32,"
    "max_position_embeddings=34"
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Texts and a tokenizer of about a hundred tokens."""
    folder, rng = tmp_path_factory.mktemp("corpus"), np.random.default_rng(0)
    for name, count in (("train", 120), ("validation", 30)):
        lines = [" ".join(rng.choice(WORDS, rng.integers(4, 12))) for _ in range(count)]
        (folder / f"{name}.txt").write_text("\n".join(lines) + "\n")
    flags = {"train_file": str(folder / "train.txt"), "vocab_size": 320, "output_dir": str(folder / "tokenizer")}
    train_tokenizer(TokenizerFlags(**flags))
    return folder


def electra(corpus, output, *flags, steps=6):
    """Run `distaff train electra` on the corpus and return the exit code. Eight devices: a row each."""
    return main(
        [
            *("train", "electra", "--output_dir", str(output)),
            *("--tokenizer_name", str(corpus / "tokenizer"), "--config_overrides", SHAPE),
            *("--max_seq_length", "16", "--per_device_train_batch_size", "1", "--per_device_eval_batch_size", "1"),
            *("--train_file", str(corpus / "train.txt"), "--validation_file", str(corpus / "validation.txt")),
            *("--max_steps", str(steps), "--logging_steps", "2", "--learning_rate", "1e-3", "--report_to", "none"),
            *map(str, flags),
        ]
    )


# The step.


class Given:
    """A module whose logits are given, so that a loss can be worked out by hand."""

    def __init__(self, logits):
        self.logits = logits

    def apply(self, variables, ids, **inputs):
        self.ids = ids
        return type("Outputs", (), {"logits": self.logits})


def hand_batch():
    """Two sentences of 6 and 4 tokens: 3 masked positions, 4 pads (the second row has two, as has a third, unused)."""
    original = np.array([[5, 6, 7, 8, 9, 10], [5, 7, 9, 6, 0, 0], [5, 6, 8, 7, 0, 0]], np.int32)
    ids = original.copy()
    ids[0, 1] = ids[0, 4] = ids[1, 2] = 4
    return original, {
        "input_ids": jnp.asarray(ids),
        "attention_mask": jnp.asarray(original != 0, jnp.int32),
        "masked_positions": jnp.asarray([[1, 4], [2, 0], [0, 0]]),
        "masked_labels": jnp.asarray([[6, 9], [9, 0], [0, 0]]),
        "masked_weights": jnp.asarray([[1.0, 1.0], [1.0, 0.0], [0.0, 0.0]]),
        "masked_used": jnp.asarray([[True, True], [True, False], [False, False]]),
        "row_weights": jnp.asarray([1.0, 1.0, 0.0]),
        "hidden_share": jnp.full(3, 3 / 10),
    }


def test_loss_by_hand():
    """Case T21: the generator's cross-entropy over masked tokens, and 50 times the discriminator's over real ones."""
    original, batch = hand_batch()
    logits = np.zeros((3, 2, 12), np.float32)
    # Draws that are certain: a replacement, the original itself, and a replacement.
    for (row, slot), token in {(0, 0): 11, (0, 1): 9, (1, 0): 3}.items():
        logits[row, slot, token] = 50.0
    scores = np.random.default_rng(0).normal(size=(3, 6)).astype(np.float32)
    generator, discriminator = Given(jnp.asarray(logits)), Given(jnp.asarray(scores))
    params = {"discriminator": {"electra": {"embeddings": {}}}, "generator": {"electra": {}}}
    values = electra_loss(generator, discriminator, 50.0, params, batch, jax.random.key(0))

    replaced = np.zeros((3, 6), bool)
    replaced[0, 1] = replaced[1, 2] = True  # not [0, 4], where the original was drawn
    seen = original.copy()
    seen[0, 1], seen[1, 2] = 11, 3
    np.testing.assert_array_equal(discriminator.ids[:2], seen[:2])
    np.testing.assert_array_equal(discriminator.ids[2], original[2])
    real = (original != 0) & (np.arange(3) < 2)[:, None]
    assert real.sum() == 10
    normal = [logits[place] - np.log(np.exp(logits[place].astype(float)).sum()) for place in ((0, 0), (0, 1), (1, 0))]
    cross_entropy = -sum(row[label] for row, label in zip(normal, (6, 9, 9)))
    binary = np.where(replaced, np.log1p(np.exp(-scores)), np.log1p(np.exp(scores)))[real]
    loss, weight = values["loss"]
    assert float(loss) / float(weight) == pytest.approx(cross_entropy / 3 + 50 * binary.mean(), rel=1e-5)
    pairs = {name: float(pair[0]) / float(pair[1]) for name, pair in values.items()}
    assert pairs["generator_loss"] == pytest.approx(cross_entropy / 3, rel=1e-5)
    assert pairs["discriminator_loss"] == pytest.approx(binary.mean(), rel=1e-5)
    assert pairs["always_original"] == pytest.approx(8 / 10)
    assert pairs["accuracy"] == pytest.approx(((scores > 0) == replaced)[real].mean())


def test_replacements_follow_the_generator_and_the_key():
    """Over many rows a drawn token has the generator's probability; a key gives the same draw again."""
    count = 4000
    _, one = hand_batch()
    batch = {name: jnp.repeat(value[:1], count, axis=0) for name, value in one.items()}
    logits = jnp.zeros((count, 2, 12)).at[:, :, 6].set(np.log(11.0))  # the original of slot 0 with one half
    ids, replaced = replace_tokens(logits, batch, row_keys(batch["input_ids"], jax.random.key(1)))
    again, _ = replace_tokens(logits, batch, row_keys(batch["input_ids"], jax.random.key(1)))
    np.testing.assert_array_equal(ids, again)
    deviation = np.sqrt(0.25 / count)
    assert abs(float(replaced[:, 1].mean()) - 0.5) < 4 * deviation
    assert abs(float((ids[:, 4] == 6).mean()) - 0.5) < 4 * deviation
    assert not replaced[:, [0, 2, 3, 5]].any()
    # In evaluation a row's tokens are its key: equal rows draw the same.
    same, _ = replace_tokens(logits, batch, row_keys(batch["input_ids"], None))
    assert (np.asarray(same) == np.asarray(same)[0]).all()


def models(**changes):
    fields = {"vocab_size": 40, "embedding_size": 8, "hidden_size": 16, "num_hidden_layers": 1, "pad_token_id": 0}
    fields |= {
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "max_position_embeddings": 16,
        "initializer_range": 0.2,
    }
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = ElectraConfig(**fields, **quiet)
    small = ElectraConfig(**{**fields, "hidden_size": 8, "num_attention_heads": 1}, **quiet)
    return FlaxElectraForPreTraining(config, seed=0), FlaxElectraForMaskedLM(small, seed=1)


def collated(rows: int):
    """A batch of rows with unequal numbers of tokens and of masks; the last only fills it."""
    masking = MlmMasking(4, 40, (0, 1, 2, 3, 4), count=4, probability=0.3)
    rng = np.random.default_rng(0)
    texts = {"input_ids": pa.array([rng.integers(5, 40, rng.integers(4, 13)).tolist() for _ in range(rows)])}
    weights = np.ones(rows)
    weights[-1] = 0
    collate = ElectraCollate(masking, 0, 0)
    return collate(texts, indices=np.arange(rows), weights=weights, epoch=0, length=12)


def test_embeddings_are_one_set_with_both_gradients():
    discriminator, generator = models()
    params = {"discriminator": discriminator.params, "generator": without_embeddings(generator.params)}
    batch = {name: jnp.asarray(value) for name, value in collated(8).items()}
    assert not any("embeddings/" in path for path in flatten(params["generator"]))
    joined = flatten(join(params))
    assert joined.keys() == flatten(generator.params).keys()

    def loss(params, weight):
        sums = electra_loss(generator.module, discriminator.module, weight, params, batch, jax.random.key(0))
        return sums["loss"][0]

    both, alone = (jax.jit(jax.grad(loss))(params, weight) for weight in (50.0, 0.0))
    words = "discriminator/electra/embeddings/word_embeddings/embedding"
    assert np.abs(flatten(alone)[words]).max() > 1e-3  # the generator's part
    assert np.abs(flatten(both)[words] - flatten(alone)[words]).max() > 1e-3
    for path, leaf in flatten(both).items():
        if path.startswith("generator/"):  # the discriminator teaches the generator nothing
            np.testing.assert_allclose(leaf, flatten(alone)[path], rtol=0, atol=1e-5, err_msg=path)


def test_weighted_sums_do_not_depend_on_micro_batches():
    """With accumulation over rows of unequal weight, the gradient is that of the whole batch: draws are fixed here."""
    discriminator, generator = models()
    params = {"discriminator": discriminator.params, "generator": without_embeddings(generator.params)}
    batch = collated(8)
    assert batch["row_weights"][-1] == 0
    assert len(set(batch["masked_weights"].sum(1).tolist())) > 1

    def fixed(params, batch, rng):
        return electra_loss(generator.module, discriminator.module, 50.0, params, batch, None)

    mesh = make_mesh(devices=jax.devices()[:1])
    norms = []
    for accumulation in (1, 4):
        tx, _ = make_optimizer(OptimizerConfig(learning_rate=1e-3), total_steps=10)
        state = create_state(params, tx, mesh=mesh)
        step = make_train_step(fixed, tx, state=state, accumulation=accumulation, donate=False)
        _, metrics = step(state, place_rows(batch, mesh, accumulation=accumulation))
        sums = {name: float(pair[0]) / float(pair[1]) for name, pair in metrics.sums.items()}
        expected = sums["generator_loss"] + 50 * sums["discriminator_loss"]
        assert sums["loss"] == pytest.approx(expected, rel=1e-5)
        norms.append(sums["grad_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


# Whole runs.


@pytest.fixture(scope="module")
def finished(corpus, tmp_path_factory):
    """The folder of a run that several tests read, and what it printed."""
    folder, printed = tmp_path_factory.mktemp("run") / "out", io.StringIO()
    with contextlib.redirect_stderr(printed):
        assert electra(corpus, folder, "--save_steps", 4) == 0
    return folder, printed.getvalue()


def test_a_run_leaves_both_models(corpus, finished, tmp_path):
    folder, printed = finished
    discriminator = FlaxElectraForPreTraining.from_pretrained(folder)
    generator = FlaxElectraForMaskedLM.from_pretrained(folder / "generator")
    assert not discriminator.loading_report.new + generator.loading_report.new
    assert not discriminator.loading_report.unused + generator.loading_report.unused
    assert (discriminator.config.hidden_size, generator.config.hidden_size) == (16, 4)
    assert generator.config.intermediate_size == 8
    for path, leaf in flatten(discriminator.params["electra"]["embeddings"]).items():
        np.testing.assert_array_equal(leaf, flatten(generator.params["electra"]["embeddings"])[path], err_msg=path)
    results = json.loads((folder / "all_results.json").read_text())
    wanted = results["eval_generator_loss"] + 50 * results["eval_discriminator_loss"]
    assert results["eval_loss"] == pytest.approx(wanted, rel=1e-5)
    assert 0.5 < results["eval_always_original"] < 1
    assert {"eval_accuracy", "eval_generator_perplexity"} <= results.keys()
    assert "compilations: train_step 1, eval_step 1" in printed
    # The figures come again from the folder, whatever the batch.
    for rows in (1, 3):
        flags = ("--max_seq_length", "16", "--validation_file", str(corpus / "validation.txt"))
        output = tmp_path / f"eval{rows}"
        code = main(
            [
                *("eval", "electra", "--model_name_or_path", str(folder), *flags, "--output_dir", str(output)),
                *("--per_device_eval_batch_size", str(rows)),
            ]
        )
        assert code == 0
        found = json.loads((output / "eval_results.json").read_text())
        for name in ("eval_loss", "eval_accuracy", "eval_always_original"):
            assert found[name] == pytest.approx(results[name], abs=1e-4), name


@pytest.mark.parametrize(
    "flags", [(), ("--gradient_accumulation_steps", "2", "--streaming", "--num_eval_samples", "20")]
)
def test_stop_and_resume_equals_an_uninterrupted_run(corpus, finished, tmp_path, flags):
    whole = tmp_path / "whole" if flags else finished[0]
    assert not flags or electra(corpus, whole, *flags, "--save_steps", 4) == 0
    parts = tmp_path / "parts"
    shutil.copytree(whole, parts)
    shutil.rmtree(parts / "checkpoints" / "6")
    for name in ("model.safetensors", "all_results.json", "train_results.json", "eval_results.json"):
        (parts / name).unlink()
    shutil.rmtree(parts / "generator")
    assert electra(corpus, parts, *flags, "--save_steps", 4, "--resume_from_checkpoint") == 0
    for name in ("model.safetensors", "generator/model.safetensors"):
        assert (parts / name).read_bytes() == (whole / name).read_bytes(), name


def test_a_checkpoint_of_both_models_is_trained_further(corpus, finished, tmp_path):
    common = ("--train_file", str(corpus / "train.txt"), "--validation_file", str(corpus / "validation.txt"))
    further = ("--max_seq_length", "16", "--max_steps", "1", "--learning_rate", "0", "--report_to", "none")
    rows = ("--per_device_train_batch_size", "1", "--per_device_eval_batch_size", "1")
    base = ("--model_name_or_path", str(finished[0]), "--output_dir", str(tmp_path))
    assert main(["train", "electra", *base, *common, *further, *rows]) == 0
    again, before = (json.loads((place / "eval_results.json").read_text()) for place in (tmp_path, finished[0]))
    for name in ("eval_generator_loss", "eval_discriminator_loss"):
        assert again[name] == pytest.approx(before[name], abs=1e-5)


def test_the_generator_is_a_part_or_as_its_config_says(tmp_path):
    discriminator, _ = models()
    flags = ElectraFlags(generator_size=0.5)
    small = generator_config(flags, discriminator.config, None)
    assert (small.hidden_size, small.num_attention_heads, small.intermediate_size) == (8, 1, 16)
    small.save_pretrained(tmp_path)
    named = ElectraFlags(generator_config_name=str(tmp_path))
    assert generator_config(named, discriminator.config, None).hidden_size == 8


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--generator_size", "0"), "--generator_size is 0.0"),
        (("--generator_size", "1.5"), "--generator_size is 1.5"),
        (("--discriminator_weight", "-1"), "--discriminator_weight is -1.0"),
        (("--model_type", "bert", "--config_overrides", "hidden_size=16"), "needs an electra config"),
        (("--generator_confg_name", "x"), "did you mean --generator_config_name?"),
    ],
)
def test_bad_flags_are_refused(corpus, tmp_path, capsys, flags, message):
    assert electra(corpus, tmp_path / "out", *flags) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_generator_with_other_embeddings_is_refused(corpus, tmp_path, capsys):
    config = ElectraConfig(vocab_size=320, embedding_size=12, max_position_embeddings=34)
    config.save_pretrained(tmp_path / "config")
    assert electra(corpus, tmp_path / "out", "--generator_config_name", tmp_path / "config") == 2
    error = capsys.readouterr().err
    assert "share one set of embeddings" in error


def test_a_learning_run_beats_always_original(corpus, tmp_path):
    """Words in random order: what a small generator puts in is often no word of the list."""
    flags = ("--learning_rate", "5e-3", "--per_device_train_batch_size", 2)
    assert electra(corpus, tmp_path / "out", *flags, steps=60) == 0
    results = json.loads((tmp_path / "out" / "eval_results.json").read_text())
    assert results["eval_accuracy"] > results["eval_always_original"]
    masked = str(tmp_path / "out" / "generator")
    shutil.copy(tmp_path / "out" / "tokenizer.json", masked)
    shutil.copy(tmp_path / "out" / "tokenizer_config.json", masked)
    assert len(pipeline("fill-mask", masked)("the cat <mask> on a mat")) == 5
