"""Programs that own their loop, timed as they are: a script, transformers, Lightning, Accelerate.

    pytest examples/programs --ddp-against HEAD~1

The script is not in this folder of tests, which both sides of a comparison have from the working
tree.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest


def test_script(ddp_benchmark: Any) -> None:
    train = Path(__file__).parents[1] / "train.py"
    ddp_benchmark.script(
        str(train), args=["--batch-size=4", "--width=64"], batch_size=16
    )


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_transformers(ddp_benchmark: Any, micro_batches: int) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")

    def main(ctx: Any) -> None:
        import torch
        from transformers import (
            GPT2Config,
            GPT2LMHeadModel,
            Trainer,
            TrainingArguments,
        )

        model = GPT2LMHeadModel(
            GPT2Config(
                n_layer=2, n_head=2, n_embd=64, vocab_size=256, n_positions=64
            )
        )
        tokens = torch.randint(256, (4096, 32))
        arguments = TrainingArguments(
            output_dir=tempfile.mkdtemp(),
            per_device_train_batch_size=8,
            gradient_accumulation_steps=micro_batches,
            num_train_epochs=1000,
            use_cpu=ctx.device.type == "cpu",
            ddp_backend=ctx.backend,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        dataset = [{"input_ids": row, "labels": row} for row in tokens]
        Trainer(model=model, args=arguments, train_dataset=dataset).train()

    ddp_benchmark.loop(main, batch_size=8 * micro_batches)


@pytest.mark.parametrize("automatic", [True, False])
def test_lightning(ddp_benchmark: Any, automatic: bool) -> None:
    pytest.importorskip("lightning")

    def main(ctx: Any) -> None:
        import lightning
        import torch
        from lightning.pytorch.strategies import DDPStrategy

        class Module(lightning.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.automatic_optimization = automatic
                self.model = torch.nn.Sequential(
                    torch.nn.Linear(64, 256),
                    torch.nn.ReLU(),
                    torch.nn.Linear(256, 64),
                )

            def training_step(self, batch: Any, index: int) -> Any:
                loss = (self.model(batch[0]) - batch[0]).square().mean()
                if not automatic:
                    optimizer: Any = self.optimizers()
                    optimizer.zero_grad()
                    self.manual_backward(loss)
                    optimizer.step()
                return loss

            def configure_optimizers(self) -> Any:
                return torch.optim.AdamW(self.parameters(), lr=1e-3)

        trainer = lightning.Trainer(
            accelerator="cpu" if ctx.device.type == "cpu" else "gpu",
            devices=ctx.local_world_size,
            strategy=DDPStrategy(process_group_backend=ctx.backend),
            max_epochs=-1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        dataset = torch.utils.data.TensorDataset(torch.randn(4096, 64))
        trainer.fit(
            Module(), torch.utils.data.DataLoader(dataset, batch_size=32)
        )

    ddp_benchmark.loop(main, batch_size=32)


def test_accelerate(ddp_benchmark: Any) -> None:
    pytest.importorskip("accelerate")

    def main(ctx: Any) -> None:
        import torch
        from accelerate import Accelerator

        accelerator = Accelerator(
            cpu=ctx.device.type == "cpu", gradient_accumulation_steps=2
        )
        model = torch.nn.Sequential(
            torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64)
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        dataset = torch.utils.data.TensorDataset(torch.randn(4096, 64))
        loader = torch.utils.data.DataLoader(dataset, batch_size=16)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        while True:
            for (x,) in loader:
                with accelerator.accumulate(model):
                    loss = (model(x) - x).square().mean()
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()

    ddp_benchmark.loop(main, batch_size=32)
