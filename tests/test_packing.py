"""Several texts in a row: they are all there, each alone, and say and teach what they do unpacked."""

import datasets
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers

import distaff
from distaff.core.errors import DataError
from distaff.core.tree import flatten
from distaff.data.packing import PackedBatches, first_fit
from distaff.tasks import glue
from labelled_cases import SHAPE, make_tokenizer, rows, run, write
from recipe_cases import logged, one_line

BART = "d_model=16,encoder_layers=1,decoder_layers=1,encoder_ffn_dim=16,decoder_ffn_dim=16"
WIDTHS = ("hidden_size", "intermediate_size", "vocab_size", "embedding_size")
LENGTHS = np.array([3, 90, 12, 40, 128, 7, 7, 64, 30, 5, 21, 9, 100, 2])


def numbered(lengths=LENGTHS):
    """Texts of which each token says whose it is."""
    columns = {
        "input_ids": [[100 + index] * int(length) for index, length in enumerate(lengths)],
        "token_type_ids": [[index % 2] * int(length) for index, length in enumerate(lengths)],
        "target": list(range(len(lengths))),
    }
    return datasets.Dataset.from_dict(columns)


def packed(dataset, *, batch_size=8, **options):
    fields = {"pad_id": 1, "first_position": 2, "max_length": 128, "seed": 3, **options}
    return PackedBatches(dataset, batch_size=batch_size, **fields)


def test_first_fit():
    assert first_fit(np.array([3, 6, 4, 7]), row_length=10, texts_a_row=8).tolist() == [0, 1, 1, 0]
    found = first_fit(LENGTHS, row_length=128, texts_a_row=16)
    assert np.bincount(found, weights=LENGTHS).max() <= 128
    assert found.max() + 1 == 5  # 518 tokens do not fit in four
    # However short they are, a row does not hold more than it has heads for.
    assert np.bincount(first_fit(np.ones(20, int), row_length=128, texts_a_row=8)).tolist() == [8, 8, 4]


def test_each_text_is_in_an_epoch_once_and_whole():
    batches = packed(numbered())
    seen = []
    for step in range(batches.steps_per_epoch):
        batch = batches(step)
        assert len(batch["input_ids"]) in batches.row_counts
        assert batches.examples(batch) == batch["weights"].sum()
        for row, text in zip(*np.nonzero(batch["weights"])):
            index = batch["targets"][row, text]
            there = batch["segments"][row] == text + 1
            start = batch["first_tokens"][row, text]
            assert np.flatnonzero(there).tolist() == list(range(start, start + LENGTHS[index]))
            assert (batch["input_ids"][row, there] == 100 + index).all()
            assert (batch["token_type_ids"][row, there] == index % 2).all()
            assert batch["position_ids"][row, there].tolist() == list(range(2, 2 + LENGTHS[index]))
            seen.append(int(index))
        empty = batch["segments"] == 0
        assert (batch["input_ids"][empty] == 1).all()
        assert empty.sum() == batch["segments"].size - LENGTHS[seen[-int(batch["weights"].sum()) :]].sum()
    assert sorted(seen) == list(range(len(LENGTHS)))
    assert batches.identity() != packed(numbered(), first_position=0).identity()


def test_processes_share_a_batch_in_as_many_rows_each():
    dataset = numbered(np.random.default_rng(0).integers(2, 129, 50))
    parts = [packed(dataset, multiple=4, process_index=index, process_count=2) for index in range(2)]
    assert parts[0].row_counts == parts[1].row_counts
    assert all(count % 2 == 0 for count in parts[0].row_counts)
    seen = []
    for step in range(parts[0].steps_per_epoch):
        batches = [part(step) for part in parts]
        assert batches[0]["input_ids"].shape == batches[1]["input_ids"].shape
        seen += [batch["targets"][batch["weights"] > 0] for batch in batches]
    assert sorted(np.concatenate(seen)) == list(range(50))


def test_short_texts_need_few_rows():
    """A log-normal of mean 27, as the lengths of GLUE are: 32 texts in less than a third of the rows."""
    rng = np.random.default_rng(0)
    lengths = np.clip(np.round(rng.lognormal(np.log(27) - 0.18, 0.6, 512)), 5, 128).astype(int)
    batches = packed(numbered(lengths), batch_size=32)
    counts = [len(batches(step)["input_ids"]) for step in range(batches.steps_per_epoch)]
    assert len(set(counts)) <= 4
    assert np.mean(counts) < 32 / 3


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packing")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "cache")
        make_tokenizer(folder)
        write(folder / "train.tsv", rows(24))
        yield folder


@pytest.mark.parametrize("kind", ["bert", "roberta", "electra"])
def test_packed_bucketed_and_padded_teach_the_same(corpus, kind):
    def whole_epoch(**settings):
        """The loss and its gradient over all texts."""
        flags = glue.GlueFlags(
            model_type=kind,
            config_overrides=SHAPE + (",embedding_size=16" if kind == "electra" else ""),
            tokenizer_name=str(corpus / "tokenizer"),
            train_file=str(corpus / "train.tsv"),
            max_seq_length=32,
            per_device_train_batch_size=8,
            do_eval=False,
            **settings,
        )
        flags.check()
        made = glue.prepare(flags, (8, 8))

        def total(params, batch):
            return made.loss_fn(params, batch, None)["loss"][0]

        gradient = jax.jit(jax.value_and_grad(total))
        parts = [gradient(made.model.params, jax.tree.map(jnp.asarray, made.train(step))) for step in range(3)]
        return flatten(jax.tree.map(lambda *leaves: np.sum(leaves, axis=0), *parts)[1]), sum(part[0] for part in parts)

    expected, loss = whole_epoch(pad_to_max_length=True)
    assert np.linalg.norm(expected[f"{kind}/embeddings/position_embeddings/embedding"]) > 0.01
    for settings in ({}, {"pack_texts": True}):
        gradients, other = whole_epoch(**settings)
        np.testing.assert_allclose(other, loss, atol=1e-5)
        for path, leaf in expected.items():
            np.testing.assert_allclose(gradients[path], leaf, atol=1e-5, err_msg=path)


def test_the_recipe_packs_in_training_alone(corpus, tmp_path):
    flags = ("--model_type", "bert", "--config_overrides", SHAPE, "--tokenizer_name", corpus / "tokenizer")
    data = ("--train_file", corpus / "train.tsv", "--validation_file", corpus / "train.tsv", "--pack_texts")
    steps = ("--per_device_train_batch_size", 24, "--max_steps", 60, "--learning_rate", 1e-2, "--logging_steps", 20)
    assert run("train", "--output_dir", tmp_path, *flags, *data, *steps) == 0
    last = logged(tmp_path)[-1]
    assert last["eval_accuracy"] == 1.0, last


@pytest.mark.parametrize("kind", ["Bert", "Roberta", "Electra"])
def test_places_that_a_row_lacks_are_refused(kind):
    """Beyond the row there is nothing to gather, and jax gives NaN."""
    config = getattr(transformers, f"{kind}Config")(
        **dict.fromkeys(WIDTHS, 16), num_hidden_layers=1, num_attention_heads=2
    )
    model = getattr(distaff, f"Flax{kind}ForSequenceClassification")(config)
    ids = np.full((1, 6), 3)
    assert model(ids, first_tokens=[[0, 3]]).logits.shape == (1, 2, 2)
    with pytest.raises(DataError, match=r"first_tokens\[0, 1\] is 6, and the length of the rows is 6"):
        model(ids, first_tokens=[[0, 6]])
    with pytest.raises(DataError, match=r"first_tokens is \[2\] and must be \[batch, count\]"):
        model(ids, first_tokens=[0, 3])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--model_type", "bart", "--config_overrides", BART), "--pack_texts is not for bart models: leave it out."),
        (("--model_type", "big_bird"), "--pack_texts is not for big_bird models: leave it out."),
        (("--model_type", "bert", "--pad_to_max_length"), "contradict each other"),
    ],
)
def test_what_cannot_be_packed_is_refused(corpus, tmp_path, capsys, flags, message):
    data = ("--train_file", corpus / "train.tsv", "--tokenizer_name", corpus / "tokenizer", "--pack_texts")
    shape = () if "--config_overrides" in flags else ("--config_overrides", SHAPE)
    assert run("train", "--output_dir", tmp_path / "out", *data, *shape, *flags) == 2
    assert message in one_line(capsys)
