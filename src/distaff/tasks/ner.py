"""Token classification: a tag for each word of sentences (`distaff train ner`, `distaff eval ner`).

Starts from a pretrained encoder and learns the tags of sentences: columns of words and tags with blank lines between
sentences (CoNLL), JSON lines of "tokens" and "ner_tags", or a set of the Hub. Spans are scored as seqeval does.

    distaff train ner --model_name_or_path MODEL --train_file train.conll --validation_file validation.conll \
        --test_file test.conll --do_predict --output_dir OUT --per_device_train_batch_size 16 --learning_rate 5e-5

`predict_results.jsonl` has a line a sentence of `--test_file`, and `predict_results.conll` a line a word, in its order.
A sentence that is longer than a row is read in several that overlap; each of its words is scored once.

From MiniLM (BERT, 6 x 384) five epochs of wnut17 with batches of 16, rate 2e-4 and 50 steps of warm-up give F1 0.543
on its 1,009 validation sentences, in 13 minutes on two shared cores; a linear model of words, their shapes and
neighbours (`benchmarks/linear.py`) gives 0.150, "O" everywhere nothing.
"""

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from distaff.core.errors import DataError, UsageError, listed
from distaff.core.tree import Tree
from distaff.data.batches import Batches
from distaff.data.columns import row_lengths
from distaff.data.pieces import softmax
from distaff.data.sentences import TagColumns, check_tags, labels_of, load_sentences
from distaff.data.tag_scores import span_scores
from distaff.data.tagging import TagCollate, WordTags, tags_of_words, tokenize_sentences
from distaff.data.text import check_ids, split_validation
from distaff.models.auto import FlaxAutoModelForTokenClassification
from distaff.tasks import _finetune, _folder
from distaff.tasks import _planned as planned
from distaff.tasks import _recipe as recipe
from distaff.tasks._finetune import Finetuning, HeldOut, Outputs
from distaff.tasks._finetune_flags import FinetuneTextFlags
from distaff.tasks._flags import flag

logger = logging.getLogger("distaff")

METRICS = ("loss", "precision", "recall", "f1", "accuracy")
_LENGTH_MULTIPLE = 8


@dataclass(kw_only=True)
class NerFlags(FinetuneTextFlags):
    """Flags of `distaff train ner` and `distaff eval ner`."""

    train_file: str | None = flag(None, "Sentences to train on: columns (.conll, .txt, .tsv, .bio) or .jsonl, .json.")
    validation_file: str | None = flag(None, "Sentences to evaluate on.")
    test_file: str | None = flag(None, "Sentences to predict for; tags may be absent.")
    text_column_name: str | None = flag(None, "Column of the words; a number from 0 in files of columns.")
    label_column_name: str | None = flag(None, "Column of the tags, by default '<task_name>_tags' or the last one.")
    task_name: str = flag("ner", "What the tags are: ner, pos, chunk.")
    label_all_tokens: bool = flag(False, "Train on all pieces of a word, not only on its first.")
    return_entity_level_metrics: bool = flag(False, "Give precision, recall and F1 of each type of entity too.")
    ignore_mismatched_sizes: bool = flag(False, "Make a head anew where the checkpoint's has other labels.")
    predictions_format: str = flag("jsonl", "Of predict_results: jsonl, a line a sentence, or csv, a line a word.")


@dataclass(frozen=True)
class Tagged:
    """Sentences and the rows of pieces that they became."""

    sentences: datasets.Dataset
    rows: datasets.Dataset

    @property
    def labelled(self) -> bool:
        """Whether every sentence has tags."""
        return self.sentences.data.column("tags").null_count == 0


# Loss and figures.


def forward(module, params: Tree, batch: dict[str, jax.Array], rng: jax.Array | None = None) -> dict[str, jax.Array]:
    """Return the logits `[batch, length, labels]`, float32; with a key as in training."""
    outputs = module.apply(
        {"params": params},
        batch["input_ids"],
        batch["attention_mask"],
        deterministic=rng is None,
        rngs=None if rng is None else {"dropout": rng},
    )
    return {"logits": outputs.logits.astype(jnp.float32)}


def ner_loss(
    module, params: Tree, batch: dict[str, jax.Array], rng: jax.Array | None, *, label_smoothing: float = 0.0
) -> dict[str, tuple[Any, Any]]:
    """Sum the cross-entropy of `labels` over `label_weights`, both `[batch, length]`.

    With `label_smoothing` s a piece costs -(1 - s) log p(label) - s mean(log p(any label)).
    """
    scores = jax.nn.log_softmax(forward(module, params, batch, rng)["logits"])
    losses = -jnp.take_along_axis(scores, batch["labels"][..., None], axis=-1)[..., 0]
    if label_smoothing:
        losses = (1 - label_smoothing) * losses - label_smoothing * scores.mean(axis=-1)
    weights = batch["label_weights"]
    return {"loss": (jnp.sum(losses * weights), jnp.sum(weights))}


@dataclass(frozen=True)
class Scores:
    """Figures and predictions, from the logits of all rows."""

    labels: tuple[str, ...]
    by_type: bool

    def figures(self, outputs: Outputs, held_out: HeldOut) -> dict[str, float]:
        """Return the loss of the labelled pieces, the scores of spans and the accuracy of words."""
        tagged: Tagged = held_out.rows
        total = count = 0.0
        for labels, logits in zip(tagged.rows["labels"], outputs["logits"], strict=True):
            wanted = np.asarray(labels)
            places = np.flatnonzero(wanted >= 0)
            probabilities = softmax(logits[places])[np.arange(len(places)), wanted[places]]
            total -= float(np.log(np.maximum(probabilities, np.finfo(np.float64).tiny)).sum())
            count += len(places)
        found = [each.tags for each in self.tags(outputs, held_out)]
        scores = span_scores(tagged.sentences["tags"], found, by_type=self.by_type)
        return {"loss": total / count if count else float("nan"), **scores}

    def tags(self, outputs: Outputs, held_out: HeldOut) -> list[WordTags]:
        """Return the tags of the words of each sentence."""
        tagged: Tagged = held_out.rows
        return tags_of_words(tagged.sentences, tagged.rows, outputs["logits"], self.labels)

    def predict(self, outputs: Outputs, held_out: HeldOut, *, by_word: bool) -> Iterator[dict[str, Any]]:
        """Yield a row of predictions for each sentence, or for each word."""
        sentences = zip(held_out.rows.sentences["words"], self.tags(outputs, held_out), strict=True)
        for number, (words, found) in enumerate(sentences):
            scores = [round(score, 6) for score in found.scores]
            if not by_word:
                yield {"tokens": words, "tags": found.tags, "scores": scores}
                continue
            for word, tag, score in zip(words, found.tags, scores):
                yield {"sentence": number, "word": word, "tag": tag, "score": score}

    def write(self, folder: Path, suffix: str, outputs: Outputs, held_out: HeldOut) -> None:
        """Write the predictions as columns: a word, a tab, its tag; a blank line behind each sentence."""
        sentences = zip(held_out.rows.sentences["words"], self.tags(outputs, held_out), strict=True)
        text = "".join(f"{columns(words, found.tags)}\n" for words, found in sentences)
        _folder.replace_text(folder / f"{_folder.PREDICT}{suffix}.conll", text)


def columns(words: Iterable[str], tags: Iterable[str]) -> str:
    r"""Return lines of words and tags; a tab or an end of line inside a word stands as \t, \n or \r."""
    escapes = str.maketrans({"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r"})
    return "".join(f"{word.translate(escapes)}\t{tag}\n" for word, tag in zip(words, tags))


# Data.


def read_sentences(flags: NerFlags) -> tuple[dict[str, datasets.Dataset], list[str]]:
    """Return the sentences that the flags ask for, by "train", "eval" and "test", and the tags of the training data.

    They are all the sentences, whatever the limits; what is split off for evaluation has had a part in the tags.
    """
    found: dict[str, datasets.Dataset] = {}
    tags: list[str] = []
    if flags.do_eval and flags.validation_file:
        found["eval"] = _load(flags, flags.validation_file, "validation")
    elif flags.do_eval and flags.dataset_name and not flags.train_file and "validation" in _splits(flags):
        found["eval"] = _load(flags, None, "validation")
    if flags.do_train or (flags.do_eval and "eval" not in found):
        found["train"] = _load(flags, flags.train_file, "train")
        tags = labels_of(found["train"])
    if flags.do_eval and "eval" not in found:
        found["train"], found["eval"] = split_validation(found["train"], percentage=flags.validation_split_percentage)
    if flags.do_predict:
        if not flags.test_file and not (flags.dataset_name and "test" in _splits(flags)):
            raise UsageError("--do_predict has nothing to predict for: give --test_file.")
        found["test"] = _load(flags, flags.test_file, "test")
    return found, tags


def _splits(flags: NerFlags) -> list[str]:
    from distaff.data.hub_text import split_names

    return split_names(str(flags.dataset_name), config_name=flags.dataset_config_name, token=flags.hub_token)


def _load(flags: NerFlags, files: str | None, split: str) -> datasets.Dataset:
    predicting = split == "test"
    return load_sentences(
        TagColumns(
            words=flags.text_column_name,
            tags=flags.label_column_name,
            task=flags.task_name,
            need_tags=not predicting,
            keep_blank=predicting,
        ),
        files=files,
        dataset_name=flags.dataset_name,
        dataset_config_name=flags.dataset_config_name,
        split=split,
        cache_dir=flags.cache_dir,
        token=flags.hub_token,
    )


def word_tokenizer(flags: NerFlags) -> Any:
    """Return the tokenizer, which reads a word alone as it does behind a space.

    Tokenizers of bytes have other pieces for a word at the start of a text; the one that is saved has the same ones.
    """
    tokenizer = recipe.load_tokenizer(flags, flags.hub_token)
    if tokenizer.is_fast and _joins(tokenizer):
        from tokenizers.pre_tokenizers import ByteLevel
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(tokenizer.name_or_path, add_prefix_space=True)
        splitter = tokenizer.backend_tokenizer.pre_tokenizer
        if isinstance(splitter, ByteLevel):
            splitter.add_prefix_space = True  # a tokenizer without a class of its own does not heed the option
        if _joins(tokenizer):
            raise UsageError(
                f"The tokenizer '{tokenizer.name_or_path}' reads a word alone in other pieces than behind a space: "
                "take another one."
            )
    return tokenizer


def _joins(tokenizer: Any) -> bool:
    backend = tokenizer.backend_tokenizer
    words, text = backend.encode(["a", "a"], is_pretokenized=True), backend.encode("a a")
    return words.ids != text.ids


def choose_labels(flags: NerFlags, config: Any, tags: list[str]) -> list[str]:
    """Return the labels: the config's where it knows all `tags` or none are learnt, else the tags."""
    own = [config.id2label[number] for number in range(config.num_labels)]
    if not flags.do_train or set(tags) <= set(own):
        return own
    if len(tags) < 2:
        raise DataError(f"All training words have the tag '{tags[0]}': there is nothing to tell apart.")
    if own != [f"LABEL_{number}" for number in range(len(own))]:
        logger.warning("The model knows %s; the labels are now those of the data: %s.", listed(own), listed(tags))
    return tags


# Wiring.


def prepare(flags: NerFlags, sizes: tuple[int, int]) -> Finetuning:
    """Return what is trained, on what, and how it is measured."""
    tokenizer = word_tokenizer(flags)
    config = recipe.load_config(flags, tokenizer, flags.hub_token)
    sentences, tags = read_sentences(flags)
    labels = choose_labels(flags, config, tags)
    for part in sentences.values():
        check_tags(part, labels)
    known = [config.id2label[number] for number in range(config.num_labels)]
    _finetune.check_head(flags, config, known, labels, head="ForTokenClassification")
    config.id2label = dict(enumerate(labels))
    config.label2id = {label: number for number, label in enumerate(labels)}
    if tokenizer.pad_token_id is not None and getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = tokenizer.pad_token_id
    model = recipe.load_model(
        FlaxAutoModelForTokenClassification,
        flags,
        config,
        seed=flags.seed,
        token=flags.hub_token,
        ignore_mismatched_sizes=flags.ignore_mismatched_sizes,
    )
    recipe.check_vocabulary(tokenizer, model.config)
    make = partial(make_batches, flags, tokenizer, model, labels)
    limits = {"train": flags.max_train_samples, "eval": flags.max_eval_samples, "test": flags.max_predict_samples}
    limited = {
        part: found.select(range(min(len(found), limits[part] or len(found)))) for part, found in sentences.items()
    }
    held_out = {part: make(limited[part], sizes[1], train=False) for part in ("eval", "test") if part in limited}
    scores = Scores(tuple(labels), flags.return_entity_level_metrics)
    kinds = sorted({label.partition("-")[2] for label in labels} - {""}) if scores.by_type else []
    return Finetuning(
        model=model,
        saved=tokenizer,
        loss_fn=partial(ner_loss, model.module, label_smoothing=flags.label_smoothing_factor),
        forward=partial(forward, model.module),
        figures=scores.figures,
        metric="f1",
        metrics=(*METRICS, *(f"{kind}_{name}" for kind in kinds for name in ("precision", "recall", "f1"))),
        train=make(limited["train"], sizes[0], train=True).batches if flags.do_train else None,
        predict=partial(scores.predict, by_word=flags.predictions_format == "csv"),
        evaluations={"": held_out["eval"]} if "eval" in held_out else {},
        tests={"": held_out["test"]} if "test" in held_out else {},
        write=scores.write,
        labelled=lambda found: found.rows.labelled,
        tokens=lambda batch: int(batch["attention_mask"].sum()),
    )


def make_batches(
    flags: NerFlags, tokenizer, model, labels: list[str], sentences: datasets.Dataset, size: int, *, train: bool
) -> HeldOut:
    """Return batches of `size` rows, in the order of the sentences except in training."""
    longest = recipe.LONGEST_BY_DEFAULT if model.longest_input is None else model.longest_input
    limit = recipe.row_length(flags, tokenizer, longest)
    rows = tokenize_sentences(
        sentences,
        tokenizer=tokenizer,
        labels=labels,
        max_length=limit,
        label_all_tokens=flags.label_all_tokens,
        num_proc=flags.preprocessing_num_workers,
        overwrite_cache=flags.overwrite_cache,
    )
    check_ids(rows, vocab_size=model.config.vocab_size)
    # Short sentences do not pay for the limit: lengths are parts of the longest that there is.
    needed = -(-int(row_lengths(rows).max()) // _LENGTH_MULTIPLE) * _LENGTH_MULTIPLE
    batches = Batches(
        rows,
        collate=TagCollate(tokenizer.pad_token_id or 0),
        batch_size=size,
        seed=flags.seed,
        shuffle=train,
        max_length=limit if flags.pad_to_max_length else min(limit, needed),
        pad_to_max_length=flags.pad_to_max_length,
        group_by_length=flags.group_by_length,
        process_index=jax.process_index(),
        process_count=jax.process_count(),
    )
    return HeldOut(batches, Tagged(sentences, rows))


def plan(flags: NerFlags, mesh: Mesh) -> planned.Planned:
    """Return the step of a training on `mesh`, as shapes, with rows of the greatest length."""
    model, tokenizer = planned.text_model(FlaxAutoModelForTokenClassification, flags, mesh)
    length = recipe.row_length(flags, tokenizer, model.longest_input or recipe.LONGEST_BY_DEFAULT)
    rows = planned.rows_of(tokenizer, input_ids=length, labels=length)
    count = recipe.rows_a_step(flags, mesh)[0]
    batch = planned.batch_of(TagCollate(0), rows, count=count, length=length)
    loss_fn = partial(ner_loss, model.module, label_smoothing=flags.label_smoothing_factor)
    return _finetune.planned_step(flags, model, loss_fn, batch)


RECIPE = _finetune.Recipe(name="ner", task="token-classification", prepare=prepare)


def train(flags: NerFlags) -> int:
    """Train, evaluate, write the folder, and return the exit code."""
    return _finetune.train(RECIPE, flags)


def evaluate_only(flags: NerFlags) -> int:
    """Evaluate a checkpoint, print the figures and, with --output_dir, write them."""
    return _finetune.evaluate_only(RECIPE, flags)
