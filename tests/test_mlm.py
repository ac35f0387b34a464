"""The masked LM recipe, from files to a folder, through the command line."""

import contextlib
import io
import json
import re
import shutil
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import yaml
from datasets import Dataset, DatasetDict
from transformers import AutoTokenizer, BertConfig, RobertaConfig

from distaff import FlaxAutoModelForMaskedLM, FlaxBertForMaskedLM, FlaxRobertaForMaskedLM, pipeline
from distaff.cli import find_command, main, parse
from distaff.core.errors import CheckpointError
from distaff.core.mesh import batch_sharding, make_mesh, place, replicated
from distaff.core.tree import flatten
from distaff.data.batches import Batches
from distaff.data.masking import MlmCollate, MlmMasking
from distaff.data.text import load_texts, tokenize_lines
from distaff.tasks._folder import begin
from distaff.tasks._recipe import command_line
from distaff.tasks._text_data import Texts
from distaff.tasks.mlm import MlmFlags, make_data, mlm_loss, mlm_rows
from distaff.tasks.tokenizer import TokenizerFlags
from distaff.tasks.tokenizer import run as train_tokenizer
from distaff.train import (
    OptimizerConfig,
    TrainState,
    create_state,
    evaluate,
    make_optimizer,
    make_train_step,
    place_rows,
    read_params,
)

WORDS = "the cat sat on a mat while two dogs ran over green hills and saw red birds fly home at night".split()
SHAPE = "hidden_size=16,num_hidden_layers=1,num_attention_heads=2,intermediate_size=32,max_position_embeddings=34"


def sentences(count: int, seed: int) -> list[str]:
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, rng.integers(4, 12))) for _ in range(count)]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Texts and a tokenizer of about a hundred tokens."""
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "train.txt").write_text("\n".join(sentences(120, 0)) + "\n")
    (folder / "validation.txt").write_text("\n".join(sentences(30, 1)) + "\n")
    train_tokenizer(
        TokenizerFlags(train_file=str(folder / "train.txt"), vocab_size=320, output_dir=str(folder / "tokenizer"))
    )
    return folder


def mlm(corpus, output, *flags, steps=10):
    """Run `distaff train mlm` on the corpus and return the exit code. Eight devices: a row each."""
    return main(
        [
            *("train", "mlm", "--output_dir", str(output), "--model_type", "roberta"),
            *("--tokenizer_name", str(corpus / "tokenizer"), "--config_overrides", SHAPE),
            *("--max_seq_length", "16", "--per_device_train_batch_size", "8", "--per_device_eval_batch_size", "8"),
            *("--train_file", str(corpus / "train.txt"), "--validation_file", str(corpus / "validation.txt")),
            *("--max_steps", str(steps), "--logging_steps", "2", "--learning_rate", "1e-3", "--report_to", "none"),
            *map(str, flags),
        ]
    )


def logged(folder, *, timings=("seconds", "second", "memory")):
    """The rows of metrics.jsonl without what depends on the clock."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if not any(word in name for word in timings)} for row in rows]


@pytest.fixture(scope="module")
def finished(corpus, tmp_path_factory):
    """The folder of a run of ten steps that several tests read, and what it printed."""
    folder, printed = tmp_path_factory.mktemp("run") / "out", io.StringIO()
    with contextlib.redirect_stderr(printed):
        code = mlm(corpus, folder, "--report_to", "tensorboard", "--save_steps", 4, "--save_total_limit", 2)
    assert code == 0
    return folder, printed.getvalue()


# What a run leaves.


def test_a_run_leaves_a_folder_that_opens(finished):
    folder, printed = finished
    names = {path.name for path in folder.iterdir()}
    assert names >= set(
        "config.json model.safetensors tokenizer.json README.md recipe.yaml train_results.json eval_results.json "
        "all_results.json metrics.jsonl runs checkpoints".split()
    )
    assert any((folder / "runs").rglob("events.out.tfevents*"))
    assert sorted(int(path.name) for path in (folder / "checkpoints").iterdir()) == [8, 10]
    results = json.loads((folder / "all_results.json").read_text())
    assert results["train_steps"] == 10
    assert results["eval_perplexity"] == pytest.approx(np.exp(results["eval_loss"]), rel=1e-6)
    recipe = yaml.safe_load((folder / "recipe.yaml").read_text())
    assert recipe["max_seq_length"] == 16
    assert "hub_token" not in recipe
    assert "distaff train mlm" not in (folder / "config.json").read_text()
    assert AutoTokenizer.from_pretrained(folder).mask_token == "<mask>"
    model = FlaxRobertaForMaskedLM.from_pretrained(folder)
    assert model.loading_report.new == ()
    saved = read_params(folder / "checkpoints" / "10", jax.eval_shape(lambda: model.params))
    for path, leaf in flatten(saved).items():
        np.testing.assert_array_equal(leaf, flatten(model.params)[path], err_msg=path)
    assert "compilations: train_step 1, eval_step 1" in printed
    assert len(pipeline("fill-mask", str(folder))("the cat <mask> on a mat")) == 5


def test_eval_command_repeats_the_runs_figures(corpus, finished, tmp_path, capsys):
    wanted = json.loads((finished[0] / "eval_results.json").read_text())
    for rows in (1, 3):
        code = main(
            [
                *("eval", "mlm", "--model_name_or_path", str(finished[0]), "--max_seq_length", "16"),
                *("--validation_file", str(corpus / "validation.txt"), "--per_device_eval_batch_size", str(rows)),
                *("--output_dir", str(tmp_path / f"eval{rows}")),
            ]
        )
        assert code == 0
        found = json.loads((tmp_path / f"eval{rows}" / "eval_results.json").read_text())
        assert found["eval_loss"] == pytest.approx(wanted["eval_loss"], abs=1e-6)
        assert found["eval_accuracy"] == pytest.approx(wanted["eval_accuracy"], abs=1e-6)
    assert "eval_loss = " in capsys.readouterr().out


@pytest.mark.parametrize(
    "flags",
    [
        ("--optimizer", "lion", "--moment_dtype", "bfloat16", "--ema_decay", "0.9"),
        ("--gradient_accumulation_steps", "2", "--adafactor", "--line_by_line", "--whole_word_mask"),
        ("--streaming", "--num_eval_samples", "20", "--shuffle_buffer_size", "5"),
    ],
    ids=["lion", "adafactor", "streaming"],
)
def test_stop_and_resume_equals_an_uninterrupted_run(corpus, tmp_path, flags):
    """With dropout; resumed twice (cases T68 and T101)."""
    assert mlm(corpus, tmp_path / "whole", *flags, "--save_steps", 4, "--eval_steps", 4) == 0
    parts = tmp_path / "parts"
    shutil.copytree(tmp_path / "whole", parts)
    # What a run that was killed after step 4 leaves behind.
    for path in (parts / "checkpoints").iterdir():
        if path.name != "4":
            shutil.rmtree(path)
    for name in ("model.safetensors", "all_results.json", "train_results.json", "eval_results.json"):
        (parts / name).unlink()
    assert mlm(corpus, parts, *flags, "--save_steps", 3, "--eval_steps", 4, "--resume_from_checkpoint") == 0
    shutil.rmtree(parts / "checkpoints" / "10")
    assert mlm(corpus, parts, *flags, "--save_steps", 3, "--eval_steps", 4, "--resume_from_checkpoint") == 0
    whole = FlaxRobertaForMaskedLM.from_pretrained(tmp_path / "whole")
    again = FlaxRobertaForMaskedLM.from_pretrained(parts)
    for path, leaf in flatten(whole.params).items():
        np.testing.assert_array_equal(leaf, flatten(again.params)[path], err_msg=path)
    assert logged(parts) == logged(tmp_path / "whole")


def test_earlier_run_is_neither_lost_nor_mixed(corpus, tmp_path, capsys):
    assert mlm(corpus, tmp_path / "out", steps=2) == 0
    before = (tmp_path / "out" / "model.safetensors").read_bytes()
    assert mlm(corpus, tmp_path / "out", steps=2) == 2
    assert "already holds a run: go on with --resume_from_checkpoint" in capsys.readouterr().err
    assert mlm(corpus, tmp_path / "out", "--resume_from_checkpoint", tmp_path / "another", steps=2) == 2
    assert "already holds a run" in capsys.readouterr().err
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before
    assert mlm(corpus, tmp_path / "fresh", "--resume_from_checkpoint", steps=2) == 2
    assert "no complete checkpoint" in capsys.readouterr().err
    assert mlm(corpus, tmp_path / "out", "--overwrite_output_dir", "--seed", 7, steps=2) == 0
    assert (tmp_path / "out" / "model.safetensors").read_bytes() != before


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "flax_model.msgpack", "model-00001-of-00002.safetensors", "config.json", "notes.txt"]
)
def test_a_folder_with_something_else_in_it_is_refused(corpus, tmp_path, capsys, name):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_text("mine")
    assert mlm(corpus, tmp_path / "out") == 2
    assert f"is not empty (it holds {name})" in one_line(capsys)
    assert [path.read_text() for path in (tmp_path / "out").iterdir()] == ["mine"]


def test_tokenizer_and_config_may_wait_in_the_folder(corpus, tmp_path, capsys):
    """The commands of the guide: all three write into one folder, and none replaces what is not its own."""
    folder = str(tmp_path / "roberta-als")
    text = str(corpus / "train.txt")
    assert main(["tokenizer", "train", "--train_file", text, "--vocab_size", "320", "--output_dir", folder]) == 0
    create = ["config", "create", "--model_type", "roberta", "--output_dir", folder, "--tokenizer_name", folder]
    assert main([*create, "--config_overrides", SHAPE]) == 0
    before = (tmp_path / "roberta-als" / "config.json").read_text()
    assert main([*create, "--config_overrides", f"{SHAPE},hidden_size=32"]) == 2
    assert "is there already" in one_line(capsys)
    assert (tmp_path / "roberta-als" / "config.json").read_text() == before
    words = ["--output_dir", folder, "--config_name", folder, "--tokenizer_name", folder, "--train_file", text]
    words += ["--max_seq_length", "16", "--per_device_train_batch_size", "1", "--max_steps", "1", "--report_to", "none"]
    # A config of its own would take the place of the one that waits.
    assert main(["train", "mlm", *words[:2], "--model_type", "roberta", *words[4:]]) == 2
    assert "it holds config.json" in one_line(capsys)
    assert main(["train", "mlm", *words]) == 0
    assert (tmp_path / "roberta-als" / "model.safetensors").exists()


def test_results_are_those_of_the_run(corpus, finished, tmp_path, capsys):
    """Whatever an earlier run left beside them."""
    folder = tmp_path / "out"
    shutil.copytree(finished[0], folder)
    old = {name: (folder / name).read_text() for name in ("all_results.json", "eval_results.json")}
    assert mlm(corpus, folder, "--resume_from_checkpoint", steps=12) == 0
    wanted = json.loads((folder / "eval_results.json").read_text())
    # Killed after its last checkpoint, before the results; and a file that was cut short.
    (folder / "eval_results.json").write_text(old["eval_results.json"])
    (folder / "all_results.json").write_text(old["all_results.json"][:-20])
    recipe = (folder / "recipe.yaml").read_text()
    assert mlm(corpus, folder, "--resume_from_checkpoint", steps=12) == 0
    assert json.loads((folder / "eval_results.json").read_text()) == wanted
    assert json.loads((folder / "all_results.json").read_text())["train_steps"] == 12
    assert f"{wanted['eval_loss']:.5g}" in (folder / "README.md").read_text()
    # Without its log it is measured again.
    (folder / "metrics.jsonl").unlink()
    assert mlm(corpus, folder, "--resume_from_checkpoint", steps=12) == 0
    assert json.loads((folder / "eval_results.json").read_text())["eval_loss"] == pytest.approx(wanted["eval_loss"])
    # A resume that is refused leaves everything as it was.
    capsys.readouterr()
    shape = SHAPE.replace("hidden_size=16", "hidden_size=32")
    assert mlm(corpus, folder, "--resume_from_checkpoint", "--config_overrides", shape, steps=14) == 1
    assert "does not fit this run" in one_line(capsys)
    assert (folder / "recipe.yaml").read_text() == recipe
    # Other data is said, one setting at a time.
    other = (
        "--per_device_train_batch_size",
        "16",
        "--mlm_probability",
        "0.2",
        "--train_file",
        corpus / "validation.txt",
    )
    assert mlm(corpus, folder, "--resume_from_checkpoint", *other, steps=13) == 0
    warning = next(line for line in capsys.readouterr().err.splitlines() if "other data" in line)
    assert "batch_size was 8 and is 16" in warning
    assert "probability was 0.15 and is 0.2" in warning
    assert "content was" in warning
    assert "seed" not in warning
    # A run that is overwritten leaves neither its figures nor, while the new one is under way, its model.
    assert mlm(corpus, folder, "--overwrite_output_dir", "--do_eval", "False", steps=1) == 0
    assert not (folder / "eval_results.json").exists()
    assert not [name for name in json.loads((folder / "all_results.json").read_text()) if name.startswith("eval_")]


def test_an_overwritten_model_is_gone_from_the_start(corpus, tmp_path):
    assert mlm(corpus, tmp_path, "--overwrite_output_dir", steps=1) == 0
    (tmp_path / "README.md").write_text("Mine.\n\n" + (tmp_path / "README.md").read_text().split("---\n", 2)[2])
    flags = MlmFlags(output_dir=str(tmp_path), overwrite_output_dir=True, model_name_or_path=str(tmp_path))
    begin(tmp_path, flags, "mlm")
    assert (tmp_path / "model.safetensors").exists()  # the run starts from it
    begin(tmp_path, replace(flags, model_name_or_path=None), "mlm")
    assert not (tmp_path / "model.safetensors").exists()
    assert not (tmp_path / "all_results.json").exists()
    assert (tmp_path / "README.md").read_text().strip() == "Mine."


def test_a_dataset_brings_its_own_validation_texts(corpus, tmp_path):
    texts = {
        name: Dataset.from_dict({"text": sentences(count, 3)}) for name, count in (("train", 40), ("validation", 7))
    }
    DatasetDict(**texts).save_to_disk(tmp_path / "saved")
    (tmp_path / "files").mkdir()
    for name in ("train", "validation"):
        shutil.copy(corpus / f"{name}.txt", tmp_path / "files" / f"{name}.txt")
    for name, wanted in (("saved", (40, 7)), ("files", (120, 30))):
        flags = MlmFlags(dataset_name=str(tmp_path / name), cache_dir=str(tmp_path / "cache"))
        assert tuple(map(len, Texts(flags).split())) == wanted
    texts["train"].save_to_disk(tmp_path / "one")
    assert tuple(map(len, Texts(MlmFlags(dataset_name=str(tmp_path / "one"))).split())) == (38, 2)


def test_limits_hold_for_streams_too(corpus, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(corpus / "tokenizer")
    flags = MlmFlags(train_file=str(corpus / "train.txt"), streaming=True, num_eval_samples=50, max_train_samples=60)
    flags.max_seq_length = 16
    model = FlaxRobertaForMaskedLM(RobertaConfig(vocab_size=320, num_hidden_layers=1), _do_init=False)

    def data(**changes):
        changed = replace(flags, **changes)
        rows = mlm_rows(changed, tokenizer, model)
        return make_data(changed, tokenizer, rows, vocab_size=320, sizes=(8, 8))

    whole, fewer = data(), data(max_eval_samples=10)
    assert whole.eval_steps > fewer.eval_steps > 0
    assert data(do_eval=False).evaluation is None
    validation = str(corpus / "validation.txt")
    assert data(do_eval=False, validation_file=validation).evaluation is None
    few = data(validation_file=validation, max_eval_samples=4)
    assert 0 < few.eval_steps < data(validation_file=validation).eval_steps


@pytest.mark.parametrize("spelling", ["--hub_token {}", "--hub_token={}", "--hub-token {}", "--hub-token={}"])
def test_the_token_is_not_published(monkeypatch, spelling):
    words = spelling.format("hf_secret").split()
    monkeypatch.setattr("sys.argv", ["/bin/distaff", "train", "mlm", *words, "--seed", "3"])
    name, command = find_command(["train", "mlm"])
    line = command_line(parse(name, command, MlmFlags, words)[0])
    assert line.startswith("distaff train mlm --hub")
    assert line.endswith("... --seed 3")
    assert "secret" not in line


def test_a_checkpoint_is_trained_further(corpus, finished, tmp_path):
    code = main(
        [
            *("train", "mlm", "--output_dir", str(tmp_path / "second")),
            *("--model_name_or_path", str(finished[0]), "--max_seq_length", "16", "--max_steps", "1"),
            *("--train_file", str(corpus / "train.txt"), "--validation_file", str(corpus / "validation.txt")),
            *(
                "--learning_rate",
                "0",
                "--report_to",
                "none",
                "--per_device_train_batch_size",
                "1",
                "--per_device_eval_batch_size",
                "1",
            ),
        ]
    )
    assert code == 0
    first, second = (
        json.loads((folder / "eval_results.json").read_text()) for folder in (finished[0], tmp_path / "second")
    )
    assert second["eval_loss"] == pytest.approx(first["eval_loss"], abs=1e-5)


def test_recipe_file_and_flags_that_win(finished, tmp_path, capsys):
    again = tmp_path / "again.yaml"
    again.write_text((finished[0] / "recipe.yaml").read_text())
    assert main(["train", "mlm", str(again), "--output_dir", str(tmp_path / "two"), "--max_steps", "3"]) == 0
    assert json.loads((tmp_path / "two" / "train_results.json").read_text())["train_steps"] == 3
    # An evaluation passes over what is for training in a file, and refuses it on its command line.
    evaluation = [
        "eval",
        "mlm",
        str(again),
        "--model_name_or_path",
        str(finished[0]),
        "--output_dir",
        str(tmp_path / "e"),
    ]
    assert main(evaluation) == 0
    found, wanted = (json.loads((place / "eval_results.json").read_text()) for place in (tmp_path / "e", finished[0]))
    assert found["eval_loss"] == pytest.approx(wanted["eval_loss"], abs=1e-6)
    capsys.readouterr()
    assert main([*evaluation, "--learning_rate=3"]) == 2
    assert "--learning_rate is for training: leave it out of 'distaff eval mlm'" in one_line(capsys)
    again.write_text("learning_rat: 3\n")
    assert main(["train", "mlm", str(again)]) == 2
    assert "did you mean --learning_rate?" in capsys.readouterr().err


def test_whole_run_learns(corpus, tmp_path):
    """Words in random order: the loss must fall from that of all tokens to that of the twenty words."""
    assert mlm(corpus, tmp_path / "out", "--learning_rate", "3e-3", "--per_device_train_batch_size", 32, steps=200) == 0
    loss = json.loads((tmp_path / "out" / "eval_results.json").read_text())["eval_loss"]
    assert np.log(len(WORDS)) * 0.8 < loss < np.log(len(WORDS)) + 0.5


# The step.


def step_batches(corpus, rows: int, **collate):
    tokenizer = AutoTokenizer.from_pretrained(corpus / "tokenizer")
    masking = MlmMasking.from_tokenizer(tokenizer, max_length=16)
    dataset = tokenize_lines(load_texts(files=str(corpus / "train.txt")), tokenizer=tokenizer, max_length=16)
    collation = MlmCollate.from_tokenizer(tokenizer, masking=masking, seed=0)
    return Batches(dataset, collate=collation, batch_size=rows, max_length=16, **collate)


def tiny_model(**changes):
    config = RobertaConfig(
        vocab_size=320,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=34,
        type_vocab_size=1,
        **changes,
    )
    return FlaxRobertaForMaskedLM(config)


def one_update(model, batch, *, devices: int, accumulation: int):
    """The parameters after a step, and its loss."""
    tx, _ = make_optimizer(OptimizerConfig(learning_rate=1e-2), total_steps=10, decay_mask=model.decay_mask())
    mesh = make_mesh(devices=jax.devices()[:devices])
    state = create_state(model.params, tx, mesh=mesh)
    step = make_train_step(partial(mlm_loss, model.module), tx, state=state, accumulation=accumulation)
    state, metrics = step(state, place_rows(batch, mesh, accumulation=accumulation))
    total, weight = metrics.sums["loss"]
    return flatten(jax.device_get(state.params)), float(total) / float(weight)


def test_accumulation_and_devices_do_not_change_the_update(corpus):
    """Rows have unequal numbers of labels (case T63); no dropout, so that micro-batches are comparable."""
    model = tiny_model(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    batch = step_batches(corpus, 8)(0)
    counts = batch["masked_weights"].sum(axis=1)
    assert len(set(counts.tolist())) > 1
    wanted, loss = one_update(model, batch, devices=1, accumulation=1)
    found, accumulated = one_update(model, batch, devices=1, accumulation=4)
    assert accumulated == pytest.approx(loss, abs=1e-6)
    # Adam divides by the gradient's size: what is compared to 1e-6 is the gradient, seen through its first moment.
    for path, leaf in wanted.items():
        np.testing.assert_allclose(found[path], leaf, atol=1e-5, err_msg=path)
    for devices in (2, 8):
        found, on_devices = one_update(model, batch, devices=devices, accumulation=1)
        assert on_devices == pytest.approx(loss, abs=1e-5)
        for path, leaf in wanted.items():
            np.testing.assert_allclose(found[path], leaf, atol=1e-5, err_msg=path)


def test_dropout_does_not_depend_on_the_device_count(corpus):
    """Case T65: masks belong to row, step and purpose, not to a device."""
    model = tiny_model(hidden_dropout_prob=0.5)
    batch = step_batches(corpus, 8)(0)
    _, one = one_update(model, batch, devices=1, accumulation=1)
    _, eight = one_update(model, batch, devices=8, accumulation=1)
    assert one == pytest.approx(eight, abs=1e-5)
    same = {name: np.repeat(rows[:1], 8, axis=0) for name, rows in batch.items()}
    rng = jax.random.key(0)
    hidden = model.module.apply(
        {"params": model.params}, same["input_ids"], same["attention_mask"], deterministic=False, rngs={"dropout": rng}
    ).logits
    assert len({float(row.sum()) for row in hidden}) == 8


def test_loss_is_that_of_full_logits(corpus):
    """Logits at masked positions alone give the loss and the gradients of logits everywhere."""
    model = tiny_model(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    batch = step_batches(corpus, 8)(0)
    labels = np.full(batch["input_ids"].shape, -100)
    for row in range(8):
        for position, label, weight in zip(*(batch[f"masked_{n}"][row] for n in ("positions", "labels", "weights"))):
            if weight:
                labels[row, position] = label
    assert (labels >= 0).sum() == batch["masked_weights"].sum()

    def full(params):
        logits = model(batch["input_ids"], batch["attention_mask"], params=params).logits
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, np.maximum(labels, 0))
        return jnp.sum(losses * (labels >= 0))

    def masked(params):
        return mlm_loss(model.module, params, batch, None)["loss"][0]

    wanted, found = (jax.jit(jax.value_and_grad(loss))(model.params) for loss in (full, masked))
    assert float(found[0]) == pytest.approx(float(wanted[0]), rel=1e-6)
    for path, leaf in flatten(wanted[1]).items():
        np.testing.assert_allclose(flatten(found[1])[path], leaf, atol=2e-5, err_msg=path)


def test_step_never_holds_all_logits():
    """Temporary memory of the peers' step (RoBERTa 6 x 384, 16 x 128, vocabulary 50,265), a fact of the program."""
    config = RobertaConfig(
        vocab_size=50265,
        hidden_size=384,
        num_hidden_layers=6,
        num_attention_heads=6,
        intermediate_size=1536,
        max_position_embeddings=514,
        type_vocab_size=1,
    )
    model = FlaxRobertaForMaskedLM(config, _do_init=False)
    tx, _ = make_optimizer(OptimizerConfig(learning_rate=1e-4), total_steps=10)
    batch, length = 16, 128

    def abstract(params):
        return TrainState(jnp.zeros((), jnp.int32), params, tx.init(params), jax.random.key(0))

    def memory(count):
        ids = jax.ShapeDtypeStruct((batch, length), jnp.int32)
        slots = jax.ShapeDtypeStruct((batch, count), jnp.int32)
        rows = {"input_ids": ids, "attention_mask": ids, "masked_positions": slots, "masked_labels": slots}
        rows["masked_weights"] = jax.ShapeDtypeStruct((batch, count), jnp.float32)
        step = make_train_step(partial(mlm_loss, model.module), tx)
        return step.lower(jax.eval_shape(abstract, model.params_shape_tree), rows).compile().memory_analysis()

    masked, everywhere = memory(24), memory(length)
    all_logits = batch * length * config.vocab_size * 4
    # Both hold the activations of the layers, 0.8 GB. Logits at the masked positions, their softmax and the error are
    # a fifth of all of them, and where all are asked for they come in chunks.
    assert masked.temp_size_in_bytes < 2.6 * all_logits
    assert everywhere.temp_size_in_bytes - masked.temp_size_in_bytes < 0.6 * all_logits
    # The state is donated: parameters and both moments are updated in place.
    assert masked.alias_size_in_bytes > 3 * 4 * model.num_params() * 0.99


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_evaluation_does_not_depend_on_the_batch(corpus, rows):
    """Case T56: the last batch is padded and weighted zero."""
    model = tiny_model()
    loss_fn = partial(mlm_loss, model.module)
    values = []
    for size in (8, rows):
        batches = step_batches(corpus, size, shuffle=False)
        values.append(evaluate(loss_fn, params=model.params, batches=batches, steps=batches.steps_per_epoch))
    assert values[1]["loss"] == pytest.approx(values[0]["loss"], abs=1e-6)
    assert values[1]["accuracy"] == pytest.approx(values[0]["accuracy"], abs=1e-6)


def test_a_padded_row_does_not_change_the_loss(corpus):
    """Case T18: a row without weight may hold anything."""
    model = tiny_model()
    batch = step_batches(corpus, 4, shuffle=False)(0)
    loss = jax.jit(lambda batch: mlm_loss(model.module, model.params, batch, None)["loss"])
    wanted = loss(batch)
    pad = {name: np.concatenate([rows, np.zeros_like(rows[:1])]) for name, rows in batch.items()}
    pad["input_ids"][-1] = 1
    found = loss(pad)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_transfers_during_steps_are_explicit(corpus):
    model = tiny_model()
    tx, schedule = make_optimizer(OptimizerConfig(learning_rate=1e-2), total_steps=10)
    mesh = make_mesh()
    state = create_state(model.params, tx, mesh=mesh)
    step = make_train_step(partial(mlm_loss, model.module), tx, state=state, schedule=schedule)
    batch = place(step_batches(corpus, 8)(0), batch_sharding(mesh))
    with jax.transfer_guard("disallow"):
        for _ in range(2):
            state, metrics = step(state, batch)
    assert np.isfinite(jax.device_get(metrics.sums["loss"][0]))
    assert state.step.sharding == replicated(mesh)


# What is refused: one sentence, exit code 2 for usage and 1 for what is on disk, and nothing lost.


def one_line(capsys) -> str:
    """The error that was printed, which is one line without a traceback."""
    error = capsys.readouterr().err
    assert "Traceback" not in error
    lines = [line for line in error.splitlines() if line.startswith("distaff: ")]
    assert len(lines) == 1, error
    assert re.search(r"[.?]$", lines[0]), lines[0]
    return lines[0]


@pytest.mark.parametrize(
    ("content", "name", "code", "words"),
    [
        (None, "missing.txt", 1, "There is no file"),
        ("", "empty.txt", 1, "is empty"),
        ("\n  \n\t\n", "blank.txt", 1, "has no text: 3 blank rows"),
        ("the cat sat\n", "short.txt", 1, "less than one block of 16"),
        ('{"text": "a"}\n{"text": "b"}\n{"text": \n', "broken.jsonl", 1, "line 3"),
        ("title,body\n1,2\n", "columns.csv", 2, "has no column 'text'"),
        ('{"text": "a"}\n' + "[" * 100_000, "deep.jsonl", 1, "line 2: JSON that cannot be read"),
        ("a\n", "letter.doc", 2, "none of"),
    ],
    ids=lambda value: value if isinstance(value, str) and "." in value and " " not in value else "",
)
def test_bad_files_are_one_sentence(corpus, tmp_path, capsys, content, name, code, words):
    if content is not None:
        (tmp_path / name).write_text(content)
    flags = ("--text_column", "text") if name == "columns.csv" else ()
    found = mlm(corpus, tmp_path / "out", "--train_file", tmp_path / name, *flags)
    assert words in one_line(capsys)
    assert found in (1, code)
    # Nothing stands in the way of the corrected command.
    assert not any((tmp_path / "out").iterdir())


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--warmup_steps", "11"), "warmup_steps 11"),
        (("--learning_rat", "1"), "did you mean --learning_rate?"),
        (("--per_device_train_batch_size", "0"), "--per_device_train_batch_size is 0"),
        (("--per_device_train_batch_size", "-4"), "--per_device_train_batch_size is -4"),
        (("--per_device_train_batch_size", "many"), "invalid int value: 'many'"),
        (("--mlm_probability", "1.5"), "1.5"),
        (("--max_seq_length", "500"), "more than the 32 positions"),
        (("--dtype", "float8"), "'float8' is not a dtype"),
        (("--lr_scheduler_type", "cosinus"), "cosinus"),
        (("--config_overrides", "hidden_sice=16"), "hidden_sice"),
        (("--model_type", "bertt"), "bertt"),
        (("--max_train_samples", "0"), "max_train_samples is 0"),
        (("--streaming", "--line_by_line"), "leave --line_by_line out"),
        (("--streaming", "--num_eval_samples", "0", "--validation_file", ""), "--num_eval_samples is 0"),
        (("--train_file", ","), "names no file"),
        (("--mlm_probability", "nan"), "nan"),
        (("--max_steps", "-1", "--num_train_epochs", "nan"), "--num_train_epochs is nan"),
        (("--max_steps", "-1", "--num_train_epochs", "inf"), "--num_train_epochs is inf"),
        (("--max_steps", str(2**40)), "steps are counted to"),
        (("--num_train_steps", "-3"), "--num_train_steps is -3"),
        (("--num_train_steps", "3"), "mean the same"),
        (("--seed", str(2**70)), "--seed is"),
        (("--learning_rate", "inf"), "learning_rate must be zero or more, and finite"),
        (("--weight_decay", "inf"), "weight_decay must be zero or more, and finite"),
        (("--adam_epsilon", "inf"), "adam_epsilon must be above zero, and finite"),
        (("--param_dtype", "float16"), "--adam_epsilon 1e-08 is zero in --param_dtype float16"),
        (("--max_seq_length", "0"), "--max_seq_length is 0"),
        (("--report_to", "tensorbord"), "tensorbord"),
        (("--config_overrides", f"{SHAPE},num_attention_heads=0"), "num_attention_heads=0 (at least 1)"),
        (("--config_overrides", f"{SHAPE},type_vocab_size=0"), "type_vocab_size=0 (at least 1)"),
        (("--config_overrides", f"{SHAPE},hidden_dropout_prob=1.5"), "hidden_dropout_prob=1.5 (from 0 to 1)"),
        (("--config_overrides", f"{SHAPE},attention_probs_dropout_prob=nan"), "attention_probs_dropout_prob=nan"),
    ],
    ids=lambda value: value[0].strip("-") if isinstance(value, tuple) else "",
)
def test_bad_flags_are_one_sentence(corpus, tmp_path, capsys, flags, words):
    assert mlm(corpus, tmp_path / "out", *flags) == 2
    assert words in one_line(capsys)
    assert not (tmp_path / "out").exists() or not any((tmp_path / "out").iterdir())


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (("--mlm_probability", "1e-9"), 1, "or a higher --mlm_probability"),
        (("--streaming",), 2, "leave it out"),
        (("--do_eval", "False"), 2, "leave --do_eval False out"),
        (("--validation_file", ""), 2, "give --validation_file"),
        (("--per_device_eval_batch_size", "0"), 2, "--per_device_eval_batch_size is 0"),
        (("--max_seq_length", "-1"), 2, "--max_seq_length is -1"),
        (("--output_dir", ""), 2, "--output_dir is empty"),
        (("--model_name_or_path", ""), 2, "is empty"),
    ],
    ids=lambda value: value[0].strip("-") if isinstance(value, tuple) else "",
)
def test_evaluations_that_cannot_be_are_one_sentence(corpus, tmp_path, capsys, flags, code, words):
    tiny_model().save_pretrained(tmp_path)
    named = ("--model_name_or_path", str(tmp_path), "--tokenizer_name", str(corpus / "tokenizer"))
    text = ("--validation_file", str(corpus / "validation.txt"), "--max_seq_length", "16")
    assert main(["eval", "mlm", *named, *text, *flags]) == code
    assert words in one_line(capsys)


@pytest.mark.parametrize("content", ["[]", "{", '{"model_type": "roberta", "hidden_size": "16"}'])
def test_a_broken_config_is_named(corpus, tmp_path, capsys, content):
    for path in (corpus / "tokenizer").iterdir():
        shutil.copy(path, tmp_path)
    tiny_model().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(content)
    text = ("--validation_file", str(corpus / "validation.txt"))
    assert main(["eval", "mlm", "--model_name_or_path", str(tmp_path), *text]) == 1
    assert "config" in (line := one_line(capsys))
    assert "The tokenizer in" not in line
    assert main(["predict", "fill-mask", str(tmp_path), "the <mask> sat"]) == 1
    assert "config.json" in (line := one_line(capsys))
    assert "The tokenizer in" not in line
    for model_class in (FlaxRobertaForMaskedLM, FlaxAutoModelForMaskedLM):
        with pytest.raises(CheckpointError, match="config"):
            model_class.from_pretrained(tmp_path)


def test_a_directory_as_file_is_refused(corpus, tmp_path, capsys):
    assert mlm(corpus, tmp_path / "out", "--train_file", tmp_path) == 1
    assert "is a folder, not a file" in one_line(capsys)


def test_an_output_that_cannot_be_written_is_refused(corpus, tmp_path, capsys):
    (tmp_path / "file").write_text("mine")
    assert mlm(corpus, tmp_path / "file" / "out") == 1
    assert "cannot be written" in one_line(capsys)
    assert mlm(corpus, tmp_path / "file") == 2
    assert "is a file" in one_line(capsys)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_tokenizer_larger_than_the_model_stops_before_step_one(corpus, tmp_path, capsys):
    """Case T19."""
    assert mlm(corpus, tmp_path / "out", "--config_overrides", f"{SHAPE},vocab_size=100") == 2
    assert "The tokenizer has" in one_line(capsys)


def test_a_checkpoint_of_other_shapes_is_refused(corpus, tmp_path, capsys):
    FlaxBertForMaskedLM(
        BertConfig(vocab_size=400, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    ).save_pretrained(tmp_path / "bert")
    config = json.loads((tmp_path / "bert" / "config.json").read_text())
    (tmp_path / "bert" / "config.json").write_text(json.dumps({**config, "hidden_size": 32}))
    flags = ("--model_name_or_path", tmp_path / "bert", "--config_overrides", "num_hidden_layers=1")
    assert mlm(corpus, tmp_path / "out", *flags) == 1
    assert "of another shape" in one_line(capsys)


def test_flags_are_dataclass_fields_with_help():
    from dataclasses import fields

    for field in fields(MlmFlags):
        assert field.metadata.get("help"), field.name


def test_help_lists_every_command(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for command in (
        "train mlm",
        "eval mlm",
        "predict fill-mask",
        "tokenizer train",
        "config create",
        "push",
        "quickstart",
    ):
        assert command in text
    assert main(["trane", "mlm"]) == 2
    assert "did you mean 'distaff train mlm'" in capsys.readouterr().err
