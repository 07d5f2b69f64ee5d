"""Tables in files beside a GPU: what a lookup asks for is known before the host looks for it."""

from __future__ import annotations

from pathlib import Path

import torch

from pretrain.engine.tables.stored_tables import StoredTables

NUM_ROWS = 100_000


def test_a_lookup_outside_of_steps_gets_the_rows_it_asks_for(gpu: torch.device, tmp_path: Path) -> None:
    tables = StoredTables(tmp_path, gpu)
    room = tables.room((NUM_ROWS, 8), torch.float32)
    room.weights.copy_(torch.arange(NUM_ROWS).unsqueeze(1))
    table = room.reader(torch.nn.Parameter(room.weights), 0)
    for seed in range(3):
        generator = torch.Generator(gpu).manual_seed(seed)
        # The device is behind the host, as in a forward pass.
        torch.cuda._sleep(200_000_000)
        asked = torch.randint(0, NUM_ROWS, (4096, 4), generator=generator, device=gpu)
        weights, places = table.table(asked)
        assert torch.equal(weights[places.long()][..., 0].detach(), asked.float())
