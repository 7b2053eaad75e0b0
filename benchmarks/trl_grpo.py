"""TRL's GRPOTrainer as a peer: float32 on a CPU, and otherwise its defaults."""


def trl_trainer(folder, group, reply):
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = GRPOConfig(
        output_dir="/tmp/escrag-bench-trl", per_device_train_batch_size=group, num_generations=group, max_completion_length=reply,
        beta=0.0, use_cpu=not torch.cuda.is_available(), bf16=False, fp16=False, gradient_checkpointing=False, report_to=[],
        logging_steps=1, save_strategy="no", learning_rate=1e-6, disable_tqdm=True, loss_type="grpo")
    return GRPOTrainer(model=model, reward_funcs=lambda completions, **_: [0.0] * len(completions), args=config,
                       train_dataset=Dataset.from_list([{"prompt": "hi"}]), processing_class=AutoTokenizer.from_pretrained(folder))
