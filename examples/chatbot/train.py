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
from confidence import calibrated
from data import Spelt, collate, load
from loss import Loss
from model import Seq2Seq
from options import network, optimizer, parse, schedule
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
        times=options.times or (),
        skip_bad=options.skip_bad,
    )
    shape = network(options, len(data.vocabulary))

    def cosine(of: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        updates = options.steps or options.epochs * trainer.updates_per_epoch(data.train)
        return schedule(options, of, updates)

    trainer = quorate.Trainer(
        lambda: Seq2Seq(**shape),
        Loss(data.vocabulary, data.language, options.no_repeat),
        totals={"bleu": bleu.finish},
        optimizer=quorate.Optimize(
            lambda params: optimizer(options, params),
            schedule=cosine,
            clip_norm=options.clip_norm or None,
        ),
        batch_size=options.batch_size,
        shards=2,
        seed=options.seed,
        loading=quorate.Loading(
            collate=collate,
            augment=Spelt(options.spell),
            order=ByLength(data.train.lengths, options.batch_size, options.window),
        ),
        run_dir=quorate.RunDir(options.run_dir, save_every_s=60.0),
    )
    trainer.fit(
        data.train,
        epochs=options.epochs,
        steps=options.steps,
        validation=quorate.Validation(data.validation, every_epochs=2),
        callbacks=[Samples(data, shape, options.no_repeat)],
    )
    good = reached(trainer.evaluate, trainer.model, data, options.target, options.no_repeat)
    sure = calibrated(trainer.model, data, options.decline, options.no_repeat)
    sure.save(trainer.run_dir)
    print(f"results: {trainer.run_dir}  (python examples/chatbot/chat.py {trainer.run_dir})")
    if not good:
        sys.exit(1)


if __name__ == "__main__":
    main()
