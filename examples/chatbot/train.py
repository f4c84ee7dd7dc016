"""The chatbot on every device: the loop of single.py by a quorate.Trainer.

    python examples/chatbot/train.py --data insuranceqa
    quorate run --devices cpu --workers 1 examples/chatbot/train.py --data insuranceqa
    quorate run --devices cuda:0,cuda:1 examples/chatbot/train.py --data pairs.tsv --language en

It ends with exit code 1 if the answers to questions that were never seen are not predicted as well
as target.py says.
"""

from __future__ import annotations

import sys

import bleu
import torch
from buckets import ByLength
from data import collate, load
from loss import Loss
from model import Seq2Seq
from options import network, parse
from samples import Samples
from target import reached

import quorate


def main() -> None:
    """Train, evaluate, and say where the results are."""
    options = parse(__doc__.splitlines()[0], "runs/chatbot")
    data = load(
        options.data,
        options.language,
        vocabulary_size=options.vocabulary,
        least_answer=options.least_answer,
        skip_bad=options.skip_bad,
    )
    shape = network(options, len(data.vocabulary))

    def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        updates = options.steps or options.epochs * trainer.updates_per_epoch(data.train)
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, updates)

    trainer = quorate.Trainer(
        lambda: Seq2Seq(**shape),
        Loss(data.vocabulary, data.language),
        totals={"bleu": bleu.finish},
        optimizer=quorate.Optimize(
            lambda params: torch.optim.Adam(params, lr=options.lr), schedule=schedule, clip_norm=5.0
        ),
        batch_size=options.batch_size,
        shards=2,
        loading=quorate.Loading(
            collate=collate, order=ByLength(data.train.lengths, options.batch_size)
        ),
        run_dir=quorate.RunDir(options.run_dir, save_every_s=60.0),
    )
    trainer.fit(
        data.train,
        epochs=options.epochs,
        steps=options.steps,
        validation=quorate.Validation(data.validation, every_epochs=2),
        callbacks=[Samples(data, shape)],
    )
    good = reached(trainer.evaluate, data)
    print(f"results: {trainer.run_dir}  (python examples/chatbot/chat.py {trainer.run_dir})")
    if not good:
        sys.exit(1)


if __name__ == "__main__":
    main()
