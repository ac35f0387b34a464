"""The command line. Each command is one line of the table below; its module is imported when it is called."""

import argparse
import difflib
import importlib
import io
import logging
import os
import signal
import sys
import threading
from collections.abc import Collection, Container, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from distaff.core.distributed import leaving_together
from distaff.core.errors import UNWRITABLE, DistaffError, UsageError, endings_named


@dataclass(frozen=True)
class Command:
    """A command: the module and function that do it, its dataclass of flags, and a line of help."""

    module: str
    function: str
    flags: str
    help: str
    positional: tuple[str, ...] = ()


def _predict(flags: str, help: str) -> Command:
    """Return the command of a pipeline of texts."""
    return Command("distaff.tasks.predict", "predict", flags, help, ("model_name_or_path", "texts"))


COMMANDS: dict[tuple[str, ...], Command] = {
    ("quickstart",): Command(
        "distaff.quickstart", "run", "QuickstartFlags", "Train a small RoBERTa on text that comes with Python."
    ),
    ("doctor",): Command("distaff.tasks.doctor", "run", "DoctorFlags", "Say what of this machine would spoil a run."),
    ("tokenizer", "train"): Command("distaff.tasks.tokenizer", "run", "TokenizerFlags", "Train a tokenizer on texts."),
    ("config", "create"): Command("distaff.tasks.config", "create", "ConfigFlags", "Write a model config."),
    ("train", "mlm"): Command("distaff.tasks.mlm", "train", "MlmFlags", "Masked language modeling."),
    ("eval", "mlm"): Command("distaff.tasks.mlm", "evaluate_only", "MlmFlags", "Evaluate a masked language model."),
    ("train", "clm"): Command("distaff.tasks.clm", "train", "ClmFlags", "Causal language modeling."),
    ("eval", "clm"): Command("distaff.tasks.clm", "evaluate_only", "ClmFlags", "Evaluate a causal language model."),
    ("train", "t5-mlm"): Command("distaff.tasks.t5_mlm", "train", "T5MlmFlags", "T5's span corruption."),
    ("eval", "t5-mlm"): Command("distaff.tasks.t5_mlm", "evaluate_only", "T5MlmFlags", "Evaluate span corruption."),
    ("train", "bart-dlm"): Command("distaff.tasks.bart_dlm", "train", "BartDlmFlags", "BART's denoising."),
    ("eval", "bart-dlm"): Command("distaff.tasks.bart_dlm", "evaluate_only", "BartDlmFlags", "Evaluate denoising."),
    ("train", "electra"): Command("distaff.tasks.electra", "train", "ElectraFlags", "ELECTRA, both its models."),
    ("eval", "electra"): Command("distaff.tasks.electra", "evaluate_only", "ElectraFlags", "Evaluate both models."),
    ("train", "summarization"): Command(
        "distaff.tasks.summarization", "train", "SummarizationFlags", "Summaries of texts."
    ),
    ("eval", "summarization"): Command(
        "distaff.tasks.summarization",
        "evaluate_only",
        "SummarizationFlags",
        "Evaluate a model of summaries.",
    ),
    ("train", "translation"): Command("distaff.tasks.translation", "train", "TranslationFlags", "Translation."),
    ("eval", "translation"): Command(
        "distaff.tasks.translation", "evaluate_only", "TranslationFlags", "Evaluate a model of translation."
    ),
    ("train", "glue"): Command("distaff.tasks.glue", "train", "GlueFlags", "Classes or numbers for texts."),
    ("eval", "glue"): Command("distaff.tasks.glue", "evaluate_only", "GlueFlags", "Evaluate a classifier of texts."),
    ("train", "qa"): Command("distaff.tasks.qa", "train", "QaFlags", "Question answering on a text, as in SQuAD."),
    ("eval", "qa"): Command("distaff.tasks.qa", "evaluate_only", "QaFlags", "Evaluate a model of question answering."),
    ("train", "ner"): Command("distaff.tasks.ner", "train", "NerFlags", "Tags of words."),
    ("eval", "ner"): Command("distaff.tasks.ner", "evaluate_only", "NerFlags", "Evaluate a model of tags."),
    ("train", "image-classification"): Command(
        "distaff.tasks.image_classification", "train", "ImageClassificationFlags", "Labels of images."
    ),
    ("eval", "image-classification"): Command(
        "distaff.tasks.image_classification", "evaluate_only", "ImageClassificationFlags", "Evaluate a model of images."
    ),
    ("predict", "fill-mask"): _predict("FillMaskFlags", "Fill mask tokens."),
    ("predict", "text-classification"): _predict("TextClassificationFlags", "Which class a text is of."),
    ("predict", "zero-shot-classification"): _predict("ZeroShotClassificationFlags", "Which of any labels fits."),
    ("predict", "token-classification"): _predict("TokenClassificationFlags", "What each piece of a text is."),
    ("predict", "feature-extraction"): _predict("FeatureExtractionFlags", "Vectors of tokens."),
    ("predict", "sentence-similarity"): _predict("SentenceSimilarityFlags", "How near texts are to the first."),
    ("predict", "text-generation"): _predict("TextGenerationFlags", "Continue texts."),
    ("predict", "text2text-generation"): _predict("Text2TextFlags", "Answer texts."),
    ("predict", "summarization"): _predict("SummarizationFlags", "Summarise texts."),
    ("predict", "translation"): _predict("TranslationFlags", "Translate texts."),
    ("predict", "question-answering"): Command(
        "distaff.tasks.predict_answers",
        "question_answering",
        "QuestionAnsweringFlags",
        "Answer questions from a text.",
        ("model_name_or_path", "question", "context"),
    ),
    ("predict", "image-classification"): Command(
        "distaff.tasks.predict_images",
        "image_classification",
        "ImagesFlags",
        "Say what is on images.",
        ("model_name_or_path", "images"),
    ),
    ("generate",): Command(
        "distaff.tasks.generate", "generate", "GenerateFlags", "Write text, shown as it comes.", ("model_name_or_path",)
    ),
    ("push",): Command(
        "distaff.tasks.push", "push", "PushFlags", "Publish a folder on the Hub.", ("folder", "repo_id")
    ),
}

COMMANDS |= {
    ("fit", name[1]): Command(command.module, "plan", command.flags, f"Whether 'distaff train {name[1]}' fits a slice.")
    for name, command in tuple(COMMANDS.items())
    if name[0] == "train"
}
COMMANDS[("fit",)] = Command(
    "distaff.tasks.fit", "run", "BareFlags", "The same of a config that has no recipe yet.", ("config_name",)
)
# Flags that the commands of a group take besides their own.
FURTHER = {
    "train": ("distaff.tasks._cluster_flags", "ClusterFlags"),
    "eval": ("distaff.tasks._cluster_flags", "ClusterFlags"),
    "fit": ("distaff.tasks.fit", "FitFlags"),
}

# Asks glibc for transparent huge pages: the buffers of a step cost 100,000 page faults otherwise, a fifth of its time.
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `distaff` with `arguments` and return the exit code: 0, 1 where something failed, 2 for wrong usage."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = _take(words, "--debug")
    huge_pages = not _take(words, "--no_hugepages")
    try:
        told = about(words)
        if told is not None:
            print(told, flush=True)
            return 0
        name, command = find_command(words)
        rest = words[len(name) :]
        if huge_pages and arguments is None and not {"-h", "--help"} & set(rest):
            restart_with_huge_pages()
        with leaving_together(debug=debug), endings_named():
            code = call(name, command, rest)
        sys.stdout.flush()
        return code
    except DistaffError as error:
        if debug:
            raise
        print(f"distaff: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("distaff: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Whoever read the output has left, as `head` does; what is still buffered goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # what a shell gives a process that SIGPIPE ended


def about(words: Sequence[str]) -> str | None:
    """Return the list of commands or the version, where `words` ask for one of them."""
    if not words or words[0] in ("-h", "--help", "help"):
        return usage()
    group = [name for name in COMMANDS if name[0] == words[0]]
    if len(group) > 1 and words[1:2] in (["-h"], ["--help"], ["help"]):
        return usage(group)
    if words[0] in ("-V", "--version"):
        return importlib.import_module("importlib.metadata").version("distaff")
    return None


def usage(names: Collection[tuple[str, ...]] = COMMANDS) -> str:
    """Return the list of the commands `names`."""
    lines = ["usage: distaff COMMAND [flags]   (distaff COMMAND --help for its flags)", ""]
    width = max(len(" ".join(name)) for name in names)
    lines += [f"  {' '.join(name):<{width}}  {COMMANDS[name].help}" for name in names]
    lines += [
        "",
        "  A .yaml file after the command holds flags; flags on the command line win over it.",
        "  --debug shows tracebacks; --no_hugepages leaves the process's memory as the system sets it.",
    ]
    return "\n".join(lines)


def find_command(words: Sequence[str]) -> tuple[tuple[str, ...], Command]:
    """Return the command that `words` begin with. Raises `UsageError` that names the nearest one."""
    for length in (2, 1):
        name = tuple(words[:length])
        if name in COMMANDS:
            return name, COMMANDS[name]
    if words[0].startswith("-"):
        raise UsageError(f"{words[0]} stands where a command belongs: see 'distaff --help'.")
    asked = " ".join(word for word in words[:2] if not word.startswith("-"))
    known = [" ".join(name) for name in COMMANDS]
    group = [name for name in known if name.startswith(f"{words[0]} ")]
    if group and asked == words[0]:
        raise UsageError(f"'{asked}' lacks its second word: there are {', '.join(group)}.")
    near = difflib.get_close_matches(asked, known, 1) or group
    raise UsageError(
        f"There is no command '{asked}'"
        + (f": did you mean 'distaff {near[0]}'?" if near else f": there are {', '.join(known)}.")
    )


def call(name: tuple[str, ...], command: Command, words: list[str]) -> int:
    """Parse the flags and run the command in a process that is set up for it."""
    set_up_process()
    module = importlib.import_module(command.module)
    flags, further = parse(name, command, getattr(module, command.flags), words)
    if name[0] == "fit":
        return importlib.import_module("distaff.tasks.fit").run(*name[1:] or (None,), flags, further)
    if further is not None:
        further.join()  # before any device is used
    result = getattr(module, command.function)(flags)
    return result if isinstance(result, int) else 0


def parse(name: tuple[str, ...], command: Command, flags_class: Any, words: list[str]) -> tuple[Any, Any]:
    """Return the flags of `words`, after those of a .yaml file that stands first, and those of `FURTHER`, if any."""
    from transformers import HfArgumentParser

    from distaff.tasks._cluster_flags import CLUSTER_ONLY
    from distaff.tasks._flags import TRAINING_ONLY

    classes: Any = (flags_class,)
    if name[0] in FURTHER:
        module, further = FURTHER[name[0]]
        classes = (flags_class, getattr(importlib.import_module(module), further))

    class Parser(HfArgumentParser):
        def error(self, message: str):
            raise UsageError(f"{message[:1].upper()}{message[1:]}; see 'distaff {' '.join(name)} --help'.")

    # In an annotation its own: HfArgumentParser asks for types by name in the dataclass's module.
    parser: Any = Parser(classes, prog=f"distaff {' '.join(name)}", description=command.help, allow_abbrev=False)
    known = {option: action.dest for action in parser._actions for option in action.option_strings}
    # What a recipe.yaml may hold and this command has no use for.
    unused = {"eval": TRAINING_ONLY, "fit": CLUSTER_ONLY}.get(name[0], frozenset())
    for action in parser._actions:
        if action.dest in unused:
            action.help = argparse.SUPPRESS
        elif action.option_strings and action.option_strings[0].startswith("--no_") and action.const is False:
            # HfArgumentParser gives the opposite of a flag the help of the flag itself.
            action.help = f"The same as --{action.dest} False."
    recipe = words[0] if words and words[0].endswith((".yaml", ".yml")) else None
    words = words if recipe is None else words[1:]
    for word in words:
        if known.get(word.split("=")[0]) in unused:
            raise UsageError(f"{word.split('=')[0]} is for training: leave it out of 'distaff {' '.join(name)}'.")
    words = _positional(command, words)
    words = words if recipe is None else [*recipe_words(recipe, known, without=unused), *words]
    *parsed, left = parser.parse_args_into_dataclasses(args=words, return_remaining_strings=True)
    if left:
        raise UsageError(_unknown(left[0], known, name))
    return parsed[0], parsed[1] if len(classes) > 1 else None


def recipe_words(name: str, known: Collection[str], *, without: Container[str]) -> list[str]:
    """Return the flags of the .yaml file `name` as words of a command line, `without` some of them."""
    import yaml

    path = Path(name)
    if not path.is_file():
        raise UsageError(f"There is no recipe '{path}': check its name.")
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise UsageError(f"'{path}' is not UTF-8 (byte {error.start}): save it as UTF-8.") from error
    except OSError as error:
        raise UsageError(f"'{path}' cannot be read: {error.strerror}.") from error
    except yaml.YAMLError as error:
        raise UsageError(f"'{path}' is not valid YAML: {' '.join(str(error).split())}.") from error
    if not isinstance(values, dict):
        raise UsageError(f"'{path}' must hold flags as 'name: value' lines.")
    values.pop("recipe", None)
    found = []
    for key, value in values.items():
        if key in without:
            continue
        if f"--{key}" not in known:
            raise UsageError(_unknown(f"--{key}", known, (str(path),)))
        # An empty list is what a flag of several words is without them.
        if value is not None and value != []:
            found += [f"--{key}", *map(str, value if isinstance(value, list) else [value])]
    return found


def set_up_process() -> None:
    """Set what belongs to a process and not to a library: quiet logs, and the cache of compiled programs."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr, force=True)
    logging.getLogger("distaff").setLevel(logging.INFO)
    # Orbax warns of every folder that is not its own, and of a save that fails each of its threads and tasks prints a
    # traceback; that failure is raised besides.
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    _drop_echoes()
    # A character that the output's encoding lacks is written as an escape and ends nothing.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    import jax

    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "distaff" / "xla"
    if getattr(jax.config, "jax_compilation_cache_dir", None) is None:
        jax.config.update("jax_compilation_cache_dir", str(cache))


def restart_with_huge_pages() -> None:
    """Start this command again, once, with huge pages for malloc; only before jax is loaded, and only on Linux."""
    if not sys.platform.startswith("linux") or "GLIBC_TUNABLES" in os.environ or "jax" in sys.modules:
        return
    print("distaff: started again with huge pages for malloc (--no_hugepages leaves that out)", file=sys.stderr)
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **HUGE_PAGES})


def _drop_echoes() -> None:
    """Print uncaught exceptions, but not the echoes of what was raised besides.

    What Orbax left running after a failed save finds its loop closed, and TensorBoard's thread its queue; logs that are
    closed on a full disk fail again.
    """

    def echo(kind: type[BaseException] | None, error: BaseException | None) -> bool:
        full = isinstance(error, OSError) and error.errno in UNWRITABLE
        return full or (kind in (RuntimeError, OSError) and str(error) in ("Event loop is closed", "handle is closed"))

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not echo(kind, error):
            sys.__excepthook__(kind, error, trace)

    def report_thread(caught: threading.ExceptHookArgs) -> None:
        if not echo(caught.exc_type, caught.exc_value):
            threading.__excepthook__(caught)

    def report_unraisable(caught: "sys.UnraisableHookArgs") -> None:
        if issubclass(caught.exc_type, KeyboardInterrupt):
            # Python drops what is raised while it collects garbage, where jax has a callback: the wish is told again.
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        elif not echo(caught.exc_type, caught.exc_value):
            sys.__unraisablehook__(caught)

    # One that somebody else has set, a test runner say, stays.
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = report
    if threading.excepthook is threading.__excepthook__:
        threading.excepthook = report_thread
    if sys.unraisablehook is sys.__unraisablehook__:
        sys.unraisablehook = report_unraisable


def _take(words: list[str], word: str) -> bool:
    present = word in words
    while word in words:
        words.remove(word)
    return present


def _positional(command: Command, words: list[str]) -> list[str]:
    """Turn the leading words that are no flags into the flags that they stand for."""
    turned: list[str] = []
    rest = list(words)
    for index, name in enumerate(command.positional):
        last = index == len(command.positional) - 1
        taken: list[str] = []
        while rest and not rest[0].startswith("--") and (last or not taken):
            taken.append(rest.pop(0))
        turned += [f"--{name}", *taken] if taken else []
    return turned + rest


def _unknown(word: str, known: Iterable[str], where: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(word.split("=")[0], known, 1)
    hint = f"did you mean {near[0]}?" if near else f"see 'distaff {' '.join(where)} --help'."
    return f"{' '.join(where)} has no flag {word}: {hint}"


if __name__ == "__main__":
    sys.exit(main())
