"""TRL's trainers as peers: float32 on a CPU, and otherwise their defaults."""
import torch

SETTINGS = {
    "output_dir": "/tmp/escrag-bench-trl", "use_cpu": not torch.cuda.is_available(), "bf16": False, "fp16": False,
    "gradient_checkpointing": False, "report_to": [], "save_strategy": "no", "disable_tqdm": True}


def grpo_trainer(folder, group, reply, reward_model=None, **settings):
    """TRL's GRPOTrainer for groups of `group` responses of `reply` tokens, scored by a transformers model, or not at all."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = GRPOConfig(per_device_train_batch_size=group, num_generations=group, max_completion_length=reply, beta=0.0,
                        logging_steps=1, learning_rate=1e-6, loss_type="grpo", **settings, **SETTINGS)
    trainer = GRPOTrainer(
        model=model, reward_funcs=reward_model or (lambda completions, **_: [0.0] * len(completions)), args=config,
        train_dataset=Dataset.from_list([{"prompt": "hi"}]), processing_class=AutoTokenizer.from_pretrained(folder),
        reward_processing_classes=AutoTokenizer.from_pretrained(folder) if reward_model else None)
    trainer.current_gradient_accumulation_steps = 1
    return trainer


def gradient_difference(model, trainer):
    """Norm of the difference between our gradient and the trainer's, as a share of ours; an error where it is not small."""
    theirs = dict(trainer.model.named_parameters())
    difference = sum((p.grad - theirs[n].grad).square().sum() for n, p in model.named_parameters()).sqrt()
    share = (difference / sum(p.grad.square().sum() for p in model.parameters()).sqrt()).item()
    assert share < 1e-3, f"gradients differ by {share:.1e} of their norm"
    return share


def updater(trainer):
    """Give a trainer its optimizer, at a rate that changes nothing -> a function that clips, takes a step and clears."""
    trainer.create_optimizer()
    for group in trainer.optimizer.param_groups:
        group["lr"] = 1e-9

    def step():
        torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
    return step


def update_contender(trainer, rows, model, gradient, at_once=None, total=None):
    """A trainer's update on one batch -> (function that makes it, how it was seen to compute what ours does).

    model, gradient: ours, and the function that leaves its gradient and returns its loss.
    at_once: rows a forward, whose gradients accumulate [all]; total: targets of all rows, which its losses are divided by.
    """
    at_once = at_once or len(rows)
    batches = [trainer.data_collator(rows[i:i + at_once]) for i in range(0, len(rows), at_once)]
    step = updater(trainer)

    def backward():
        losses = []
        for batch in batches:
            loss = trainer.compute_loss(trainer.model, dict(batch), num_items_in_batch=total)
            loss.backward()
            losses.append(loss.item())
        return sum(losses)

    def trl():
        trainer.model.train()
        backward()
        step()
    one, other = gradient(), backward()
    assert abs(one - other) < 1e-3 * one, f"losses differ: {one}, {other}"
    share = gradient_difference(model, trainer)
    model.zero_grad(), trainer.model.zero_grad()
    return trl, f"loss {one:.4f} and {other:.4f}, gradients differ by {share:.1e} of their norm"
