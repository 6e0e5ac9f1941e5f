"""Models of plain torch and of torch_geometric: recurrent, adversarial, with sparse gradients, on graphs."""

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from benchmarks.zoo.model import Parts, RealModel, Size, images, named, text


class LstmLanguageModel(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.token = nn.Embedding(size.vocabulary, size.width)
        self.lstm = nn.LSTM(size.width, size.width, num_layers=size.layers, batch_first=True)
        self.head = nn.Linear(size.width, size.vocabulary)

    def forward(self, ids: Tensor) -> Tensor:  # (batch, length)
        hidden, _ = self.lstm(self.token(ids[:, :-1]))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), ids[:, 1:].flatten())


def _next_token(parts: Parts, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = parts["model"](batch["input_ids"])
    return loss


def _gan(size: Size) -> dict[str, nn.Module]:
    """DCGAN (Radford et al., 2016) in small, for images of 16x16."""
    width = size.width
    generator = nn.Sequential(
        nn.ConvTranspose2d(16, width, 4, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.ConvTranspose2d(width, width // 2, 4, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(width // 2),
        nn.ReLU(),
        nn.ConvTranspose2d(width // 2, 3, 4, stride=2, padding=1),
        nn.Tanh(),
    )
    discriminator = nn.Sequential(
        nn.Conv2d(3, width // 2, 4, stride=2, padding=1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(width // 2, width, 4, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.LeakyReLU(0.2),
        nn.Conv2d(width, 1, 4),
        nn.Flatten(0),
    )
    return {"discriminator": discriminator, "generator": generator}


def _seeds_and_images(size: Size, generator: Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(size.batch, 16, 1, 1, generator=generator), images(size, generator)[:, :, :16, :16].contiguous()


def _tell_apart(parts: Parts, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The discriminator's loss: two of its forwards, and one of the generator's that gets no gradient."""
    seeds, real = batch
    made = parts["generator"](seeds).detach()
    return F.softplus(-parts["discriminator"](real)).mean() + F.softplus(parts["discriminator"](made)).mean()


def _deceive(parts: Parts, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The generator's loss, whose backward goes through the discriminator."""
    return F.softplus(-parts["discriminator"](parts["generator"](batch[0]))).mean()


class Dlrm(nn.Module):
    """Naumov et al., 2019: dense features, bags of categories with sparse gradients, and their dot products."""

    def __init__(self, size: Size, tables: int = 4) -> None:
        super().__init__()
        rows, width = size.vocabulary, size.width
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum", sparse=True) for _ in range(tables))
        self.bottom = nn.Sequential(nn.Linear(13, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))
        pairs = tables * (tables + 1) // 2
        self.top = nn.Sequential(nn.Linear(width + pairs, 2 * width), nn.ReLU(), nn.Linear(2 * width, 1))

    def forward(self, dense: Tensor, bags: Tensor) -> Tensor:  # (batch, 13), (batch, tables, categories)
        bottom = self.bottom(dense)
        features = torch.stack([bottom, *(table(bags[:, i]) for i, table in enumerate(self.tables))], dim=1)
        products = features @ features.transpose(1, 2)
        rows, columns = torch.triu_indices(features.shape[1], features.shape[1], offset=1)
        return self.top(torch.cat([bottom, products[:, rows, columns]], dim=1)).squeeze(1)


def _clicks(size: Size, generator: Generator) -> tuple[Tensor, Tensor, Tensor]:
    batch = 4 * size.batch
    bags = torch.randint(0, size.vocabulary, (batch, 4, 3), generator=generator)
    clicked = torch.randint(0, 2, (batch,), generator=generator).float()
    return torch.randn(batch, 13, generator=generator), bags, clicked


def _click_loss(parts: Parts, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    dense, bags, clicked = batch
    return F.binary_cross_entropy_with_logits(parts["model"](dense, bags), clicked)


def _gnn(size: Size) -> nn.Module:
    from torch_geometric.nn import GAT

    return GAT(16, size.width, num_layers=size.layers, out_channels=5, heads=4, v2=True)


def _graph(size: Size, generator: Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Other numbers of nodes and of edges in each batch."""
    nodes = int(torch.randint(20, 60, (), generator=generator))
    edges = int(torch.randint(2 * nodes, 5 * nodes, (), generator=generator))
    places = torch.randint(0, nodes, (2, edges), generator=generator)
    kinds = torch.randint(0, 5, (nodes,), generator=generator)
    return torch.randn(nodes, 16, generator=generator), places, kinds


def _kind_of_node(parts: Parts, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    x, places, kinds = batch
    return F.cross_entropy(parts["model"](x, places), kinds)


OTHER_MODELS = named(
    [
        RealModel("LSTM", LstmLanguageModel, text, {"model": _next_token}),
        RealModel("GAN", _gan, _seeds_and_images, {"discriminator": _tell_apart, "generator": _deceive}),
        RealModel("DLRM, sparse embeddings", Dlrm, _clicks, {"model": _click_loss}, sparse=True),
        RealModel("GNN, changing shapes", _gnn, _graph, {"model": _kind_of_node}, package="torch_geometric"),
    ]
)
