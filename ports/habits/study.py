"""A study of Optuna around trainings: three learning rates, the best is kept.

Later loops of a script use towers in every engine, so a study needs no processes.
"""

import optuna
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import quorate


def rows() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(64, 12, generator=generator)
    return TensorDataset(values, torch.randint(3, (64,), generator=generator))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 3))


def plain() -> nn.Module:
    models = {}

    def objective(trial):
        model = models[trial.number] = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=trial.suggest_float("lr", 0.01, 0.3))
        loader = DataLoader(rows(), batch_size=16)
        for _ in range(2):
            for values, labels in loader:
                loss = F.cross_entropy(model(values), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        with torch.no_grad():
            return sum(F.cross_entropy(model(v), labels).item() for v, labels in loader)

    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    study.optimize(objective, n_trials=3)
    return models[study.best_trial.number]


def ported() -> nn.Module:
    models = {}

    def loss(model, batch):
        values, labels = batch
        return F.cross_entropy(model(values), labels)

    def objective(trial):
        rate = trial.suggest_float("lr", 0.01, 0.3)
        trainer = quorate.Trainer(
            network(),
            loss,
            optimizer=lambda params: torch.optim.SGD(params, lr=rate),
            batch_size=16,
            shards=2,
            workers=quorate.Workers(engine="towers"),
        )
        trainer.fit(rows(), epochs=2, shuffle=False)
        models[trial.number] = trainer.model
        return trainer.evaluate(rows())["loss"]

    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    study.optimize(objective, n_trials=3)
    return models[study.best_trial.number]


if __name__ == "__main__":
    ported()
