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
from data import Pairs, collate, load
from loss import Loss
from model import Seq2Seq
from options import network, parse
from safetensors.torch import save_file
from target import reached


def main() -> None:
    """Train, evaluate, and say where the results are."""
    options = parse(__doc__.splitlines()[0], "runs/chatbot-single")
    data = load(
        options.data,
        options.language,
        vocabulary_size=options.vocabulary,
        least_answer=options.least_answer,
        skip_bad=options.skip_bad,
    )
    shape = network(options, len(data.vocabulary))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    model = Seq2Seq(**shape).to(device)
    loss = Loss(data.vocabulary, data.language)
    optimizer = torch.optim.Adam(model.parameters(), lr=options.lr)
    order = ByLength(data.train.lengths, options.batch_size)
    updates = options.steps or options.epochs * -(-len(data.train) // options.batch_size)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, updates)

    def batch_of(dataset: Pairs, rows: list[int]) -> tuple:
        batch = collate([dataset[row] for row in rows])
        return batch._replace(
            questions=batch.questions.to(device), answers=batch.answers.to(device)
        )

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

    step = 0
    while step < updates:
        rows = order(torch.randperm(len(data.train)).numpy())
        for start in range(0, len(rows), options.batch_size):
            found = loss(model, batch_of(data.train, rows[start : start + options.batch_size]))
            optimizer.zero_grad()
            found["loss"].backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            schedule.step()
            step += 1
            if step % 50 == 0:
                print(f"step {step:,} of {updates:,}: loss {found['loss'].detach():.4f}")
            if step == updates:
                break
        print(f"step {step:,}: validation", evaluate(data.validation))
    saved_run.save(options.run_dir, data, shape)
    save_file(model.state_dict(), options.run_dir / saved_run.WEIGHTS)
    good = reached(evaluate, data)
    print(f"results: {options.run_dir}  (python examples/chatbot/chat.py {options.run_dir})")
    if not good:
        sys.exit(1)


if __name__ == "__main__":
    main()
