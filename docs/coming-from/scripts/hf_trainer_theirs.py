"""Digits that follow from the two before, with transformers.Trainer.

torchrun --nproc-per-node 2 hf_trainer_theirs.py
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset
from transformers import EvalPrediction, Trainer, TrainingArguments, set_seed


class Digits(Dataset[dict[str, torch.Tensor]]):
    """Rows of 4 to 11 digits: two at random; each that follows is the larger of two, plus 1."""

    def __init__(self, rows: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.starts = torch.randint(10, (rows, 2), generator=generator).tolist()
        self.lengths = torch.randint(4, 12, (rows,), generator=generator).tolist()

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        digits = list(self.starts[row])
        while len(digits) <= self.lengths[row]:
            digits.append((max(digits[-2:]) + 1) % 10)
        return {"input_ids": torch.tensor(digits[:-1]), "labels": torch.tensor(digits[1:])}


def pad(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    def padded(name: str, value: int) -> torch.Tensor:
        return nn.utils.rnn.pad_sequence([row[name] for row in rows], True, value)

    return {"input_ids": padded("input_ids", 0), "labels": padded("labels", -100)}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.digits, self.places = nn.Embedding(10, 32), nn.Embedding(12, 32)
        layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.logits = nn.Linear(32, 10)

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor, **loss_kwargs: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        length = input_ids.shape[1]
        states = self.digits(input_ids) + self.places.weight[:length]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=states.device)
        logits = self.logits(self.layers(states, mask, is_causal=True))
        loss = F.cross_entropy(logits.transpose(1, 2), labels, reduction="sum")
        # Tokens over all processes and over what is accumulated
        return {"loss": loss / loss_kwargs["num_items_in_batch"], "logits": logits}


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    labels = prediction.label_ids
    right = prediction.predictions.argmax(-1) == labels
    return {"accuracy": float(right[labels != -100].mean())}


if __name__ == "__main__":
    set_seed(0)
    trainer = Trainer(
        Net(),
        TrainingArguments(
            "digits",
            num_train_epochs=4,
            per_device_train_batch_size=16,
            per_device_eval_batch_size=16,
            gradient_accumulation_steps=2,
            learning_rate=3e-3,
            lr_scheduler_type="linear",
            warmup_steps=20,
            max_grad_norm=1.0,
            weight_decay=0.01,
            eval_strategy="epoch",
            save_strategy="epoch",
            load_best_model_at_end=True,
            metric_for_best_model="accuracy",
            report_to="none",
            use_cpu=not torch.cuda.is_available(),
        ),
        data_collator=pad,
        train_dataset=Digits(2000, seed=0),
        eval_dataset=Digits(501, seed=1),
        compute_metrics=accuracy,
    )
    trainer.train()
