"""T5's pretraining, span corruption: the encoder reads text with holes, the decoder writes what was in them.

    distaff tokenizer train --train_file train.txt --vocab_size 2000 --extra_ids 100 --output_dir tokens
    distaff config create --model_type t5 --tokenizer_name tokens --output_dir small --config_overrides \\
      d_model=192,d_kv=48,d_ff=512,num_layers=3,num_decoder_layers=3,num_heads=4,feed_forward_proj=gated-gelu
    distaff train t5-mlm --output_dir t5-play --config_name small --config_overrides dropout_rate=0.0 \\
        --tokenizer_name tokens --train_file train.txt --validation_file validation.txt --max_seq_length 128 \\
        --per_device_train_batch_size 16 --max_steps 1500 --adafactor --learning_rate 5e-3 --warmup_steps 200 \\
        --lr_scheduler_type inverse_sqrt

On tinyshakespeare (1.0 million characters) this reaches 4.24 nats a token of the validation targets, in 10 minutes on
two cores; the frequencies of tokens in the training targets alone give 5.55.
"""

import logging
from dataclasses import dataclass
from functools import partial

from distaff.core.errors import UsageError
from distaff.data.span_corruption import SpanCorruption, check_sentinels, sentinel_ids, span_lengths
from distaff.models.auto import FlaxAutoModelForSeq2SeqLM
from distaff.tasks import _denoise as denoise
from distaff.tasks import _recipe as recipes
from distaff.tasks import _text as text
from distaff.tasks._flags import flag
from distaff.tasks._text_data import Rows

logger = logging.getLogger("distaff")


@dataclass(kw_only=True)
class T5MlmFlags(denoise.DenoiseFlags):
    """Flags of `distaff train t5-mlm` and `distaff eval t5-mlm`."""

    mlm_probability: float = flag(0.15, "Share of the tokens that are cut out.")
    mean_noise_span_length: float = flag(3.0, "Mean length of the spans that are cut out, in tokens.")


def t5_rows(flags: T5MlmFlags, tokenizer, model) -> Rows:
    """Return how texts become rows that fill an encoder of --max_seq_length tokens."""
    if model.config.model_type not in ("t5", "mt5"):
        raise UsageError(f"t5-mlm trains T5 models, not {model.config.model_type}: take 'distaff train bart-dlm'.")
    inputs = text.block_size(
        flags.max_seq_length,
        tokenizer,
        model.longest_input,
        flag_name="--max_seq_length",
        most=recipes.LONGEST_BY_DEFAULT,
    )
    lengths = span_lengths(inputs, density=flags.mlm_probability, mean_span=flags.mean_noise_span_length)
    sentinels = sentinel_ids(tokenizer)
    check_sentinels(len(sentinels), lengths)
    logger.info("%s", lengths.explained())
    pad = tokenizer.pad_token_id
    collate = SpanCorruption(
        lengths, sentinels, tokenizer.eos_token_id, 0 if pad is None else pad, denoise.start_token(model), flags.seed
    )
    return Rows(
        block=lengths.raw,
        collate=collate,
        loss_fn=partial(denoise.denoise_loss, model.module),
        tokens=denoise.count_tokens,
        advice=f"lower --max_seq_length, for which rows of {lengths.raw} tokens are cut",
    )


RECIPE = text.TextRecipe(
    name="t5-mlm", task="text2text-generation", model=partial(text.model_of, FlaxAutoModelForSeq2SeqLM), rows=t5_rows
)
plan = partial(text.plan, RECIPE)
train = partial(denoise.train, RECIPE)
evaluate_only = partial(text.evaluate_only, RECIPE)
