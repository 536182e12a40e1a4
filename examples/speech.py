"""Speech to text with a CTC loss: beeps of four pitches, written as the letters a to d.

    python examples/speech.py                              # generated beeps, a tiny Wav2Vec2
    python examples/speech.py --data clips.npz             # arrays `audio_0`, `text_0`, `audio_1`, ...
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from generated import tones
from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

from loopwright import Trainer, TrainingArguments, set_seed

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--data", help="an .npz file of numpy")
parser.add_argument("--output", default="runs/speech")
options = parser.parse_args()


set_seed(0)
clips = np.load(options.data, allow_pickle=False) if options.data else {}
rows = [{"audio": clips[f"audio_{i}"], "text": str(clips[f"text_{i}"])} for i in range(len(clips) // 2)] or tones(600)
letters = ["", *sorted({letter for row in rows for letter in row["text"]})]  # 0 is CTC's blank
samples = [{"audio": row["audio"], "labels": [letters.index(letter) for letter in row["text"]]} for row in rows]


def collate(batch: list[dict]) -> dict[str, torch.Tensor]:
    audio = [torch.as_tensor(row["audio"]) for row in batch]
    labels = [torch.tensor(row["labels"]) for row in batch]
    pad = torch.nn.utils.rnn.pad_sequence
    return {
        "input_values": pad(audio, batch_first=True),
        "attention_mask": pad([torch.ones_like(each, dtype=torch.long) for each in audio], batch_first=True),
        "labels": pad(labels, batch_first=True, padding_value=-100),
    }


def text_of(ids: np.ndarray) -> str:
    """CTC: letters that repeat are one letter, blanks separate."""
    kept = [each for each, before in zip(ids, [0, *ids[:-1]], strict=True) if each > 0 and each != before]
    return "".join(letters[each] for each in kept)


def letters_right(evaluation):
    found = [text_of(each.argmax(-1)) for each in evaluation.predictions]
    wanted = ["".join(letters[i] for i in row if i > 0) for row in evaluation.label_ids]
    return {"exact": sum(a == b for a, b in zip(found, wanted, strict=True)) / len(wanted)}


class ModelForCTC(Wav2Vec2ForCTC):
    """A Wav2Vec2 that answers with blanks after the end of a clip, instead of what it computes from padding."""

    def forward(self, input_values, attention_mask, labels=None):
        outputs = super().forward(input_values, attention_mask, labels=labels)
        ends = self._get_feat_extract_output_lengths(attention_mask.sum(-1))
        padding = torch.arange(outputs.logits.shape[1], device=ends.device) >= ends[:, None]
        outputs.logits[..., 0] = outputs.logits[..., 0].masked_fill(padding, torch.inf)
        return outputs


config = Wav2Vec2Config(
    vocab_size=len(letters), hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
    conv_dim=(32, 32), conv_kernel=(20, 8), conv_stride=(10, 4), num_conv_pos_embeddings=8, mask_time_prob=0.0,
    num_conv_pos_embedding_groups=4, feat_extract_norm="layer", ctc_loss_reduction="mean", layerdrop=0.0,
)  # fmt: skip
args = TrainingArguments(
    output_dir=options.output, num_train_epochs=3, per_device_train_batch_size=8, learning_rate=3e-3,
    eval_strategy="epoch", save_strategy="no", report_to="none", remove_unused_columns=False,
)  # fmt: skip
trainer = Trainer(
    model=ModelForCTC(config), args=args, data_collator=collate, compute_metrics=letters_right,
    train_dataset=samples[60:], eval_dataset=samples[:60],
)  # fmt: skip
trainer.train()
print(f"without a mistake {trainer.evaluate()['eval_exact']:.3f}")
