"""The causal LM recipe, from files to a folder, through the command line."""

import contextlib
import io
import json
import math
import re
from functools import partial

import datasets
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tokenizers import processors
from transformers import AutoTokenizer, GPT2Config, GPTNeoConfig, OPTConfig

from distaff import FlaxGPT2LMHeadModel, FlaxGPTNeoForCausalLM, FlaxOPTForCausalLM
from distaff.cli import main
from distaff.core.mesh import make_mesh
from distaff.core.tree import flatten
from distaff.data.documents import joining_tokenizer, load_documents, prompting_tokenizer, token_characters
from distaff.data.text import tokenize_blocks
from distaff.nn.vocabulary import CHUNK
from distaff.tasks.clm import clm_loss, documents_of
from distaff.train import OptimizerConfig, TrainState, create_state, make_optimizer, make_train_step, place_rows
from recipe_cases import as_if_killed, logged, one_line, results, sentences
from text_cases import tokenizer_of

SHAPE = "n_embd=16,n_layer=1,n_head=2,n_positions=32"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Texts and a tokenizer of about a hundred tokens."""
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "train.txt").write_text("\n".join(sentences(120, 0)) + "\n")
    (folder / "validation.txt").write_text("\n".join(sentences(30, 1)) + "\n")
    flags = ("--train_file", str(folder / "train.txt"), "--vocab_size", "320")
    assert main(["tokenizer", "train", *flags, "--output_dir", str(folder / "tokenizer")]) == 0
    return folder


def clm(corpus, output, *flags, steps=10):
    """Run `distaff train clm` on the corpus and return the exit code. Eight devices: a row each."""
    return main(
        [
            *("train", "clm", "--output_dir", str(output), "--model_type", "gpt2"),
            *("--tokenizer_name", str(corpus / "tokenizer"), "--config_overrides", SHAPE),
            *("--block_size", "16", "--per_device_train_batch_size", "8", "--per_device_eval_batch_size", "8"),
            *("--train_file", str(corpus / "train.txt"), "--validation_file", str(corpus / "validation.txt")),
            *("--max_steps", str(steps), "--logging_steps", "2", "--learning_rate", "1e-3", "--report_to", "none"),
            *map(str, flags),
        ]
    )


@pytest.fixture(scope="module")
def finished(corpus, tmp_path_factory):
    """The folder of a run of ten steps that several tests read, and what it printed."""
    folder, printed = tmp_path_factory.mktemp("run") / "out", io.StringIO()
    with contextlib.redirect_stderr(printed):
        assert clm(corpus, folder, "--save_steps", 4, "--save_total_limit", 2) == 0
    return folder, printed.getvalue()


# What a run leaves.


def test_a_run_leaves_a_folder_that_opens(finished, corpus):
    folder, printed = finished
    names = {path.name for path in folder.iterdir()}
    assert names >= set(
        "config.json model.safetensors tokenizer.json README.md recipe.yaml train_results.json eval_results.json "
        "all_results.json metrics.jsonl checkpoints".split()
    )
    found = results(folder)
    assert found["eval_perplexity"] == pytest.approx(np.exp(found["eval_loss"]), rel=1e-6)
    assert results(folder, "train")["train_steps"] == 10
    model = FlaxGPT2LMHeadModel.from_pretrained(folder)
    assert model.loading_report.new == ()
    # Each model family names its special tokens in its config, which is what generation starts and stops by.
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.config.eos_token_id == tokenizer.eos_token_id
    # That of the corpus begins and ends each text, as RoBERTa's; a prompt that has ended would not be continued.
    original = AutoTokenizer.from_pretrained(corpus / "tokenizer")
    prompt = original("the cat")["input_ids"]
    assert prompt[0] == original.bos_token_id
    assert prompt[-1] == original.eos_token_id
    assert tokenizer("the cat")["input_ids"] == prompt[1:-1]
    assert "pipeline_tag: text-generation" in (folder / "README.md").read_text()
    assert "compilations: train_step 1, eval_step 1" in printed


@pytest.mark.parametrize("extra", [(), ("--segment_documents", "--keep_linebreaks", "False")], ids=["rows", "segments"])
def test_eval_command_repeats_the_runs_figures(corpus, finished, tmp_path, capsys, extra):
    """Case T56: whatever the batch size, and with rows that only fill up the last batch."""
    folder = tmp_path / "out" if extra else finished[0]
    assert not extra or clm(corpus, folder, *extra, steps=2) == 0
    wanted = results(folder)
    for rows in (1, 3):
        code = main(
            [
                *("eval", "clm", "--model_name_or_path", str(folder), "--block_size", "16"),
                *("--validation_file", str(corpus / "validation.txt"), "--per_device_eval_batch_size", str(rows)),
                *("--output_dir", str(tmp_path / f"eval{rows}"), *extra),
            ]
        )
        assert code == 0
        found = results(tmp_path / f"eval{rows}")
        for name in ("eval_loss", "eval_accuracy", "eval_nats_per_character"):
            assert found[name] == pytest.approx(wanted[name], rel=1e-6), name
    assert "eval_nats_per_character = " in capsys.readouterr().out


@pytest.mark.parametrize(
    "flags",
    [
        ("--gradient_accumulation_steps", "2", "--segment_documents", "--keep_linebreaks", "False"),
        ("--streaming", "--num_eval_samples", "20", "--shuffle_buffer_size", "5", "--keep_linebreaks", "False"),
    ],
    ids=["files", "streaming"],
)
def test_stop_and_resume_equals_an_uninterrupted_run(corpus, tmp_path, flags):
    """With dropout (cases T68 and T69); resumed twice in test_mlm."""
    assert clm(corpus, tmp_path / "whole", *flags, "--save_steps", 4, "--eval_steps", 4) == 0
    parts = tmp_path / "parts"
    as_if_killed(tmp_path / "whole", parts, step=4)
    assert clm(corpus, parts, *flags, "--save_steps", 3, "--eval_steps", 4, "--resume_from_checkpoint") == 0
    whole = FlaxGPT2LMHeadModel.from_pretrained(tmp_path / "whole")
    again = FlaxGPT2LMHeadModel.from_pretrained(parts)
    for path, leaf in flatten(whole.params).items():
        np.testing.assert_array_equal(leaf, flatten(again.params)[path], err_msg=path)
    assert logged(parts) == logged(tmp_path / "whole")


def test_a_stream_of_files_with_line_breaks_resumes(corpus, tmp_path):
    """A long file comes in pieces, of which the first are held out."""
    lines = sentences(400, 3)
    (tmp_path / "long.txt").write_text("\n".join(lines))
    flags = ("--train_file", tmp_path / "long.txt", "--streaming", "--num_eval_samples", "1", "--max_steps", 6)
    assert clm(corpus, tmp_path / "whole", *flags, "--save_steps", 4) == 0
    as_if_killed(tmp_path / "whole", tmp_path / "parts", step=4)
    assert clm(corpus, tmp_path / "parts", *flags, "--save_steps", 4, "--resume_from_checkpoint") == 0
    assert logged(tmp_path / "parts") == logged(tmp_path / "whole")


def test_a_checkpoint_is_trained_further(corpus, finished, tmp_path):
    code = main(
        [
            *("train", "clm", "--output_dir", str(tmp_path / "second")),
            *("--model_name_or_path", str(finished[0]), "--block_size", "16", "--max_steps", "1"),
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
    found, wanted = results(tmp_path / "second"), results(finished[0])
    assert found["eval_loss"] == pytest.approx(wanted["eval_loss"], abs=1e-5)


def test_a_dataset_folder_and_a_split(corpus, tmp_path):
    """A dataset's rows are documents; a part of them validates."""
    datasets.Dataset.from_dict({"text": sentences(200, 5)}).save_to_disk(str(tmp_path / "set"))
    code = main(
        [
            *("train", "clm", "--output_dir", str(tmp_path / "out"), "--model_type", "gpt2"),
            *("--tokenizer_name", str(corpus / "tokenizer"), "--config_overrides", SHAPE, "--block_size", "16"),
            *("--dataset_name", str(tmp_path / "set"), "--validation_split_percentage", "20"),
            *("--max_steps", "2", "--report_to", "none", "--per_device_train_batch_size", "1"),
        ]
    )
    assert code == 0
    assert results(tmp_path / "out")["eval_loss"] > 0


def test_whole_run_learns(corpus, tmp_path):
    """Words in random order: the loss must fall to that of the twenty words, and of the line's end."""
    flags = ("--learning_rate", "1e-2", "--per_device_train_batch_size", 16)
    assert clm(corpus, tmp_path / "out", *flags, steps=150) == 0
    loss = results(tmp_path / "out")["eval_loss"]
    assert np.log(20) * 0.6 < loss < np.log(20) + 0.3


# Documents.


def test_a_file_is_read_as_it_stands(corpus, tmp_path):
    """Line breaks and blank lines stay; the pieces that a file is read in do not show in its tokens."""
    lines = [line for pair in zip(sentences(400, 4), [""] * 400) for line in pair][:-1]
    text = "\n".join(lines)
    assert len(text) > 3 * 4096
    (tmp_path / "play.txt").write_text(text + "\n")
    tokenizer = AutoTokenizer.from_pretrained(corpus / "tokenizer")
    documents = load_documents(str(tmp_path / "play.txt"), eos_token=tokenizer.eos_token, cache_dir=tmp_path / "cache")
    assert len(documents) > 3
    joining = joining_tokenizer(tokenizer, add_eos=False)
    ids = [token for row in joining(documents["text"][:])["input_ids"] for token in row]
    assert ids == [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    # A file that changed is read again.
    (tmp_path / "play.txt").write_text("another text\n")
    again = load_documents(str(tmp_path / "play.txt"), eos_token=tokenizer.eos_token, cache_dir=tmp_path / "cache")
    assert again["text"][:] == [f"another text{tokenizer.eos_token}"]


def test_documents_are_joined_by_one_eos_token(tmp_path):
    """Rows depend on the texts alone: not on the order in which pieces are read or tokenised (case T54)."""
    tokenizer = tokenizer_of("roberta")
    texts = ["first one", "a second text", "third"]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    plain = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    wanted = [token for ids in plain for token in [*ids, tokenizer.eos_token_id]]
    marked = load_documents(str(tmp_path / "rows.jsonl"), eos_token=tokenizer.eos_token, cache_dir=tmp_path)
    appended = datasets.Dataset.from_dict({"text": texts})
    for documents, add_eos in ((marked, False), (appended, True)):
        joining = joining_tokenizer(tokenizer, add_eos=add_eos)
        blocks = tokenize_blocks(documents, tokenizer=joining, block=4)
        found = [token for row in blocks["input_ids"] for token in row]
        assert found == wanted[: len(wanted) // 4 * 4]


def test_characters_of_tokens_add_up_to_the_text():
    text = "Grüezi mitenand — \N{GRINNING FACE} x 中文\n\nthe end"
    tokenizer = tokenizer_of("roberta")
    ids = tokenizer(text)["input_ids"]
    assert token_characters(tokenizer)[ids].sum() == len(text)
    words = tokenizer_of("bert")
    ids = words("the reference")["input_ids"]
    assert token_characters(words)[ids].sum() == len("thereference")


# The loss.


def tiny_model(**changes):
    config = {"vocab_size": 50, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return FlaxGPT2LMHeadModel(GPT2Config(**{**config, **dropout, **changes}))


def tiny_batch(rows: int = 8, length: int = 16):
    rng = np.random.default_rng(0)
    ids = rng.integers(1, 50, (rows, length)).astype(np.int32)
    ids[:, [4, 9]] = 7  # the end of a document
    return {"input_ids": ids, "weights": np.ones(rows, np.float32)}


def test_loss_is_that_of_full_logits():
    model, batch = tiny_model(), tiny_batch()
    batch["weights"][-1] = 0

    def full(params):
        logits = model(batch["input_ids"], params=params).logits[:-1, :-1]
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["input_ids"][:-1, 1:]).sum()

    def lazy(params):
        return clm_loss(model.module, params, batch, jax.random.key(0))["loss"][0]

    wanted, found = (jax.jit(jax.value_and_grad(loss))(model.params) for loss in (full, lazy))
    assert float(found[0]) == pytest.approx(float(wanted[0]), rel=1e-6)
    for path, leaf in flatten(wanted[1]).items():
        np.testing.assert_allclose(flatten(found[1])[path], leaf, atol=2e-5, err_msg=path)
    sums = clm_loss(model.module, model.params, batch, None)
    assert float(sums["loss"][1]) == 7 * 15


SIZES = {"vocab_size": 50, "hidden_size": 16, "num_layers": 2, "num_heads": 2, "max_position_embeddings": 32}
MODELS = {
    "gpt2": lambda: tiny_model(),
    "gpt_neo": lambda: FlaxGPTNeoForCausalLM(
        GPTNeoConfig(**SIZES, attention_types=[[["global", "local"], 1]], window_size=3)
    ),
    "opt": lambda: FlaxOPTForCausalLM(
        OPTConfig(
            vocab_size=50,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            ffn_dim=32,
            max_position_embeddings=32,
            word_embed_proj_dim=16,
        )
    ),
}


@pytest.mark.parametrize("family", MODELS)
def test_segments_are_documents_by_themselves(family):
    """A packed row costs what its documents cost in rows of their own."""
    model = MODELS[family]()
    row = tiny_batch(rows=1)["input_ids"]
    packed = {"input_ids": row, "weights": np.ones(1, np.float32)}
    whole = jax.jit(lambda batch: clm_loss(model.module, model.params, batch, None))
    found = jax.jit(lambda batch: clm_loss(model.module, model.params, batch, None, eos_token_id=7))(packed)
    apart = []
    for begin, end in ((0, 5), (5, 10), (10, 16)):
        alone = {"input_ids": row[:, begin:end], "weights": np.ones(1, np.float32)}
        apart.append(whole(alone))
    for name in ("loss", "accuracy"):
        np.testing.assert_allclose(found[name], np.sum([sums[name] for sums in apart], axis=0), rtol=1e-5)
    assert float(found["loss"][1]) == 13
    joined = whole(packed)["loss"]
    assert float(joined[1]) == 15
    assert abs(float(joined[0]) / 15 - float(found["loss"][0]) / 13) > 1e-3
    segments, places = documents_of(jnp.array([[7, 3, 7, 7, 5, 6]]), 7)
    assert segments.tolist() == [[0, 1, 1, 2, 3, 3]]
    assert places.tolist() == [[0, 0, 1, 0, 0, 1]]


@pytest.mark.parametrize("eos", [None, 7], ids=["rows", "segments"])
def test_accumulation_and_devices_do_not_change_the_update(eos):
    """Cases T63 and T65."""
    model, batch = tiny_model(), tiny_batch()

    def update(devices, accumulation):
        tx, _ = make_optimizer(OptimizerConfig(learning_rate=1e-2), total_steps=10, decay_mask=model.decay_mask())
        mesh = make_mesh(devices=jax.devices()[:devices])
        state = create_state(model.params, tx, mesh=mesh)
        loss_fn = partial(clm_loss, model.module, eos_token_id=eos)
        step = make_train_step(loss_fn, tx, state=state, accumulation=accumulation)
        state, metrics = step(state, place_rows(batch, mesh, accumulation=accumulation))
        total, weight = metrics.sums["loss"]
        return flatten(jax.device_get(state.params)), float(total) / float(weight)

    wanted, loss = update(1, 1)
    for devices, accumulation in ((1, 4), (8, 1)):
        found, other = update(devices, accumulation)
        assert other == pytest.approx(loss, abs=1e-5)
        for path, leaf in wanted.items():
            np.testing.assert_allclose(found[path], leaf, atol=1e-5, err_msg=path)


def test_step_never_holds_all_logits():
    """Temporary memory of the peers' step (GPT-2 6 x 384, 8 x 256, vocabulary 50,257), a fact of the program."""
    config = GPT2Config(vocab_size=50257, n_embd=384, n_layer=6, n_head=6)
    model = FlaxGPT2LMHeadModel(config, _do_init=False)
    tx, _ = make_optimizer(OptimizerConfig(learning_rate=1e-4), total_steps=10)
    batch, length = 8, 256

    def abstract(params):
        return TrainState(jnp.zeros((), jnp.int32), params, tx.init(params), jax.random.key(0))

    def all_logits_loss(module, params, rows, rng):
        logits = module.apply({"params": params}, rows["input_ids"], deterministic=False, rngs={"dropout": rng}).logits
        losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], rows["input_ids"][:, 1:])
        return {"loss": (losses.sum(), jnp.float32(losses.size))}

    def program(loss):
        rows = {
            "input_ids": jax.ShapeDtypeStruct((batch, length), jnp.int32),
            "weights": jax.ShapeDtypeStruct((batch,), jnp.float32),
        }
        step = make_train_step(partial(loss, model.module), tx)
        state = jax.eval_shape(abstract, model.params_shape_tree)
        compiled = step.lower(state, rows).compile()
        shapes = set(re.findall(r"\[(\d+(?:,\d+)*)\]", compiled.as_text()))
        largest = max(math.prod(map(int, shape.split(","))) for shape in shapes)
        return compiled.memory_analysis().temp_size_in_bytes, largest

    (ours, largest), (plain, everything) = program(clm_loss), program(all_logits_loss)
    all_logits = batch * (length - 1) * config.vocab_size
    # No array of the program is larger than a chunk of logits.
    assert everything >= all_logits
    assert largest <= CHUNK
    # The logits and their gradient, which the plain step holds together, are gone but for a chunk of each.
    assert plain - ours > 1.2 * 4 * all_logits
    assert ours < 0.62 * plain


# What is refused.


@pytest.mark.parametrize(
    ("content", "name", "words"),
    [
        (None, "missing.txt", "There is no file"),
        ("", "empty.txt", "is empty"),
        ("\n  \n\t\n", "blank.txt", "has no text: 3 blank rows"),
        ("the cat sat\n", "short.txt", "lower --block_size to at most 5"),
        ('{"text": "a"}\n{"text": \n', "broken.jsonl", "line 2"),
    ],
    ids=lambda value: value if isinstance(value, str) and "." in value and " " not in value else "",
)
@pytest.mark.parametrize("streaming", [(), ("--streaming", "--do_eval", "False")], ids=["files", "streaming"])
def test_bad_files_are_one_sentence(corpus, tmp_path, capsys, content, name, words, streaming):
    if content is not None:
        (tmp_path / name).write_text(content)
    assert clm(corpus, tmp_path / "out", "--train_file", tmp_path / name, *streaming) == 1
    assert words in one_line(capsys)
    assert not (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--block_size", "33"), "--block_size 33 is more than the 32 positions"),
        (("--block_size", "1"), "--block_size is 1"),
        (("--max_seq_length", "16"), "no flag --max_seq_length"),
        (("--model_type", "bert", "--config_overrides", "hidden_size=12"), "has no class for model type 'bert'"),
        (("--model_type", "roberta", "--config_overrides", "num_hidden_layers=1"), "distaff train mlm"),
        (("--dataset_name", "some/set"), "either from files or from a dataset"),
        (("--max_train_samples", "0"), "max_train_samples is 0"),
        (("--streaming", "--max_steps", "-1"), "give --num_train_steps"),
    ],
    ids=lambda value: value[0].strip("-") + value[1] if isinstance(value, tuple) else "",
)
def test_bad_flags_are_one_sentence(corpus, tmp_path, capsys, flags, words):
    assert clm(corpus, tmp_path / "out", *flags) == 2
    assert words in one_line(capsys)


def test_a_tokenizer_without_eos_is_refused(corpus, tmp_path, capsys):
    tokenizer_of("bert").save_pretrained(tmp_path / "bert")
    assert clm(corpus, tmp_path / "out", "--tokenizer_name", tmp_path / "bert") == 2
    assert "has no eos token" in one_line(capsys)


def test_which_tokenizers_are_saved_otherwise():
    """One that ends each text is; one that only begins it, as OPT's, stays."""
    tokenizer = tokenizer_of("roberta")
    plain = tokenizer("a cat", add_special_tokens=False)["input_ids"]
    assert prompting_tokenizer(tokenizer)("a cat")["input_ids"] == plain
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=["</s>", "$A"], special_tokens=[("</s>", tokenizer.eos_token_id)]
    )
    assert prompting_tokenizer(tokenizer) is tokenizer
