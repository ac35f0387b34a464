"""The recipes of T5's and BART's pretraining, from files to a folder, through the command line."""

import json
from functools import partial

import jax
import numpy as np
import optax
import pytest
from transformers import AutoTokenizer, BartConfig, T5Config

from distaff import FlaxBartForConditionalGeneration, FlaxT5ForConditionalGeneration
from distaff.cli import main
from distaff.core.mesh import make_mesh
from distaff.core.tree import flatten
from distaff.tasks._denoise import denoise_loss
from distaff.train import OptimizerConfig, create_state, make_optimizer, make_train_step, place_rows
from recipe_cases import as_if_killed, logged, one_line, results, sentences

SHAPES = {
    "t5-mlm": "d_model=16,d_kv=8,d_ff=32,num_layers=1,num_decoder_layers=1,num_heads=2",
    "bart-dlm": "d_model=16,encoder_layers=1,decoder_layers=1,encoder_attention_heads=2,decoder_attention_heads=2,"
    "encoder_ffn_dim=32,decoder_ffn_dim=32,max_position_embeddings=32",
}
TYPES = {"t5-mlm": "t5", "bart-dlm": "bart"}
CLASSES = {"t5-mlm": FlaxT5ForConditionalGeneration, "bart-dlm": FlaxBartForConditionalGeneration}
RECIPES = pytest.mark.parametrize("recipe", ["t5-mlm", "bart-dlm"])


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Texts and a tokenizer of about a hundred tokens, sentinels among them."""
    folder = tmp_path_factory.mktemp("corpus")
    for name, count, seed in (("train", 120, 0), ("validation", 31, 1)):
        (folder / f"{name}.txt").write_text("".join(f"{text}.\n" for text in sentences(count, seed)))
    flags = ("--train_file", str(folder / "train.txt"), "--vocab_size", "340", "--extra_ids", "8")
    assert main(["tokenizer", "train", *flags, "--output_dir", str(folder / "tokenizer")]) == 0
    return folder


def command(recipe, corpus, *flags, validation=True):
    """The words of `distaff train RECIPE`. Eight devices: a row each."""
    return [
        *("train", recipe, "--model_type", TYPES[recipe], "--config_overrides", SHAPES[recipe]),
        *("--tokenizer_name", str(corpus / "tokenizer"), "--train_file", str(corpus / "train.txt")),
        *(("--validation_file", str(corpus / "validation.txt")) if validation else ()),
        *("--max_seq_length", "16", "--per_device_train_batch_size", "1", "--per_device_eval_batch_size", "1"),
        *("--max_steps", "10", "--logging_steps", "2", "--learning_rate", "1e-3", "--report_to", "none"),
        *map(str, flags),
    ]


@RECIPES
def test_run_and_evaluation(recipe, corpus, tmp_path, capsys):
    """A folder that opens, and the same figures by another batch size (cases T48 and T56)."""
    assert main(command(recipe, corpus, "--output_dir", tmp_path / "out")) == 0
    wanted = results(tmp_path / "out")
    assert wanted["eval_perplexity"] == pytest.approx(np.exp(wanted["eval_loss"]), rel=1e-6)
    model = CLASSES[recipe].from_pretrained(tmp_path / "out")
    assert model.loading_report.new == ()
    # The decoder of a new model starts from a token of its own tokenizer.
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    start = tokenizer.pad_token_id if recipe == "t5-mlm" else tokenizer.eos_token_id
    assert model.config.decoder_start_token_id == start
    assert "pipeline_tag: text2text-generation" in (tmp_path / "out" / "README.md").read_text()
    said = capsys.readouterr().err
    if recipe == "t5-mlm":
        assert "A row is 17 tokens of text, of which 3 (15%) are cut out in 1 span(s)" in said
    for rows in (1, 3):
        code = main(
            [
                *("eval", recipe, "--model_name_or_path", str(tmp_path / "out"), "--max_seq_length", "16"),
                *("--validation_file", str(corpus / "validation.txt"), "--per_device_eval_batch_size", str(rows)),
                *("--output_dir", str(tmp_path / f"eval{rows}")),
            ]
        )
        assert code == 0
        found = results(tmp_path / f"eval{rows}")
        for name in ("eval_loss", "eval_accuracy"):
            assert found[name] == pytest.approx(wanted[name], abs=1e-6), name


@pytest.mark.parametrize(
    ("recipe", "flags"),
    [
        ("bart-dlm", ("--gradient_accumulation_steps", "2")),
        ("t5-mlm", ("--streaming", "--num_eval_samples", "20", "--shuffle_buffer_size", "5")),
    ],
    ids=["files", "streaming"],
)
def test_stop_and_resume_equals_an_uninterrupted_run(recipe, flags, corpus, tmp_path):
    stream = "--streaming" in flags
    flags = (*flags, "--keep_linebreaks", not stream, "--eval_steps", 4)
    words = partial(command, recipe, corpus, *flags, validation=not stream)
    assert main([*words(), "--output_dir", str(tmp_path / "whole"), "--save_steps", "4"]) == 0
    parts = tmp_path / "parts"
    as_if_killed(tmp_path / "whole", parts, step=4)
    again = ("--save_steps", "3", "--resume_from_checkpoint")
    assert main([*words(), "--output_dir", str(parts), *again]) == 0
    one, two = (CLASSES[recipe].from_pretrained(folder) for folder in (tmp_path / "whole", parts))
    for path, leaf in flatten(one.params).items():
        np.testing.assert_array_equal(leaf, flatten(two.params)[path], err_msg=path)
    assert logged(parts) == logged(tmp_path / "whole")


@RECIPES
def test_preview_shows_pairs_and_writes_nothing(recipe, corpus, tmp_path, capsys):
    assert main(command(recipe, corpus, "--output_dir", tmp_path / "out", "--preview", 3)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0].strip() for line in lines] == [
        f"{side} {number}" for number in (1, 2, 3) for side in ("input", "target")
    ]
    for source, target in zip(lines[::2], lines[1::2]):
        if recipe == "t5-mlm":
            assert "<extra_id_0>" in source
            assert target.split(": ")[1].startswith("'<extra_id_0>")
        else:
            assert "<mask>" in source
            assert "<mask>" not in target
    assert not (tmp_path / "out").exists()


@RECIPES
def test_a_run_learns(recipe, corpus, tmp_path):
    """Words in random order, in which only their endings can be told: well below the entropy of the words."""
    flags = ("--learning_rate", "2e-2", "--per_device_train_batch_size", 2, "--max_steps", 120)
    assert main(command(recipe, corpus, "--output_dir", tmp_path / "out", *flags)) == 0
    rows = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert results(tmp_path / "out")["eval_loss"] < min(0.6 * rows[0]["loss"], np.log(20) + 0.3)


def tiny(recipe):
    if recipe == "t5-mlm":
        shape = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_decoder_layers": 1, "num_heads": 2}
        config = T5Config(vocab_size=50, dropout_rate=0.0, decoder_start_token_id=0, **shape)
    else:
        names = "encoder_layers decoder_layers".split()
        heads = "encoder_attention_heads decoder_attention_heads".split()
        shape = {**dict.fromkeys(names, 1), **dict.fromkeys(heads, 2), "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
        config = BartConfig(vocab_size=50, d_model=16, dropout=0.0, max_position_embeddings=32, **shape)
    return CLASSES[recipe](config)


def batch_of(rows=8, inputs=12, targets=6):
    rng = np.random.default_rng(0)
    lengths = rng.integers(3, 7, rows)
    labels = rng.integers(3, 50, (rows, targets)).astype(np.int32)
    return {
        "input_ids": rng.integers(3, 50, (rows, inputs)).astype(np.int32),
        "attention_mask": (np.arange(inputs)[None] < lengths[:, None] * 2).astype(np.int32),
        "labels": labels,
        "label_weights": (np.arange(targets)[None] < lengths[:, None]).astype(np.float32),
        "decoder_input_ids": np.concatenate([np.zeros((rows, 1), np.int32), labels[:, :-1]], axis=1),
    }


@RECIPES
def test_loss_is_that_of_full_logits(recipe):
    model, batch = tiny(recipe), batch_of()

    def full(params):
        inputs = batch["input_ids"], batch["attention_mask"], batch["decoder_input_ids"]
        logits = model(*inputs, params=params).logits
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
        return (losses * batch["label_weights"]).sum()

    def lazy(params):
        return denoise_loss(model.module, params, batch, jax.random.key(0))["loss"][0]

    wanted, found = (jax.jit(jax.value_and_grad(loss))(model.params) for loss in (full, lazy))
    assert float(found[0]) == pytest.approx(float(wanted[0]), rel=1e-5)
    for path, leaf in flatten(wanted[1]).items():
        np.testing.assert_allclose(flatten(found[1])[path], leaf, atol=5e-5, err_msg=path)


@RECIPES
def test_padded_targets_do_not_change_the_loss(recipe):
    """Case T46."""
    model, batch = tiny(recipe), batch_of()
    loss = jax.jit(lambda batch: denoise_loss(model.module, model.params, batch, None)["loss"])
    wanted = loss(batch)
    sides = ("labels", "label_weights", "decoder_input_ids")
    padded = {name: np.pad(rows, ((0, 0), (0, 10))) if name in sides else rows for name, rows in batch.items()}
    found = loss(padded)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


@RECIPES
def test_accumulation_and_devices_do_not_change_the_update(recipe):
    model, batch = tiny(recipe), batch_of()

    def update(devices, accumulation):
        tx, _ = make_optimizer(OptimizerConfig(learning_rate=1e-2), total_steps=10, decay_mask=model.decay_mask())
        mesh = make_mesh(devices=jax.devices()[:devices])
        state = create_state(model.params, tx, mesh=mesh)
        step = make_train_step(partial(denoise_loss, model.module), tx, state=state, accumulation=accumulation)
        state, metrics = step(state, place_rows(batch, mesh, accumulation=accumulation))
        total, weight = metrics.sums["loss"]
        norm, _ = metrics.sums["grad_norm"]
        return float(total) / float(weight), float(norm)

    wanted = update(1, 1)
    for devices, accumulation in ((1, 4), (8, 1)):
        np.testing.assert_allclose(update(devices, accumulation), wanted, rtol=1e-5)


@pytest.mark.parametrize(
    ("recipe", "flags", "words"),
    [
        ("t5-mlm", ("--mlm_probability", "1"), "noise density is 1.0"),
        ("t5-mlm", ("--mean_noise_span_length", "0.5"), "noise span is 0.5"),
        ("t5-mlm", ("--max_seq_length", "300"), "17 spans and the tokenizer 8 sentinel(s)"),
        ("t5-mlm", ("--max_seq_length", "3"), "3 tokens are too few"),
        ("t5-mlm", ("--preview", "-1"), "--preview is -1"),
        ("bart-dlm", ("--mlm_probability", "0"), "--mlm_probability is 0.0"),
        ("bart-dlm", ("--poisson_lambda", "-1"), "--poisson_lambda is -1.0"),
        ("bart-dlm", ("--permute_sentence_ratio", "2"), "--permute_sentence_ratio is 2.0"),
        ("bart-dlm", ("--max_seq_length", "33"), "more than the 32 positions"),
    ],
    ids=lambda value: value[0].strip("-") if isinstance(value, tuple) else "",
)
def test_bad_flags_are_one_sentence(recipe, flags, words, corpus, tmp_path, capsys):
    assert main(command(recipe, corpus, "--output_dir", tmp_path / "out", *flags)) == 2
    assert words in one_line(capsys)


def test_the_other_recipe_is_named(corpus, tmp_path, capsys):
    other = ("--model_type", "bart", "--config_overrides", SHAPES["bart-dlm"], "--output_dir", tmp_path / "out")
    assert main(command("t5-mlm", corpus, *other)) == 2
    assert "distaff train bart-dlm" in one_line(capsys)


def test_a_short_text_quotes_the_right_number(corpus, tmp_path, capsys):
    """Case T49: the text needs 17 tokens for an encoder of 16."""
    (tmp_path / "short.txt").write_text("the cat sat\n")
    words = command("t5-mlm", corpus, "--output_dir", tmp_path / "out", "--train_file", tmp_path / "short.txt")
    assert main(words) == 1
    assert "less than one block of 17" in (said := one_line(capsys))
    assert "lower --max_seq_length" in said


def test_a_tokenizer_without_sentinels_is_refused(corpus, tmp_path, capsys):
    tokenizer = tmp_path / "tokenizer"
    flags = ("--train_file", str(corpus / "train.txt"), "--vocab_size", "300", "--output_dir", str(tokenizer))
    assert main(["tokenizer", "train", *flags]) == 0
    assert AutoTokenizer.from_pretrained(tokenizer).eos_token == "</s>"
    words = command("t5-mlm", corpus, "--output_dir", tmp_path / "out", "--tokenizer_name", tokenizer)
    assert main(words) == 2
    assert "has no sentinels" in one_line(capsys)
