"""`generate` of each family: rows alone and in a batch, and what is refused."""

from itertools import pairwise

import numpy as np
import pytest
from transformers import MBartConfig

from distaff import FlaxMBartForConditionalGeneration
from distaff.core.errors import DistaffError
from generation_models import GoldenModels, new_tokens
from golden import generation_cases as golden

BEAMS = {"num_beams": 3, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return GoldenModels(tmp_path_factory.mktemp("generation"))


def options_of(name):
    language = golden.LANGUAGE if name == "mbart" else {}
    return {"max_new_tokens": 12, "eos_token_id": golden.ENDS, **golden.always(name), **language}


@pytest.mark.parametrize("options", [{}, BEAMS], ids=["greedy", "beams"])
@pytest.mark.parametrize("name", golden.MODELS)
def test_a_batch_of_mixed_lengths_writes_what_each_row_does_alone(models, name, options):
    """Cases T26 and T28: 3, 7 and 12 tokens; decoders' prompts padded on the left, sources on the right."""
    model, (ids, mask) = models(name), golden.prompts(name)
    given = {**options_of(name), **options}
    together = model.generate(ids, mask, **given)
    for row in range(3):
        alone = model.generate(ids[row : row + 1, mask[row] == 1], **given)
        assert new_tokens(together, row) == new_tokens(alone, 0)
        np.testing.assert_allclose(together.scores[row], alone.scores[0], rtol=0, atol=1e-4)


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_no_bigram_comes_twice(models, options):
    """Case T36, with a model that repeats itself otherwise."""
    ids, mask = golden.prompts("gpt2")
    given = {"max_new_tokens": 20, "pad_token_id": golden.PAD, **options}

    def repeated(**more):
        outputs = models("gpt2").generate(ids, mask, **given, **more)
        rows = [outputs.sequences[row][mask[row].argmax() :].tolist() for row in range(3)]
        return [len(row) - 1 - len(set(pairwise(row))) for row in rows]

    assert repeated(no_repeat_ngram_size=2) == [0, 0, 0]
    assert all(repeated(no_repeat_ngram_size=0))


ENDLESS = ("no room", "long")
WRONG = {
    "empty": (np.zeros((2, 0), int), None, {}, "at least one token"),
    "padding alone": ([[5, 6], [7, 8]], [[1, 1], [0, 0]], {}, "Row 1 of input_ids holds padding alone"),
    "beyond the vocabulary": ([[5, 64]], None, {}, r"input_ids\[0, 1\] is 64, and vocab_size is 64"),
    "negative": ([[5, -100]], None, {}, "is -100, and vocab_size is 64"),
    "pad beyond": ([[5, 6]], None, {"pad_token_id": 64}, "pad_token_id=eos_token_id"),
    "more than beams": ([[5]], None, {"num_beams": 2, "num_return_sequences": 3}, "num_return_sequences is 3"),
    "no room": ([[5, 6]], None, {"max_new_tokens": 99}, "99 new ones do not fit the model's 64 positions"),
    "long": (np.full((1, 65), 5), None, {}, "65 tokens and the model 64 positions"),
}


# T5 has no table of positions that could be too short.
CALLS = [(name, wrong) for name in golden.MODELS for wrong in WRONG if not (name[:2] == "t5" and wrong in ENDLESS)]


@pytest.mark.parametrize(("name", "wrong"), CALLS)
def test_wrong_calls_are_one_sentence(models, name, wrong):
    ids, mask, options, message = WRONG[wrong]
    with pytest.raises(DistaffError, match=message) as caught:
        models(name).generate(ids, mask, **{**options_of(name), **options})
    assert "\n" not in str(caught.value)
    assert str(caught.value)[-1] in ".?"


@pytest.mark.parametrize("name", golden.DECODERS)
def test_a_prompt_that_fills_the_model_is_refused(models, name):
    with pytest.raises(DistaffError, match="which leaves none to generate"):
        models(name).generate(np.full((1, 64), 5), **golden.always(name))


def test_a_model_of_many_languages_needs_to_know_which():
    """Case T41: no start token, no language; and with one it is the first token."""
    sizes = {key: value for key, value in golden.BART.items() if key != "vocab_size"}
    config = MBartConfig(**sizes, vocab_size=64, decoder_start_token_id=None)
    model = FlaxMBartForConditionalGeneration(config)
    with pytest.raises(DistaffError, match="language's token as forced_bos_token_id"):
        model.generate([[5, 6]], max_new_tokens=2)
    labels = np.array([[40, 5, 6, 2, 1, 1]])
    np.testing.assert_array_equal(model.prepare_decoder_input_ids_from_labels(labels), [[2, 40, 5, 6, 2, 1]])
    outputs = model.generate([[5, 6]], max_new_tokens=2, decoder_start_token_id=2, forced_bos_token_id=40)
    assert outputs.sequences[0, :2].tolist() == [2, 40]
