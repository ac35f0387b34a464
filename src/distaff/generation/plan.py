"""What a call needs beside the model: a static plan, which is compiled for, and traced values, which may change."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from distaff.core.errors import UsageError
from distaff.generation.options import Options, as_list
from distaff.generation.processors import Values

# The fewest slots of prompts and of new tokens. Below it every length is the same program; powers of two above.
SMALLEST = 64
# The fewest slots of new tokens behind prompts that need so many themselves: prompts and new tokens of up to 128, in
# batches of up to 8, are three pairs of sizes and twelve programs.
SMALLEST_BEHIND_LONG = 128


@dataclass(frozen=True)
class Plan:
    """What a program is compiled for, beside the shapes of its arrays.

    capacity: slots for new tokens. copies: rows that continue one prompt, beams or samples. edits and filters: the
    names of those in force. processors: the caller's own.
    """

    capacity: int
    num_beams: int = 1
    copies: int = 1
    returned: int = 1
    do_sample: bool = False
    early_stopping: bool | str = False
    top_k: int = 0
    edits: tuple[str, ...] = ()
    filters: tuple[str, ...] = ()
    renormalize: bool = False
    output_scores: bool = False
    processors: tuple[Callable[..., Any], ...] = ()


def bucket(length: int, *, longest: int | None = None, smallest: int = SMALLEST) -> int:
    """Return the power of two from `smallest` on that holds `length`, at most `longest`."""
    size = max(smallest, 1 << (length - 1).bit_length())
    return size if longest is None else max(min(size, longest), length)


def new_tokens(options: Options, width: int, longest: int | None) -> int:
    """Return how many tokens are generated at most, for prompts of `width` tokens.

    `longest` is how many tokens fit the model, prompts included. Raises `UsageError` where there is no room.
    """
    given = options.max_new_tokens
    if given is None and options.max_length is not None:
        given = options.max_length - width
        if given < 1:
            raise UsageError(
                f"max_length is {options.max_length} and the prompt alone has {width} tokens: raise it, or set "
                "max_new_tokens."
            )
    room = None if longest is None else longest - width
    if room is not None and room < 1:
        raise UsageError(
            f"The prompt has {width} tokens and the model {longest} positions, which leaves none to generate: shorten "
            "the prompt."
        )
    if given is None:  # as Transformers: twenty, or what fits
        given = 20 if room is None else min(20, room)
    if room is not None and given > room:
        raise UsageError(
            f"The prompt has {width} tokens, and {given} new ones do not fit the model's {longest} positions: shorten "
            f"the prompt or generate at most {room}."
        )
    return given


def new_slots(options: Options, limit: int, *, slots: int, prompts: bool) -> int:
    """Return how many slots are made for at most `limit` new tokens.

    `slots` is the bucket of what was read; `prompts` says that new tokens follow it, as those of decoders do.
    """
    wanted = limit
    if options.max_new_tokens is None and options.max_length is not None:
        # What is left of a given total depends on the prompt: as much as the shortest prompt of the bucket leaves, so
        # that prompts of one bucket are one program.
        wanted = max(limit, options.max_length - (slots // 2 if prompts and slots > SMALLEST else 0))
    return bucket(wanted, smallest=SMALLEST_BEHIND_LONG if slots >= SMALLEST_BEHIND_LONG else SMALLEST)


def make_plan(
    options: Options, *, vocab: int, width: int, limit: int, capacity: int, processors: tuple[Callable[..., Any], ...]
) -> tuple[Plan, Values]:
    """Return plan and values for prompts of `width` tokens that may get `limit` new ones.

    Raises `UsageError` for ids that the vocabulary does not have.
    """
    edits, edit_values = _edits(options, width)
    filters, filter_values = _filters(options)
    values: Values = {"limit": np.int32(limit), **edit_values, **filter_values}
    values["eos"] = np.asarray(options.eos_ids or [-1], np.int32)
    values["pad"] = np.int32(options.filling if options.filling is not None else 0)
    _check_ids(options, vocab)
    beams = options.num_beams
    if beams > 1:
        values["length_penalty"] = np.float32(options.length_penalty)
    plan = Plan(
        capacity=capacity,
        num_beams=beams,
        copies=beams if beams > 1 else options.num_return_sequences,
        returned=options.num_return_sequences,
        do_sample=options.do_sample,
        early_stopping=options.early_stopping if beams > 1 else False,
        top_k=min(options.top_k, vocab) if options.do_sample else 0,
        edits=edits,
        filters=filters,
        renormalize=options.renormalize_logits,
        output_scores=options.output_scores,
        processors=processors,
    )
    return plan, values


def _edits(options: Options, width: int) -> tuple[tuple[str, ...], Values]:
    """Return the names of the edits in force, and their values."""
    values: Values = {}
    names = []

    def use(name: str, **arrays: Any) -> None:
        names.append(name)
        values.update(arrays)

    if options.repetition_penalty != 1:
        use("repetition", repetition_penalty=np.float32(options.repetition_penalty))
    if options.no_repeat_ngram_size:
        use("ngrams", ngram=np.zeros(options.no_repeat_ngram_size, bool))  # its shape says the size
    words = [list(map(int, word)) for word in options.bad_words_ids or []]
    words = [word for word in words if word not in [[end] for end in options.eos_ids]]
    if words:
        longest = max(map(len, words))
        use("bad_words", bad_words=np.asarray([[-1] * (longest - len(word)) + word for word in words], np.int32))
    # In force for each width, so that it is one program for all of them.
    least = options.min_new_tokens if options.min_new_tokens is not None else options.min_length - width
    if (options.min_new_tokens or options.min_length) and options.eos_ids:
        use("minimum", minimum=np.int32(least))
    first = options.forced_bos_token_id
    if first is not None:
        use("forced_bos", forced_bos=np.asarray([first], np.int32), forced_step=np.int32(0 if width == 1 else -1))
    if options.forced_eos_token_id is not None:
        use("forced_eos", forced_eos=np.asarray(as_list(options.forced_eos_token_id), np.int32))
    if options.remove_invalid_values:
        use("finite")
    if options.exponential_decay_length_penalty is not None:
        start, factor = options.exponential_decay_length_penalty
        use("decay", decay_start=np.int32(start), decay_factor=np.float32(factor))
    if options.suppress_tokens:
        use("suppress", suppress=np.asarray(options.suppress_tokens, np.int32))
    if options.begin_suppress_tokens:
        step = np.int32(1 if first is not None and width == 1 else 0)
        use("suppress_first", suppress_first=np.asarray(options.begin_suppress_tokens, np.int32), first_step=step)
    return tuple(names), values


def _filters(options: Options) -> tuple[tuple[str, ...], Values]:
    """Return the names of the filters in force, and their values."""
    if not options.do_sample:
        return (), {}
    inside = {
        "temperature": (options.temperature, options.temperature != 1),
        "top_p": (options.top_p, options.top_p < 1),
        "min_p": (options.min_p, options.min_p is not None),
        "typical": (options.typical_p, options.typical_p < 1),
        "epsilon": (options.epsilon_cutoff, options.epsilon_cutoff > 0),
        "eta": (options.eta_cutoff, options.eta_cutoff > 0),
    }
    chosen = {name: np.float32(value) for name, (value, used) in inside.items() if used}
    return tuple(chosen), dict(chosen)


def _check_ids(options: Options, vocab: int) -> None:
    """Raise `UsageError` for an id that the vocabulary does not have."""
    filling = options.pad_token_id
    if filling is not None and not 0 <= filling < vocab:
        raise UsageError(
            f"pad_token_id is {filling} and the model has {vocab} tokens: enlarge its embeddings "
            "(resize_token_embeddings), or generate with pad_token_id=eos_token_id."
        )
    lists = {
        "eos_token_id": options.eos_ids,
        "decoder_start_token_id": as_list(options.decoder_start_token_id),
        "forced_bos_token_id": as_list(options.forced_bos_token_id),
        "forced_eos_token_id": as_list(options.forced_eos_token_id),
        "suppress_tokens": as_list(options.suppress_tokens),
        "begin_suppress_tokens": as_list(options.begin_suppress_tokens),
        "bad_words_ids": [one for word in options.bad_words_ids or [] for one in word],
    }
    for name, ids in lists.items():
        outside = [one for one in ids if not 0 <= one < vocab]
        if outside:
            raise UsageError(f"{name} holds {outside[0]} and the model has {vocab} tokens: use ids below that.")
