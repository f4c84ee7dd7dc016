"""Graph classification: graph convolutions of PyTorch Geometric, its own batches."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset
from torch_geometric.data import Batch, Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GCNConv, global_mean_pool

import quorate


class Graphs(Dataset):
    def __len__(self) -> int:
        return 48

    def __getitem__(self, row: int):
        generator = torch.Generator().manual_seed(row)
        nodes = 4 + row % 5
        edges = torch.randint(nodes, (2, 3 * nodes), generator=generator)
        return Data(torch.randn(nodes, 6, generator=generator), edges, y=torch.tensor(row % 3))


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = GCNConv(6, 16), GCNConv(16, 16)
        self.head = nn.Linear(16, 3)

    def forward(self, graphs):
        found = self.first(graphs.x, graphs.edge_index).relu()
        found = self.second(found, graphs.edge_index).relu()
        return self.head(global_mean_pool(found, graphs.batch))


def plain() -> nn.Module:
    torch.manual_seed(0)
    model = Classifier()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-6)
    loader = DataLoader(Graphs(), batch_size=16)
    for _ in range(3):
        for graphs in loader:
            loss = F.cross_entropy(model(graphs), graphs.y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model


def accelerated() -> nn.Module:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = Classifier()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-6)
    loader = DataLoader(Graphs(), batch_size=16)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(3):
        for graphs in loader:
            loss = F.cross_entropy(model(graphs), graphs.y)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
    return accelerator.unwrap_model(model)


def ported() -> nn.Module:
    torch.manual_seed(0)
    model = Classifier()
    trainer = quorate.Trainer(
        model,
        lambda model, graphs: F.cross_entropy(model(graphs), graphs.y),
        optimizer=lambda params: torch.optim.Adam(params, lr=1e-3, eps=1e-6),
        batch_size=16,
        shards=2,
        loading=quorate.Loading(collate=Batch.from_data_list),
    )
    trainer.fit(Graphs(), epochs=3, shuffle=False)
    return trainer.model


if __name__ == "__main__":
    ported()
