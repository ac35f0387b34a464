"""Classes or numbers for one or two texts: the sets of GLUE, and any table with columns of text and a label.

    distaff train glue --output_dir bert-sst2 --model_name_or_path minilm --train_file train.tsv \\
        --validation_file validation.tsv --learning_rate 5e-5 --per_device_train_batch_size 32 --load_best_model_at_end
    distaff train glue --output_dir bert-mrpc --model_name_or_path bert-base-cased --task_name mrpc
    distaff eval glue --model_name_or_path bert-sst2 --do_predict --test_file test.tsv --output_dir out

Labels: see `_labels.py`; the config keeps their names. Rows of similar lengths come together and are padded to the
smallest of four lengths that they fit in. With `--pack_texts` (BERT, RoBERTa, ELECTRA) a row in training holds several
texts that do not see each other: the same losses and gradients, and short texts cost what they are long. Predictions
stand in `predict_results.csv`, a line a row in the order of the rows, with the probability of each class.

From MiniLM (BERT, 6 x 384), batches of 16 (CoLA: 32), rate 1e-4, at the last step; beside it the most frequent class
and a linear model of words and pairs of words by tf-idf (`benchmarks/linear.py`) on the same rows:

| set | rows | figure | most frequent | linear | here |
| --- | --- | --- | --- | --- | --- |
| SST-2, 4 epochs | 2,000 / 400 | accuracy | 0.543 | 0.723 | 0.880 |
| whether a sentence answers a question (SQuAD 2), 5 epochs | 1,500 / 400 | accuracy | 0.525 | 0.535 | 0.610 |
| CoLA, 4 epochs | 8,551 / 1,043 | Matthews correlation | 0 | 0.134 | 0.303 |
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from distaff.core.errors import DataError, UsageError, listed
from distaff.data.batches import Batches
from distaff.data.columns import row_lengths
from distaff.data.labelled import (
    Labelled,
    LabelledCollate,
    LabelledColumns,
    has_types,
    load_labelled,
    tokenize_labelled,
)
from distaff.data.packing import PackedBatches
from distaff.data.text import check_ids, split_validation
from distaff.models.auto import FlaxAutoModelForSequenceClassification
from distaff.tasks import _finetune as finetune
from distaff.tasks import _planned as planned
from distaff.tasks import _recipe as recipes
from distaff.tasks._class_losses import classification_loss, count_tokens, logits_of, regression_loss
from distaff.tasks._class_scores import CLASS_FIGURES, NUMBER_FIGURES, class_figures, number_figures
from distaff.tasks._finetune import Finetuning, HeldOut, Outputs
from distaff.tasks._finetune_flags import FinetuneTextFlags
from distaff.tasks._flags import flag
from distaff.tasks._labels import CLASSIFICATION, REGRESSION, Labels, labels_of

HUB_SET = "nyu-mll/glue"
_LENGTH_MULTIPLE = 8


@dataclass(frozen=True)
class GlueTask:
    """The columns of a set of GLUE, its main figure, and its splits by what is put behind the names of figures."""

    texts: tuple[str, ...]
    metric: str = "accuracy"
    splits: tuple[tuple[str, str], ...] = (("", ""),)


_PAIR = ("sentence1", "sentence2")
TASKS = {
    "cola": GlueTask(("sentence",), "matthews_correlation"),
    "mnli": GlueTask(("premise", "hypothesis"), splits=(("", "_matched"), ("_mm", "_mismatched"))),
    "mrpc": GlueTask(_PAIR, "f1"),
    "qnli": GlueTask(("question", "sentence")),
    "qqp": GlueTask(("question1", "question2"), "f1"),
    "rte": GlueTask(_PAIR),
    "sst2": GlueTask(("sentence",)),
    "stsb": GlueTask(_PAIR, "pearson"),
    "wnli": GlueTask(_PAIR),
}


@dataclass(kw_only=True)
class GlueFlags(FinetuneTextFlags):
    """Flags of `distaff train glue` and `distaff eval glue`."""

    task_name: str | None = flag(None, f"A task of GLUE: {', '.join(TASKS)}; without data its set of the Hub.")
    text_column_name: str | None = flag(None, "Column of the texts, or two of them: sentence1,sentence2.")
    label_column_name: str | None = flag(None, "Column of the labels, by default 'label'.")
    skip_blank_rows: bool = flag(False, "Leave out rows without text or label, instead of refusing them.")
    problem_type: str | None = flag(None, f"{CLASSIFICATION} or {REGRESSION}, by default as the labels look.")
    pack_texts: bool = flag(False, "Train on rows that hold several texts, each attending to itself alone.")
    class_weights: list[str] = flag(
        [], "Weights of the classes in the loss, in the order of their ids, or 'balanced'.", nargs="+"
    )
    ignore_mismatched_sizes: bool = flag(False, "Make the head anew where the checkpoint's has other classes.")

    def check(self) -> None:
        """Raise `UsageError` for values that neither a training nor an evaluation can have."""
        super().check()
        if self.task_name is not None:
            self.task_name = self.task_name.lower().replace("-", "")
            if self.task_name not in TASKS:
                raise UsageError(f"--task_name '{self.task_name}' is no task of GLUE: choose one of {listed(TASKS)}.")
            if not (self.dataset_name or self.train_file or self.validation_file or self.test_file):
                self.dataset_name, self.dataset_config_name = HUB_SET, self.task_name
        if self.problem_type not in (None, CLASSIFICATION, REGRESSION):
            raise UsageError(f"--problem_type '{self.problem_type}' is neither {CLASSIFICATION} nor {REGRESSION}.")
        if self.pack_texts and self.pad_to_max_length:
            raise UsageError("--pack_texts and --pad_to_max_length contradict each other: leave one out.")
        if self.do_predict and not (self.test_file or self.dataset_name):
            raise UsageError("--do_predict has nothing to predict for: give --test_file.")


# Data.


def columns_of(flags: GlueFlags, *, predict: bool = False) -> LabelledColumns:
    """Return where texts and labels stand; to `predict`, a label need not be there and every row stays."""
    texts = TASKS[flags.task_name].texts if flags.task_name is not None else None
    if flags.text_column_name is not None:
        texts = tuple(name.strip() for name in flags.text_column_name.split(","))
        if len(texts) > 2:
            raise UsageError(f"--text_column_name names {len(texts)} columns: a row has one or two texts.")
    return LabelledColumns(
        texts=texts,
        label=flags.label_column_name,
        need_label=not predict,
        skip_blank=flags.skip_blank_rows and not predict,
        keep=predict,
    )


def load(flags: GlueFlags, files: str | None, split: str, *, predict: bool = False) -> Labelled:
    """Return the rows of `files`, or of the split of --dataset_name."""
    return load_labelled(
        columns_of(flags, predict=predict),
        files=files,
        dataset_name=flags.dataset_name,
        dataset_config_name=flags.dataset_config_name,
        split=split,
        cache_dir=flags.cache_dir,
        token=flags.hub_token,
    )


@dataclass(frozen=True)
class Sets:
    """The rows that the flags ask for, those of evaluations and tests by their suffixes.

    known: all training rows, whatever is split off or left out, for their labels. train: what is trained on.
    """

    known: Labelled | None
    train: Labelled | None
    evaluations: dict[str, Labelled]
    tests: dict[str, Labelled]


def read_sets(flags: GlueFlags) -> Sets:
    """Return the rows that the flags ask for."""
    splits = TASKS[flags.task_name].splits if flags.task_name is not None else (("", ""),)
    there = _split_names(flags)
    train, evaluations, tests = None, {}, {}
    if flags.do_eval and flags.validation_file:
        evaluations[""] = load(flags, flags.validation_file, "validation")
    elif flags.do_eval and not flags.train_file:
        found = [(name, f"validation{end}") for name, end in splits if f"validation{end}" in there]
        evaluations = {name: load(flags, None, split) for name, split in found}
    if flags.do_train or (flags.do_eval and not evaluations):
        train = load(flags, flags.train_file, "train")
    known = train if flags.do_train else None
    if flags.do_eval and not evaluations:
        assert train is not None
        kept, held = split_validation(train.rows, percentage=flags.validation_split_percentage)
        train, evaluations[""] = replace(train, rows=kept), replace(train, rows=held)
    if flags.do_predict and flags.test_file:
        tests[""] = load(flags, flags.test_file, "test", predict=True)
    elif flags.do_predict:
        tests = {name: load(flags, None, f"test{end}", predict=True) for name, end in splits}
    train = train.first(flags.max_train_samples) if train is not None and flags.do_train else None
    return Sets(
        known,
        train,
        {name: rows.first(flags.max_eval_samples) for name, rows in evaluations.items()},
        {name: rows.first(flags.max_predict_samples) for name, rows in tests.items()},
    )


def _split_names(flags: GlueFlags) -> list[str]:
    from distaff.data.hub_text import split_names

    if flags.dataset_name is None or flags.train_file:
        return []
    return split_names(flags.dataset_name, config_name=flags.dataset_config_name, token=flags.hub_token)


@dataclass(frozen=True)
class Side:
    """What stands on the model's side; length: tokens a row at most."""

    model: Any
    tokenizer: Any
    labels: Labels
    length: int

    def batches(self, flags: GlueFlags, rows: Labelled, targets: np.ndarray, size: int, *, shuffle: bool) -> Batches:
        """Return batches of `size` rows, tokenised."""
        dataset = tokenize_labelled(
            rows.rows,
            targets,
            tokenizer=self.tokenizer,
            max_length=self.length,
            types=has_types(self.tokenizer, self.model.config),
            num_proc=flags.preprocessing_num_workers,
            overwrite_cache=flags.overwrite_cache,
        )
        check_ids(dataset, vocab_size=self.model.config.vocab_size)
        longest = -(-int(row_lengths(dataset).max()) // _LENGTH_MULTIPLE) * _LENGTH_MULTIPLE
        pad = self.tokenizer.pad_token_id
        pad_id = 0 if pad is None else pad
        options: dict[str, Any] = {
            "batch_size": size,
            "seed": flags.seed,
            "shuffle": shuffle,
            "max_length": self.length if flags.pad_to_max_length else min(self.length, longest),
            "process_index": jax.process_index(),
            "process_count": jax.process_count(),
        }
        if flags.pack_texts and shuffle:
            return PackedBatches(
                dataset,
                pad_id=pad_id,
                first_position=self.model.first_position,
                multiple=size // flags.per_device_train_batch_size,
                **options,
            )
        return Batches(
            dataset,
            collate=LabelledCollate(pad_id),
            pad_to_max_length=flags.pad_to_max_length,
            group_by_length=flags.group_by_length,
            **options,
        )


def class_weights_of(flags: GlueFlags, labels: Labels, targets: np.ndarray) -> tuple[float, ...] | None:
    """Return the weight of each class; 'balanced' gives each class the same part of the loss."""
    if not flags.class_weights:
        return None
    if labels.regression:
        raise UsageError("--class_weights are for classes, and these labels are numbers: leave it out.")
    if flags.class_weights == ["balanced"]:
        counts = np.bincount(targets, minlength=len(labels.names))
        return tuple(float(len(targets) / (np.sum(counts > 0) * count)) if count else 1.0 for count in counts)
    try:
        weights = tuple(float(word) for word in flags.class_weights)
    except ValueError as error:
        raise UsageError(f"--class_weights {' '.join(flags.class_weights)} are not numbers or 'balanced'.") from error
    if len(weights) != len(labels.names) or not all(0 < weight < math.inf for weight in weights):
        raise UsageError(
            f"--class_weights must be {len(labels.names)} positive numbers, one each for {listed(labels.names)}."
        )
    return weights


def loss_of(flags: GlueFlags, model: Any, labels: Labels, targets: np.ndarray | None) -> Any:
    """Return the loss function of the labels; `targets` are those that are trained on, None in an evaluation."""
    if not labels.regression:
        weights = None if targets is None else class_weights_of(flags, labels, targets)
        return partial(classification_loss, model, weights, flags.label_smoothing_factor)
    if flags.label_smoothing_factor:
        raise UsageError("--label_smoothing_factor is for classes, and these labels are numbers: leave it out.")
    return partial(regression_loss, model)


# Figures and predictions.


@dataclass(frozen=True)
class Rows:
    """What figures and predictions need of a set. targets: `[rows]`, -1 or nan where there is no label."""

    labels: Labels
    targets: np.ndarray

    @property
    def labelled(self) -> bool:
        """Whether every row has a label."""
        return not bool(np.any(self.targets < 0) if self.targets.dtype == np.int32 else np.any(np.isnan(self.targets)))


def figures(outputs: Outputs, held_out: HeldOut) -> dict[str, float]:
    """Return the figures of a set."""
    logits, rows = np.stack(outputs["logits"]), held_out.rows
    return number_figures(logits[:, 0], rows.targets) if rows.labels.regression else class_figures(logits, rows.targets)


def predictions(outputs: Outputs, held_out: HeldOut) -> Iterable[dict[str, Any]]:
    """Yield for each row its class and the probabilities of all, or its number."""
    labels = held_out.rows.labels
    for index, logits in enumerate(outputs["logits"]):
        if labels.regression:
            yield {"index": index, "prediction": float(logits[0])}
            continue
        shares = np.exp(logits.astype(np.float64) - logits.max())
        named = {f"probability_{name}": float(share) for name, share in zip(labels.names, shares / shares.sum())}
        yield {"index": index, "prediction": labels.names[int(logits.argmax())], **named}


# Wiring.


def prepare(flags: GlueFlags, sizes: tuple[int, int]) -> Finetuning:
    """Return what the flags describe."""
    tokenizer = recipes.load_tokenizer(flags, flags.hub_token)
    config = recipes.load_config(flags, tokenizer, flags.hub_token)
    recipes.check_vocabulary(tokenizer, config)
    sets = read_sets(flags)
    labels = labels_of(config, sets.known, flags.problem_type)
    known = [config.id2label[index] for index in range(config.num_labels)]
    finetune.check_head(flags, config, known, labels.names or ("numbers",), head="ForSequenceClassification")
    labels.put_into(config)
    if tokenizer.pad_token_id is not None and getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = tokenizer.pad_token_id
    model = recipes.load_model(
        FlaxAutoModelForSequenceClassification,
        flags,
        config,
        seed=flags.seed,
        token=flags.hub_token,
        ignore_mismatched_sizes=flags.ignore_mismatched_sizes,
    )
    if flags.pack_texts and "first_tokens" not in model.further_inputs:
        raise UsageError(f"--pack_texts is not for {config.model_type} models: leave it out.")
    if config.is_encoder_decoder and tokenizer("a")["input_ids"][-1] != config.eos_token_id:
        raise UsageError(
            f"The model reads a text at its end of sentence, token {config.eos_token_id}, and the tokenizer does not "
            "put it there: take the model's tokenizer, or set eos_token_id by --config_overrides."
        )
    longest = recipes.LONGEST_BY_DEFAULT if model.longest_input is None else model.longest_input
    side = Side(model, tokenizer, labels, recipes.row_length(flags, tokenizer, longest))

    def held_out(rows: Labelled, *, need_label: bool) -> HeldOut:
        targets = labels.targets(rows)
        found = Rows(labels, targets)
        if need_label and not found.labelled:
            raise DataError("The rows to evaluate on have no labels: evaluate on others, or predict for them.")
        return HeldOut(side.batches(flags, rows, targets, sizes[1], shuffle=False), found)

    targets: Any = None if sets.train is None else labels.targets(sets.train)
    metric = TASKS[flags.task_name].metric if flags.task_name is not None else None
    names = NUMBER_FIGURES if labels.regression else CLASS_FIGURES
    return Finetuning(
        model=model,
        saved=tokenizer,
        loss_fn=loss_of(flags, model, labels, targets),
        forward=lambda params, batch: {"logits": logits_of(model, params, batch, None)},
        figures=figures,
        metric=metric if metric in names else "pearson" if labels.regression else "accuracy",
        metrics=names,
        train=None if sets.train is None else side.batches(flags, sets.train, targets, sizes[0], shuffle=True),
        predict=predictions,
        evaluations={name: held_out(rows, need_label=True) for name, rows in sets.evaluations.items()},
        tests={name: held_out(rows, need_label=False) for name, rows in sets.tests.items()},
        labelled=lambda held: held.rows.labelled,
        tokens=count_tokens,
    )


def plan(flags: GlueFlags, mesh: Mesh) -> planned.Planned:
    """Return the step of a training on `mesh`, as shapes, with rows of the greatest length."""
    if flags.pack_texts:
        raise UsageError("'distaff fit' knows no packed rows, whose number is the texts': leave --pack_texts out.")
    model, tokenizer = planned.text_model(FlaxAutoModelForSequenceClassification, flags, mesh)
    labels = labels_of(model.config, None, flags.problem_type)
    length = recipes.row_length(flags, tokenizer, model.longest_input or recipes.LONGEST_BY_DEFAULT)
    types = {"token_type_ids": length} if has_types(tokenizer, model.config) else {}
    rows = planned.rows_of(tokenizer, input_ids=length, **types)
    rows = planned.with_values(rows, target=np.float32(0) if labels.regression else np.int32(0))
    count = recipes.rows_a_step(flags, mesh)[0]
    batch = planned.batch_of(LabelledCollate(0), rows, count=count, length=length)
    return finetune.planned_step(flags, model, loss_of(flags, model, labels, None), batch)


RECIPE = finetune.Recipe(name="glue", task="text-classification", prepare=prepare)


def train(flags: GlueFlags) -> int:
    """Train, evaluate and write the folder."""
    return finetune.train(RECIPE, flags)


def evaluate_only(flags: GlueFlags) -> int:
    """Evaluate a checkpoint, and predict with it."""
    return finetune.evaluate_only(RECIPE, flags)
