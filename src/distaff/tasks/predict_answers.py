"""`distaff predict question-answering`: the pipeline on the command line."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from distaff.core.errors import UsageError
from distaff.data.files import expand_files
from distaff.data.questions import read_questions
from distaff.pipelines import pipeline
from distaff.tasks._flags import flag
from distaff.tasks._lines import check_words

# Questions that are answered together, so that windows of like length meet.
_TOGETHER = 64


@dataclass(kw_only=True)
class QuestionAnsweringFlags:
    """Flags of `distaff predict question-answering`."""

    model_name_or_path: str = flag(
        "", "Folder or Hub id of a question answering model; may stand first.", required=True
    )
    question: str | None = flag(None, "The question; may follow the model.")
    context: str | None = flag(None, "The text that answers it; may follow the question.")
    file: str | None = flag(None, "Questions with their contexts instead: .jsonl, .json (SQuAD's too), .csv, .parquet.")
    top_k: int = flag(1, "Answers a question.")
    handle_impossible_answer: bool = flag(False, "There may be no answer, which is the empty one.")
    max_answer_len: int = flag(15, "Tokens an answer at most.")
    max_seq_len: int | None = flag(None, "Tokens a window at most, by default 384 or what the model allows.")
    doc_stride: int | None = flag(None, "Tokens that a window shares with the one before it, by default 128.")
    batch_size: int = flag(8, "Windows that are computed together.")
    mesh: str | None = flag(None, "Devices that share the work: data=2,tensor=4; by default the first alone.")
    json: bool = flag(False, "Print a line of JSON a question.")


def question_answering(flags: QuestionAnsweringFlags) -> int:
    """Print the best answers to each question, in the order of the questions."""
    asked = _asked(flags)
    ask = pipeline(
        "question-answering",
        flags.model_name_or_path,
        batch_size=flags.batch_size,
        mesh=flags.mesh,
        top_k=flags.top_k,
        handle_impossible_answer=flags.handle_impossible_answer,
        max_answer_len=flags.max_answer_len,
        max_seq_len=flags.max_seq_len,
        doc_stride=flags.doc_stride,
    )
    while several := list(islice(asked, _TOGETHER)):
        for each, found in zip(several, ask(several)):
            answers = found if isinstance(found, list) else [found]
            if flags.json:
                kept = {name: value for name, value in each.items() if name != "context"}
                print(json.dumps({**kept, "answers": answers}, ensure_ascii=False))
                continue
            print(each["question"])
            for answer in answers:
                print(f"  {answer['answer']}  {answer['score']:.3f}  ({answer['start']}-{answer['end']})")
    return 0


def _asked(flags: QuestionAnsweringFlags) -> Iterator[dict[str, Any]]:
    if flags.file is not None:
        if flags.question is not None or flags.context is not None:
            raise UsageError("A question and a file of questions are given: leave --file out, or the question.")
        return _of_files(expand_files(flags.file))
    for name in ("question", "context"):
        if getattr(flags, name) is None:
            raise UsageError(f"There is no {name}: write question and context after the model, or give --file.")
    question, context = str(flags.question), str(flags.context)
    check_words((question, context))
    return iter([{"question": question, "context": context}])


def _of_files(paths: list[Any]) -> Iterator[dict[str, Any]]:
    for path in paths:
        for found in read_questions(path, need_answers=False):
            yield {"id": found.id, "question": found.question, "context": found.context}
