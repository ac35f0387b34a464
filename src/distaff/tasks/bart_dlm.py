"""BART's pretraining: the encoder reads text with masked spans and moved sentences, the decoder writes it."""

from dataclasses import dataclass
from functools import partial

from distaff.core.errors import UsageError
from distaff.data.denoising import Denoising, sentence_ends
from distaff.models.auto import FlaxAutoModelForSeq2SeqLM
from distaff.tasks import _denoise as denoise
from distaff.tasks import _recipe as recipes
from distaff.tasks import _text as text
from distaff.tasks._flags import flag
from distaff.tasks._text_data import Rows


@dataclass(kw_only=True)
class BartDlmFlags(denoise.DenoiseFlags):
    """Flags of `distaff train bart-dlm` and `distaff eval bart-dlm`."""

    mlm_probability: float = flag(0.3, "Share of the tokens that are masked.")
    poisson_lambda: float = flag(3.0, "Mean length of the masked spans, which is Poisson distributed.")
    permute_sentence_ratio: float = flag(1.0, "Share of the sentences that change places.")


def bart_rows(flags: BartDlmFlags, tokenizer, model) -> Rows:
    """Return how texts become rows of --max_seq_length tokens, the special ones around them included."""
    if model.config.model_type not in ("bart", "mbart"):
        raise UsageError(f"bart-dlm trains BART models, not {model.config.model_type}: take 'distaff train t5-mlm'.")
    for name in ("mask_token", "bos_token", "pad_token"):
        if getattr(tokenizer, name) is None:
            raise UsageError(f"The tokenizer '{tokenizer.name_or_path}' has no {name}, which denoising needs.")
    length = text.block_size(
        flags.max_seq_length,
        tokenizer,
        model.longest_input,
        flag_name="--max_seq_length",
        most=recipes.LONGEST_BY_DEFAULT,
    )
    collate = Denoising(
        length=length,
        mask_id=tokenizer.mask_token_id,
        bos_id=tokenizer.bos_token_id,
        eos_id=tokenizer.eos_token_id,
        pad_id=tokenizer.pad_token_id,
        start_id=denoise.start_token(model),
        sentence_ends=sentence_ends(tokenizer),
        mask_ratio=flags.mlm_probability,
        poisson_lambda=flags.poisson_lambda,
        permute_ratio=flags.permute_sentence_ratio,
        seed=flags.seed,
    )
    return Rows(
        block=length - 2,
        collate=collate,
        loss_fn=partial(denoise.denoise_loss, model.module),
        tokens=denoise.count_tokens,
        advice="lower --max_seq_length to two more than {total}",
    )


RECIPE = text.TextRecipe(
    name="bart-dlm",
    task="text2text-generation",
    model=partial(text.model_of, FlaxAutoModelForSeq2SeqLM),
    rows=bart_rows,
)
plan = partial(text.plan, RECIPE)
train = partial(denoise.train, RECIPE)
evaluate_only = partial(text.evaluate_only, RECIPE)
