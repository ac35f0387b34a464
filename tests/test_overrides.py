"""`--config_overrides`, and what a config from a model type takes from its tokenizer."""

import pytest
from transformers import BartConfig, BertConfig, GPT2Config, GPTNeoConfig, T5Config

from distaff.core.errors import UsageError
from distaff.tasks._overrides import override
from distaff.tasks._recipe import fit_config_to_tokenizer
from text_cases import tokenizer_of


def overridden(config, text):
    override(config, text)
    return config


@pytest.mark.parametrize(
    ("config", "text", "wanted"),
    [
        (T5Config(), "feed_forward_proj=gated-gelu", {"is_gated_act": True, "dense_act_fn": "gelu_new"}),
        (T5Config(feed_forward_proj="gated-silu"), "feed_forward_proj=relu", {"is_gated_act": False}),
        (T5Config(), "num_layers=2", {"num_decoder_layers": 2}),
        (T5Config(), "num_hidden_layers=2", {"num_layers": 2, "num_decoder_layers": 2}),
        (T5Config(), "num_layers=2,num_decoder_layers=3", {"num_layers": 2, "num_decoder_layers": 3}),
        (T5Config(num_decoder_layers=4), "num_layers=2", {"num_layers": 2, "num_decoder_layers": 4}),
        (T5Config(), "tie_word_embeddings=false", {"tie_word_embeddings": False, "scale_decoder_outputs": False}),
        (
            GPTNeoConfig(),
            "num_layers=3,attention_types=[[[global,local,local],1]],hidden_size=32",
            {"attention_layers": ["global", "local", "local"], "hidden_size": 32},
        ),
        (GPT2Config(), "n_inner=64,attn_pdrop=0,scale_attn_weights=No", {"n_inner": 64, "scale_attn_weights": False}),
        (BertConfig(), "hidden_size=30, num_attention_heads=3", {"hidden_size": 30, "num_attention_heads": 3}),
        (BartConfig(), "encoder_layers=1,d_model=16", {"encoder_layers": 1, "d_model": 16}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_a_class_derives_follows(config, text, wanted):
    found = overridden(config, text)
    assert {name: getattr(found, name) for name in wanted} == wanted
    # The file says the same to whoever opens it.
    again = type(found).from_dict(found.to_dict())
    assert {name: getattr(again, name) for name in wanted if name != "tie_word_embeddings"} == {
        name: value for name, value in wanted.items() if name != "tie_word_embeddings"
    }


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("hidden_sice=3", "'hidden_sice' is no field"),
        ("n_embd", "'n_embd' is not name=value"),
        ("n_embd=x", "n_embd is a whole number, not x"),
        ("attn_pdrop=x", "attn_pdrop is a number, not x"),
        ("scale_attn_weights=perhaps", "scale_attn_weights is true or false, not perhaps"),
    ],
)
def test_what_does_not_fit_is_refused(text, words):
    with pytest.raises(UsageError, match=words):
        override(GPT2Config(), text)


@pytest.mark.parametrize(("config", "start"), [(T5Config(), "pad_token_id"), (BartConfig(), "eos_token_id")])
def test_a_new_decoder_starts_as_its_family_does(config, start):
    tokenizer = tokenizer_of("roberta")
    fit_config_to_tokenizer(config, tokenizer)
    assert config.decoder_start_token_id == getattr(tokenizer, start)
    assert getattr(config, "forced_eos_token_id", None) in (None, tokenizer.eos_token_id)
