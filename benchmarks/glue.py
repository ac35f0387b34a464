"""A step of text classification through the recipe's loss and the real training step, 32 texts of about 27 tokens.

`--variant ours` is what `distaff train glue --pack_texts` runs; `plain` pads each text to 128 tokens and keeps its old
state too. With `--full` each text has 128 tokens, and both pad.
"""

from functools import partial

from transformers import BertConfig

from distaff import FlaxBertForSequenceClassification
from distaff.data.batches import Batches
from distaff.data.labelled import LabelledCollate
from distaff.data.packing import PackedBatches
from distaff.tasks._class_losses import classification_loss
from steps import measure, parser
from workloads import GLUE, GLUE_LENGTH, GLUE_ROWS, glue_texts


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--full", action="store_true")
    flags = options.parse_args()
    texts = glue_texts(full=flags.full)
    if flags.full or flags.variant == "plain":
        batches = Batches(texts, collate=LabelledCollate(0), batch_size=GLUE_ROWS, max_length=GLUE_LENGTH)
    else:
        batches = PackedBatches(texts, pad_id=0, first_position=0, batch_size=GLUE_ROWS, max_length=GLUE_LENGTH)
        # One program: all batches in the rows that the fullest needs.
        batches.row_counts = batches.row_counts[-2:]
    model = FlaxBertForSequenceClassification(BertConfig(**GLUE), dtype=flags.dtype)
    loss_fn = partial(classification_loss, model, None, 0.0)
    measure(model, loss_fn, [batches(step) for step in range(batches.steps_per_epoch)], flags)


if __name__ == "__main__":
    main()
