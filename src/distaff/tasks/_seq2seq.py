"""What summarization and translation share: the loss, and the run from flags to a folder.

Empty texts: rows without source and target are left out and counted; a row that lacks one of them is refused with its
file and line, or with `--skip_blank_pairs` left out and counted too. In `--test_file` every row stays, so that line n
of `generated_predictions.txt` belongs to row n, and an empty text that is compared scores 0.
"""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from distaff.core.errors import UsageError
from distaff.core.processes import is_first
from distaff.core.tree import Tree
from distaff.data.batches import Batches
from distaff.data.pairs import PairCollate
from distaff.models._seq2seq import shift_tokens_right
from distaff.models.auto import FlaxAutoModelForSeq2SeqLM
from distaff.nn.vocabulary import cross_entropy_sum, score_sums
from distaff.tasks import _folder, _placement
from distaff.tasks import _planned as planned
from distaff.tasks import _recipe as recipe
from distaff.tasks._flags import check_epsilon
from distaff.tasks._pairs import (
    HeldOut,
    Seq2SeqFlags,
    Side,
    Task,
    generate_texts,
    hold_out,
    lengths_of,
    make_batches,
    prepare_model,
    read_pairs,
    read_test,
    write_lines,
)
from distaff.train import evaluate, fit, make_optimizer

logger = logging.getLogger("distaff")


# Loss.


def seq2seq_loss(
    module,
    decoder_inputs: Callable[[jax.Array], jax.Array],
    params: Tree,
    batch: dict[str, jax.Array],
    rng: jax.Array | None,
    *,
    label_smoothing: float = 0.0,
) -> dict[str, tuple[Any, Any]]:
    """Sum the cross-entropy of `labels` over `label_weights`, both `[batch, target length]`.

    The decoder reads the labels shifted to the right. With `label_smoothing` s, in training alone, a token costs
    -(1 - s) log p(label) - s mean(log p(any token)); the old script's smoothing is this less a constant, up to the part
    of the label itself in the mean. `[batch, target length, vocab]` never exists as a whole.
    """
    outputs = module.apply(
        {"params": params},
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        decoder_input_ids=decoder_inputs(batch["labels"]),
        deterministic=rng is None,
        lazy_logits=True,
        rngs=None if rng is None else {"dropout": rng},
    )
    labels, weights = batch["labels"], batch["label_weights"]
    if rng is not None:
        loss = cross_entropy_sum(outputs.logits, labels, weights, label_smoothing=label_smoothing)
        return {"loss": (loss, jnp.sum(weights))}
    loss, hits = score_sums(outputs.logits, labels, weights)
    return {"loss": (loss, jnp.sum(weights)), "accuracy": (hits, jnp.sum(weights))}


# Wiring.


def train(flags: Seq2SeqFlags, task: Task) -> int:
    """Train and evaluate, write the folder, predict where asked, and return the exit code."""
    if not flags.do_train:
        return evaluate_only(flags, task)
    flags.check()
    flags.check_training()
    check_epsilon(flags, flags)
    folder = _folder.check_folder(flags)
    side = prepare_model(flags, task)
    model, mesh = side.model, recipe.mesh_of(flags)
    rows = recipe.rows_a_step(flags, mesh)
    pairs, eval_pairs = read_pairs(flags, task)
    batches = make_batches(flags, side, pairs, rows[0], train=True)
    evaluation = hold_out(flags, side, eval_pairs, rows[1])
    # Read before the training, so that what is wrong with them is not said after it.
    test = hold_out(flags, side, read_test(flags, task), rows[1])
    epoch = batches.steps_per_epoch
    plan = recipe.Plan(*rows, recipe.count_steps(flags, epoch))
    plan.log(flags, mesh)
    recipe.log_start(flags, flags)
    masks = {"decay_mask": model.decay_mask(), "matrices": model.matrices()}
    tx, schedule = make_optimizer(flags.optimizer_config(), total_steps=plan.total_steps, **masks)
    eval_steps = 0 if evaluation is None else evaluation.batches.steps_per_epoch
    _placement.show(flags, model, tx, mesh)
    result = fit(
        loss_function(flags, model),
        params=model.hand_over,
        filled=model.filled_shapes(),
        tx=tx,
        schedule=schedule,
        batches=batches,
        eval_batches=None if evaluation is None else evaluation.batches,
        config=flags.loop(total_steps=plan.total_steps, steps_per_epoch=epoch, eval_batches=eval_steps),
        mesh=mesh,
        tokens_per_batch=lambda batch: int(batch["attention_mask"].sum() + batch["label_weights"].sum()),
        score=scorer(task, side, evaluation) if flags.predict_with_generate and evaluation else None,
        on_start=partial(_folder.begin, folder, flags, task.name),
    )
    if result.interrupted:
        logger.warning("Stopped at step %d; go on with --resume_from_checkpoint.", result.step)
        return 128 + result.interrupted
    params, metrics = result.params, recipe.measured(result, folder)
    if not result.metrics and evaluation is not None and "eval_loss" not in metrics:
        metrics |= figures(flags, task, side, params, evaluation, mesh)
    predicted = {} if test is None else predict(flags, task, side, params, test, mesh, folder)
    recipe.finish(
        folder,
        flags,
        model=model,
        params=params,
        tokenizer=side.tokenizer,
        task=task.pipeline,
        metrics=metrics,
        step=result.step,
    )
    if is_first():
        _folder.write_results(folder, {"predict": predicted}, add=True)
    return 0


def evaluate_only(flags: Seq2SeqFlags, task: Task) -> int:
    """Evaluate a checkpoint, predict where asked, print the metrics and, with --output_dir, write them."""
    flags.check()
    flags.do_train = False
    if flags.model_name_or_path is None:
        raise UsageError("There is nothing to evaluate: give --model_name_or_path.")
    if flags.do_predict and not flags.output_dir:
        raise UsageError("Predictions go into a folder: name it with --output_dir.")
    # With --do_predict and data for it alone there is nothing else to evaluate on.
    flags.do_eval = flags.do_eval and bool(
        flags.validation_file or flags.train_file or flags.dataset_name or not flags.do_predict
    )
    if not (flags.do_eval or flags.do_predict):
        raise UsageError("Without training and evaluation nothing is left to do: leave --do_eval False out.")
    folder = _folder.output_folder(flags.output_dir) if flags.output_dir is not None else None
    side, mesh = prepare_model(flags, task), recipe.mesh_of(flags)
    named: dict[str, float] = {}
    rows, params = recipe.rows_a_step(flags, mesh)[1], side.model.params
    if flags.do_eval:
        evaluation = hold_out(flags, side, read_pairs(flags, task)[1], rows)
        assert evaluation is not None
        named = figures(flags, task, side, params, evaluation, mesh)
        if folder is not None and is_first():
            _folder.write_results(folder, {"eval": named}, add=True)
    test = hold_out(flags, side, read_test(flags, task), rows)
    if test is not None and folder is not None:
        predicted = predict(flags, task, side, params, test, mesh, folder)
        _folder.write_results(folder, {"predict": predicted}, add=True)
        named |= predicted
    for name, value in named.items() if is_first() else ():
        print(f"{name} = {value:.6g}")
    return 0


def plan(flags: Seq2SeqFlags, mesh: Mesh) -> planned.Planned:
    """Return the step of a training on `mesh`, as shapes, with sources and targets of the greatest lengths."""
    model, tokenizer = planned.text_model(FlaxAutoModelForSeq2SeqLM, flags, mesh)
    if model.decoder_start_token_id is None:
        model.config.decoder_start_token_id = tokenizer.eos_token_id
    lengths = lengths_of(flags, tokenizer, model.longest_input)
    rows = planned.rows_of(tokenizer, input_ids=lengths.source, labels=lengths.target)
    count = recipe.rows_a_step(flags, mesh)[0]
    batch = planned.batch_of(PairCollate(0, lengths.target), rows, count=count, length=lengths.source)
    return planned.Planned(model=model, loss_fn=loss_function(flags, model), batch=batch, scored=lengths.target)


def loss_function(flags: Seq2SeqFlags, model):
    """Return `(params, batch, rng) -> sums` of the model."""
    # What generation starts from too; labels are never -100 here.
    inputs = partial(
        shift_tokens_right,
        pad_token_id=model.config.pad_token_id or 0,
        decoder_start_token_id=model.decoder_start_token_id,
    )
    return partial(seq2seq_loss, model.module, inputs, label_smoothing=flags.label_smoothing_factor)


def measure(flags: Seq2SeqFlags, side: Side, params: Tree, batches: Batches, mesh: Mesh) -> dict[str, float]:
    """Return loss and accuracy."""
    loss_fn = loss_function(flags, side.model)
    return evaluate(loss_fn, params=params, batches=batches, steps=batches.steps_per_epoch, mesh=mesh)


def figures(
    flags: Seq2SeqFlags, task: Task, side: Side, params: Tree, evaluation: HeldOut, mesh: Mesh
) -> dict[str, float]:
    """Return what an evaluation of `params` gives, as `eval_...`."""
    values = measure(flags, side, params, evaluation.batches, mesh)
    if flags.predict_with_generate:
        values |= scorer(task, side, evaluation)(params)
    return {f"eval_{name}": value for name, value in values.items()}


def predict(
    flags: Seq2SeqFlags, task: Task, side: Side, params: Tree, test: HeldOut, mesh: Mesh, folder: Path
) -> dict[str, float]:
    """Write `generated_predictions.txt`, and return how it compares with the targets, if there are any."""
    texts = generate_texts(side, params, test.batches)
    write_lines(folder / _folder.PREDICTIONS, texts)
    values: dict[str, float] = {"samples": len(texts)}
    wanted = [target.strip() for target in test.targets if target is not None]
    if len(wanted) == len(texts):
        values |= measure(flags, side, params, test.batches, mesh) | task.scores(texts, wanted)
    return {f"predict_{name}": value for name, value in values.items()}


def scorer(task: Task, side: Side, evaluation: HeldOut):
    """Return the function from parameters to the scores of what they write."""
    wanted = [(target or "").strip() for target in evaluation.targets]

    def score(params: Tree) -> dict[str, float]:
        return task.scores(generate_texts(side, params, evaluation.batches), wanted)

    return score
