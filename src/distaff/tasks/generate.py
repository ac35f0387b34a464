"""`distaff generate`: texts continued, or answered, on the terminal as they are written."""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from distaff.core.errors import UsageError
from distaff.generation_pipelines import GenerationPipeline, open_generator
from distaff.tasks._flags import flag
from distaff.tasks._lines import check_words, lines_of


@dataclass(kw_only=True)
class GenerateFlags:
    """Flags of `distaff generate`; what is not given is as the model's generation_config.json says."""

    model_name_or_path: str = flag("", "Folder or Hub id of a causal or an encoder-decoder model.", required=True)
    prompt: list[str] = flag([], "Texts to continue or to answer; standard input where there are none.")
    prompt_file: str | None = flag(None, "A file with a prompt a line.")
    max_new_tokens: int | None = flag(None, "Tokens to generate at most.")
    max_length: int | None = flag(None, "The same with the prompt's tokens counted.")
    min_new_tokens: int | None = flag(None, "Tokens to generate at least.")
    do_sample: bool | None = flag(None, "Draw tokens instead of taking the likeliest.", nargs="?", const=True)
    temperature: float | None = flag(None, "Below 1 draws likelier tokens, above 1 less likely ones.")
    top_k: int | None = flag(None, "Draw among so many of the likeliest tokens; 0 is all.")
    top_p: float | None = flag(None, "Draw among the likeliest tokens that together have this probability.")
    min_p: float | None = flag(None, "Draw among tokens at least this share as likely as the likeliest.")
    typical_p: float | None = flag(None, "Draw among the most typical tokens that have this probability.")
    num_beams: int | None = flag(None, "Beams of beam search.")
    num_return_sequences: int | None = flag(None, "Texts a prompt.")
    length_penalty: float | None = flag(None, "Above 0 favours long beams.")
    early_stopping: str | None = flag(None, "When beam search ends: true, false or never.")
    repetition_penalty: float | None = flag(None, "Above 1 makes tokens that were used less likely.")
    no_repeat_ngram_size: int | None = flag(None, "Never repeat so many tokens in a row.")
    src_lang: str | None = flag(None, "Code of the prompts' language, for mBART.")
    tgt_lang: str | None = flag(None, "Code of the language to write, for mBART.")
    stop_strings: list[str] = flag([], "End a text where one of these comes.")
    seed: int | None = flag(None, "Of the draws; without it they differ each time.")
    batch_size: int = flag(1, "Prompts at a time; with 1, text is shown as it comes.")
    dtype: str = flag("float32", "dtype of the computation: float32, bfloat16 or float16.")
    mesh: str | None = flag(None, "Devices that share the work: data=2,tensor=4; by default the first alone.")
    json: bool = flag(False, "Print a line of JSON a prompt.")


OPTIONS = (
    "max_new_tokens max_length min_new_tokens do_sample temperature top_k top_p min_p typical_p num_beams "
    "num_return_sequences length_penalty repetition_penalty no_repeat_ngram_size src_lang tgt_lang"
).split()


def generate(flags: GenerateFlags) -> int:
    """Print what the model writes for each prompt."""
    prompts = read_prompts(flags)
    options = options_of(flags)
    if flags.batch_size < 1:
        raise UsageError(f"--batch_size is {flags.batch_size}: it must be at least 1.")
    loading = {"dtype": flags.dtype, "mesh": flags.mesh}
    write = open_generator(flags.model_name_or_path, batch_size=flags.batch_size, **loading)
    streamed = flags.batch_size == 1 and not flags.json
    streamed = streamed and (flags.num_beams or 1) == 1 and (flags.num_return_sequences or 1) == 1
    count, batch = 0, []
    for prompt in prompts:
        count += 1
        if streamed:
            show(write, prompt, options)
            continue
        batch.append(prompt)
        if len(batch) == flags.batch_size:
            report(batch, write(batch, **options), as_json=flags.json)
            batch = []
    if batch:
        report(batch, write(batch, **options), as_json=flags.json)
    if not count:
        raise UsageError("There is no prompt: write --prompt, name a --prompt_file, or pipe lines in.")
    return 0


def read_prompts(flags: GenerateFlags) -> Iterator[str]:
    """Return the prompts, those of standard input as they are typed."""
    if flags.prompt and flags.prompt_file:
        raise UsageError("--prompt and --prompt_file both name prompts: leave one out.")
    if flags.prompt_file is None:
        check_words(flags.prompt)
        return iter(flags.prompt) if flags.prompt else lines_of(sys.stdin, "Standard input")
    path = Path(flags.prompt_file)
    if not path.is_file():
        raise UsageError(f"There is no prompt file '{path}': check its name.")
    with path.open(encoding="utf-8-sig") as file:
        # Whole, so that what is wrong in it is said before anything is generated.
        return iter(list(lines_of(file, f"'{path}'")))


def options_of(flags: GenerateFlags) -> dict[str, Any]:
    """Return the options of `model.generate` that were given."""
    options = {name: getattr(flags, name) for name in OPTIONS if getattr(flags, name) is not None}
    if flags.early_stopping is not None:
        words = {"true": True, "false": False, "never": "never"}
        if flags.early_stopping not in words:
            raise UsageError(f"--early_stopping is '{flags.early_stopping}': choose true, false or never.")
        options["early_stopping"] = words[flags.early_stopping]
    if flags.stop_strings:
        options["stop_strings"] = flags.stop_strings
    if flags.seed is not None:
        options["prng_key"] = jax.random.key(flags.seed)
    return options


def show(write: GenerationPipeline, prompt: str, options: dict[str, Any]) -> None:
    """Print a prompt of a decoder, and new text as it comes."""

    def put(piece: str) -> None:
        print(piece, end="", flush=True)

    if not write.model.config.is_encoder_decoder:
        put(prompt)
    write.stream(prompt, put, **options)
    print(flush=True)


def report(prompts: list[str], results: list[list[dict[str, str]]], *, as_json: bool) -> None:
    """Print finished texts."""
    for prompt, texts in zip(prompts, results):
        written = [next(iter(text.values())) for text in texts]
        if as_json:
            print(json.dumps({"prompt": prompt, "texts": written}, ensure_ascii=False))
        else:
            print("\n".join(written))
    sys.stdout.flush()
