"""`generate`, for every class that continues token ids."""

import copy
import inspect
import json
import logging
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from distaff.core.errors import DataError, UsageError
from distaff.core.tree import Tree
from distaff.generation import options as generation_options
from distaff.generation.decoders import CausalDecoder, EncoderDecoder, Inputs, blank_of
from distaff.generation.options import Options, resolve_options
from distaff.generation.plan import Plan, bucket, make_plan, new_slots, new_tokens
from distaff.generation.programs import Call, Programs, make_programs
from distaff.generation.prompts import filled_up, left_padded, read_rows, right_padded, row_bucket, tokens_of
from distaff.generation.stopping import stop_values
from distaff.generation.streaming import Streamer, stream
from distaff.hub import resolve
from distaff.models._outputs import ModelOutput
from distaff.pretrained import FlaxPreTrainedModel

logger = logging.getLogger(__name__)

# Called with tokens `[rows, slots]`, scores `[rows, vocab]` and the number of filled slots; returns scores.
LogitsProcessor = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


class FlaxGenerateOutput(ModelOutput):
    """What `generate` returns; rows are prompts, each with its `num_return_sequences` one after the other.

    sequences: `[rows, length]`, prompts and what follows, filled up with the pad token. lengths: `[rows]`, generated
    tokens, the ending one among them. scores: `[rows]`, the sum of their log-probabilities; of beam search divided by
    the length to the power of `length_penalty`. token_scores, with `output_scores`: `[rows, steps, vocab]`, the scores
    that each token was chosen by, of beam search edited log-probabilities of every beam. seed: that of the draws, where
    no key was given.
    """

    sequences: np.ndarray | None = None
    lengths: np.ndarray | None = None
    scores: np.ndarray | None = None
    token_scores: np.ndarray | None = None
    seed: int | None = None


class Generates(FlaxPreTrainedModel):
    """A model that has `generate`, and reads and writes `generation_config.json`."""

    # The options in the folder's file, None where the model comes from a config alone.
    generation_config: dict[str, Any] | None = None
    # With the module that they are of: a model that was resized has another one.
    _programs: tuple[Any, Programs] | None = None

    def generate(
        self,
        input_ids,
        attention_mask=None,
        *,
        params: Tree | None = None,
        generation_config: Any = None,
        prng_key: jax.Array | None = None,
        logits_processor: Sequence[LogitsProcessor] | None = None,
        streamer: Streamer | None = None,
        tokenizer: Any = None,
        decoder_input_ids=None,
        **options: Any,
    ) -> FlaxGenerateOutput:
        """Continue prompts, or answer sources, `input_ids` `[batch, length]` or a list of rows of any lengths.

        `options` are those of `distaff.generation.options.Options`; they win over `generation_config` (a dict or a
        `GenerationConfig`), which wins over the folder's. Draws come from `prng_key`, without one from a fresh seed
        that is returned. `streamer` is called after each step with the newest tokens `[rows]`, -1 in rows that are
        finished. `tokenizer` is needed for `stop_strings`. `decoder_input_ids` `[batch, length]` is what an
        encoder-decoder starts from instead of its start token.

        Raises `UsageError` for options that are unknown or not supported, `DataError` for prompts that do not fit.
        """
        if "lazy_logits" not in inspect.signature(type(self.module).__call__).parameters:
            raise UsageError(f"{type(self).__name__} has no language modeling head: load the class that has one.")
        vocab = self.config.vocab_size
        start = getattr(self, "decoder_start_token_id", None)
        chosen = resolve_options(self.config, self.generation_config, generation_config, options, start=start)
        if streamer is not None and chosen.num_beams > 1:
            raise UsageError("A streamer cannot follow beams, which change their past: leave num_beams or it out.")
        ids, mask = read_rows(input_ids, attention_mask, chosen, vocab)
        inputs, prompts = self._inputs(ids, mask, chosen, decoder_input_ids)
        width = prompts.shape[1]
        limit = new_tokens(chosen, width, self._longest)
        capacity = new_slots(chosen, limit, slots=inputs.ids.shape[1], prompts=inputs.start is None)
        processors = tuple(logits_processor or ())
        plan, values = make_plan(
            chosen, vocab=vocab, width=width, limit=limit, capacity=capacity, processors=processors
        )
        key, seed = _key(prng_key, chosen)
        batch = row_bucket(len(ids))
        if chosen.stops:
            before = list(prompts) if self._is_encoder_decoder else tokens_of(ids, mask)
            values |= stop_values(chosen.stops, tokenizer, before, vocab=vocab)
            values["stop_start"] = filled_up(values["stop_start"], batch)
        inputs = Inputs(*(None if array is None else filled_up(array, batch) for array in inputs))
        # From numpy's arrays: operations of jax here would each be a program of its own.
        call = jax.device_put(Call(inputs, np.arange(batch) < len(ids), values, key))
        started = inputs.ids if inputs.start is None else inputs.start
        init_cache: Any = self.init_cache  # type: ignore[attr-defined]
        blank = blank_of(lambda: init_cache(batch, started.shape[1] + plan.capacity))
        params = self.params if params is None else params
        with self.computing(params):
            if streamer is None:
                state = self._compiled.whole(params, call, blank=blank, plan=plan)
            else:
                rows = len(ids) * plan.copies
                state = stream(self._compiled, params, call, blank=blank, plan=plan, rows=rows, streamer=streamer)
        return _output(jax.device_get(state.replace(memory=None, key=None)), prompts, plan, seed)

    # What a family may say otherwise.

    @property
    def _longest(self) -> int | None:
        """How many tokens fit a row, None where there is no limit."""
        return getattr(self, "longest_input", None)

    @property
    def _is_encoder_decoder(self) -> bool:
        return bool(getattr(self.config, "is_encoder_decoder", False))

    # Inside.

    @property
    def _compiled(self) -> Programs:
        if self._programs is None or self._programs[0] is not self.module:
            decoder = EncoderDecoder(self.module) if self._is_encoder_decoder else CausalDecoder(self.module)
            self._programs = self.module, make_programs(decoder)
        return self._programs[1]

    def _inputs(self, ids, mask, options: Options, decoder_input_ids) -> tuple[Inputs, np.ndarray]:
        """Return the padded inputs, and the prompts `[batch, width]` that the sequences begin with."""
        filling, longest = options.filling or 0, self._longest
        if not self._is_encoder_decoder:
            if decoder_input_ids is not None:
                raise UsageError(f"{type(self).__name__} has no encoder: pass the prompt as input_ids.")
            rows = tokens_of(ids, mask)
            return Inputs(*left_padded(rows, filling, bucket(max(map(len, rows)), longest=longest))), ids
        if longest is not None and ids.shape[1] > longest:
            raise DataError(f"The source has {ids.shape[1]} tokens and the model {longest} positions: truncate it.")
        if decoder_input_ids is None:
            if options.decoder_start_token_id is None:
                raise UsageError(
                    "Nothing says what the decoder starts from: set decoder_start_token_id; multilingual models also "
                    "take the target language's token as forced_bos_token_id."
                )
            prompts = np.full((len(ids), 1), options.decoder_start_token_id, np.int32)
        else:
            everywhere = np.ones(np.shape(decoder_input_ids))
            prompts, _ = read_rows(decoder_input_ids, everywhere, options, self.config.vocab_size)
        source = right_padded(ids, mask, filling, bucket(ids.shape[1], longest=longest))
        return Inputs(*source, prompts), prompts

    # The file beside the config.

    @classmethod
    def from_pretrained(cls, name_or_dir, **settings: Any):
        """Load a model as `FlaxPreTrainedModel.from_pretrained` does, with the folder's generation options."""
        names = ("revision", "token", "subfolder", "local_files_only")
        folder = resolve(str(name_or_dir), **{name: settings.pop(name) for name in names if name in settings})
        loaded = super().from_pretrained(folder, **settings)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        if (folder / generation_options.FILE).is_file():
            model.generation_config = generation_options.read_file(folder)
        return loaded

    def save_pretrained(self, directory, params: Tree | None = None, **settings: Any) -> None:
        """Save the model as `FlaxPreTrainedModel.save_pretrained` does, with its generation options."""
        if self.generation_config is not None:
            Path(directory).mkdir(parents=True, exist_ok=True)
            text = json.dumps(copy.deepcopy(self.generation_config), indent=2, sort_keys=True)
            (Path(directory) / generation_options.FILE).write_text(text + "\n", encoding="utf-8")
        super().save_pretrained(directory, params, **settings)


def _key(prng_key: Any, options: Options) -> tuple[jax.Array | None, int | None]:
    """Return the key of the draws, None where there are none, and the seed where it is a fresh one."""
    if not options.do_sample:
        return None, None
    if prng_key is not None:
        typed = jnp.issubdtype(jnp.asarray(prng_key).dtype, jax.dtypes.prng_key)
        return (prng_key if typed else jax.random.wrap_key_data(jnp.asarray(prng_key))), None
    seed = secrets.randbits(31)
    logger.info("Sampling with the fresh seed %d: pass prng_key=jax.random.key(%d) for the same tokens.", seed, seed)
    return jax.random.key(seed), seed


def _output(state: Any, prompts: np.ndarray, plan: Plan, seed: int | None) -> FlaxGenerateOutput:
    """Return what the caller gets of the final state, without the rows that only filled the batch."""
    batch = len(prompts)
    if plan.num_beams > 1:
        tokens, lengths, scores = (
            array[:batch, : plan.returned].reshape(batch * plan.returned, *array.shape[2:])
            for array in (state.done_tokens, state.done_lengths, state.done_scores)
        )
    else:
        tokens, lengths, scores = (
            array[: batch * plan.copies] for array in (state.tokens, state.lengths, state.scores)
        )
    start = tokens.shape[1] - plan.capacity
    generated = tokens[:, start : start + int(lengths.max())]
    history = None
    if state.history is not None:
        history = state.history[: int(state.step), : batch * plan.copies].swapaxes(0, 1)
    sequences = np.concatenate([np.repeat(prompts, plan.returned, axis=0), generated], axis=1)
    return FlaxGenerateOutput(sequences, lengths, scores, history, seed)
