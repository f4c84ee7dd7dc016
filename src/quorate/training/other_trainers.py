"""Keywords known from other trainers, and the same setting in quorate."""

from __future__ import annotations

_OPTIMIZER = "Trainer(optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.001))"

# From a keyword of plain loops, Accelerate, HF Trainer, Lightning and Ray Train.
KEYWORDS_OF_OTHER_TRAINERS = {
    **dict.fromkeys(("lr", "learning_rate", "weight_decay"), _OPTIMIZER),
    **dict.fromkeys(("scheduler", "lr_scheduler"), "Optimize(schedule=)"),
    **dict.fromkeys(("gradient_clip_val", "max_grad_norm"), "Optimize(clip_norm=)"),
    **dict.fromkeys(("epochs", "max_epochs", "num_epochs", "num_train_epochs"), "fit(epochs=)"),
    "max_steps": "fit(steps=)",
    **dict.fromkeys(
        ("train_dataset", "train_dataloader", "train_dataloaders"), "fit(dataset), without a name"
    ),
    **dict.fromkeys(("eval_dataset", "val_dataloaders", "val_dataloader"), "fit(validation=)"),
    "eval_dataloader": "fit(validation=)",
    **dict.fromkeys(("accelerator", "device", "gpus"), "Trainer(devices=)"),
    **dict.fromkeys(("world_size", "num_processes"), "Trainer(workers=)"),
    "strategy": "Workers(engine=)",
    "num_nodes": "torchrun --nnodes",
    **dict.fromkeys(("gradient_accumulation_steps", "accumulate_grad_batches"), "Trainer(shards=)"),
    **dict.fromkeys(
        ("train_batch_size", "per_device_train_batch_size", "per_device_batch_size"),
        "Trainer(batch_size=), rows per update over all devices",
    ),
    **dict.fromkeys(("fp16", "bf16", "mixed_precision", "amp"), "Trainer(precision=)"),
    **dict.fromkeys(("output_dir", "default_root_dir"), "Trainer(run_dir=)"),
    "compute_metrics": "Trainer(loss=), whose dict may hold metrics, or Trainer(totals=)",
    "num_workers": "Loading(processes=), or a DataLoader(num_workers=) as the dataset",
    "collate_fn": "Loading(collate=)",
    "logger": "fit(callbacks=)",
}
