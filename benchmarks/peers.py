"""The same training with four libraries, each as its own documentation writes a loop.

Each function runs in its own processes and imports its library. Options are set as in the other
loops: fused AdamW, logging to TensorBoard, no progress bar, no checkpoints. Samples are shuffled by
the library's own sampler.
"""

import math
from typing import Any

import torch
from tasks import Settings
from torch import Tensor, nn
from torch.utils.data import DataLoader


def parts(settings: Settings) -> tuple[Any, nn.Module]:
    """Return the training data and the model."""
    torch.manual_seed(settings.seed)
    data_info = settings.recipe.prepare_data()
    data = settings.recipe.build_datasets(data_info)[0]
    return data, settings.recipe.build_model(data_info)


def loader(settings: Settings, data: Any) -> DataLoader:
    """Return the DataLoader, which a library then distributes over its processes."""
    return DataLoader(
        data,
        batch_size=settings.micro_batch_size,
        shuffle=True,
        drop_last=True,
        pin_memory=torch.cuda.is_available(),
    )


def adamw(
    settings: Settings, model: nn.Module, scheduler_steps: int = 1, *, fused: bool = True
) -> tuple[torch.optim.Optimizer, Any]:
    """Return the optimizer and a torch scheduler.

    Args:
        settings: the settings of all loops.
        model: the model whose parameters are trained.
        scheduler_steps: how often the scheduler steps in one optimizer step.
        fused: use one kernel for all weights.
    """
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2]},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        groups, lr=settings.lr, weight_decay=settings.weight_decay, fused=fused
    )

    def factor(scheduler_step: int) -> float:
        step = scheduler_step // scheduler_steps
        if step < settings.warmup_steps:
            return (step + 1) / settings.warmup_steps
        progress = (step - settings.warmup_steps) / (settings.steps - settings.warmup_steps)
        return 0.5 * (1 + math.cos(math.pi * progress))

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def accelerate_example(settings: Settings) -> None:
    """Train as accelerate's examples and transformers' run_clm_no_trainer.py do."""
    from accelerate import Accelerator

    accelerator = Accelerator(
        gradient_accumulation_steps=settings.accumulation,
        mixed_precision=settings.precision,
        log_with="tensorboard",
        project_dir=settings.folder,
    )
    accelerator.init_trackers("benchmark")
    data, model = parts(settings)
    # a prepared scheduler takes one step per process in each optimizer step
    optimizer, scheduler = adamw(settings, model, accelerator.num_processes)
    model, optimizer, batches, scheduler = accelerator.prepare(
        model, optimizer, loader(settings, data), scheduler
    )
    model.train()
    step, loss_sum = 0, torch.zeros((), device=accelerator.device)
    while step < settings.steps:
        for batch in batches:
            with accelerator.accumulate(model):
                with accelerator.autocast():
                    loss = settings.recipe.mean_loss(model, batch)
                loss_sum += loss.detach().float()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), settings.clip_norm)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                step += 1
                if step % settings.log_every == 0:
                    mean = loss_sum.item() / (settings.log_every * settings.accumulation)
                    rate = scheduler.get_last_lr()[0]
                    accelerator.log({"loss": mean, "learning_rate": rate}, step=step)
                    loss_sum.zero_()
                if step == settings.steps:
                    break
    accelerator.end_training()


def lightning_fabric(settings: Settings) -> None:
    """Train as the documentation of Lightning Fabric does."""
    from lightning.fabric import Fabric  # pyright: ignore[reportMissingImports]
    from lightning.fabric.loggers import TensorBoardLogger  # pyright: ignore[reportMissingImports]

    fabric = Fabric(
        devices=settings.processes,
        strategy="ddp" if settings.processes > 1 else "auto",
        precision="bf16-mixed" if settings.precision == "bf16" else "32-true",
        loggers=TensorBoardLogger(settings.folder),
        **on_device(),
    )
    fabric.launch()
    data, model = parts(settings)
    optimizer, scheduler = adamw(settings, model)
    model, optimizer = fabric.setup(model, optimizer)
    batches: Any = fabric.setup_dataloaders(loader(settings, data))
    model.train()
    step, micro_batch, epoch, loss_sum = 0, 0, 0, torch.zeros((), device=fabric.device)
    while step < settings.steps:
        if hasattr(batches.sampler, "set_epoch"):
            batches.sampler.set_epoch(epoch)
        epoch += 1
        for batch in batches:
            micro_batch += 1
            is_accumulating = micro_batch % settings.accumulation != 0
            with fabric.no_backward_sync(model, enabled=is_accumulating):
                loss = settings.recipe.mean_loss(model, batch)
                fabric.backward(loss / settings.accumulation)
            loss_sum += loss.detach()
            if is_accumulating:
                continue
            fabric.clip_gradients(model, optimizer, max_norm=settings.clip_norm)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            step += 1
            if step % settings.log_every == 0:
                mean = loss_sum.item() / (settings.log_every * settings.accumulation)
                fabric.log_dict({"loss": mean, "learning_rate": scheduler.get_last_lr()[0]}, step)
                loss_sum.zero_()
            if step == settings.steps:
                break


def lightning_trainer(settings: Settings) -> None:
    """Train as the documentation of Lightning does: a LightningModule and its Trainer."""
    import lightning  # pyright: ignore[reportMissingImports]
    from lightning.pytorch.loggers import TensorBoardLogger  # pyright: ignore[reportMissingImports]

    data, model = parts(settings)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, batch_index: int) -> Tensor:
            loss = settings.recipe.mean_loss(self.model, batch)
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            # Lightning's precision plugin refuses to clip gradients for a fused optimizer
            fused = settings.precision == "no"
            optimizer, scheduler = adamw(settings, self.model, fused=fused)
            schedule: Any = {"scheduler": scheduler, "interval": "step"}
            return {"optimizer": optimizer, "lr_scheduler": schedule}

    trainer = lightning.Trainer(
        devices=settings.processes,
        strategy="ddp" if settings.processes > 1 else "auto",
        precision="bf16-mixed" if settings.precision == "bf16" else "32-true",
        max_steps=settings.steps,
        accumulate_grad_batches=settings.accumulation,
        gradient_clip_val=settings.clip_norm,
        log_every_n_steps=settings.log_every,
        logger=TensorBoardLogger(settings.folder),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **on_device(),
    )
    trainer.fit(Module(), loader(settings, data))


def transformers_trainer(settings: Settings) -> None:
    """Train as the documentation of transformers does: a model that returns its loss, and Trainer.

    Trainer logs the gradient norm and the learning rate by itself.
    """
    from transformers import Trainer, TrainingArguments

    data, model = parts(settings)

    class ModelWithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, batch: Any) -> dict[str, Tensor]:
            return {"loss": settings.recipe.mean_loss(self.model, batch)}

    def collate(samples: list[Any]) -> dict[str, Any]:
        return {"batch": torch.utils.data.default_collate(samples)}

    trainer = Trainer(
        model=ModelWithLoss(),
        args=TrainingArguments(
            output_dir=str(settings.folder),
            per_device_train_batch_size=settings.micro_batch_size,
            gradient_accumulation_steps=settings.accumulation,
            max_steps=settings.steps,
            max_grad_norm=settings.clip_norm,
            logging_steps=settings.log_every,
            report_to="tensorboard",
            save_strategy="no",
            disable_tqdm=True,
            remove_unused_columns=False,
            dataloader_drop_last=True,
            bf16=settings.precision == "bf16",
            use_cpu=not torch.cuda.is_available(),
        ),
        train_dataset=data,
        data_collator=collate,
        optimizers=adamw(settings, model),
    )
    trainer.train()


def on_device() -> dict[str, str]:
    """Return Lightning's options for the device."""
    return {"accelerator": "gpu" if torch.cuda.is_available() else "cpu"}
