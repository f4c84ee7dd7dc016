"""The chatbot on one device, in plain PyTorch.

    python examples/chatbot/single.py --data insuranceqa

train.py is the same with quorate: `diff examples/chatbot/single.py examples/chatbot/train.py`.
"""

from __future__ import annotations

import sys
from collections import Counter

import bleu
import saved_run
import torch
from buckets import ByLength
from confidence import calibrated
from data import Batch, Pairs, Spelt, collate, load
from loss import Loss
from model import Seq2Seq
from options import network, optimizer, parse, schedule
from safetensors.torch import save_file
from target import reached

import quorate


def main() -> None:
    """Train, evaluate, and say where the results are."""
    options = parse(__doc__.splitlines()[0], "runs/chatbot-single")
    data = load(
        options.data,
        options.language,
        vocabulary_size=options.vocabulary,
        least_answer=options.least_answer,
        times=options.times or (),
        skip_bad=options.skip_bad,
    )
    shape = network(options, len(data.vocabulary))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(options.seed)
    model = Seq2Seq(**shape).to(device)
    loss = Loss(data.vocabulary, data.language, options.no_repeat)
    adam_or_sgd = optimizer(options, model.parameters())
    order = ByLength(data.train.lengths, options.batch_size, options.window)
    augment = Spelt(options.spell)
    updates = options.steps or options.epochs * -(-len(data.train) // options.batch_size)
    cosine = schedule(options, adam_or_sgd, updates)

    def batch_of(dataset: Pairs, rows: list[int], epoch: int | None = None) -> Batch:
        batch = collate([dataset[row] for row in rows])
        if epoch is not None:
            batch = augment(batch, quorate.Draws(options.seed, epoch, rows))
        return Batch(*(part.to(device) for part in batch))

    def evaluate(dataset: Pairs) -> dict[str, float]:
        model.eval()
        sums, total = Counter(), 0
        for start in range(0, len(dataset), options.batch_size):
            rows = range(start, min(start + options.batch_size, len(dataset)))
            with torch.no_grad():
                found = loss(model, batch_of(dataset, list(rows)))
            weight, counted = int(found.pop("weight")), found.pop("bleu")
            total = total + counted
            sums.update(weight=weight, **{n: weight * float(v) for n, v in found.items()})
        model.train()
        weight = sums.pop("weight")
        return {name: value / weight for name, value in sums.items()} | {"bleu": bleu.finish(total)}

    step, epoch = 0, 0
    while step < updates:
        rows = order(torch.randperm(len(data.train)).numpy())
        for start in range(0, len(rows), options.batch_size):
            some = rows[start : start + options.batch_size]
            found = loss(model, batch_of(data.train, some, epoch))
            adam_or_sgd.zero_grad()
            found["loss"].backward()
            if options.clip_norm:
                torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip_norm)
            adam_or_sgd.step()
            cosine.step()
            step += 1
            if step % 50 == 0:
                print(f"step {step:,} of {updates:,}: loss {found['loss'].detach():.4f}")
            if step == updates:
                break
        epoch += 1
        print(f"step {step:,}: validation", evaluate(data.validation))
    saved_run.save(options.run_dir, data, shape, options.no_repeat)
    save_file(model.state_dict(), options.run_dir / saved_run.WEIGHTS)
    good = reached(evaluate, model, data, options.target, options.no_repeat)
    calibrated(model, data, options.decline, options.no_repeat).save(options.run_dir)
    print(f"results: {options.run_dir}  (python examples/chatbot/chat.py {options.run_dir})")
    if not good:
        sys.exit(1)


if __name__ == "__main__":
    main()
