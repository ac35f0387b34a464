"""`generate` in use: batches, programs, draws, streams, own processors, files of options, and what is refused."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from transformers import GenerationConfig, GPT2Config

from distaff import FlaxGPT2LMHeadModel, FlaxGPT2Model
from distaff.core.errors import CheckpointError, DistaffError, UsageError
from generation_models import new_tokens
from golden import generation_cases as golden

CONFIG = {"vocab_size": 64, "n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 256, "initializer_range": 0.3}


def gpt2(**fields):
    return FlaxGPT2LMHeadModel(GPT2Config(**{**CONFIG, "bos_token_id": 63, "eos_token_id": 63, **fields}))


@pytest.fixture(scope="module")
def model():
    return gpt2()


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(0)
    return [rng.integers(0, 60, length).tolist() for length in (3, 7, 12)]


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"repetition_penalty": 1.5, "no_repeat_ngram_size": 1}])
def test_a_batch_of_mixed_lengths_writes_what_each_row_does_alone(model, prompts, options):
    options = {"max_new_tokens": 10, "pad_token_id": 62, "eos_token_id": [5, 17, 31, 40], **options}
    together = model.generate(prompts, **options)
    for row, prompt in enumerate(prompts):
        alone = model.generate([prompt], **options)
        assert new_tokens(together, row) == new_tokens(alone, 0)
        np.testing.assert_allclose(together.scores[row], alone.scores[0], rtol=0, atol=1e-4)


def test_where_padding_stands_does_not_matter(model, prompts):
    """A mask says what is real: on the right, on the left, in between, or found by the pad token."""
    ids, mask = np.full((3, 15), 62), np.zeros((3, 15), int)
    for row, prompt in enumerate(prompts):
        places = np.arange(len(prompt)) + row
        ids[row, places], mask[row, places] = prompt, 1
    expected = model.generate(prompts, max_new_tokens=6, pad_token_id=62)
    for given in ((ids, mask), (ids, None), (ids, mask.astype(float))):
        found = model.generate(*given, max_new_tokens=6, pad_token_id=62)
        assert [new_tokens(found, row) for row in range(3)] == [new_tokens(expected, row) for row in range(3)]
        np.testing.assert_array_equal(found.sequences[:, :15], ids)


def counted(model, batches, **options):
    """Return how many programs the batches compile, of jax and not only of ours; options may be functions of a batch."""
    compiled = []

    def listen(event, duration, **tags):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    jax.block_until_ready(model.params)
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for number, batch in enumerate(batches):
            given = {name: value(number) if callable(value) else value for name, value in options.items()}
            model.generate(batch, pad_token_id=62, **given)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    return len(compiled)


@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({"max_length": 124}, 8),
        ({"max_new_tokens": 3, "min_length": 40, "forced_bos_token_id": 5}, 8),
        ({"max_new_tokens": lambda number: (1, 3, 60, 64, 65, 128)[number % 6]}, 12),
    ],
    ids=["total", "minimum", "others"],
)
def test_few_programs_for_many_lengths_and_batches(options, most):
    """200 prompts of 1 to 120 tokens in batches of 1 to 8; each size of prompts and new tokens with each of rows."""
    model, rng = gpt2(n_embd=8, n_head=1, eos_token_id=list(range(60))), np.random.default_rng(1)
    left, sizes = 200, []
    while left:
        sizes.append(min(int(rng.integers(1, 9)), left))
        left -= sizes[-1]
    batches = [[rng.integers(0, 60, rng.integers(1, 121)).tolist() for _ in range(size)] for size in sizes]
    assert 4 <= counted(model, batches, **options) <= most
    assert model._compiled.whole._cache_size() <= most


@pytest.mark.parametrize("options", [{}, {"num_beams": 2, "early_stopping": True}], ids=["greedy", "beams"])
def test_finished_rows_cost_nothing(model, prompts, options):
    """The model runs as often as the row that ends last needs it, and not for rows that only fill the batch."""
    calls = []

    def count(tokens, scores, filled):
        jax.debug.callback(lambda: calls.append(1))
        return scores

    ends = [5, 17, 31, 40, 50, 51, 52, 53]
    given = {"max_new_tokens": 60, "eos_token_id": ends, "pad_token_id": 62, **options}
    outputs = model.generate(prompts, logits_processor=[count], **given)
    jax.effects_barrier()
    assert 1 < outputs.lengths.max() < 30
    # A beam that is no answer in the end may have gone on longer.
    assert outputs.lengths.max() <= len(calls) <= (30 if options else outputs.lengths.max())


def chi_square(counts, probabilities):
    drawn = probabilities > 0
    expected = counts.sum() * probabilities[drawn]
    return float(((counts[drawn] - expected) ** 2 / expected).sum())


@pytest.mark.parametrize(
    "options",
    [{"top_k": 0}, {"top_k": 0, "temperature": 0.6}, {"top_k": 12}, {"top_k": 0, "top_p": 0.8}, {"min_p": 0.2}],
)
def test_draws_follow_the_distribution(model, prompts, options):
    """20,000 draws of a next token; the bound is passed by chance once in a million."""
    outputs = [
        model.generate(
            prompts[:1],
            do_sample=True,
            max_new_tokens=1,
            num_return_sequences=1000,
            prng_key=jax.random.key(number),
            **options,
        )
        for number in range(20)
    ]
    counts = np.bincount(np.concatenate([one.sequences[:, -1] for one in outputs]), minlength=64)
    logits = np.asarray(model(np.asarray(prompts[:1])).logits[0, -1], np.float64) / options.get("temperature", 1.0)
    probabilities = np.exp(logits - logits.max())
    order = np.argsort(-probabilities)
    kept = np.ones(64, bool)
    if options.get("top_k", 50):
        kept[order[options.get("top_k", 50) :]] = False
    if "top_p" in options:
        share = probabilities[order] / probabilities.sum()
        kept[order[np.cumsum(share) - share >= options["top_p"]]] = False
    if "min_p" in options:
        kept &= probabilities >= options["min_p"] * probabilities.max()
    probabilities = np.where(kept, probabilities, 0) / probabilities[kept].sum()
    assert counts.sum() == 20_000
    assert counts[~kept].sum() == 0
    freedom = kept.sum() - 1
    assert chi_square(counts, probabilities) < freedom + 6 * np.sqrt(2 * freedom) + 12


def test_keys_and_seeds(model, prompts):
    options = {"do_sample": True, "max_new_tokens": 12}
    one, same, other = (model.generate(prompts, prng_key=jax.random.key(seed), **options) for seed in (1, 1, 2))
    np.testing.assert_array_equal(one.sequences, same.sequences)
    assert not np.array_equal(one.sequences, other.sequences)
    np.testing.assert_array_equal(
        one.sequences, model.generate(prompts, prng_key=jax.random.PRNGKey(1), **options).sequences
    )
    assert one.seed is None
    fresh, next_fresh = model.generate(prompts, **options), model.generate(prompts, **options)
    assert fresh.seed != next_fresh.seed
    again = model.generate(prompts, prng_key=jax.random.key(fresh.seed), **options)
    np.testing.assert_array_equal(fresh.sequences, again.sequences)


@pytest.mark.parametrize("limit", [{"top_k": 1}, {"top_p": 1e-6}, {"temperature": 1e-4}])
def test_sampling_ends_up_greedy(model, prompts, limit):
    greedy = model.generate(prompts, max_new_tokens=12)
    drawn = model.generate(prompts, max_new_tokens=12, do_sample=True, **limit)
    np.testing.assert_array_equal(greedy.sequences, drawn.sequences)


def test_scores_of_each_token(model, prompts):
    outputs = model.generate(prompts[:1], max_new_tokens=5, output_scores=True)
    assert outputs.token_scores.shape == (1, 5, 64)
    whole = model(outputs.sequences[:, :-1]).logits[:, -5:]
    np.testing.assert_allclose(outputs.token_scores, whole, rtol=0, atol=1e-4)
    logs = jax.nn.log_softmax(whole, axis=-1)
    total = jnp.take_along_axis(logs, outputs.sequences[:, -5:, None], axis=-1).sum()
    np.testing.assert_allclose(outputs.scores[0], total, rtol=0, atol=1e-4)
    drawn = model.generate(prompts, max_new_tokens=3, do_sample=True, top_k=4, output_scores=True)
    assert (np.isfinite(drawn.token_scores).sum(axis=-1) == 4).all()
    beams = model.generate(prompts, max_new_tokens=3, num_beams=2, output_scores=True)
    assert beams.token_scores.shape == (6, 3, 64)


def test_returned_sequences(model, prompts):
    outputs = model.generate(prompts, max_new_tokens=6, do_sample=True, num_return_sequences=3)
    assert outputs.sequences.shape == (9, 18)
    np.testing.assert_array_equal(outputs.sequences[3, :12], outputs.sequences[5, :12])
    beams = model.generate(prompts, max_new_tokens=6, num_beams=4, num_return_sequences=2)
    assert (beams.scores[0::2] >= beams.scores[1::2]).all()
    sampled = model.generate(prompts, max_new_tokens=6, num_beams=3, do_sample=True, prng_key=jax.random.key(0))
    same = model.generate(prompts, max_new_tokens=6, num_beams=3, do_sample=True, prng_key=jax.random.key(0))
    np.testing.assert_array_equal(sampled.sequences, same.sequences)


def test_streamed_tokens_are_those_of_the_result(model, prompts):
    seen = []
    options = {"max_new_tokens": 8, "eos_token_id": [5, 17, 31, 40], "pad_token_id": 62}
    outputs = model.generate(prompts, streamer=seen.append, **options)
    whole = model.generate(prompts, **options)
    np.testing.assert_array_equal(outputs.sequences, whole.sequences)
    np.testing.assert_array_equal(outputs.lengths, whole.lengths)
    columns = np.stack(seen, axis=1)
    for row in range(3):
        assert [token for token in columns[row] if token >= 0] == new_tokens(whole, row)


def test_own_processors(model, prompts):
    def only_seven(tokens, scores, filled):
        return jnp.where(jnp.arange(scores.shape[-1])[None] == 7, scores, -jnp.inf)

    def after_itself(tokens, scores, filled):
        last = jnp.take(tokens, filled - 1, axis=1)[:, None]
        return jnp.where(jnp.arange(scores.shape[-1])[None] == (last + 1) % 60, 0.0, -jnp.inf)

    seven = model.generate(prompts, max_new_tokens=3, logits_processor=[only_seven])
    assert (seven.sequences[:, -3:] == 7).all()
    counting = model.generate([[9]], max_new_tokens=4, logits_processor=[after_itself])
    assert counting.sequences.tolist() == [[9, 10, 11, 12, 13]]


def test_parameters_of_a_call(model, prompts):
    other = gpt2(n_head=2)
    zeros = jax.tree.map(jnp.zeros_like, model.params)
    assert model.generate(prompts, params=zeros, max_new_tokens=2).sequences[0, -1] == 0
    assert other.generate(prompts, max_new_tokens=2).sequences.shape == (3, 14)


def test_a_model_that_has_generated_can_be_pickled(model, prompts):
    expected = model.generate(prompts, max_new_tokens=2, pad_token_id=62)
    found = pickle.loads(pickle.dumps(model)).generate(prompts, max_new_tokens=2, pad_token_id=62)
    np.testing.assert_array_equal(found.sequences, expected.sequences)


def test_options_of_the_folder(tmp_path, model, prompts):
    model.save_pretrained(tmp_path)
    GenerationConfig(max_new_tokens=4, num_beams=2, num_return_sequences=2, eos_token_id=5).save_pretrained(tmp_path)
    loaded = FlaxGPT2LMHeadModel.from_pretrained(tmp_path)
    assert loaded.generate(prompts).sequences.shape == (6, 16)
    assert loaded.generate(prompts, num_return_sequences=1).sequences.shape == (3, 16)
    config = GenerationConfig(max_new_tokens=3, num_beams=1, num_return_sequences=1)
    assert loaded.generate(prompts, generation_config=config).sequences.shape == (3, 15)
    assert loaded.generate(prompts, generation_config={"max_new_tokens": 2}).sequences.shape == (6, 14)
    loaded.save_pretrained(tmp_path / "again")
    again = FlaxGPT2LMHeadModel.from_pretrained(tmp_path / "again")
    assert again.generation_config == loaded.generation_config
    (tmp_path / "generation_config.json").write_text('{"max_new_tokens": 3, "penalty_alpha": 0.6}')
    with pytest.raises(DistaffError, match="penalty_alpha"):
        FlaxGPT2LMHeadModel.from_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        FlaxGPT2LMHeadModel.from_pretrained(tmp_path)


WRONG = {
    "unknown": ({"max_new_token": 3}, "max_new_tokens"),
    "not supported": ({"penalty_alpha": 0.5}, "penalty_alpha"),
    "groups": ({"num_beam_groups": 2}, "num_beam_groups"),
    "more sequences than beams": ({"num_beams": 2, "num_return_sequences": 3}, "num_return_sequences"),
    "greedy finds one": ({"num_return_sequences": 2}, "do_sample"),
    "idle temperature": ({"temperature": 0.5}, "do_sample"),
    "idle length penalty": ({"length_penalty": 2.0}, "num_beams"),
    "cold": ({"do_sample": True, "temperature": 0.0}, "temperature"),
    "top_p": ({"do_sample": True, "top_p": 1.5}, "top_p"),
    "no tokens": ({"max_new_tokens": 0}, "max_new_tokens"),
    "short": ({"max_length": 2}, "max_length"),
    "early": ({"num_beams": 2, "early_stopping": "soon"}, "early_stopping"),
    "pad beyond": ({"pad_token_id": 64}, "pad_token_id=eos_token_id"),
    "eos beyond": ({"eos_token_id": 70}, "eos_token_id"),
    "bad word beyond": ({"bad_words_ids": [[70]]}, "bad_words_ids"),
    "empty bad word": ({"bad_words_ids": [[]]}, "bad_words_ids"),
    "no tokenizer": ({"stop_strings": "x"}, "tokenizer"),
    "no tokenizer with beams": ({"stop_strings": "x", "num_beams": 2}, "tokenizer"),
    "empty string": ({"stop_strings": ["a", ""], "tokenizer": golden.tokenizer("gpt2")}, "empty string"),
    "no such text": ({"stop_strings": "aXb", "tokenizer": golden.tokenizer("gpt2")}, "spell none"),
    "stream of beams": ({"streamer": print, "num_beams": 2}, "streamer cannot follow beams"),
    "no encoder": ({"decoder_input_ids": [[1]]}, "decoder_input_ids|input_ids"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_options_are_refused(model, prompts, name):
    options, message = WRONG[name]
    with pytest.raises(UsageError, match=message) as caught:
        model.generate(prompts, **options)
    assert str(caught.value).count("\n") == 0


def test_wrong_prompts_are_refused(model):
    long = np.ones((1, 256), int)
    for ids, mask, message in (
        (np.zeros((2, 0), int), None, "at least one token"),
        ([[1, 2], [3, 4]], [[1, 1], [0, 0]], "Row 1"),
        ([[1, 64]], None, "vocab_size is 64"),
        ([[1, -1]], None, "-1"),
        ([1, 2], None, "batch, length"),
        ([[1.0, 2.0]], None, "whole numbers"),
        ([[1, 2]], [[1]], "attention_mask"),
        (long, None, "256 positions"),
        (np.ones((1, 300), int), None, "256 positions"),
        (np.ones((1, 250), int), None, "at most 6"),
    ):
        with pytest.raises(DistaffError, match=message):
            model.generate(ids, mask, max_new_tokens=7)
    assert model.generate(np.ones((1, 250), int)).lengths.tolist() == [6]
    with pytest.raises(UsageError, match="head"):
        FlaxGPT2Model(GPT2Config(**CONFIG)).generate([[1]])
