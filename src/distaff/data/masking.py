"""Masked language modelling: which tokens are hidden, by what, and which positions are scored."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from distaff.core.errors import UsageError
from distaff.data.columns import pad_rows
from distaff.data.draws import row_keys, uniforms

# Of the chosen tokens 80 % become the mask, 10 % a random word and 10 % stay (BERT, arXiv:1810.04805, section 3.1).
_TO_MASK, _TO_MASK_OR_RANDOM = 0.8, 0.9


def masked_count(max_length: int, *, probability: float = 0.15) -> int:
    """Return how many positions a row has room for: 1.25 times the expected number, and at least one."""
    _check_probability(probability)
    # Rounded first, because 1.25 * 0.15 * 16 is a hair above 3.
    return min(max_length, max(1, math.ceil(round(1.25 * probability * max_length, 6))))


def _check_probability(probability: float) -> None:
    if not 0 < probability <= 1:
        raise UsageError(f"The probability of masking is {probability}: it must be above 0 and at most 1.")


def special_ids(tokenizer: Any) -> tuple[int, ...]:
    """Return the ids that are never hidden and never a random word: named, added as special, or put around a text."""
    added = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    around = tokenizer("", return_attention_mask=False, return_token_type_ids=False)["input_ids"]
    return tuple(sorted({*tokenizer.all_special_ids, *added, *around}))


@dataclass(frozen=True)
class MlmMasking:
    """Hides tokens of a batch; a pure function of the ids and the rows' keys.

    `count` positions a row are scored. A row that drew more keeps the first, and its other tokens stay as they were:
    nothing is hidden that is not scored. With `whole_word` a word is hidden with all its tokens or not at all; the
    numbers 80/10/10 then hold for each token by itself.
    """

    mask_token_id: int
    vocab_size: int
    special_ids: tuple[int, ...]
    count: int
    probability: float = 0.15
    whole_word: bool = False

    def __post_init__(self):
        _check_probability(self.probability)
        if self.count < 1:
            raise UsageError(f"{self.count} masked positions a row leave nothing to learn: at least 1 is needed.")
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise UsageError(
                f"The mask token has id {self.mask_token_id}, outside a vocabulary of {self.vocab_size}: "
                "take the tokenizer that belongs to the model."
            )
        if self._words.size == 0:
            raise UsageError(f"All {self.vocab_size} ids of the vocabulary are special: there is no word to predict.")

    @classmethod
    def from_tokenizer(
        cls, tokenizer: Any, *, max_length: int, probability: float = 0.15, whole_word: bool = False
    ) -> "MlmMasking":
        """Return the masking for rows of at most `max_length` tokens of `tokenizer`."""
        if tokenizer.mask_token_id is None:
            raise UsageError(
                f"The tokenizer '{tokenizer.name_or_path}' has no mask token, which masked language modelling needs: "
                "choose another, or train one with 'distaff tokenizer train'."
            )
        count = masked_count(max_length, probability=probability)
        ids = special_ids(tokenizer)
        return cls(tokenizer.mask_token_id, len(tokenizer), ids, count, probability, whole_word)

    @cached_property
    def _is_special(self) -> np.ndarray:
        table = np.zeros(self.vocab_size, bool)
        table[[index for index in self.special_ids if index < self.vocab_size]] = True
        return table

    @cached_property
    def _words(self) -> np.ndarray:
        return np.flatnonzero(~self._is_special).astype(np.int32)

    def __call__(
        self,
        input_ids: np.ndarray,
        *,
        keys: np.ndarray,
        special_mask: np.ndarray | None = None,
        word_start: np.ndarray | None = None,
    ) -> dict[str, np.ndarray]:
        """Return the masked batch.

        Args:
            input_ids: [batch, length], each below the vocabulary's size.
            keys: [batch] of `row_keys`.
            special_mask: [batch, length], true at further positions that must stay, such as padding.
            word_start: [batch, length], true at the first token of each word; needed for `whole_word`.

        Returns:
            `input_ids` [batch, length] int32, `masked_positions` and `masked_labels` [batch, count] int32 and
            `masked_weights` [batch, count] float32; unused slots are 0 in all three.
        """
        maskable = ~self._is_special[input_ids]  # [batch, length]
        if special_mask is not None:
            maskable &= ~special_mask.astype(bool)
        chosen = self._choose(maskable, keys, word_start)

        fate = uniforms(keys, input_ids.shape[1], draw=1)
        random = self._words[(uniforms(keys, input_ids.shape[1], draw=2) * self._words.size).astype(np.int64)]
        replacement = np.where(
            fate < _TO_MASK, self.mask_token_id, np.where(fate < _TO_MASK_OR_RANDOM, random, input_ids)
        )

        rows, columns = np.nonzero(chosen)
        slots = (np.cumsum(chosen, axis=1) - 1)[rows, columns]
        scored: dict[str, np.ndarray] = {
            name: np.zeros((len(input_ids), self.count), dtype)
            for name, dtype in (("positions", np.int32), ("labels", np.int32), ("weights", np.float32))
        }
        scored["positions"][rows, slots] = columns
        scored["labels"][rows, slots] = input_ids[rows, columns]
        scored["weights"][rows, slots] = 1.0
        masked = {f"masked_{name}": values for name, values in scored.items()}
        return {"input_ids": np.where(chosen, replacement, input_ids).astype(np.int32), **masked}

    def _choose(self, maskable: np.ndarray, keys: np.ndarray, word_start: np.ndarray | None) -> np.ndarray:
        """Return which positions [batch, length] are hidden: drawn by chance, at most `count` a row, the first ones."""
        draws = uniforms(keys, maskable.shape[1], draw=0)
        if not self.whole_word:
            chosen = maskable & (draws < self.probability)
            return chosen & (np.cumsum(chosen, axis=1) <= self.count)
        if word_start is None:
            raise UsageError("Whole-word masking needs rows with 'word_start': tokenise with whole_word=True.")
        word = np.cumsum(word_start, axis=1) - 1  # [batch, length]: the number of each token's word
        word = np.maximum(word, 0)  # a row may begin inside a word
        chosen = maskable & (np.take_along_axis(draws, word, axis=1) < self.probability)
        rows, columns = np.nonzero(chosen & (np.cumsum(chosen, axis=1) > self.count))
        cut = np.zeros_like(chosen)
        cut[rows, word[rows, columns]] = True  # words with a token too many
        return chosen & ~np.take_along_axis(cut, word, axis=1)


@dataclass(frozen=True)
class MlmCollate:
    """Makes the batch of masked language modelling out of tokenised rows.

    The masks are a function of (seed, epoch, index): an evaluation always passes the same epoch, so its masks are fixed
    and do not depend on the batch size.
    """

    masking: MlmMasking
    pad_id: int
    seed: int = 0
    token_types: bool = False

    @classmethod
    def from_tokenizer(cls, tokenizer: Any, *, masking: MlmMasking, seed: int = 0) -> "MlmCollate":
        """Return the collation for rows of `tokenizer`; `token_type_ids` only where its models take them."""
        pad_id = 0 if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        return cls(masking, pad_id, seed, "token_type_ids" in tokenizer.model_input_names)

    def __call__(
        self, rows: Any, *, indices: np.ndarray, weights: np.ndarray, epoch: int, length: int | None
    ) -> dict[str, np.ndarray]:
        """Return `attention_mask` (and `token_type_ids`) [batch, length] int32 and what `MlmMasking` returns."""
        input_ids, attention_mask = pad_rows(rows["input_ids"], length=length, fill=self.pad_id)
        starts = pad_rows(rows["word_start"], length=length, fill=1)[0] if self.masking.whole_word else None
        keys = row_keys(self.seed, epoch, indices)
        batch = self.masking(input_ids, keys=keys, special_mask=attention_mask == 0, word_start=starts)
        batch["masked_weights"] *= weights[:, None]
        batch["attention_mask"] = attention_mask
        if self.token_types:
            batch["token_type_ids"] = np.zeros_like(attention_mask)
        return batch
