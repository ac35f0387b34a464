"""Extractive question answering: where in a text the answer to a question stands, and with SQuAD 2 whether it does.

    distaff train qa --output_dir minilm-squad2 --model_name_or_path MINILM --version_2_with_negative \\
        --train_file squad_v2/train.json --validation_file squad_v2/validation.json \\
        --max_seq_length 384 --doc_stride 128 --learning_rate 1e-4 --num_train_epochs 2
    distaff eval qa --model_name_or_path minilm-squad2 --version_2_with_negative --validation_file dev-v2.0.json \\
        --null_score_diff_threshold -1.5 --output_dir out

A context that is longer than a window is read in windows that overlap; in training the windows without the answer say
"no answer", as does a question that has none: the first token. An evaluation writes `predictions.json`,
`nbest_predictions.json` and `null_odds.json`, which the official scripts read; predictions for `--test_file` have
`predict_` before these names, and a table with a row a question.

How long a small model takes to answer at all, on half of SQuAD 2's development set (4,953 and 1,125 questions of other
articles), two processors: all-MiniLM-L6 after one epoch, in windows of 384, batches of 8, at 2e-4, 18 minutes, has an
F1 of 50.6, which is that of never answering (a linear model of words: 38.3); in windows of 192, batches of 16, 17
minutes, 50.7, and 51.5 with the best threshold. So many steps are too few: with batches of 4 the loss in evaluation
is 1.73 where batches of 8 end at 2.56, with the best threshold 51.3: where answers stand comes before whether.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from distaff.core.errors import UsageError
from distaff.core.tree import Tree
from distaff.data.spans import SpanSettings
from distaff.data.windows import WindowCollate
from distaff.models._seq2seq import shift_tokens_right
from distaff.models.auto import FlaxAutoModelForQuestionAnswering
from distaff.question_pipelines import takes_token_types
from distaff.tasks import _finetune as finetune
from distaff.tasks import _planned as planned
from distaff.tasks import _recipe as recipes
from distaff.tasks._finetune_flags import FinetuneTextFlags
from distaff.tasks._flags import check_positive, flag
from distaff.tasks._qa_data import Windows, figures_of, read, rows_of, write_answers
from distaff.tasks._text import with_dropout


@dataclass(kw_only=True)
class QaFlags(FinetuneTextFlags):
    """Flags of `distaff train qa` and `distaff eval qa`."""

    max_seq_length: int | None = flag(None, "Tokens a window at most, by default 384 or what the model allows.")
    doc_stride: int = flag(128, "Tokens that a window shares with the one before it.")
    version_2_with_negative: bool = flag(False, "Some questions have no answer.")
    null_score_diff_threshold: float = flag(
        0.0, "There is no answer where its score is higher than that of the best span by more than this."
    )
    n_best_size: int = flag(20, "Starts and ends that are combined in a window, and spans that are written a question.")
    max_answer_length: int = flag(30, "Tokens an answer at most.")

    def check(self) -> None:
        """Raise `UsageError` for values that neither a training nor an evaluation can have."""
        super().check()
        check_positive(self, "n_best_size max_answer_length")
        if self.null_score_diff_threshold and not self.version_2_with_negative:
            raise UsageError(
                "--null_score_diff_threshold needs --version_2_with_negative: without it all have answers."
            )
        if self.do_predict and not (self.test_file or self.dataset_name):
            raise UsageError("--do_predict has nothing to predict for: give --test_file.")

    def spans(self) -> SpanSettings:
        """How answers are chosen."""
        return SpanSettings(
            n_best=self.n_best_size,
            max_length=self.max_answer_length,
            negative=self.version_2_with_negative,
            threshold=self.null_score_diff_threshold,
        )


# Loss.


def span_losses(
    start_logits: jax.Array, end_logits: jax.Array, batch: dict[str, jax.Array], *, label_smoothing: float = 0.0
) -> tuple[jax.Array, jax.Array]:
    """Return the loss and the weight of each row, `[batch]`: the mean of start's and end's cross-entropy.

    Logits are `[batch, length]`; padding takes no part, so that the loss is that of the row alone. A position of -100
    is not known, and its row weighs nothing. With `label_smoothing` s a position costs
    -(1 - s) log p(it) - s mean(log p(any token of the context, or "no answer")).
    """
    real, allowed = batch["attention_mask"] > 0, batch["allowed"] > 0
    known = (batch["start"] >= 0) & (batch["end"] >= 0)
    total = jnp.zeros(known.shape, jnp.float32)
    for logits, position in ((start_logits, batch["start"]), (end_logits, batch["end"])):
        logits = jnp.where(real, logits.astype(jnp.float32), jnp.finfo(jnp.float32).min)
        logs = jax.nn.log_softmax(logits, axis=-1)
        chosen = jnp.take_along_axis(logs, jnp.maximum(position, 0)[:, None], axis=1)[:, 0]
        if label_smoothing:
            mean = jnp.sum(jnp.where(allowed, logs, 0), axis=1) / jnp.maximum(jnp.sum(allowed, axis=1), 1)
            chosen = (1 - label_smoothing) * chosen + label_smoothing * mean
        total = total - chosen / 2
    weights = batch["weights"] * known
    return total * weights, weights


def logits_of(model: Any, apply: Any, batch: dict[str, jax.Array]) -> Any:
    """Return what `apply` of the module says about a batch, with `start_logits` and `end_logits` `[batch, length]`."""
    names = ["input_ids", "attention_mask", *(["token_type_ids"] if "token_type_ids" in batch else [])]
    inputs = {name: batch[name] for name in names}
    if getattr(model.config, "is_encoder_decoder", False):
        # The decoder reads the source again, behind its start.
        start = None if model.wraps_labels else model.decoder_start_token_id
        inputs["decoder_input_ids"] = shift_tokens_right(inputs["input_ids"], model.config.pad_token_id, start)
    return apply(**inputs)


def qa_loss(
    model: Any, label_smoothing: float, params: Tree, batch: dict[str, jax.Array], rng: jax.Array | None
) -> dict[str, tuple[Any, Any]]:
    """Sum the loss over the rows of a batch."""
    outputs = logits_of(model, with_dropout(model.module, params, rng), batch)
    smoothing = 0.0 if rng is None else label_smoothing
    losses, weights = span_losses(outputs.start_logits, outputs.end_logits, batch, label_smoothing=smoothing)
    return {"loss": (jnp.sum(losses), jnp.sum(weights))}


def qa_forward(model: Any, params: Tree, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Return the logits of each row, its loss and its weight."""
    outputs = logits_of(model, with_dropout(model.module, params, None), batch)
    start, end = (logits.astype(jnp.float32) for logits in (outputs.start_logits, outputs.end_logits))
    losses, weights = span_losses(start, end, batch)
    return {"start_logits": start, "end_logits": end, "loss": losses, "weight": weights}


# Wiring.


def prepare(flags: QaFlags, sizes: tuple[int, int]) -> finetune.Finetuning:
    """Return model, data and functions that the flags describe."""
    tokenizer = recipes.load_tokenizer(flags, flags.hub_token)
    config = recipes.load_config(flags, tokenizer, flags.hub_token)
    recipes.check_vocabulary(tokenizer, config)
    train, evaluation, test = read(flags)
    model = recipes.load_model(FlaxAutoModelForQuestionAnswering, flags, config, seed=flags.seed, token=flags.hub_token)
    windows, settings = Windows(flags, model, tokenizer), flags.spans()

    def write(prefix: str, folder: Path, suffix: str, outputs: finetune.Outputs, held_out: finetune.HeldOut) -> None:
        write_answers(settings, folder, prefix, outputs, held_out)

    return finetune.Finetuning(
        model=model,
        saved=tokenizer,
        loss_fn=partial(qa_loss, model, flags.label_smoothing_factor),
        forward=partial(qa_forward, model),
        figures=partial(figures_of, settings),
        metric="f1",
        metrics=(
            "loss",
            *(("exact", "f1", "HasAns_exact", "HasAns_f1") if settings.negative else ("exact_match", "f1")),
        ),
        train=None if train is None else windows.batches(windows.of(train), sizes[0], shuffle=True),
        evaluations={} if evaluation is None else {"": windows.held_out(evaluation, sizes[1])},
        tests={} if test is None else {"": windows.held_out(test, sizes[1])},
        predict=partial(rows_of, settings),
        write=partial(write, "predict_"),
        write_evaluation=partial(write, ""),
        labelled=lambda held_out: held_out.rows.labelled,
        tokens=lambda batch: int(batch["attention_mask"].sum()),
    )


def plan(flags: QaFlags, mesh: Mesh) -> planned.Planned:
    """Return the step of a training on `mesh`, as shapes, with windows of the greatest length."""
    model, tokenizer = planned.text_model(FlaxAutoModelForQuestionAnswering, flags, mesh)
    length = Windows(flags, model, tokenizer).length
    types = {"token_type_ids": length} if takes_token_types(model, tokenizer) else {}
    rows = planned.rows_of(tokenizer, input_ids=length, first=length, **types)
    rows = planned.with_values(rows, null=np.int32(0), start=np.int32(0), end=np.int32(0))
    count = recipes.rows_a_step(flags, mesh)[0]
    batch = planned.batch_of(WindowCollate(0), rows, count=count, length=length)
    return finetune.planned_step(flags, model, partial(qa_loss, model, flags.label_smoothing_factor), batch)


RECIPE = finetune.Recipe(name="qa", task="question-answering", prepare=prepare)


def train(flags: QaFlags) -> int:
    """Train, evaluate and write the folder."""
    return finetune.train(RECIPE, flags)


def evaluate_only(flags: QaFlags) -> int:
    """Evaluate a checkpoint, and predict with it."""
    return finetune.evaluate_only(RECIPE, flags)
